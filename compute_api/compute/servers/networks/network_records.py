# SPDX-License-Identifier: Apache-2.0
"""Access to records of the network service, for the proxies and for the addresses of servers.

Requests carry the caller's token, and change no row of the database. In a cloud without a network
service lists are empty, records do not exist, and creation is not implemented.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from common.domain import errors
from common.domain.json_types import JsonObject
from compute_api.compute.request.dependencies import TenantNetworks
from compute_api.compute.request.request import Request
from compute_api.http.validation import FORMATS

NETWORKS, PORTS, FLOATING_IPS = "networks", "ports", "floatingips"
GROUPS, RULES = "security-groups", "security-group-rules"
_WITHOUT = (
    "This cloud has no network service, so there are no networks, security groups or floating IPs."
)


def required(request: Request) -> TenantNetworks:
    """Return the network service for a request that reads or changes a record.

    Raises:
        NotFound: The cloud has no network service.
    """
    networks = request.networks
    if networks is None:
        raise errors.NotFound(_WITHOUT)
    return networks


def required_to_make(request: Request) -> TenantNetworks:
    """Return the network service for a request that creates a record.

    Raises:
        NotImplementedHere: The cloud has no network service.
    """
    networks = request.networks
    if networks is None:
        raise errors.NotImplementedHere(_WITHOUT)
    return networks


def is_id(text: str) -> bool:
    """Return whether the text has the form of a record's id, a UUID."""
    return FORMATS["uuid"](text)


def one(request: Request, resource: str, record_id: str) -> JsonObject:
    """Return the network service's record with this id.

    Args:
        request: The request, whose token the network service checks.
        resource: Path of the collection, for example ``PORTS``.
        record_id: Id of the record.

    Raises:
        NotFound: The record does not exist for the caller, or the cloud has no network service.
    """
    networks = required(request)
    if not is_id(record_id):
        raise errors.NotFound(
            f"{record_id[:80]} is not a UUID, so the network service has no record with this ID."
        )
    return networks.record(request.context.token, resource, record_id)


@contextlib.contextmanager
def conflicts_as(kind: type[errors.Problem], *also: type[errors.Problem]) -> Iterator[None]:
    """Replace Conflict from the with block by ``kind`` with the same text.

    Errors of the types in ``also`` are replaced too.
    """
    kinds: tuple[type[errors.Problem], ...] = (errors.Conflict, *also)
    try:
        yield
    except kinds as problem:
        raise kind(problem.text) from problem


def list_floating_ips(networks: TenantNetworks, token: str, **filters: object) -> list[JsonObject]:
    """Return the floating IPs that match all filters, or [] if the service has no routers."""
    try:
        return networks.records(token, FLOATING_IPS, **filters)
    except errors.NotFound:
        return []
