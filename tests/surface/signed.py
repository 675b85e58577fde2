# SPDX-License-Identifier: Apache-2.0
"""Metadata service and image gateway: who asks is known by what it signs, and has no token.

Tenants' personas have what proves that they are their own guest, or the host of their own image;
the admin also what opens the foreign ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Any

from common.domain import errors, ids
from common.domain.instance_data import DOCUMENTS, EC2_KEYS, VERSIONS
from common.security.image_tickets import LIFETIME, Tickets
from common.security.rate_limit import RateLimiter
from common.security.vault import Vault
from compute_api.image_gateway import app as gateway
from compute_api.metadata import app as metadata
from compute_api.metadata.guest_cache import GuestCache
from compute_api.metadata.proxy_headers import host_key, signature
from tests.surface.compute import Compute
from tests.surface.operations import Operation
from tests.surface.site import Site

SECRET = "the secret of the proxies"
VENDOR = {"ntp": "n1"}
METADATA, GATEWAY = "metadata", "image-gateway"
Proof = Mapping[str, str]


class Signed(Site):
    """``proofs``: what tenants may show; ``others``: what only who is no tenant may show."""

    def __init__(
        self,
        name: str,
        application: Any,
        compute: Compute,
        known: dict[str, dict[str, str]],
        proofs: list[Proof],
        others: list[Proof],
        also: Any = lambda: None,
    ) -> None:
        super().__init__(name, application, {}, known, compute.site.database, also=also)
        self._proofs, self._others = proofs, others

    def proof(self, persona: str, chance: Random) -> dict[str, str]:
        """One of those; one in five is spoilt, or left away."""
        found = dict(chance.choice(self._others if persona == "admin" else self._proofs))
        if chance.random() < 0.2:
            name = chance.choice(list(found))
            found[name] = chance.choice(
                (
                    "",
                    "\xff",
                    "\xff" * 100,
                    "A" * 5000,
                    found[name][:-1],
                    found[name] + "0",
                    found[name].upper(),
                    "é",
                    ".",
                    "a.b",
                    "=" * 40 + ".x",
                )
            )
        return found if chance.random() < 0.97 else {}


class Own:
    """The image service as Kilonova's own user sees it: all images of it. ``content``: their
    bytes."""

    def __init__(self, images: Mapping[str, bytes]) -> None:
        self._images = images

    def ask(self, call: Any) -> Any:
        return call(self, "own token")

    def record(self, image: str, token: str) -> dict[str, Any]:
        return {
            "id": image,
            "status": "active",
            "size": len(self._of(image)),
            "owner": "somebody",
            "direct_url": "rbd://keys/where",
        }

    def open(self, image: str, token: str) -> Bytes:
        return Bytes(self._of(image))

    def put(self, image: str, token: str, chunks: Iterable[bytes]) -> None:
        self._of(image)
        for _ in chunks:
            pass

    def _of(self, image: str) -> bytes:
        if image not in self._images:
            raise errors.NotFound(f"Image {image[:80]} could not be found.")
        return self._images[image]


class Bytes:
    """An image on its way."""

    def __init__(self, content: bytes) -> None:
        self._content, self.size = content, len(content)

    def __iter__(self) -> Iterator[bytes]:
        yield self._content

    def close(self) -> None:
        """Nothing is open."""


def metadata_site(compute: Compute) -> Signed:
    """Guests of two projects, asked for by proxies that have the secret, and by one that has its
    host's key alone."""

    def proof(owner: str, host: str = "", **more: str) -> Proof:
        server, key = compute.ids[owner]["servers"], host_key(SECRET, host) if host else SECRET
        return {
            "X-Instance-ID": server,
            "X-Tenant-ID": compute.ids[owner]["os-quota-sets"],
            "X-Forwarded-For": compute.ids[owner]["fixed"],
            "X-Instance-ID-Signature": signature(key, server),
            **({"X-Instance-Host": host} if host else {}),
            **more,
        }

    own, foreign = proof("own"), proof("foreign")
    guests = GuestCache(compute.cloud.store, VENDOR, Vault("k"), 15)
    mixed = [
        {**foreign, "X-Instance-ID-Signature": own["X-Instance-ID-Signature"]},
        {**own, "X-Tenant-ID": foreign["X-Tenant-ID"]},
        proof("own", "host9"),
        proof("own", "host1"),
    ]
    known = {
        owner: {
            "servers": found["servers"],
            "projects": found["os-quota-sets"],
            "openstack": "latest",
            "latest": "meta_data.json",
            "meta-data": "instance-type",
        }
        for owner, found in compute.ids.items()
    }
    return Signed(
        METADATA,
        metadata.create(guests, SECRET, RateLimiter(10**9)),
        compute,
        known,
        [own] * 6 + mixed,
        [own, foreign],
        guests._guests.clear,
    )


def gateway_site(compute: Compute) -> Signed:
    """An image of each project, and one that waits for its bytes; tickets for them, old and forged
    ones."""
    own, waits, foreign = ids.new(), ids.new(), ids.new()
    known = {"own": {"images": own}, "foreign": {"images": foreign, "canary": "c4nary" * 8}}
    tickets = Tickets(Vault("k"))
    old = Tickets(Vault("k"), lambda: time.time() - LIFETIME - 1)
    shown = [
        tickets.make("host1", [own]),
        tickets.make("host1", [], [own]),
        tickets.make("host1", [own], [waits]),
        old.make("host1", [own]),
        Tickets(Vault("another")).make("host1", [foreign]),
    ]
    application = gateway.create(
        Own({own: b"own" * 100, waits: b"", foreign: known["foreign"]["canary"].encode()}), tickets
    )  # type: ignore[arg-type]  # the same interface
    return Signed(
        GATEWAY,
        application,
        compute,
        known,
        [{"X-Auth-Token": one} for one in shown],
        [{"X-Auth-Token": tickets.make("host2", [own, foreign], [foreign])}],
    )


def operations() -> Iterator[Operation]:
    """What guests and hosts ask for; parameters are what else could stand there."""
    paths = [
        "/",
        "/ec2",
        "/openstack",
        "/latest",
        "/latest/user-data",
        "/latest/meta-data",
        "/latest/meta-data/public-keys/0/openssh-key",
        "/openstack/{version}",
        "/openstack/latest/{document}",
        "/latest/meta-data/{key}",
        *(f"/ec2/2009-04-04/meta-data/{key}" for key in EC2_KEYS),
        *(
            f"/openstack/{version}/{name}"
            for version in (VERSIONS[0], VERSIONS[-1])
            for name in DOCUMENTS
        ),
    ]
    yield from (Operation(METADATA, "GET", path) for path in paths)
    yield Operation(METADATA, "POST", f"/openstack/{VERSIONS[-1]}/password")
    for method, path in (("GET", ""), ("GET", "/file"), ("PUT", "/file")):
        yield Operation(GATEWAY, method, f"/v2/images/{{image}}{path}")
