# SPDX-License-Identifier: Apache-2.0
"""Which interfaces a server gets: from what a request says of networks to the arguments of the
action.

Called for new servers and for an interface that is attached later. Everything is read from the
network service with the caller's token before anything is written; ports are made and bound by the
conductor. A requested interface is an
entry of the action's args: {"network" | "port", "label", "fixed_ip"?, "tag"?}, in the order asked
for.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common import errors
from common.clients.network import find_unsupported_request
from common.json_types import JsonMapping, JsonObject
from common.models import Interface
from common.store.servers import servers
from common.wire import to_wire
from compute_api.compute.dependencies import TenantNetworks
from compute_api.compute.request import Request
from compute_api.edge.validation import FORMATS

ATTACH_NETWORK = "os_compute_api:servers:create:attach_network"
ATTACH_EXTERNAL = "network:attach_external_network"
DEFAULT_GROUP = "default"
#: Types of QoS rules from which ports get a resource_request.
GUARANTEES = ("minimum_bandwidth", "minimum_packet_rate")
AMBIGUOUS = "Multiple possible networks found, use a Network ID to be more specific."


@dataclass(frozen=True)
class NetworkErrors:
    """The errors that differ between a create and an attachment."""

    unknown: type[errors.Problem]
    taken: type[errors.Problem]
    ambiguous: type[errors.Problem]


CREATING = NetworkErrors(
    unknown=errors.BadRequest, taken=errors.BadRequest, ambiguous=errors.Conflict
)
ATTACHING = NetworkErrors(
    unknown=errors.NotFound, taken=errors.Conflict, ambiguous=errors.BadRequest
)


@dataclass(frozen=True)
class ChosenInterfaces:
    """What a new server gets."""

    args: JsonObject  #: of its action
    max_count: int  #: servers that the project's quota of ports allows
    groups: list[dict[str, str]]  #: names of security groups, for its row
    #: the caller's own ports, for its row
    interfaces: list[JsonObject] = field(default_factory=list)


def read_again(request: Request, networks: TenantNetworks, server_id: str) -> None:
    """Write down what the network service says of the server's interfaces now."""
    request.write(
        servers.refresh_interfaces, server_id, networks.interfaces(request.context.token, server_id)
    )


def service(request: Request) -> TenantNetworks | None:
    """The network service; None: this cloud has none, and its servers no interfaces."""
    networks = request.services.networks
    return networks if networks is not None and networks.has_service() else None


def choose_interfaces(
    request: Request, body: JsonMapping, min_count: int, max_count: int
) -> ChosenInterfaces:
    """The interfaces and security groups of the servers of one create.

    Raises:
        BadRequest, Forbidden, Conflict: what is wrong with them. Unavailable: the network service
        does not answer.
    """
    asked, groups = body.get("networks"), parse_security_groups(body)
    networks = service(request)
    if networks is None:
        _refuse_networks(body)
        return ChosenInterfaces({"networks": []}, max_count, groups)
    if asked:
        request.require(ATTACH_NETWORK)
    project_id = request.context.project_id
    requested: list[JsonObject] = []
    ports: list[Interface] = []
    if asked != "none":
        items = [] if asked == "auto" else _items(asked or (), max_count)
        requested, ports = requested_interfaces(request, project_id, items, CREATING)
    if asked == "auto" and not requested:
        raise errors.BadRequest(
            f"networks: unable to automatically allocate a network for project {project_id}; make "
            'one, or ask for "none".'
        )
    found = security_groups(
        networks, request.context.token, project_id, [group["name"] for group in groups]
    )
    max_count = count_within_port_quota(
        networks, request.context.token, project_id, requested, min_count, max_count
    )
    return ChosenInterfaces(
        {"networks": requested, "security_groups": [group["id"] for group in found]},
        max_count,
        [{"name": str(group["name"])} for group in found] or groups,
        [to_wire(port) for port in ports],
    )


def parse_security_groups(body: JsonMapping) -> list[dict[str, str]]:
    """Return the requested names of security groups, each once, or that of the default group."""
    names = dict.fromkeys(
        group["name"] for group in body.get("security_groups", ()) if "name" in group
    )
    return [{"name": name} for name in names or (DEFAULT_GROUP,)]


