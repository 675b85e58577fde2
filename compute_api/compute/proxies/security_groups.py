# SPDX-License-Identifier: Apache-2.0
"""/os-security-groups and /os-security-group-rules (until 2.35): groups and their ingress rules.

Everything is done in the network service with the caller's token. Its conflicts (a name that is
taken, a group in use, a rule that exists) are 400 in this API, and its quota is 403."""

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
#: Protocol -> the least and the highest number that its two ports, or type and code, may have.
_NUMBERS = {"tcp": (1, 65535), "udp": (1, 65535), "icmp": (-1, 255)}
ALL_OF_ICMP = -1


def index(request: Request) -> JsonObject:
    """GET /os-security-groups"""
    networks, context = request.networks, request.context
    if networks is None:
        return {"security_groups": []}
    everybodys = request.is_admin and "all_tenants" in request.query
    known = (
        networks.records(context.token, GROUPS)
        if everybodys
        else networks.security_groups(context.token, context.project_id, whole=True)
    )
    page = sorted(known, key=lambda group: (group["project_id"], group["name"], group["id"]))
    page = page[int(request.first("offset") or 0) :][: request.limit or None]
    return {"security_groups": [view.group(group, known) for group in page]}


def show(request: Request, group_id: str) -> JsonObject:
    """GET /os-security-groups/{id}"""
    return _shown(request, network_records.one(request, GROUPS, _checked(group_id)))


def create(request: Request) -> JsonObject:
    """POST /os-security-groups"""
    networks = network_records.required_to_make(request)
    with conflicts_as(errors.BadRequest):
        return _shown(request, networks.create(request.context.token, GROUPS, _words(request)))


def update(request: Request, group_id: str) -> JsonObject:
    """PUT /os-security-groups/{id}"""
    networks, found = network_records.required(request), _checked(group_id)
    with conflicts_as(errors.BadRequest):
        return _shown(
            request, networks.update(request.context.token, GROUPS, found, _words(request))
        )


def delete(request: Request, group_id: str) -> None:
    """DELETE /os-security-groups/{id}"""
    networks, found = network_records.required(request), _checked(group_id)
    with conflicts_as(errors.BadRequest):
        networks.delete(request.context.token, GROUPS, found)


def create_rule(request: Request) -> JsonObject:
    """POST /os-security-group-rules"""
    given, networks = request.body["security_group_rule"], network_records.required_to_make(request)
    values = _rule(given)
    parent = network_records.one(request, GROUPS, given["parent_group_id"])
    sources = (
        [network_records.one(request, GROUPS, given["group_id"])] if given.get("group_id") else []
    )
    with conflicts_as(errors.BadRequest):
        made = networks.create(
            request.context.token,
            RULES,
            {"security_group_id": parent["id"], "direction": "ingress", **values},
        )
    return {"security_group_rule": view.rule(made, {group["id"]: group for group in sources})}


def delete_rule(request: Request, rule_id: str) -> None:
    """DELETE /os-security-group-rules/{id}"""
    network_records.required(request).delete(request.context.token, RULES, _checked(rule_id))


def _checked(record_id: str) -> str:
    if not network_records.is_id(record_id):
        raise errors.BadRequest(
            f"{record_id[:80]} is not a UUID, as the ids of security groups and their rules are."
        )
    return record_id


def _words(request: Request) -> JsonObject:
    given = request.body["security_group"]
    return {"name": given["name"], "description": given["description"]}


def _shown(request: Request, group: JsonObject) -> JsonObject:
    """A group; those that its rules name are looked up."""
    named = any(rule.get("remote_group_id") for rule in group["security_group_rules"])
    networks, token = network_records.required(request), request.context.token
    known = networks.security_groups(token, group["project_id"], whole=True) if named else []
    return {"security_group": view.group(group, known)}


# --- what a rule says ---
def _rule(given: JsonMapping) -> JsonObject:
    """A rule in the network service's words. One for addresses names a protocol and its ports; one
    for the members of a group may leave out the ports, or all of it.

    Raises:
        BadRequest: it says too little, or what cannot be.
    """
    source = given.get("group_id")
    where = (
        {"ethertype": "IPv4", "remote_group_id": source} if source else _range(given.get("cidr"))
    )
    said = [given.get("ip_protocol"), given.get("from_port"), given.get("to_port")]
    if said == [None, None, None] and source:
        return where
    if (
        said[0] is None
        or (said[1] is None) != (said[2] is None)
        or (said[1] is None and not source)
    ):
        raise errors.BadRequest(
            "Not enough parameters to build a valid rule: give ip_protocol, from_port and to_port."
        )
    protocol = str(said[0]).lower()
    if protocol not in _NUMBERS:
        raise errors.BadRequest(
            f"Invalid IP protocol {protocol[:40]}: it must be tcp, udp or icmp."
        )
    if said[1] is None:
        return {**where, "protocol": protocol}
    low, high = _number("from_port", said[1]), _number("to_port", said[2])
    least, most = _NUMBERS[protocol]
    if not (least <= low <= most and least <= high <= most and (low <= high or protocol == "icmp")):
        raise errors.BadRequest(
            f"Invalid port range {low}:{high}: with {protocol} both are from {least} to {most}, "
            "and from_port is not above to_port."
        )
    ports = {"port_range_min": low, "port_range_max": high}
    return {
        **where,
        "protocol": protocol,
        **{name: port for name, port in ports.items() if port != ALL_OF_ICMP},
    }


def _number(name: str, given: object) -> int:
    text = str(given).strip()
    if not _NUMBER.fullmatch(text):
        raise errors.BadRequest(f"{name}: {text[:40]} is not a number from -1 to 65535.")
    return int(text)


def _range(cidr: object) -> JsonObject:
    """Where what comes in may come from; everywhere, unless it is said."""
    try:
        if cidr is not None and not isinstance(cidr, str):
            raise ValueError("a range is text")
        found = ipaddress.ip_interface(cidr or "0.0.0.0/0")
    except ValueError as problem:
        raise errors.BadRequest(f"Invalid cidr {str(cidr)[:80]}.") from problem
    if found.network.prefixlen == 0 and int(found.ip):
        raise errors.BadRequest(
            f"Bad prefix for network in cidr {cidr}: a length of 0 means every address."
        )
    text = cidr if cidr and "/" in cidr else str(found.network)
    return {"ethertype": f"IPv{found.version}", "remote_ip_prefix": text}
