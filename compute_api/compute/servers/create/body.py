# SPDX-License-Identifier: Apache-2.0
"""Create, phase 1: parse the body.

The result holds the fields that later phases look up, check or convert. Later phases read the other
fields, such as the description, from the body. An image may also define block devices, so this
phase reads the image with the caller's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.domain import errors, request_spec
from common.domain.json_types import JsonMapping, JsonObject
from compute_api.compute.request.request import Request
from compute_api.compute.servers import destinations
from compute_api.compute.servers import fields as server_fields
from compute_api.compute.servers.destinations import Destination
from compute_api.compute.servers.disks import block_devices
from compute_api.compute.servers.disks.block_devices import BlockDevices


@dataclass(frozen=True)
class RequestedServers:
    """The servers of one create, as its body names them."""

    min_count: int
    max_count: int
    devices: BlockDevices
    #: Files for the config drive (personality).
    files: Sequence[dict[str, str]] = field(repr=False)
    hints: JsonObject
    #: The server group in the hints, or None.
    group_id: str | None
    flavor_id: str
    #: The caller is allowed to choose this destination. Its existence is checked later.
    destination: Destination


def parse_body(request: Request) -> RequestedServers:
    """Parse the body of POST /servers.

    Raises:
        BadRequest: A field is invalid, or the image does not exist for the caller.
        Forbidden: Files or metadata exceed their limits, the caller may not choose a host, or hosts
            could not download the image.
        Unavailable: An external service does not answer.
    """
    body = request.body["server"]
    min_count, max_count = _parse_counts(body)
    if body.get("hostname") and max_count > 1:
        raise errors.BadRequest(
            "hostname: several servers of one request cannot have the same host name. Leave hostname "
            "out, and each server gets a host name from its name."
        )
    devices = block_devices.parse(body, request.image)
    files = server_fields.parse_personality(body, request.limits)
    server_fields.check_metadata(body.get("metadata", {}), request.limits)
    hints: JsonObject = (
        request.body.get("os:scheduler_hints")
        or request.body.get("OS-SCH-HNT:scheduler_hints")
        or {}
    )
    server_fields.check_hints(hints)
    return RequestedServers(
        min_count=min_count,
        max_count=max_count,
        devices=devices,
        files=files,
        hints=hints,
        group_id=request_spec.group_of(hints),
        flavor_id=server_fields.parse_flavor_id(body["flavorRef"]),
        destination=_parse_destination(request, body),
    )


def _parse_counts(body: JsonMapping) -> tuple[int, int]:
    """Return min_count (default 1) and max_count (default min_count).

    Raises:
        BadRequest: A count is below 1, min_count is above max_count, or max_count is above 1000.
    """
    min_count = int(body.get("min_count") or 1)
    max_count = int(body.get("max_count") or min_count)
    if min_count < 1 or max_count < 1:
        raise errors.BadRequest("min_count and max_count must be at least 1")
    if min_count > max_count:
        raise errors.BadRequest("min_count must be <= max_count")
    if max_count > 1000:
        raise errors.BadRequest(
            "max_count must be at most 1000: create the servers in several requests"
        )
    return min_count, max_count


def _parse_destination(request: Request, body: JsonMapping) -> Destination:
    """Return the requested zone, host and node. Without a zone the configured default applies.

    Raises:
        Forbidden: The body names a host or a node, and the caller may not choose one.
        BadRequest: Both availability_zone and host or hypervisor_hostname name a host, or
            availability_zone has more than two colons.
    """
    destination = destinations.parse(
        body.get("availability_zone"), request.services.settings.default_schedule_zone
    )
    hosts = {name: body[name] for name in ("host", "hypervisor_hostname") if name in body}
    if destination.forced:
        request.require("os_compute_api:servers:create:forced_host")
    if not hosts:
        return destination
    request.require("compute:servers:create:requested_destination")
    if destination.forced:
        raise errors.BadRequest(
            f"A host in availability_zone cannot be given together with {' and '.join(hosts)}."
        )
    return Destination(destination.zone, hosts.get("host"), hosts.get("hypervisor_hostname"))
