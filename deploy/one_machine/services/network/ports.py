# SPDX-License-Identifier: Apache-2.0
"""/v2.0/ports: where something is plugged into a network, with its addresses, its groups and its
place (binding).

`add` is how every port comes to be, a router's too, except the one of a network's DHCP. What must
stay true: a port's addresses, groups and binding change in one transaction with what hosts and the
compute service get of it.
"""

from collections.abc import Mapping

from sqlalchemy import ColumnElement, delete, insert, or_, select, true

from deploy.one_machine.services.database import DbRow, DbSelect, DbValues
from deploy.one_machine.services.listing import collect
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.addresses import choose_addresses, free_mac, has_mac, store
from deploy.one_machine.services.network.attributes import (
    ADMIN_STATE_UP,
    CIDR,
    FIXED_IPS,
    ID,
    NAME,
    PROFILE,
    REQUIRED,
    STANDARD,
    TAGS,
    UNSET,
    Attribute,
    Attributes,
)
from deploy.one_machine.services.network.bindings import (
    ROUTER_OWNERS,
    UNBOUND,
    bind,
    bind_to_carrier,
    is_of_server,
    notify_changed,
    shown_binding,
    withdraw,
)
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Change
from deploy.one_machine.services.network.faults import fault, invalid, malformed
from deploy.one_machine.services.network.host_names import host_name, qualified
from deploy.one_machine.services.network.networks import visible_network
from deploy.one_machine.services.network.quotas import spend
from deploy.one_machine.services.network.resource import NetworkResource
from deploy.one_machine.services.network.security_groups import default_group, require_groups
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import TRUTH, array, mapping, nullable, one_of, text

PORTS, HELD, GROUPS = schema.ports, schema.addresses, schema.port_groups
FLOATING, ROUTERS = schema.floating_ips, schema.routers
MAC_ADDRESS = text(64, format="mac-address")
PAIRS = {**array(mapping({"ip_address": CIDR, "mac_address": MAC_ADDRESS}), 10), "null_is": []}
_LABEL = "[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
#: One label, or several of which the last is no number: that would be an address.
DNS_NAME = text(
    pattern=rf"^({_LABEL}(\.{_LABEL})*\.(?![0-9]+$){_LABEL}|{_LABEL})?$",
    format="lower-case",
    null_is="",
)


#: A server's instance learns of changes of these.
NOTIFIED = {"fixed_ips", "security_groups", "allowed_address_pairs", "port_security_enabled"}
#: The columns of a floating address that leads to no port.
NOWHERE: Mapping[str, None] = {"port_id": None, "fixed_ip_address": None, "router_id": None}


def _with_address(field: str, value: str) -> ColumnElement[bool]:
    return PORTS.c.id.in_(select(HELD.c.port_id).where(HELD.c[field] == value))


def by_fixed_ips(values: list[str]) -> ColumnElement[bool]:
    """?fixed_ips=ip_address=10.0.0.5&fixed_ips=subnet_id=…: a port must have all of these."""
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
                raise malformed(
                    f"Invalid input for fixed_ips. Reason: '{field[:64]}' is not known."
                )
    return rule & or_(*alike) if alike else rule


