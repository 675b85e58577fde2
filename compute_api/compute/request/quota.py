# SPDX-License-Identifier: Apache-2.0
"""Quotas: the source of limits, and the resources that the limits count.

With ``[quota] driver = kilonova`` the limits are in this database, also for single users, and count
servers, cores and RAM. With ``unified`` they come from Keystone, and count servers and resource
classes. In both cases usage is counted under the project's lock, in the transaction that adds
servers. Keystone's limits are read before that transaction begins. See decision 0015.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from common.store.engine import Connection
from common.store.tenants import quotas
from compute_api.compute.schemas.quota_sets import UNLIMITED

#: Names of limits in this API -> names in Keystone.
NAMES = {
    "instances": "servers",
    "cores": "class:VCPU",
    "ram": "class:MEMORY_MB",
    "metadata_items": "server_metadata_items",
    "injected_files": "server_injected_files",
    "injected_file_content_bytes": "server_injected_file_content_bytes",
    "injected_file_path_bytes": "server_injected_file_path_bytes",
    "key_pairs": "server_key_pairs",
    "server_groups": "server_groups",
    "server_group_members": "server_group_members",
}
CLASS = "class:"
Source = Callable[[Connection], quotas.Numbers]


class KeystoneLimits(Protocol):
    """Client for Keystone's limits. Raises Unavailable if the identity service does not answer."""

    def of(self, project_id: str) -> Mapping[str, int]:
        """Return the limits of a project by Keystone's names.

        A limit of the project overrides the registered limit. A resource without both is missing.
        For "*" return the registered limits.
        """


@dataclass(frozen=True)
class UnregisteredLimits:
    """The limits of resources without a registered limit in Keystone."""

    #: "require": resources in ``listed`` have the limit 0, others no limit. "ignore": the opposite.
    strategy: str = "require"
    listed: Iterable[str] = ("servers",)

    def limit(self, name: str) -> int:
        """Return the limit of a resource without a registered limit: 0, or -1 for no limit.

        With the strategy "require" resources in ``listed`` have the limit 0, and others no limit.
        With "ignore" resources in ``listed`` have no limit, and others the limit 0.
        """
        return 0 if (name in self.listed) == (self.strategy == "require") else -1


@dataclass(frozen=True)
class UnifiedLimits:
    """Keystone's limits of one project, with the interface of ``quotas.Numbers``.

    Users have no separate limits.
    """

    numbers: Mapping[str, int]
    missing: UnregisteredLimits
    by_user: bool = False

    def of(self, resource: str, user_id: str = "") -> int:
        """Return the limit of a resource, or -1 for no limit.

        Without a limit in Keystone, ``missing`` gives the limit of a resource class or of a
        resource in ``NAMES``. Other resources, such as floating IPs, have no limit.

        Args:
            resource: Name of the limit in this API or in Keystone.
            user_id: Ignored, because Keystone has no limits for single users.
        """
        name = self.name(resource)
        if name not in self.numbers and not name.startswith(CLASS) and name not in NAMES.values():
            return -1
        return self.numbers[name] if name in self.numbers else self.missing.limit(name)

    def name(self, resource: str) -> str:
        """Return Keystone's name of a limit, or the same name if Keystone has no other."""
        return NAMES.get(resource, resource)

    def has_own(self, user_id: str, resource: str) -> bool:
        """Return False, because Keystone has no limits for single users."""
        return False

    def count(self, size: quotas.Size) -> dict[str, int]:
        """Return Keystone's names of limits -> the amounts in ``size``."""
        return {
            "servers": size.servers,
            **{CLASS + name: amount for name, amount in size.classes.items()},
        }

    def read_usage(self, tx: Connection, project_id: str) -> dict[str, dict[str, int]]:
        """Return {"": usage of the project}, with the usage by Keystone's names of limits.

        The key "" means all users.
        """
        held = quotas.count_resources(tx, project_id)
        return {
            "": {
                "servers": held.pop("", 0),
                **{CLASS + name: amount for name, amount in held.items()},
            }
        }


class Quota:
    """The source of limits for handlers.

    Args:
        defaults: Limits for resources without a limit of the project or the quota class.
        keystone: Client for limits that replace those in the database, or None.
        missing: Limits of resources that Keystone does not list. None means the defaults of
            ``UnregisteredLimits``.
    """

    def __init__(
        self,
        defaults: Mapping[str, int],
        keystone: KeystoneLimits | None = None,
        missing: UnregisteredLimits | None = None,
    ) -> None:
        self._defaults = {**dict.fromkeys(UNLIMITED, -1), **defaults}
        self._keystone, self._missing = keystone, missing or UnregisteredLimits()

    @property
    def is_ours(self) -> bool:
        """True if the limits are in this database, so that callers set them through this API."""
        return self._keystone is None

    def source(self, project_id: str) -> Source:
        """Return a function that returns the limits of a project inside a transaction.

        The function reads limits in the database when it is called. Keystone's limits are read now,
        because the transaction must not wait for Keystone.

        Args:
            project_id: Id of the project, "*" for the default limits, or "class:NAME" for the
                limits of another quota class in the database.

        Raises:
            Unavailable: Keystone does not answer.
        """
        if self._keystone is None:
            return lambda tx: quotas.limits(tx, project_id, self._defaults)
        keystone_limits = UnifiedLimits(self._keystone.of(project_id), self._missing)
        return lambda tx: keystone_limits
