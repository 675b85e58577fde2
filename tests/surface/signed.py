# SPDX-License-Identifier: Apache-2.0
"""The metadata service and the image gateway, which authenticate by signatures without a token.

The personas of tenants have the signatures of their own guest, or the tickets of their own image.
The admin also has the signatures and tickets of the foreign project.
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
    """A site without tokens.

    Args:
        proofs: Headers that tenants may send.
        others: Headers that only the admin may send.
    """

    def __init__(
        self,
        name: str,
        application: Any,
        compute: Compute,
        records_by_owner: dict[str, dict[str, str]],
        proofs: list[Proof],
        others: list[Proof],
        also: Any = lambda: None,
    ) -> None:
        super().__init__(name, application, {}, records_by_owner, compute.site.database, also=also)
        self._proofs, self._others = proofs, others

    def proof(self, persona: str, chance: Random) -> dict[str, str]:
        """Return random headers of the persona. About one in five is damaged or left out."""
        headers = dict(chance.choice(self._others if persona == "admin" else self._proofs))
        if chance.random() < 0.2:
            name = chance.choice(list(headers))
            headers[name] = chance.choice(
                (
                    "",
                    "\xff",
                    "\xff" * 100,
                    "A" * 5000,
                    headers[name][:-1],
                    headers[name] + "0",
                    headers[name].upper(),
                    "é",
                    ".",
                    "a.b",
                    "=" * 40 + ".x",
                )
            )
        return headers if chance.random() < 0.97 else {}


class OwnImages:
    """The image service as seen by Kilonova's own user: all images with their bytes."""

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
    """A download of an image."""

    def __init__(self, content: bytes) -> None:
        self._content, self.size = content, len(content)

    def __iter__(self) -> Iterator[bytes]:
        yield self._content

    def close(self) -> None:
        """Ignore the call, because no connection is open."""


def metadata_site(compute: Compute) -> Signed:
    """Return the metadata service with guests of two projects.

    Some requests come from proxies with the shared secret, others from a proxy with the key of its
    host.
    """

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
    records_by_owner = {
        owner: {
            "servers": records["servers"],
            "projects": records["os-quota-sets"],
            "openstack": "latest",
            "latest": "meta_data.json",
            "meta-data": "instance-type",
        }
        for owner, records in compute.ids.items()
    }
    return Signed(
        METADATA,
        metadata.create(guests, SECRET, RateLimiter(10**9)),
        compute,
        records_by_owner,
        [own] * 6 + mixed,
        [own, foreign],
        guests._guests.clear,
    )


def gateway_site(compute: Compute) -> Signed:
    """Return the image gateway with an image of each project and an image without data.

    The tickets are valid, expired or forged.
    """
    own, waits, foreign = ids.new(), ids.new(), ids.new()
    records_by_owner = {
        "own": {"images": own},
        "foreign": {"images": foreign, "canary": "c4nary" * 8},
    }
    tickets = Tickets(Vault("k"))
    old = Tickets(Vault("k"), lambda: time.time() - LIFETIME - 1)
    tenant_tickets = [
        tickets.make("host1", [own]),
        tickets.make("host1", [], [own]),
        tickets.make("host1", [own], [waits]),
        old.make("host1", [own]),
        Tickets(Vault("another")).make("host1", [foreign]),
    ]
    application = gateway.create(
        OwnImages(
            {own: b"own" * 100, waits: b"", foreign: records_by_owner["foreign"]["canary"].encode()}
        ),
        tickets,
    )  # type: ignore[arg-type]  # OwnImages has the used methods.
    return Signed(
        GATEWAY,
        application,
        compute,
        records_by_owner,
        [{"X-Auth-Token": ticket} for ticket in tenant_tickets],
        [{"X-Auth-Token": tickets.make("host2", [own, foreign], [foreign])}],
    )


def operations() -> Iterator[Operation]:
    """Yield the requests of guests and hosts. Path parameters stand for other values."""
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