class PortsApi(NetworkResource):
    """Ports."""

    name, plural, table, missing = "port", "ports", PORTS, "PortNotFound"
    attributes = Attributes(
        {
            **STANDARD,
            "network_id": Attribute(ID, REQUIRED, put=False),
            "admin_state_up": ADMIN_STATE_UP,
            "mac_address": Attribute(nullable(MAC_ADDRESS)),
            "fixed_ips": Attribute(FIXED_IPS),
            "device_id": Attribute(NAME, ""),
            "device_owner": Attribute(NAME, ""),
            "security_groups": Attribute(nullable(array(ID, 50))),
            "port_security_enabled": Attribute(TRUTH),
            "allowed_address_pairs": Attribute(PAIRS, []),
            "dns_name": Attribute(DNS_NAME, ""),
            "status": Attribute(text(16), UNSET, post=False, put=False),
            "tags": Attribute(TAGS, [], put=False),
            "binding:host_id": Attribute(NAME, "", admin=True, hidden=True, column="host"),
            "binding:profile": Attribute(PROFILE, {}, admin=True, hidden=True, column="profile"),
            "binding:vnic_type": Attribute(one_of("normal"), "normal", column="vnic_type"),
        }
    )
    constant = {"extra_dhcp_opts": []}
    filters = {
        "fixed_ips": by_fixed_ips,
        "ip_address": lambda values: by_fixed_ips([f"ip_address={value}" for value in values]),
        "ip_address_substr": lambda values: by_fixed_ips(
            [f"ip_address_substr={value}" for value in values]
        ),
        "security_groups": lambda values: PORTS.c.id.in_(
            select(GROUPS.c.port_id).where(GROUPS.c.group_id.in_(values))
        ),
        "mac_address": lambda values: PORTS.c.mac_address.in_([value.lower() for value in values]),
    }

    def select(self) -> DbSelect:
        fixed = collect(schema.FIXED_IP, HELD.c.port_id == PORTS.c.id)
        groups = collect(GROUPS.c.group_id, GROUPS.c.port_id == PORTS.c.id)
        return select(PORTS, fixed.label("fixed_ips"), groups.label("security_groups"))

    def visible_to(self, project_id: str) -> ColumnElement[bool]:
        own = select(schema.networks.c.id).where(schema.networks.c.project_id == project_id)
        return or_(PORTS.c.project_id == project_id, PORTS.c.network_id.in_(own))

    def view(self, row: DbValues, caller: NetworkCaller) -> Body:
        assigned = []
        for held in (fixed["ip_address"] for fixed in row["fixed_ips"]):
            name = host_name(row["dns_name"], held)
            assigned.append({"hostname": name, "ip_address": held, "fqdn": qualified(name)})
        shown = super().view(row, caller) | {"dns_assignment": assigned}
        return shown | (shown_binding(row) if caller.is_admin else {})

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        network = visible_network(change, caller, body["network_id"])
        if not (caller.owns(network.project_id) or network.shared):
            raise fault("PolicyNotAuthorized", rule="(rule:create_port on an external network)")
        _check_policy(caller, network, body, "create_port")
        spend(change, body["project_id"], "port")
        return add(change, network, body, caller)

    def update(self, change: Change, caller: NetworkCaller, row: DbRow, body: Body) -> None:
        network = change.get_existing(schema.networks, row.network_id)
        _check_policy(caller, network, body, "update_port")
        owner = body.get("device_owner", row.device_owner)
        if row.device_owner in ROUTER_OWNERS and owner != row.device_owner:
            why = "device_owner of a router's port is the router's to change"
            raise invalid(why)
        own = self.columns(body)
        requested, groups = body.get("fixed_ips"), body.get("security_groups")
        host = own.pop("host", None)
        if own.get("mac_address", "") is None or own.get("mac_address") == row.mac_address:
            own.pop("mac_address")
        if own.get("mac_address"):
            _require_free_mac(change, row.network_id, own["mac_address"])
        change.touch(networks=[row.network_id], groups=row.security_groups, hosts=[row.host])
        if requested is not None:
            _readdress(change, row, requested, own.get("mac_address") or row.mac_address)
        if groups is not None:
            require_groups(change, caller, groups, row.project_id)
            change.execute(delete(GROUPS).where(GROUPS.c.port_id == row.id))
            _join(change, row.id, groups)
            change.touch(groups=groups)
        after = {**row._mapping, **own} | ({} if groups is None else {"security_groups": groups})
        _check_security(after)
        if own.get("admin_state_up") is False:
            own["status"] = "DOWN"
        elif own.get("admin_state_up") and not row.admin_state_up and row.vif_type == "bridge":
            own |= bind(change, row.host)
        change.set(PORTS, row.id, own | ({} if host is None else _rebound(change, row, host, own)))
        if not caller.is_service and NOTIFIED & body.keys():
            notify_changed(change, row)

    def delete(self, change: Change, caller: NetworkCaller, row: DbRow) -> None:
        if row.device_owner.startswith("network:"):
            why = f"it has device owner {row.device_owner}"
            raise fault("ServicePortInUse", id=row.id, why=why)
        remove(change, row)
        if not caller.is_service and row.host and is_of_server(row):
            change.add_event("network-vif-deleted", row.device_id, row.id)


