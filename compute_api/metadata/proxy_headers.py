# SPDX-License-Identifier: Apache-2.0
"""Which guest a request comes from: the headers of the network service's metadata proxy, if they
are signed.

Pure. The proxy knows the guest by the network and the source address of its packet, removes such
headers of the guest's own, and signs the server's id. Neutron's proxies sign with the secret that
they share with us. A host of the standalone network service has a key of its own, names itself, and
is believed for guests on it alone. Must stay true: without the secret nobody is believed;
signatures are compared in constant time; nothing here or in a log shows the secret or a right
signature."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from common.domain import errors

SERVER, PROJECT, ADDRESS, SIGNATURE = (
    "X-INSTANCE-ID",
    "X-TENANT-ID",
    "X-FORWARDED-FOR",
    "X-INSTANCE-ID-SIGNATURE",
)
HOST = "X-INSTANCE-HOST"
MAX_LENGTH = 64  # of an id or an address


@dataclass(frozen=True, slots=True)
class GuestIdentity:
    """The server, its project, and the address that it sent from, as the proxy knows them;
    ``host``: on which host the proxy is, "" for one that is believed for the guests of all
    hosts."""

    server: str
    project: str
    address: str
    host: str = ""


def identify(headers: Mapping[str, str], secret: str) -> GuestIdentity:
    """The guest that asks; ``headers`` by their names in capitals.

    Raises:
        Forbidden: there is no secret, or another one signed this.
        BadRequest: a header is missing.
        NotFound: the address is none.
    """
    if not secret:
        raise errors.Forbidden(
            "This cloud has no [metadata] proxy_shared_secret; its operator has to set one."
        )
    for name in (SERVER, PROJECT, SIGNATURE):
        if not headers.get(name):
            raise errors.BadRequest(f"{name.title()} header is missing from request.")
    server, project, host = headers[SERVER], headers[PROJECT], headers.get(HOST, "")
    key = host_key(secret, host) if host else secret
    if not hmac.compare_digest(signature(key, server).encode(), headers[SIGNATURE].encode()):
        raise errors.Forbidden("Invalid proxy request signature.")
    if max(len(server), len(project)) > MAX_LENGTH:
        raise errors.NotFound("There is no such server.")
    return GuestIdentity(server, project, canonical_address(headers.get(ADDRESS, "")), host)


def signature(secret: str, server: str) -> str:
    """What the proxy sends in its last header."""
    return hmac.new(secret.encode(), server.encode(), hashlib.sha256).hexdigest()


def host_key(secret: str, host: str) -> str:
    """The key of one host's proxy, from which neither the secret nor another host's key follows."""
    return hmac.new(secret.encode(), f"host {host}".encode(), hashlib.sha256).hexdigest()


def canonical_address(address: str) -> str:
    """The one way to write an address. Raises NotFound when it is none, or several."""
    try:
        return str(ipaddress.ip_address(address[:MAX_LENGTH].strip()))
    except ValueError as problem:
        raise errors.NotFound(
            "The request does not come from an address of the server."
        ) from problem
