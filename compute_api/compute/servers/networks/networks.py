# SPDX-License-Identifier: Apache-2.0
"""Choose the interfaces of new servers, and look up interfaces for later attachments.

All reads of the network service carry the caller's token and precede the commit. The conductor
creates and binds ports. A requested interface is an entry of the action's arguments, in the
requested order, with these keys: {"network" | "port", "label", "fixed_ip"?, "tag"?}.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.clients.network import find_unsupported_request
from common.domain import errors
from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import Interface
from common.domain.wire import to_wire
from common.store.servers import servers
from compute_api.compute.request.dependencies import TenantNetworks
from compute_api.compute.request.request import Request
from compute_api.http.validation import FORMATS

ATTACH_NETWORK = "os_compute_api:servers:create:attach_network"
ATTACH_EXTERNAL = "network:attach_external_network"
DEFAULT_GROUP = "default"
#: Types of QoS rules that give ports a resource_request.
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
    """The interfaces and security groups of each new server."""

    #: Arguments of the action.
    args: JsonObject
    #: Number of servers that the project's quota of ports allows.
    max_count: int
    #: Names of security groups, for the server's row.
    groups: list[dict[str, str]]
    #: The caller's own ports, for the server's row.
    interfaces: list[JsonObject] = field(default_factory=list)


def refresh_interfaces(request: Request, networks: TenantNetworks, server_id: str) -> None:
    """Copy the data of the server's interfaces from the network service to the server's row.

    Only interfaces in the row are changed. Other ports of the server are ignored.
    """
    request.write(
        servers.refresh_interfaces, server_id, networks.interfaces(request.context.token, server_id)
    )


def choose_interfaces(
    request: Request, body: JsonMapping, min_count: int, max_count: int
) -> ChosenInterfaces:
    """Choose the interfaces and security groups of the servers of one create.

    A request without networks gets the only network that the project can use, or no interface if
    there is no such network. In a cloud without a network service the servers get no interfaces.

    Args:
        request: The request.
        body: The object ``server`` of the request's body.
        min_count: Least number of servers for which the quota must have ports.
        max_count: Requested number of servers, reduced in the result to the quota of ports.

    Raises:
        BadRequest, Conflict: A network, port, address or group cannot be used, or the choice of a
            network or group is ambiguous.
        Forbidden: The policy does not allow the networks, or the quota has ports for fewer than
            min_count servers.
        Unavailable: The network service does not answer.
    """
    value, names = body.get("networks"), parse_security_groups(body)
    networks = request.networks
    if networks is None:
        _refuse_networks(body)
        return ChosenInterfaces({"networks": []}, max_count, names)
    if value:
        request.require(ATTACH_NETWORK)
    project_id = request.context.project_id
    requested: list[JsonObject] = []
    ports: list[Interface] = []
    if value != "none":
        items = [] if value == "auto" else _check_items(value or (), max_count)
        requested, ports = look_up_interfaces(request, project_id, items, CREATING)
    if value == "auto" and not requested:
        raise errors.BadRequest(
            f"networks: unable to automatically allocate a network for project {project_id}; create "
            'a network, or give "none".'
        )
    groups = _look_up_groups(
        networks, request.context.token, project_id, [group["name"] for group in names]
    )
    max_count = count_within_port_quota(
        networks, request.context.token, project_id, requested, min_count, max_count
    )
    return ChosenInterfaces(
        {"networks": requested, "security_groups": [group["id"] for group in groups]},
        max_count,
        [{"name": str(group["name"])} for group in groups] or names,
        [to_wire(port) for port in ports],
    )


def parse_security_groups(body: JsonMapping) -> list[dict[str, str]]:
    """Return the requested names of security groups without repetitions, or the default group."""
    names = dict.fromkeys(
        group["name"] for group in body.get("security_groups", ()) if "name" in group
    )
    return [{"name": name} for name in names or (DEFAULT_GROUP,)]


def _refuse_networks(body: JsonMapping) -> None:
    """Raise BadRequest if the request lists networks, because the cloud has no network service."""
    networks = body.get("networks")
    if isinstance(networks, list) and networks:
        raise errors.BadRequest(
            "networks: this cloud has no network service; leave networks out, or give "
            '"none" or "auto".'
        )


def _check_items(items: Sequence[JsonMapping], max_count: int) -> Sequence[JsonMapping]:
    """Return the entries, after a check that each names a port or a network.

    Raises:
        BadRequest: An entry names no port and no network's UUID, names a port together with an
            address, or names a port or an address although ``max_count`` is above 1.
    """
    for item in items:
        network_id, port_id, address = item.get("uuid"), item.get("port"), item.get("fixed_ip")
        if port_id and address:
            raise errors.BadRequest(
                f"networks: fixed_ip {address} cannot be given together with port {port_id}, which "
                "has its addresses already."
            )
        if port_id and max_count > 1:
            raise errors.BadRequest(
                "networks: a port can belong to one server only; create servers with existing ports "
                "in separate requests."
            )
        if address and max_count > 1:
            raise errors.BadRequest(
                "networks: max_count cannot be greater than 1 if a fixed_ip is specified."
            )
        if not port_id and not FORMATS["uuid"](str(network_id)):
            raise errors.BadRequest(
                f"networks: each entry needs a port, or a network's UUID as uuid; "
                f"{str(network_id)[:80]} is not a UUID."
            )
    return items


def look_up_interfaces(
    request: Request, project_id: str, items: Sequence[JsonMapping], refusals: NetworkErrors
) -> tuple[list[JsonObject], list[Interface]]:
    """Return the requested interfaces, and an ``Interface`` for each existing port among them.

    The requested interfaces are entries of the action's arguments.

    Args:
        request: The request.
        project_id: Project of the server.
        items: Entries of the request. If empty, the only network that the project can use is
            requested, if any.
        refusals: The errors that differ between a create and an attachment.

    Raises:
        BadRequest, Forbidden, NotFound, Conflict: A network, port or address cannot be used, or the
            entries are empty and the project can use several networks.
    """
    networks = request.networks
    assert networks is not None
    token = request.context.token
    if not items:
        project_networks = networks.networks(token, project_id)
        if len(project_networks) > 1:
            raise refusals.ambiguous(AMBIGUOUS)
        items = [{"uuid": network["id"]} for network in project_networks]
    ports = _look_up_ports(networks, token, project_id, items, refusals)
    ids = [
        ports[item["port"]]["network_id"] if item.get("port") else item["uuid"] for item in items
    ]
    by_id = (
        {network["id"]: network for network in networks.networks(token, project_id, ids)}
        if ids
        else {}
    )
    for item in items:
        if not item.get("port"):
            _check_network(request, item["uuid"], by_id, refusals)
            reason = _find_guarantee(networks, token, by_id[item["uuid"]])
            if reason:
                raise errors.BadRequest(
                    f"Network {item['uuid']} cannot be used: no host supports its {reason}."
                )
    _check_addresses(networks, token, items, refusals)
    requested, own_ports = [], []
    for item, network_id in zip(items, ids, strict=True):
        label = str(by_id.get(network_id, {}).get("name") or "")
        options = {name: item[name] for name in ("fixed_ip", "tag") if item.get(name)}
        if item.get("port"):
            requested.append({"port": item["port"], "label": label, **options})
            own_ports.append(
                Interface(
                    port=item["port"],
                    network=network_id,
                    label=label,
                    own=False,
                    mac=ports[item["port"]]["mac_address"],
                    tag=item.get("tag") or "",
                )
            )
        else:
            requested.append({"network": network_id, "label": label, **options})
    return requested, own_ports


def _look_up_ports(
    networks: TenantNetworks,
    token: str,
    project_id: str,
    items: Iterable[JsonMapping],
    refusals: NetworkErrors,
) -> dict[str, JsonObject]:
    """Return the requested ports by id, after checks that a server can use them.

    Args:
        networks: The network service.
        token: The caller's token.
        project_id: Project of the server, to which the ports must belong.
        items: Entries of the request. Entries without a port are skipped.
        refusals: The errors that differ between a create and an attachment.

    Raises:
        BadRequest, NotFound, Conflict: A port cannot be used.
    """
    ports: dict[str, JsonObject] = {}
    for port_id in [item["port"] for item in items if item.get("port")]:
        if port_id in ports:
            raise errors.BadRequest(f"networks: port {port_id} is given twice.")
        try:
            port = networks.port(token, port_id)
        except (errors.NotFound, errors.Forbidden) as problem:
            raise refusals.unknown(f"Port id {port_id} could not be found.") from problem
        if port.get("device_id"):
            raise errors.Conflict(f"Port {port_id} is still in use.")
        if port.get("project_id", port.get("tenant_id")) not in (project_id, None):
            raise errors.BadRequest(f"Port {port_id} is not usable: it belongs to another project.")
        if not port.get("fixed_ips") and port.get("ip_allocation") not in ("deferred", "none"):
            raise errors.BadRequest(f"Port {port_id} requires a FixedIP in order to be used.")
        reason = find_unsupported_request(port) or _find_guarantee(networks, token, port)
        if reason:
            raise errors.BadRequest(
                f"Port {port_id} cannot be used: no host supports its {reason}."
            )
        ports[port_id] = port
    return ports


def _find_guarantee(networks: TenantNetworks, token: str, record: JsonMapping) -> str | None:
    """Return the QoS rule that guarantees a rate to a port or network, as text for errors, or None.

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
    """Check that servers of the caller can have interfaces in a network.

    Args:
        request: The request.
        network_id: The requested network.
        by_id: The requested networks that the caller can see, by id.
        refusals: The errors that differ between a create and an attachment.

    Raises:
        BadRequest: The network has no subnet.
        Forbidden: The network is external and not shared, and the policy does not allow that.
        Problem: The network does not exist for the caller (``refusals.unknown``).
    """
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
    """Check that each requested address is free, and in a subnet of its network.

    Raises:
        BadRequest: The address is in no subnet of the network.
        Problem: The address is in use, or an earlier entry requests it (``refusals.taken``).
    """
    requested = [
        (item["uuid"], str(ipaddress.ip_address(item["fixed_ip"])))
        for item in items
        if item.get("fixed_ip")
    ]
    subnets = (
        networks.subnets(token, sorted({network_id for network_id, _ in requested}))
        if requested
        else []
    )
    for number, (network_id, address) in enumerate(requested):
        ranges = [subnet["cidr"] for subnet in subnets if subnet["network_id"] == network_id]
        if not any(
            ipaddress.ip_address(address) in ipaddress.ip_network(cidr, strict=False)
            for cidr in ranges
        ):
            raise errors.BadRequest(
                f"Fixed IP address {address} is in no subnet of network {network_id}."
            )
        ports = networks.ports(token, network_id=network_id, fixed_ips=f"ip_address={address}")
        if ports or (network_id, address) in requested[:number]:
            holder = (
                f" on instance {ports[0]['device_id']}"
                if ports and ports[0].get("device_id")
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
    """Return the number of servers for which the project's quota has ports, at most max_count.

    ``requested`` are the interfaces of one server. Interfaces with an existing port need no quota.

    Raises:
        Forbidden: The quota has ports for fewer than min_count servers.
    """
    each = sum("port" not in one for one in requested)
    left = networks.ports_left(token, project_id) if each else -1
    if left < 0:
        return max_count
    if left < each * min_count:
        raise errors.Forbidden("Maximum number of ports exceeded")
    return min(max_count, left // each)


def _look_up_groups(
    networks: TenantNetworks, token: str, project_id: str, names: Sequence[str]
) -> list[JsonObject]:
    """Return the groups with these names or ids.

    The result is empty for the default group alone, because the network service adds that by
    default.

    Raises:
        BadRequest: A group does not exist.
        Conflict: Several groups have the name.
    """
    if set(names) <= {DEFAULT_GROUP}:
        return []
    all_groups = networks.security_groups(token, project_id)
    groups = [find_group(all_groups, name, errors.BadRequest) for name in names]
    return list({group["id"]: group for group in groups}.values())


def find_group(
    all_groups: Sequence[JsonObject], name: str, missing: type[errors.Problem]
) -> JsonObject:
    """Return the group of ``all_groups`` with this id, or else with this name.

    Raises:
        missing: No group has this id or name.
        Conflict: Several groups have the name.
    """
    groups = [group for group in all_groups if group["id"] == name] or [
        group for group in all_groups if group["name"] == name
    ]
    if not groups:
        raise missing(f"Security group {name} not found.")
    if len(groups) > 1:
        raise errors.Conflict(
            f"Multiple security_group matches found for name '{name}', use an ID to be more "
            "specific."
        )
    return groups[0]