def add(change: Change, network: DbRow, body: Body, caller: NetworkCaller | None = None) -> str:
    """Make a port of `network`; `body` has the attributes of a port, checked. Without `caller` it
    is a service's own.

    Raises 400, 404 and 409 for addresses, groups and MACs that cannot be had.
    """
    own = PortsApi.columns(body)
    groups, host = body.get("security_groups"), own.pop("host", "")
    secure = own.setdefault("port_security_enabled", network.port_security_enabled)
    owner = own.get("device_owner", "")
    if own.get("mac_address"):
        _require_free_mac(change, network.id, own["mac_address"])
    else:
        own["mac_address"] = free_mac(change.connection, network.id)
    if groups is None:
        is_open = owner.startswith("network:") or not secure
        groups = [] if is_open else [default_group(change, own["project_id"])]
    elif caller is not None:
        require_groups(change, caller, groups, own["project_id"])
    _check_security({"allowed_address_pairs": [], **own, "security_groups": groups})
    router, mac = owner in ROUTER_OWNERS, own["mac_address"]
    requested = body.get("fixed_ips")
    fixed = choose_addresses(change.connection, network.id, mac, requested, router=router)
    if router:
        own |= bind_to_carrier(change, host)
    elif host:
        own |= bind(change, host, own.get("admin_state_up", True))
    key = change.add(PORTS, own)
    store(change.connection, key, fixed)
    _join(change, key, groups)
    change.touch(networks=[network.id] if host else (), groups=groups if fixed else ())
    return key


def remove(change: Change, row: DbRow) -> None:
    """Remove a port with all that hangs on it; its addresses are free, floating ones no longer
    associated."""
    groups = change.scalars(select(GROUPS.c.group_id).where(GROUPS.c.port_id == row.id))
    change.touch(networks=[row.network_id] if row.host else (), groups=groups, hosts=[row.host])
    withdraw(change, row.id)
    disassociate(change, row.id)
    change.remove(PORTS, row.id)


def disassociate(change: Change, port_id: str, address: str | None = None) -> None:
    """No floating address leads to this port (or to this address of it) any more; its routers'
    hosts learn of it."""
    query = select(FLOATING.c.id, ROUTERS.c.host).outerjoin_from(FLOATING, ROUTERS)
    query = query.where(FLOATING.c.port_id == port_id)
    if address is not None:
        query = query.where(FLOATING.c.fixed_ip_address == address)
    for row in change.rows(query):
        change.set(FLOATING, row.id, NOWHERE)
        change.touch(hosts=[row.host or ""])


def _check_policy(caller: NetworkCaller, network: DbRow, body: Body, rule: str) -> None:
    """What only the owner of the network may request. Raises 403."""
    if caller.owns(network.project_id) and not body.get("device_owner", "").startswith("network:"):
        return
    if body.get("device_owner", "").startswith("network:"):
        caller.require_admin(f"(rule:{rule}:device_owner)")
    for name in ("mac_address", "port_security_enabled"):
        if body.get(name) is not None and not caller.owns(network.project_id):
            raise fault("PolicyNotAuthorized", rule=f"(rule:{rule}:{name})")


def _check_security(port: Body) -> None:
    pairs, is_secure = port["allowed_address_pairs"], port["port_security_enabled"]
    if any("ip_address" not in pair for pair in pairs):
        raise malformed("AllowedAddressPair must contain ip_address")
    if not is_secure and port["security_groups"]:
        raise fault("PortSecurityAndIPRequiredForSecurityGroups")
    if not is_secure and pairs:
        raise fault("AddressPairAndPortSecurityRequired")


def _require_free_mac(change: Change, network_id: str, mac_address: str) -> None:
    if has_mac(change.connection, network_id, mac_address):
        raise fault("MacAddressInUse", network=network_id, mac=mac_address)


def _readdress(change: Change, row: DbRow, requested: list[Body], mac_address: str) -> None:
    before = [(fixed["subnet_id"], fixed["ip_address"]) for fixed in row.fixed_ips]
    router = row.device_owner in ROUTER_OWNERS
    after = choose_addresses(
        change.connection, row.network_id, mac_address, requested, before, router=router
    )
    for subnet, held in set(before) - set(after):
        disassociate(change, row.id, held)
        change.execute(delete(HELD).where(HELD.c.subnet_id == subnet, HELD.c.address == held))
    store(change.connection, row.id, [fixed for fixed in after if fixed not in before])


def _join(change: Change, key: str, groups: list[str]) -> None:
    if groups:
        rows = [{"port_id": key, "group_id": group} for group in groups]
        change.execute(insert(GROUPS).values(rows))


def _rebound(change: Change, row: DbRow, host: str, own: Body) -> Body:
    """The columns of a port that is to be at `host`, and nowhere else; none when it is there
    already, as it should be."""
    if host == row.host and row.vif_type in ("bridge", "unbound"):
        return {}
    withdraw(change, row.id)
    change.execute(delete(schema.arrivals).where(schema.arrivals.c.port_id == row.id))
    change.touch(hosts=[host])
    if host:
        return bind(change, host, own.get("admin_state_up", row.admin_state_up))
    if row.status == "ACTIVE" and is_of_server(row):
        change.add_event("network-vif-unplugged", row.device_id, row.id)
    return dict(UNBOUND)