def _refuse_networks(body: JsonMapping) -> None:
    """Refuse named networks in a cloud without a network service."""
    networks = body.get("networks")
    if isinstance(networks, list) and networks:
        raise errors.BadRequest(
            "networks: this cloud has no network service; leave networks out, or ask for "
            '"none" or "auto".'
        )


def _items(asked: Iterable[JsonMapping], max_count: int) -> list[JsonMapping]:
    """Each entry names a port or a network, and no more than fits together."""
    items = list(asked)
    for one in items:
        network_id, port_id, address = one.get("uuid"), one.get("port"), one.get("fixed_ip")
        if port_id and address:
            raise errors.BadRequest(
                f"networks: fixed_ip {address} cannot be given together with port {port_id}, which "
                "has its addresses already."
            )
        if port_id and max_count > 1:
            raise errors.BadRequest(
                "networks: a port belongs to one server; make servers with ports of their own in "
                "separate requests."
            )
        if address and max_count > 1:
            raise errors.BadRequest(
                "networks: max_count cannot be greater than 1 if a fixed_ip is specified."
            )
        if not port_id and not FORMATS["uuid"](str(network_id)):
            raise errors.BadRequest(
                f"networks: each entry needs a port, or the uuid of a network, which "
                f"{str(network_id)[:80]} is not."
            )
    return items


def requested_interfaces(
    request: Request, project_id: str, items: Sequence[JsonMapping], refusals: NetworkErrors
) -> tuple[list[JsonObject], list[Interface]]:
    """The requested interfaces of these entries, and the caller's own ports among them. Without
    entries the project's only network is meant; there may be none."""
    networks = service(request)
    assert networks is not None
    token = request.context.token
    if not items:
        possible = networks.networks(token, project_id)
        if len(possible) > 1:
            raise refusals.ambiguous(AMBIGUOUS)
        items = [{"uuid": network["id"]} for network in possible]
    ports = _ports(networks, token, project_id, items, refusals)
    ids = [ports[one["port"]]["network_id"] if one.get("port") else one["uuid"] for one in items]
    by_id = (
        {network["id"]: network for network in networks.networks(token, project_id, ids)}
        if ids
        else {}
    )
    for one in items:
        if not one.get("port"):
            _check_network(request, one["uuid"], by_id, refusals)
            reason = _find_guarantee(networks, token, by_id[one["uuid"]])
            if reason:
                raise errors.BadRequest(
                    f"Network {one['uuid']} cannot be used: no host supports its {reason}."
                )
    _check_addresses(networks, token, items, refusals)
    requested, own = [], []
    for one, network_id in zip(items, ids, strict=True):
        label = str(by_id.get(network_id, {}).get("name") or "")
        more = {name: one[name] for name in ("fixed_ip", "tag") if one.get(name)}
        if one.get("port"):
            requested.append({"port": one["port"], "label": label, **more})
            own.append(
                Interface(
                    port=one["port"],
                    network=network_id,
                    label=label,
                    own=False,
                    mac=ports[one["port"]]["mac_address"],
                    tag=one.get("tag") or "",
                )
            )
        else:
            requested.append({"network": network_id, "label": label, **more})
    return requested, own


def _ports(
    networks: TenantNetworks,
    token: str,
    project_id: str,
    items: Iterable[JsonMapping],
    refusals: NetworkErrors,
) -> dict[str, JsonObject]:
    """The ports asked for, each usable by a new owner."""
    found: dict[str, JsonObject] = {}
    for port_id in [one["port"] for one in items if one.get("port")]:
        if port_id in found:
            raise errors.BadRequest(f"networks: port {port_id} is given twice.")
        try:
            port = networks.port(token, port_id)
        except (errors.NotFound, errors.Forbidden) as problem:
            raise refusals.unknown(f"Port id {port_id} could not be found.") from problem
        if port.get("device_id"):
            raise errors.Conflict(f"Port {port_id} is still in use.")
        if port.get("project_id", port.get("tenant_id")) not in (project_id, None):
            raise errors.BadRequest(f"Port {port_id} is not usable: it is another project's.")
        if not port.get("fixed_ips") and port.get("ip_allocation") not in ("deferred", "none"):
            raise errors.BadRequest(f"Port {port_id} requires a FixedIP in order to be used.")
        reason = find_unsupported_request(port) or _find_guarantee(networks, token, port)
        if reason:
            raise errors.BadRequest(
                f"Port {port_id} cannot be used: no host supports its {reason}."
            )
        found[port_id] = port
    return found


