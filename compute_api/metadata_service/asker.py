# SPDX-License-Identifier: Apache-2.0
"""Who asks: what the network service's metadata proxy says of the guest behind a request, believed only when signed.

Pure. The proxy knows the guest by the network and the address that its packet came from, strips such headers from
what the guest sent, and signs the server's id with the secret that it shares with us.
Must stay true: without the secret nobody is believed; the signature is compared in constant time; nothing here or in
a log shows the secret or a right signature.
"""
from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from common import errors

SERVER, PROJECT, ADDRESS, SIGNATURE = ("X-INSTANCE-ID", "X-TENANT-ID", "X-FORWARDED-FOR", "X-INSTANCE-ID-SIGNATURE")
LONGEST = 64             # of an id or an address


@dataclass(frozen=True, slots=True)
class Asker:
    """The server, its project, and the address that it sent from, as the proxy knows them."""

    server: str
    project: str
    address: str


def identify(headers: Mapping[str, str], secret: str) -> Asker:
    """The guest that asks; ``headers`` by their names in capitals.

    Raises:
        Forbidden: there is no secret, or another one signed this.
        BadRequest: a header is missing.
        NotFound: the address is none.
    """
    if not secret:
        raise errors.Forbidden("This cloud has no [metadata] proxy_shared_secret; its operator has to set one.")
    for name in (SERVER, PROJECT, SIGNATURE):
        if not headers.get(name):
            raise errors.BadRequest(f"{name.title()} header is missing from request.")
    server, project = headers[SERVER], headers[PROJECT]
    if not hmac.compare_digest(signature(secret, server).encode(), headers[SIGNATURE].encode()):
        raise errors.Forbidden("Invalid proxy request signature.")
    if max(len(server), len(project)) > LONGEST:
        raise errors.NotFound("There is no such server.")
    return Asker(server, project, plain(headers.get(ADDRESS, "")))


def signature(secret: str, server: str) -> str:
    """What the proxy sends in its last header."""
    return hmac.new(secret.encode(), server.encode(), hashlib.sha256).hexdigest()


def plain(address: str) -> str:
    """The one way to write an address. Raises NotFound when it is none, or several."""
    try:
        return str(ipaddress.ip_address(address[:LONGEST].strip()))
    except ValueError as problem:
        raise errors.NotFound("The request does not come from an address of the server.") from problem
