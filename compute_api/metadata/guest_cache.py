# SPDX-License-Identifier: Apache-2.0
"""The guests of requests, as the database has them, cached for a few seconds.

Used by ``metadata.app``. One statement reads all about a guest. A cached guest costs a small one,
which compares versions, so that no guest is told what was true before an action. Only the password
that a guest posts is ever written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from common.domain import errors
from common.domain.instance_data import InstanceData, guest_spec
from common.domain.json_types import JsonObject
from common.domain.models import AttachedVolume
from common.security.vault import Vault
from common.store.engine import Connection, Store
from common.store.rows import ServerFacts
from common.store.servers import metadata
from compute_api.metadata.proxy_headers import GuestIdentity, canonical_address

MAX_GUESTS = 1000  # guests that are remembered; each with up to 64 KiB of user data


@dataclass(frozen=True, slots=True)
class GuestRecord:
    """What is told to a guest, and what tells it from others; ``hosts``: where it is, or is being
    moved."""

    data: InstanceData
    project: str
    addresses: frozenset[str]
    hosts: frozenset[str]
    password: str
    version: metadata.Version


class VendorDataSource(Protocol):
    """The operator's services."""

    def of(self, facts: JsonObject) -> JsonObject:
        """What they say of the guest with these facts. Raises Unavailable."""


class CachedVendorData:
    """What they say of one guest, asked for once, for as long as the guest is remembered."""

    def __init__(self, ask: Callable[[], JsonObject]) -> None:
        self._ask, self._lock = ask, threading.Lock()
        self._known: JsonObject | None = None

    def __call__(self) -> JsonObject:
        """Raises Unavailable: they do not say it, or another request of the guest is waiting for it
        already."""
        if self._known is None:
            if not self._lock.acquire(blocking=False):
                raise errors.Unavailable(
                    "The vendor data of the server is being asked for; try again later."
                )
            try:
                self._known = self._ask() if self._known is None else self._known
            finally:
                self._lock.release()
        return self._known


class GuestCache:
    """Guests by their servers' ids. ``vendor`` is what the operator tells all, ``dynamic`` who is
    asked for each; ``vault`` opens user data; ``seconds`` is how long one is known at most,
    ``most`` how many are."""

    def __init__(
        self,
        store: Store,
        vendor: JsonObject | None,
        vault: Vault,
        seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
        most: int = MAX_GUESTS,
        *,
        dynamic: VendorDataSource | None = None,
    ) -> None:
        self._store, self._vendor, self._vault, self._dynamic = store, vendor, vault, dynamic
        self._seconds, self._monotonic, self._most = seconds, monotonic, most
        self._known: dict[str, tuple[float, GuestRecord]] = {}

    def find(self, identity: GuestIdentity) -> GuestRecord:
        """The guest that asks.

        Raises:
            NotFound: there is no such server in that project or on that host, or the address is not
            one of its
                interfaces'.
        """
        until, guest = self._known.get(identity.server, (0.0, None))
        if (
            guest is None
            or self._monotonic() >= until
            or guest.version != self._store.read(lambda tx: metadata.version(tx, identity.server))
        ):
            guest = self._read(identity.server)
        if not _is_there(guest, identity):
            raise errors.NotFound("The server is not on the host that asks for it.")
        if guest.project != identity.project:
            raise errors.NotFound("The server belongs to another project.")
        if identity.address not in guest.addresses:
            raise errors.NotFound("The request does not come from an address of the server.")
        return guest

    def post_password(self, server_id: str, password: str) -> None:
        """Keep what the guest posted, encrypted by the public key of its owner.

        Raises:
            Conflict: there is one.
        """
        posted = self._store.write(lambda tx: metadata.post_password(tx, server_id, password))
        self._known.pop(server_id, None)
        if not posted:
            raise errors.Conflict("The password has been set; its owner has to clear it first.")

    def _ask(self, services: VendorDataSource, data: InstanceData) -> JsonObject:
        roles = self._store.read(lambda tx: metadata.boot_roles(tx, data.spec.server))
        return services.of({**data.facts(), "boot-roles": ",".join(roles)})

    def _read(self, server_id: str) -> GuestRecord:
        row, tagged = self._store.read(lambda tx: _facts(tx, server_id))
        if row is None:
            self._known.pop(server_id, None)
            raise errors.NotFound("There is no such server.")
        spec = replace(guest_spec(row, row.fence), volumes=tagged)
        if spec.user_data:
            spec = replace(spec, user_data=self._vault.open_text(spec.user_data))
        addresses = frozenset(
            canonical_address(address["address"])
            for interface in spec.interfaces
            for address in interface.addresses
        )
        hosts = frozenset(host for host in (row.host, row.source_host, row.dest_host) if host)
        data = InstanceData(spec, self._vendor)
        if self._dynamic is not None:
            data = replace(data, dynamic=CachedVendorData(partial(self._ask, self._dynamic, data)))
        guest = GuestRecord(
            data, row.project_id, addresses, hosts, row.password or "", metadata.version_of(row)
        )
        if self._seconds:
            while server_id not in self._known and len(self._known) >= self._most:
                self._known.pop(next(iter(self._known)), None)
            self._known[server_id] = (self._monotonic() + self._seconds, guest)
        return guest


def _facts(tx: Connection, server_id: str) -> tuple[ServerFacts | None, list[AttachedVolume]]:
    """The server, and its tagged volumes as the guest finds them."""
    row = metadata.facts(tx, server_id)
    rows = metadata.tagged_volumes(tx, row) if row is not None else []
    return row, [
        AttachedVolume(
            str(one.volume_id),
            one.device_name,
            one.size_gb or 0,
            bus=one.disk_bus or "virtio",
            tag=one.tag or "",
        )
        for one in rows
    ]


def _is_there(guest: GuestRecord, identity: GuestIdentity) -> bool:
    return not identity.host or identity.host in guest.hosts