def _find_guarantee(networks: TenantNetworks, token: str, record: JsonMapping) -> str | None:
    """Name the guarantee that a port or a network gets from its QoS policy; None if there is none.

    Why: the network service shows resource_request to administrators only. A policy that the caller
    may not read is left to the conductor, which sees the request when it binds the port.
    """
    for policy_id in (record.get("qos_policy_id"), record.get("qos_network_policy_id")):
        if not policy_id:
            continue
        try:
            policy = networks.record(token, "qos/policies", policy_id)
        except (errors.NotFound, errors.Forbidden):
            continue
        for rule in policy.get("rules") or ():
            if rule.get("type") in GUARANTEES:
                return f"{rule['type']} of QoS policy {policy_id}"
    return None


def _check_network(
    request: Request, network_id: str, by_id: Mapping[str, JsonObject], refusals: NetworkErrors
) -> None:
    network = by_id.get(network_id)
    if network is None:
        raise refusals.unknown(f"Network {network_id} could not be found.")
    if (
        network.get("router:external")
        and not network.get("shared")
        and not request.allows(ATTACH_EXTERNAL)
    ):
        raise errors.Forbidden(
            f"It is not allowed to create an interface on external network {network_id}"
        )
    if not network.get("subnets"):
        raise errors.BadRequest(
            f"Network {network_id} requires a subnet in order to boot instances on."
        )


def _check_addresses(
    networks: TenantNetworks, token: str, items: Iterable[JsonMapping], refusals: NetworkErrors
) -> None:
    """Each address asked for lies in a subnet of its network, and nobody has it."""
    wanted = [
        (one["uuid"], str(ipaddress.ip_address(one["fixed_ip"])))
        for one in items
        if one.get("fixed_ip")
    ]
    subnets = (
        networks.subnets(token, sorted({network_id for network_id, _ in wanted})) if wanted else []
    )
    for number, (network_id, address) in enumerate(wanted):
        ranges = [subnet["cidr"] for subnet in subnets if subnet["network_id"] == network_id]
        if not any(
            ipaddress.ip_address(address) in ipaddress.ip_network(cidr, strict=False)
            for cidr in ranges
        ):
            raise errors.BadRequest(
                f"Fixed IP address {address} is in no subnet of network {network_id}."
            )
        there = networks.ports(token, network_id=network_id, fixed_ips=f"ip_address={address}")
        if there or (network_id, address) in wanted[:number]:
            holder = (
                f" on instance {there[0]['device_id']}"
                if there and there[0].get("device_id")
                else ""
            )
            raise refusals.taken(f"Fixed IP address {address} is already in use{holder}.")


def count_within_port_quota(
    networks: TenantNetworks,
    token: str,
    project_id: str,
    requested: Iterable[JsonObject],
    min_count: int,
    max_count: int,
) -> int:
    """How many servers there can be ports for."""
    each = sum("port" not in one for one in requested)
    left = networks.ports_left(token, project_id) if each else -1
    if left < 0:
        return max_count
    if left < each * min_count:
        raise errors.Forbidden("Maximum number of ports exceeded")
    return min(max_count, left // each)


def security_groups(
    networks: TenantNetworks, token: str, project_id: str, names: Sequence[str]
) -> list[JsonObject]:
    """The groups of these names or ids; none for the default one alone, which the network service
    takes by itself."""
    if set(names) <= {DEFAULT_GROUP}:
        return []
    known = networks.security_groups(token, project_id)
    return list(
        {
            group["id"]: group
            for group in (one_group(known, name, errors.BadRequest) for name in names)
        }.values()
    )


def one_group(known: Sequence[JsonObject], name: str, missing: type[errors.Problem]) -> JsonObject:
    """The group with this id, else the only one with this name.

    Raises:
        missing: there is none. Conflict: there are several.
    """
    found = [group for group in known if group["id"] == name] or [
        group for group in known if group["name"] == name
    ]
    if not found:
        raise missing(f"Security group {name} not found.")
    if len(found) > 1:
        raise errors.Conflict(
            f"Multiple security_group matches found for name '{name}', use an ID to be more "
            "specific."
        )
    return found[0]
