# SPDX-License-Identifier: Apache-2.0
"""/v2.0/ports: where something is plugged into a network, with its addresses, its groups and its place (binding).

`add` is how every port comes to be, a router's too, except the one of a network's DHCP. What must stay true: a port's
addresses, groups and binding change in one transaction with what hosts and the compute service are told of it.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any

from sqlalchemy import JSON, ColumnElement, Row, Select, delete, func, insert, or_, select, true, type_coerce

from deploy.standalone.network import schema
from deploy.standalone.network.addresses import chosen, free_mac, has_mac, store
from deploy.standalone.network.association import let_go
from deploy.standalone.network.attributes import (
    REQUIRED,
    STANDARD,
    UNSET,
    Attribute,
    Body,
    address,
    cidr,
    columns,
    emptied,
    free_mapping,
    identifier,
    listed,
    mac,
    mapping,
    one_of,
    optional,
    text,
    truth,
)
from deploy.standalone.network.bindings import BINDINGS, bind, carried, shown_binding, tell_changed, withdraw
from deploy.standalone.network.caller import Caller
from deploy.standalone.network.fabric import Change
from deploy.standalone.network.faults import fault
from deploy.standalone.network.host_names import host_name, qualified
from deploy.standalone.network.quotas import spend
from deploy.standalone.network.resource import TAG_LIST, Noun
from deploy.standalone.network.security_groups import default_group, require_groups

PORTS, HELD, GROUPS = schema.ports, schema.addresses, schema.port_groups
FIXED_IPS = optional(listed(mapping(subnet_id=identifier, ip_address=address), 20))
PAIRS = emptied(listed(mapping(ip_address=cidr, mac_address=mac), 10), [])
_LABEL = "[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
#: One label, or several of which the last is no number: that would be an address.
DNS_NAME = text(255, rf"({_LABEL}(\.{_LABEL})*\.(?![0-9]+$){_LABEL}|{_LABEL})?")
ROUTERS = ("network:router_interface", "network:router_gateway")


def _dns_name(value: Any) -> str:
    """A host name, whole or its first label, in lower case: case makes no other name. "" and null are none."""
    return str(emptied(DNS_NAME, "")(value)).lower()


def _with_address(field: str, value: str) -> ColumnElement[bool]:
    return PORTS.c.id.in_(select(HELD.c.port_id).where(HELD.c[field] == value))


def by_fixed_ips(values: list[str]) -> ColumnElement[bool]:
    """?fixed_ips=ip_address=10.0.0.5&fixed_ips=subnet_id=…: a port must have all that is said."""
    rule: ColumnElement[bool] = true()
    alike: list[ColumnElement[bool]] = []
    for part in ",".join(values).split(","):
        field, _, wanted = part.partition("=")
        match field:
            case "ip_address":
                alike.append(_with_address("address", wanted))
            case "subnet_id" | "subnet":
                rule &= _with_address("subnet_id", wanted)
            case "ip_address_substr":
                pattern = HELD.c.address.contains(wanted, autoescape=True)
                rule &= PORTS.c.id.in_(select(HELD.c.port_id).where(pattern))
            case _:
                raise fault("HTTPBadRequest", why=f"Invalid input for fixed_ips. Reason: '{field[:64]}' is not known.")
    return rule & or_(*alike) if alike else rule


class Ports(Noun):
    """Ports."""

    name, plural, table, missing = "port", "ports", PORTS, "PortNotFound"
    attributes = STANDARD | {
        "network_id": Attribute(identifier, REQUIRED, put=False),
        "admin_state_up": Attribute(truth, True),
        "mac_address": Attribute(optional(mac)),
        "fixed_ips": Attribute(FIXED_IPS),
        "device_id": Attribute(emptied(text(255), ""), ""),
        "device_owner": Attribute(emptied(text(255), ""), ""),
        "security_groups": Attribute(optional(listed(identifier, 50))),
        "port_security_enabled": Attribute(truth),
        "allowed_address_pairs": Attribute(PAIRS, []),
        "dns_name": Attribute(_dns_name, ""),
        "status": Attribute(text(16), UNSET, post=False, put=False),
        "tags": Attribute(TAG_LIST, [], put=False),
        "binding:host_id": Attribute(emptied(text(255), ""), "", admin=True, hidden=True, column="host"),
        "binding:profile": Attribute(emptied(free_mapping, {}), {}, admin=True, hidden=True, column="profile"),
        "binding:vnic_type": Attribute(one_of("normal"), "normal", column="vnic_type"),
    }
    filters = {
        "fixed_ips": by_fixed_ips,
        "ip_address": lambda values: by_fixed_ips([f"ip_address={value}" for value in values]),
        "ip_address_substr": lambda values: by_fixed_ips([f"ip_address_substr={value}" for value in values]),
        "security_groups": lambda values: PORTS.c.id.in_(
            select(GROUPS.c.port_id).where(GROUPS.c.group_id.in_(values))),
        "mac_address": lambda values: PORTS.c.mac_address.in_([value.lower() for value in values]),
    }

    def select(self) -> Select[Any]:
        fixed = select(func.json_group_array(func.json_object(
            "subnet_id", HELD.c.subnet_id, "ip_address", HELD.c.address))).where(HELD.c.port_id == PORTS.c.id)
        groups = select(func.json_group_array(GROUPS.c.group_id)).where(GROUPS.c.port_id == PORTS.c.id)
        return select(PORTS, type_coerce(fixed.scalar_subquery(), JSON).label("fixed_ips"),
                      type_coerce(groups.scalar_subquery(), JSON).label("security_groups"))

    def visible(self, caller: Caller) -> ColumnElement[bool]:
        own = select(schema.networks.c.id).where(schema.networks.c.project_id == caller.project_id)
        return true() if caller.is_admin else or_(
            PORTS.c.project_id == caller.project_id, PORTS.c.network_id.in_(own))

    def show(self, row: Mapping[Any, Any], caller: Caller) -> Body:
        named = [(host_name(row["dns_name"], fixed["ip_address"]), fixed["ip_address"]) for fixed in row["fixed_ips"]]
        assigned = [{"hostname": name, "ip_address": held, "fqdn": qualified(name)} for name, held in named]
        shown = super().show(row, caller) | {"dns_assignment": assigned, "extra_dhcp_opts": []}
        return shown | (shown_binding(row) if caller.is_admin else {})

    def create(self, change: Change, caller: Caller, body: Body) -> str:
        network = change.one(schema.networks, body["network_id"])
        if network is None or not (caller.owns(network.project_id) or network.shared or network.external):
            raise fault("NetworkNotFound", id=body["network_id"])
        if not (caller.owns(network.project_id) or network.shared):
            raise fault("PolicyNotAuthorized", rule="(rule:create_port on an external network)")
        _check_policy(caller, network, body, "create_port")
        spend(change, body["project_id"], "port")
        return add(change, network, body, caller)

    def update(self, change: Change, caller: Caller, row: Row[Any], body: Body) -> None:
        network = change.one(schema.networks, row.network_id)
        assert network is not None
        _check_policy(caller, network, body, "update_port")
        if "device_owner" in body and row.device_owner in ROUTERS and body["device_owner"] != row.device_owner:
            raise fault("InvalidInput", why="device_owner of a router's port is the router's to change")
        own = dict(columns(body, self.attributes))
        asked, groups = own.pop("fixed_ips", None), own.pop("security_groups", None)
        host = own.pop("host", None)
        if own.get("mac_address", "") is None or own.get("mac_address") == row.mac_address:
            own.pop("mac_address")
        if own.get("mac_address"):
            _require_free_mac(change, row.network_id, own["mac_address"])
        change.touch(networks=[row.network_id], groups=row.security_groups, hosts=[row.host])
        if asked is not None:
            _readdress(change, row, asked, own.get("mac_address") or row.mac_address)
        if groups is not None:
            require_groups(change, caller, groups, row.project_id)
            _regroup(change, row.id, groups)
            change.touch(groups=groups)
        merged = {name: own.get(name, getattr(row, name)) for name in ("port_security_enabled",
                                                                      "allowed_address_pairs")}
        _check_security(merged["port_security_enabled"], row.security_groups if groups is None else groups,
                        merged["allowed_address_pairs"])
        if own.get("admin_state_up") is False:
            own["status"] = "DOWN"
        elif own.get("admin_state_up") and not row.admin_state_up and row.vif_type == "bridge":
            own |= bind(change, row.host)
        change.set(PORTS, row.id, own | ({} if host is None else _rebound(change, row, host, own)))
        if not caller.is_service and {"fixed_ips", "security_groups", "allowed_address_pairs",
                                    "port_security_enabled"} & body.keys():
            tell_changed(change, row)

    def delete(self, change: Change, caller: Caller, row: Row[Any]) -> None:
        if row.device_owner.startswith("network:"):
            raise fault("ServicePortInUse", id=row.id, why=f"it has device owner {row.device_owner}")
        remove(change, row)
        if not caller.is_service and row.host and row.device_id and row.device_owner.startswith("compute:"):
            change.tell("network-vif-deleted", row.device_id, row.id)


def add(change: Change, network: Row[Any], body: Body, caller: Caller | None = None) -> str:
    """Make a port of `network`; `body` has the attributes of a port, checked. Without `caller` it is a service's own.

    Raises 400, 404 and 409 for addresses, groups and MACs that cannot be had.
    """
    own = columns(body, Ports.attributes)
    asked, groups, host = own.pop("fixed_ips", None), own.pop("security_groups", None), own.pop("host", "")
    secure = own.setdefault("port_security_enabled", network.port_security_enabled)
    is_service = own.get("device_owner", "").startswith("network:")
    if own.get("mac_address"):
        _require_free_mac(change, network.id, own["mac_address"])
    else:
        own["mac_address"] = free_mac(change.connection, network.id)
    if groups is None:
        groups = [] if is_service or not secure else [default_group(change, own["project_id"])]
    elif caller is not None:
        require_groups(change, caller, groups, own["project_id"])
    _check_security(secure, groups, own.get("allowed_address_pairs", []))
    fixed = chosen(change.connection, network.id, own["mac_address"], asked,
                   router=own.get("device_owner", "") in ROUTERS)
    if own.get("device_owner") in ROUTERS:
        own |= carried(change, host)
    elif host:
        own |= bind(change, host, own.get("admin_state_up", True))
    key = change.add(PORTS, own)
    store(change.connection, key, fixed)
    if groups:
        change.connection.execute(insert(GROUPS), [{"port_id": key, "group_id": group} for group in groups])
    change.touch(networks=[network.id] if host else (), groups=groups if fixed else ())
    return key


def remove(change: Change, row: Row[Any]) -> None:
    """Remove a port with all that hangs on it; its addresses are free, floating ones no longer associated."""
    groups = change.connection.execute(select(GROUPS.c.group_id).where(GROUPS.c.port_id == row.id)).scalars().all()
    change.touch(networks=[row.network_id] if row.host else (), groups=groups, hosts=[row.host])
    withdraw(change, row.id)
    let_go(change, row.id)
    change.remove(PORTS, row.id)


def _check_policy(caller: Caller, network: Row[Any], body: Body, rule: str) -> None:
    """What only the owner of the network may ask for. Raises 403."""
    if caller.owns(network.project_id) and not body.get("device_owner", "").startswith("network:"):
        return
    if body.get("device_owner", "").startswith("network:"):
        caller.require_admin(f"(rule:{rule}:device_owner)")
    for name in ("mac_address", "port_security_enabled"):
        if body.get(name) is not None and not caller.owns(network.project_id):
            raise fault("PolicyNotAuthorized", rule=f"(rule:{rule}:{name})")


def _check_security(secure: bool, groups: list[str], pairs: list[Body]) -> None:
    if any("ip_address" not in pair for pair in pairs):
        raise fault("HTTPBadRequest", why="AllowedAddressPair must contain ip_address")
    if not secure and groups:
        raise fault("PortSecurityAndIPRequiredForSecurityGroups")
    if not secure and pairs:
        raise fault("AddressPairAndPortSecurityRequired")


def _require_free_mac(change: Change, network_id: str, mac_address: str) -> None:
    if has_mac(change.connection, network_id, mac_address):
        raise fault("MacAddressInUse", network=network_id, mac=mac_address)


def _readdress(change: Change, row: Row[Any], asked: list[Body], mac_address: str) -> None:
    before = [(fixed["subnet_id"], fixed["ip_address"]) for fixed in row.fixed_ips]
    after = chosen(change.connection, row.network_id, mac_address, asked, before, router=row.device_owner in ROUTERS)
    for subnet, held in set(before) - set(after):
        let_go(change, row.id, held)
        change.connection.execute(delete(HELD).where(HELD.c.subnet_id == subnet, HELD.c.address == held))
    store(change.connection, row.id, [fixed for fixed in after if fixed not in before])


def _regroup(change: Change, key: str, groups: list[str]) -> None:
    change.connection.execute(delete(GROUPS).where(GROUPS.c.port_id == key))
    if groups:
        change.connection.execute(insert(GROUPS), [{"port_id": key, "group_id": group} for group in groups])


def _rebound(change: Change, row: Row[Any], host: str, own: Body) -> Body:
    """The columns of a port that is to be at `host`, and nowhere else; none when it is there already, as it should
    be."""
    if host == row.host and row.vif_type in ("bridge", "unbound"):
        return {}
    withdraw(change, row.id)
    change.connection.execute(delete(schema.arrivals).where(schema.arrivals.c.port_id == row.id))
    change.touch(hosts=[host])
    if row.status == "ACTIVE" and row.device_id and row.device_owner.startswith("compute:") and not host:
        change.tell("network-vif-unplugged", row.device_id, row.id)
    return bind(change, host, own.get("admin_state_up", row.admin_state_up)) if host else dict(BINDINGS)


def prefix_of(address_: str, subnet: Row[Any]) -> str:
    """An address with the length of its subnet's prefix."""
    return f"{address_}/{ipaddress.ip_network(subnet.cidr).prefixlen}"
