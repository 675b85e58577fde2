# SPDX-License-Identifier: Apache-2.0
"""Records of guests from the database, cached for a few seconds.

``metadata.app`` uses the cache. The full record of a guest takes one statement. For a cached guest,
a smaller statement compares the version, so that a guest never receives data from before an action.
The only value that this module writes is the password that a guest posts.
"""

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

#: Largest number of cached guests. Each has up to 64 KiB of user data.
MAX_GUESTS = 1000


@dataclass(frozen=True, slots=True)
class GuestRecord:
    """A guest's documents, and the facts that identify the guest.

    Attributes:
        data: The content of the documents.
        project: Id of the project.
        addresses: Addresses of the guest's interfaces.
        hosts: The guest's host, and source and destination of a running move.
        password: The password that the guest posted, encrypted, or "".
        version: Changes with every change of the guest's data.
    """

    data: InstanceData
    project: str
    addresses: frozenset[str]
    hosts: frozenset[str]
    password: str
    version: metadata.Version


class VendorDataSource(Protocol):
    """The operator's services that return vendor data for single guests."""

    def of(self, facts: JsonObject) -> JsonObject:
        """Return the services' answers by name, for the guest with these ``InstanceData.facts``.

        A service without a usable answer has the answer {}.

        Raises:
            Unavailable: A service has no usable answer, and the operator requires all answers.
        """


class CachedVendorData:
    """The vendor data of one guest, requested once and kept with the cached guest."""

    def __init__(self, request_data: Callable[[], JsonObject]) -> None:
        self._request_data, self._lock = request_data, threading.Lock()
        self._data: JsonObject | None = None

    def __call__(self) -> JsonObject:
        """Return the vendor data, requested by the first call and then kept.

        A failed request is repeated by the next call.

        Raises:
            Unavailable: A required answer is missing, the database does not answer, or another
                request of the guest is waiting for the vendor data.
        """
        if self._data is None:
            if not self._lock.acquire(blocking=False):
                raise errors.Unavailable(
                    "The vendor data of the server is being requested; try again later."
                )
            try:
                self._data = self._request_data() if self._data is None else self._data
            finally:
                self._lock.release()
        return self._data


class GuestCache:
    """Guests by the ids of their servers.

    Args:
        store: The database.
        vendor: Vendor data for all guests, or None.
        vault: Decrypts user data.
        seconds: Lifetime of a cached record. 0 disables the cache.
        monotonic: The clock.
        most: Largest number of cached guests.
        dynamic: Services for vendor data of single guests, or None.
    """

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
        self._guests: dict[str, tuple[float, GuestRecord]] = {}

    def find(self, identity: GuestIdentity) -> GuestRecord:
        """Return the guest that sent a request, from the cache unless expired or changed.

        Raises:
            NotFound: The server does not exist, belongs to another project, is not on the proxy's
                host, or has no interface with the source address.
            Unavailable: The user data cannot be decrypted, or the database does not answer.
        """
        until, guest = self._guests.get(identity.server, (0.0, None))
        if (
            guest is None
            or self._monotonic() >= until
            or guest.version != self._store.read(lambda tx: metadata.version(tx, identity.server))
        ):
            guest = self._read(identity.server)
        if not _is_on_host(guest, identity):
            raise errors.NotFound(
                "The server is not on the host of the proxy that sent the request."
            )
        if guest.project != identity.project:
            raise errors.NotFound(
                "The server belongs to another project than the metadata proxy sent."
            )
        if identity.address not in guest.addresses:
            raise errors.NotFound("The request does not come from an address of the server.")
        return guest

    def post_password(self, server_id: str, password: str) -> None:
        """Store the password that the guest posted, and drop the cached record of the guest.

        The password is stored unchanged, because the guest encrypts it with the owner's key.

        Raises:
            Conflict: A password is already stored, or the server was deleted meanwhile.
        """
        is_stored = self._store.write(lambda tx: metadata.post_password(tx, server_id, password))
        self._guests.pop(server_id, None)
        if not is_stored:
            raise errors.Conflict(
                "The server has a password already, which the owner must clear first, or was deleted."
            )

    def _request_vendor_data(self, services: VendorDataSource, data: InstanceData) -> JsonObject:
        roles = self._store.read(lambda tx: metadata.boot_roles(tx, data.spec.server))
        return services.of({**data.facts(), "boot-roles": ",".join(roles)})

    def _read(self, server_id: str) -> GuestRecord:
        row, tagged = self._store.read(lambda tx: _read_facts(tx, server_id))
        if row is None:
            self._guests.pop(server_id, None)
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
            data = replace(
                data,
                dynamic=CachedVendorData(partial(self._request_vendor_data, self._dynamic, data)),
            )
        guest = GuestRecord(
            data, row.project_id, addresses, hosts, row.password or "", metadata.version_of(row)
        )
        if self._seconds:
            while server_id not in self._guests and len(self._guests) >= self._most:
                self._guests.pop(next(iter(self._guests)), None)
            self._guests[server_id] = (self._monotonic() + self._seconds, guest)
        return guest


def _read_facts(tx: Connection, server_id: str) -> tuple[ServerFacts | None, list[AttachedVolume]]:
    """Return the server, and its attached volumes that have a tag.

    Return None and an empty list if the server does not exist.
    """
    row = metadata.facts(tx, server_id)
    rows = metadata.tagged_volumes(tx, row) if row is not None else []
    return row, [
        AttachedVolume(
            str(volume.volume_id),
            volume.device_name,
            volume.size_gb or 0,
            bus=volume.disk_bus or "virtio",
            tag=volume.tag or "",
        )
        for volume in rows
    ]


def _is_on_host(guest: GuestRecord, identity: GuestIdentity) -> bool:
    return not identity.host or identity.host in guest.hosts
