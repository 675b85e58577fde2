# SPDX-License-Identifier: Apache-2.0
"""/os-security-groups and /os-security-group-rules (until 2.35): groups and their ingress rules.

The handlers send all requests to the network service with the caller's token. Conflicts there are
400 in this API, for example a duplicate name, a group in use or a duplicate rule. An exceeded quota
is 403.
"""

from __future__ import annotations

import ipaddress
import re

from common.domain import errors
from common.domain.json_types import JsonMapping, JsonObject
from compute_api.compute.request.request import Request
from compute_api.compute.servers.networks import network_records
from compute_api.compute.servers.networks.network_records import GROUPS, RULES, conflicts_as
from compute_api.compute.views import security_groups as view

_NUMBER = re.compile(r"-?[0-9]{1,5}")
#: Protocol -> lowest and highest value of from_port and to_port, which are type and code for ICMP.
_NUMBERS = {"tcp": (1, 65535), "udp": (1, 65535), "icmp": (-1, 255)}
ALL_OF_ICMP = -1


def index(request: Request) -> JsonObject:
    """Return one page of security groups for GET /os-security-groups.

    If the query has ``all_tenants``, administrators get the groups of all projects. The limit 0
    means no limit. Without a network service the list is empty.
    """
    networks, context = request.networks, request.context
    if networks is None:
        return {"security_groups": []}
    all_projects = request.is_admin and "all_tenants" in request.query
    groups = (
        networks.records(context.token, GROUPS)
        if all_projects
        else networks.security_groups(context.token, context.project_id, whole=True)
    )
    page = sorted(groups, key=lambda group: (group["project_id"], group["name"], group["id"]))
    page = page[int(request.query_value("offset") or 0) :][: request.limit or None]
    return {"security_groups": [view.group(group, groups) for group in page]}


def show(request: Request, group_id: str) -> JsonObject:
    """Return one security group for GET /os-security-groups/{id}."""
    return _show_group(request, network_records.one(request, GROUPS, _check_id(group_id)))


def create(request: Request) -> JsonObject:
    """Create a security group for POST /os-security-groups.

    Raises:
        BadRequest: The network service refuses the group.
        Forbidden: A quota of the network service does not allow the group.
        NotImplementedHere: The cloud has no network service.
    """
    networks = network_records.required_to_make(request)
    with conflicts_as(errors.BadRequest):
        return _show_group(
            request, networks.create(request.context.token, GROUPS, _select_fields(request))
        )


def update(request: Request, group_id: str) -> JsonObject:
    """Change the name and description of a group for PUT /os-security-groups/{id}."""
    networks, record_id = network_records.required(request), _check_id(group_id)
    with conflicts_as(errors.BadRequest):
        return _show_group(
            request,
            networks.update(request.context.token, GROUPS, record_id, _select_fields(request)),
        )


def delete(request: Request, group_id: str) -> None:
    """Delete a security group for DELETE /os-security-groups/{id}.

    Raises:
        BadRequest: The id is not a UUID, or the group is in use.
        NotFound: The group does not exist, or the cloud has no network service.
    """
    networks, record_id = network_records.required(request), _check_id(group_id)
    with conflicts_as(errors.BadRequest):
        networks.delete(request.context.token, GROUPS, record_id)


def create_rule(request: Request) -> JsonObject:
    """Add an ingress rule to a group for POST /os-security-group-rules.

    Raises:
        BadRequest: The rule is invalid, or the network service refuses the rule.
        Forbidden: A quota of the network service does not allow the rule.
        NotFound: The group or the source group does not exist for the caller.
        NotImplementedHere: The cloud has no network service.
    """
    body, networks = request.body["security_group_rule"], network_records.required_to_make(request)
    values = _convert_rule(body)
    parent = network_records.one(request, GROUPS, body["parent_group_id"])
    sources = (
        [network_records.one(request, GROUPS, body["group_id"])] if body.get("group_id") else []
    )
    with conflicts_as(errors.BadRequest):
        rule = networks.create(
            request.context.token,
            RULES,
            {"security_group_id": parent["id"], "direction": "ingress", **values},
        )
    return {"security_group_rule": view.rule(rule, {group["id"]: group for group in sources})}


