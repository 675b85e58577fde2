# SPDX-License-Identifier: Apache-2.0
"""Interfaces of a server in responses, from ports of the network service or from server rows."""

from __future__ import annotations

from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import Interface
from compute_api.http.microversions import Range

_TAGGED = Range("2.70")


def of_port(port: JsonMapping, tag: str, version: int) -> JsonObject:
    """Return the body for a port of the network service.

    Args:
        port: The port, in the format of the network service.
        tag: Tag of the interface from the server's row, or "".
        version: The microversion of the request.
    """
    fixed = [
        {"ip_address": address["ip_address"], "subnet_id": address["subnet_id"]}
        for address in port.get("fixed_ips") or ()
    ]
    return _build_body(
        port["id"],
        port["network_id"],
        port["mac_address"],
        str(port.get("status") or "UNKNOWN"),
        fixed,
        tag,
        version,
    )


def of_interface(interface: Interface, version: int) -> JsonObject:
    """Return the body for an interface in the form that servers' rows and actions store."""
    fixed = [
        {"ip_address": address["address"], "subnet_id": address["subnet"]}
        for address in interface.addresses
    ]
    return _build_body(
        interface.port,
        interface.network,
        interface.mac,
        "ACTIVE" if interface.active else "DOWN",
        fixed,
        interface.tag,
        version,
    )


def _build_body(
    port_id: str, net_id: str, mac: str, state: str, fixed: list[JsonObject], tag: str, version: int
) -> JsonObject:
    body = {
        "port_id": port_id,
        "net_id": net_id,
        "mac_addr": mac,
        "port_state": state,
        "fixed_ips": fixed,
    }
    return {**body, "tag": tag or None} if version in _TAGGED else body
