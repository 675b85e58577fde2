# SPDX-License-Identifier: Apache-2.0
"""The guests that ask, as the database knows them, remembered for a few seconds.

Used by ``metadata_service.app``. One statement finds all about a guest; until it is forgotten it costs none. The only
thing ever written is the password that a guest posts, once.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from common import errors
from common.instance_data import InstanceData, guest_spec
from common.models import JSON
from common.store import metadata
from common.store.engine import Store
from compute_api.metadata_service.asker import Asker, plain

MOST = 1000              # guests that are remembered; each with up to 64 KiB of user data


@dataclass(frozen=True, slots=True)
class Guest:
    """What is told to a guest, and what tells it from others."""

    data: InstanceData
    project: str
    addresses: frozenset[str]
    password: str


class Guests:
    """Guests by their servers' ids. ``vendor`` is what the operator tells all, ``seconds`` how long one is known,
    ``most`` how many are."""

    def __init__(self, store: Store, vendor: JSON, seconds: float, monotonic: Callable[[], float] = time.monotonic,
                 most: int = MOST) -> None:
        self._store, self._vendor = store, vendor
        self._seconds, self._monotonic, self._most = seconds, monotonic, most
        self._known: dict[str, tuple[float, Guest]] = {}

    def find(self, asker: Asker) -> Guest:
        """The guest that asks.

        Raises:
            NotFound: there is no such server in that project, or the address is not one of its interfaces'.
        """
        until, guest = self._known.get(asker.server, (0.0, None))
        # An address that is not known may be of an interface that was attached a moment ago.
        if guest is None or self._monotonic() >= until or asker.address not in guest.addresses:
            guest = self._read(asker.server)
        if guest.project != asker.project:
            raise errors.NotFound("The server belongs to another project.")
        if asker.address not in guest.addresses:
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

    def _read(self, server_id: str) -> Guest:
        row = self._store.read(lambda tx: metadata.facts(tx, server_id))
        if row is None:
            self._known.pop(server_id, None)
            raise errors.NotFound("There is no such server.")
        spec = guest_spec(row, row.fence)
        addresses = frozenset(plain(address["address"]) for interface in spec.interfaces
                              for address in interface.addresses)
        guest = Guest(InstanceData(spec, self._vendor), row.project_id, addresses, row.password or "")
        if self._seconds:
            while server_id not in self._known and len(self._known) >= self._most:
                self._known.pop(next(iter(self._known)), None)
            self._known[server_id] = (self._monotonic() + self._seconds, guest)
        return guest