def delete_rule(request: Request, rule_id: str) -> None:
    """Delete a security group rule for DELETE /os-security-group-rules/{id}."""
    network_records.required(request).delete(request.context.token, RULES, _check_id(rule_id))


def _check_id(record_id: str) -> str:
    if not network_records.is_id(record_id):
        raise errors.BadRequest(
            f"{record_id[:80]} is not a UUID. Ids of security groups and of their rules are UUIDs."
        )
    return record_id


def _select_fields(request: Request) -> JsonObject:
    body = request.body["security_group"]
    return {"name": body["name"], "description": body["description"]}


def _show_group(request: Request, group: JsonObject) -> JsonObject:
    """Return the response for a group.

    If a rule has a source group, this reads the groups of the project, for the name of the source.
    """
    has_sources = any(rule.get("remote_group_id") for rule in group["security_group_rules"])
    networks, token = network_records.required(request), request.context.token
    groups = networks.security_groups(token, group["project_id"], whole=True) if has_sources else []
    return {"security_group": view.group(group, groups)}


# --- rules ---
def _convert_rule(body: JsonMapping) -> JsonObject:
    """Return a rule in the format of the network service, without its group and direction.

    A rule for a range of addresses needs a protocol and ports. A rule for a source group may omit
    the ports, or the protocol and the ports.

    Raises:
        BadRequest: The rule is incomplete or invalid.
    """
    source = body.get("group_id")
    where = (
        {"ethertype": "IPv4", "remote_group_id": source}
        if source
        else _convert_range(body.get("cidr"))
    )
    values = [body.get("ip_protocol"), body.get("from_port"), body.get("to_port")]
    if values == [None, None, None] and source:
        return where
    if (
        values[0] is None
        or (values[1] is None) != (values[2] is None)
        or (values[1] is None and not source)
    ):
        raise errors.BadRequest(
            "Not enough parameters to build a valid rule: give ip_protocol, from_port and to_port."
        )
    protocol = str(values[0]).lower()
    if protocol not in _NUMBERS:
        raise errors.BadRequest(
            f"Invalid IP protocol {protocol[:40]}: it must be tcp, udp or icmp."
        )
    if values[1] is None:
        return {**where, "protocol": protocol}
    low, high = _parse_number("from_port", values[1]), _parse_number("to_port", values[2])
    least, most = _NUMBERS[protocol]
    if not (least <= low <= most and least <= high <= most and (low <= high or protocol == "icmp")):
        order = "" if protocol == "icmp" else ", and from_port must not be above to_port"
        raise errors.BadRequest(
            f"Invalid port range {low}:{high}: for {protocol}, from_port and to_port must be from "
            f"{least} to {most}{order}."
        )
    ports = {"port_range_min": low, "port_range_max": high}
    return {
        **where,
        "protocol": protocol,
        **{name: port for name, port in ports.items() if port != ALL_OF_ICMP},
    }


def _parse_number(name: str, value: object) -> int:
    text = str(value).strip()
    if not _NUMBER.fullmatch(text):
        raise errors.BadRequest(f"{name}: {text[:40]} is not a number from -1 to 65535.")
    return int(text)


def _convert_range(cidr: object) -> JsonObject:
    """Return the ethertype and the prefix of a range of source addresses.

    Without a range (None or "") the result means all IPv4 addresses.

    Raises:
        BadRequest: The range is invalid.
    """
    try:
        if cidr is not None and not isinstance(cidr, str):
            raise ValueError("cidr must be a string")
        interface = ipaddress.ip_interface(cidr or "0.0.0.0/0")
    except ValueError as problem:
        raise errors.BadRequest(f"Invalid cidr {str(cidr)[:80]}.") from problem
    if interface.network.prefixlen == 0 and int(interface.ip):
        raise errors.BadRequest(
            f"Bad prefix for network in cidr {cidr}: the length 0 means all addresses; give "
            "0.0.0.0/0 or ::/0."
        )
    text = cidr if cidr and "/" in cidr else str(interface.network)
    return {"ethertype": f"IPv{interface.version}", "remote_ip_prefix": text}
