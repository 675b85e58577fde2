# SPDX-License-Identifier: Apache-2.0
"""Interfaces of a server as answers: from a port of the network service, or from our record."""

from __future__ import annotations

from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import Interface
from compute_api.http.microversions import Range

_TAGGED = Range("2.70")


def of_port(port: JsonMapping, tag: str, version: int) -> JsonObject:
    """A port of the network service."""
    fixed = [
        {"ip_address": one["ip_address"], "subnet_id": one["subnet_id"]}
        for one in port.get("fixed_ips") or ()
    ]
    return _body(
        port["id"],
        port["network_id"],
        port["mac_address"],
        str(port.get("status") or "UNKNOWN"),
        fixed,
        tag,
        version,
    )


def of_interface(interface: Interface, version: int) -> JsonObject:
    """Our record, as the conductor made it."""
    fixed = [
        {"ip_address": one["address"], "subnet_id": one["subnet"]} for one in interface.addresses
    ]
    return _body(
        interface.port,
        interface.network,
        interface.mac,
        "ACTIVE" if interface.active else "DOWN",
        fixed,
        interface.tag,
        version,
    )


def _body(
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
