# SPDX-License-Identifier: Apache-2.0
"""Identify the guest of a request from the signed headers of the metadata proxy.

The network service's proxy recognizes the guest by the network and the source address, removes such
headers of the guest, and signs the server's id. Neutron's proxies sign with the shared secret. The
proxy on a host of the embedded network service has a key of its own and adds the host's name. This
key is only valid for guests on that host.

Invariant: without the secret no request is accepted. Signatures are compared in constant time. No
response and no log line contains the secret or a valid signature.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from common.domain import errors
from common.security import secret_lists

SERVER, PROJECT, ADDRESS, SIGNATURE = (
    "X-INSTANCE-ID",
    "X-TENANT-ID",
    "X-FORWARDED-FOR",
    "X-INSTANCE-ID-SIGNATURE",
)
HOST = "X-INSTANCE-HOST"
#: Largest length of an id or an address.
MAX_LENGTH = 64


@dataclass(frozen=True, slots=True)
class GuestIdentity:
    """The sender of a request, as the proxy identified it.

    Attributes:
        server: Id of the server.
        project: Id of the project.
        address: Source address, in canonical form.
        host: Host of the proxy, or "" for a proxy that serves guests of all hosts.
    """

    server: str
    project: str
    address: str
    host: str = ""


def identify(headers: Mapping[str, str], secrets: str) -> GuestIdentity:
    """Return the guest that sent the request, after a check of the proxy's signature.

    The caller checks that this guest exists (``GuestCache.find``).

    Args:
        headers: The headers, with names in upper case.
        secrets: The shared secrets, separated by commas. All are accepted.

    Raises:
        Forbidden: There is no secret, or the signature is wrong.
        BadRequest: The header with the server, the project or the signature is missing.
        NotFound: The address is missing or invalid, or an id is too long.
    """
    if not (keys := secret_lists.split(secrets)):
        raise errors.Forbidden(
            "This cloud has no [metadata] proxy_shared_secret; its operator must set the option."
        )
    for name in (SERVER, PROJECT, SIGNATURE):
        if not headers.get(name):
            raise errors.BadRequest(f"{name.title()} header is missing from request.")
    server, project, host = headers[SERVER], headers[PROJECT], headers.get(HOST, "")
    signed = headers[SIGNATURE].encode()
    if not any(
        hmac.compare_digest(
            signature(host_key(key, host) if host else key, server).encode(), signed
        )
        for key in keys
    ):
        raise errors.Forbidden("Invalid proxy request signature.")
    if max(len(server), len(project)) > MAX_LENGTH:
        raise errors.NotFound("There is no such server.")
    return GuestIdentity(server, project, canonical_address(headers.get(ADDRESS, "")), host)


def signature(secret: str, server: str) -> str:
    """Return the proxy's signature of the server's id: HMAC-SHA256 with ``secret``, in hex."""
    return hmac.new(secret.encode(), server.encode(), hashlib.sha256).hexdigest()


def host_key(secret: str, host: str) -> str:
    """Derive the key of a host's proxy. The key reveals neither the secret nor other keys."""
    return hmac.new(secret.encode(), f"host {host}".encode(), hashlib.sha256).hexdigest()


def canonical_address(address: str) -> str:
    """Return the canonical form of an address.

    Raises:
        NotFound: The text is not a single valid address.
    """
    try:
        return str(ipaddress.ip_address(address[:MAX_LENGTH].strip()))
    except ValueError as problem:
        raise errors.NotFound(
            "The request does not come from an address of the server."
        ) from problem
