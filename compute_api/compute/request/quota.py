# SPDX-License-Identifier: Apache-2.0
"""Quotas: whose limits are in force, and in which resources they are counted.

``[quota] driver`` chooses ``kilonova`` (limits of this database, also of users, in servers, cores
and RAM) or ``unified`` (Keystone's, in servers and resource classes). In both cases usage is
counted under the project's lock in the transaction that adds to it. Keystone's limits are read
before that transaction begins. See decision 0015."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from common.store.engine import Connection
from common.store.tenants import quotas
from compute_api.compute.schemas.quota_sets import UNLIMITED

#: The API's names of what Keystone limits, and Keystone's.
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
    """Reads limits; raises Unavailable when the identity service does not answer."""

    def of(self, project_id: str) -> Mapping[str, int]:
        """A project's limits by Keystone's names, its own before the registered ones; of '*' the
        registered ones."""


@dataclass(frozen=True)
class UnregisteredLimits:
    """What is true of a resource without a registered limit. strategy: "require": those ``listed``
    cannot be had, all others without end; "ignore": the other way round."""

    strategy: str = "require"
    listed: Iterable[str] = ("servers",)

    def limit(self, name: str) -> int:
        """0 or -1."""
        return 0 if (name in self.listed) == (self.strategy == "require") else -1


@dataclass(frozen=True)
class UnifiedLimits:
    """Keystone's limits of one project: users have none of their own."""

    numbers: Mapping[str, int]
    missing: UnregisteredLimits
    by_user: bool = False

    def of(self, resource: str, user_id: str = "") -> int:
        """By the API's name or Keystone's; what is neither, as networks are, is not limited
        here."""
        name = self.name(resource)
        if name not in self.numbers and not name.startswith(CLASS) and name not in NAMES.values():
            return -1
        return self.numbers[name] if name in self.numbers else self.missing.limit(name)

    def name(self, resource: str) -> str:
        """Keystone's."""
        return NAMES.get(resource, resource)

    def has_own(self, user_id: str, resource: str) -> bool:
        """Never."""
        return False

    def counted(self, size: quotas.Size) -> dict[str, int]:
        """Servers and resource classes."""
        return {
            "servers": size.servers,
            **{CLASS + name: amount for name, amount in size.classes.items()},
        }

    def used(self, tx: Connection, project_id: str) -> dict[str, dict[str, int]]:
        """Of the whole project."""
        held = quotas.held(tx, project_id)
        return {
            "": {
                "servers": held.pop("", 0),
                **{CLASS + name: amount for name, amount in held.items()},
            }
        }


class Quota:
    """Where handlers get limits from.

    Args:
        defaults: limits where neither project nor class has one in the database.
        keystone: whose limits are in force instead; None: the database's.
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
        """Are the limits in our database, so that they are set through our API?"""
        return self._keystone is None

    def source(self, project_id: str) -> Source:
        """Call it before a transaction, and what it returns in there. '*' has what is true of every
        project.

        Raises:
            Unavailable: Keystone's limits are not known now.
        """
        if self._keystone is None:
            return lambda tx: quotas.limits(tx, project_id, self._defaults)
        found = UnifiedLimits(self._keystone.of(project_id), self._missing)
        return lambda tx: found
