# SPDX-License-Identifier: Apache-2.0
"""/v2.0/ports: the connections of devices to networks, with addresses, groups and bindings.

`add` creates every port, also those of routers, except the DHCP port of a network. Invariant: a
port's addresses, groups and binding change in one transaction with the hosts' revisions and the
events for the compute service.
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
    remove_inactive_bindings,
    view_binding,
)
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Change
from deploy.one_machine.services.network.faults import fault, invalid, malformed
from deploy.one_machine.services.network.host_names import host_name, qualify
from deploy.one_machine.services.network.networks import visible_network
from deploy.one_machine.services.network.quotas import spend
from deploy.one_machine.services.network.resource import NetworkResource
from deploy.one_machine.services.network.security_groups import default_group, require_groups
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import TRUTH, array, mapping, nullable, one_of, text

PORTS, ADDRESSES, GROUPS = schema.ports, schema.addresses, schema.port_groups
FLOATING, ROUTERS = schema.floating_ips, schema.routers
MAC_ADDRESS = text(64, format="mac-address")
PAIRS = {**array(mapping({"ip_address": CIDR, "mac_address": MAC_ADDRESS}), 10), "null_is": []}
_LABEL = "[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
#: One label, or several of which the last is no number, because that would be an address.
DNS_NAME = text(
    pattern=rf"^({_LABEL}(\.{_LABEL})*\.(?![0-9]+$){_LABEL}|{_LABEL})?$",
    format="lower-case",
    null_is="",
)


#: Attributes of which a change is sent to the compute service.
NOTIFIED = {"fixed_ips", "security_groups", "allowed_address_pairs", "port_security_enabled"}
#: The columns of a floating IP without a port.
UNASSOCIATED: Mapping[str, None] = {"port_id": None, "fixed_ip_address": None, "router_id": None}


def _with_address(field: str, value: str) -> ColumnElement[bool]:
    return PORTS.c.id.in_(select(ADDRESSES.c.port_id).where(ADDRESSES.c[field] == value))


def by_fixed_ips(values: list[str]) -> ColumnElement[bool]:
    """Return the condition on ports for the values of the query parameter ``fixed_ips``.

    Each value is ``field=value``, or several of these separated by commas. For example,
    ``?fixed_ips=ip_address=10.0.0.5&fixed_ips=subnet_id=…``. A port matches if it has any of the
    ``ip_address`` values, every ``subnet_id`` (or ``subnet``), and for every ``ip_address_substr``
    an address that contains the text. Different addresses of the port may meet different
    conditions.

    Raises:
        Fault: 400, a field is unknown.
    """
    rule: ColumnElement[bool] = true()
    address_rules: list[ColumnElement[bool]] = []
    for part in ",".join(values).split(","):
        field, _, value = part.partition("=")
        match field:
            case "ip_address":
                address_rules.append(_with_address("address", value))
            case "subnet_id" | "subnet":
                rule &= _with_address("subnet_id", value)
            case "ip_address_substr":
                pattern = ADDRESSES.c.address.contains(value, autoescape=True)
                rule &= PORTS.c.id.in_(select(ADDRESSES.c.port_id).where(pattern))
            case _:
                raise malformed(
                    f"Invalid input for fixed_ips. Reason: '{field[:64]}' is not a field of fixed_ips."
                )
    return rule & or_(*address_rules) if address_rules else rule


class PortsApi(NetworkResource):
    """The API of ports, /v2.0/ports."""

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
        fixed = collect(schema.FIXED_IP, ADDRESSES.c.port_id == PORTS.c.id)
        groups = collect(GROUPS.c.group_id, GROUPS.c.port_id == PORTS.c.id)
        return select(PORTS, fixed.label("fixed_ips"), groups.label("security_groups"))

    def visible_to(self, project_id: str) -> ColumnElement[bool]:
        own_networks = select(schema.networks.c.id).where(
            schema.networks.c.project_id == project_id
        )
        return or_(PORTS.c.project_id == project_id, PORTS.c.network_id.in_(own_networks))

    def view(self, row: DbValues, caller: NetworkCaller) -> Body:
        assignments = []
        for address in (fixed["ip_address"] for fixed in row["fixed_ips"]):
            name = host_name(row["dns_name"], address)
            assignments.append({"hostname": name, "ip_address": address, "fqdn": qualify(name)})
        view = super().view(row, caller) | {"dns_assignment": assignments}
        return view | (view_binding(row) if caller.is_admin else {})

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
            why = f"device_owner of port {row.id} cannot be changed, because the port belongs to a router"
            raise invalid(why)
        columns = self.columns(body)
        requested, groups = body.get("fixed_ips"), body.get("security_groups")
        host = columns.pop("host", None)
        if columns.get("mac_address", "") is None or columns.get("mac_address") == row.mac_address:
            columns.pop("mac_address")
        if columns.get("mac_address"):
            _require_free_mac(change, row.network_id, columns["mac_address"])
        change.touch(networks=[row.network_id], groups=row.security_groups, hosts=[row.host])
        if requested is not None:
            _readdress(change, row, requested, columns.get("mac_address") or row.mac_address)
        if groups is not None:
            require_groups(change, caller, groups, row.project_id)
            change.execute(delete(GROUPS).where(GROUPS.c.port_id == row.id))
            _add_to_groups(change, row.id, groups)
            change.touch(groups=groups)
        new_port = {**row._mapping, **columns} | (
            {} if groups is None else {"security_groups": groups}
        )
        _check_security(new_port)
        if columns.get("admin_state_up") is False:
            columns["status"] = "DOWN"
        elif columns.get("admin_state_up") and not row.admin_state_up and row.vif_type == "bridge":
            columns |= bind(change, row.host)
        change.set(
            PORTS, row.id, columns | ({} if host is None else _rebind(change, row, host, columns))
        )
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
    """Create a port with its addresses, groups and binding, and return the id.

    Without `security_groups`, a port with port security gets the default group of the project,
    unless the device_owner begins with "network:". The quota is not checked here.

    Args:
        change: The transaction.
        network: The row of the port's network.
        body: The validated attributes of the port.
        caller: The caller, or None for a port of this service, which needs no check of groups.

    Raises:
        Fault: 400, 404 or 409, the addresses, groups or MAC address are not available, or the
            attributes contradict each other.
    """
    columns = PortsApi.columns(body)
    groups, host = body.get("security_groups"), columns.pop("host", "")
    is_secure = columns.setdefault("port_security_enabled", network.port_security_enabled)
    owner = columns.get("device_owner", "")
    if columns.get("mac_address"):
        _require_free_mac(change, network.id, columns["mac_address"])
    else:
        columns["mac_address"] = free_mac(change.connection, network.id)
    if groups is None:
        is_open = owner.startswith("network:") or not is_secure
        groups = [] if is_open else [default_group(change, columns["project_id"])]
    elif caller is not None:
        require_groups(change, caller, groups, columns["project_id"])
    _check_security({"allowed_address_pairs": [], **columns, "security_groups": groups})
    router, mac = owner in ROUTER_OWNERS, columns["mac_address"]
    requested = body.get("fixed_ips")
    addresses = choose_addresses(change.connection, network.id, mac, requested, router=router)
    if router:
        columns |= bind_to_carrier(change, host)
    elif host:
        columns |= bind(change, host, columns.get("admin_state_up", True))
    key = change.add(PORTS, columns)
    store(change.connection, key, addresses)
    _add_to_groups(change, key, groups)
    change.touch(networks=[network.id] if host else (), groups=groups if addresses else ())
    return key


def remove(change: Change, row: DbRow) -> None:
    """Remove a port with its addresses and bindings, and disassociate its floating IPs.

    The hosts concerned get a new revision. The caller adds any event.
    """
    groups = change.scalars(select(GROUPS.c.group_id).where(GROUPS.c.port_id == row.id))
    change.touch(networks=[row.network_id] if row.host else (), groups=groups, hosts=[row.host])
    remove_inactive_bindings(change, row.id)
    disassociate(change, row.id)
    change.remove(PORTS, row.id)


def disassociate(change: Change, port_id: str, address: str | None = None) -> None:
    """Disassociate the floating IPs of a port, which then have no port.

    The hosts of the floating IPs' routers get a new revision.

    Args:
        change: The transaction.
        port_id: The port.
        address: The port's address whose floating IPs are disassociated, or None for all.
    """
    query = select(FLOATING.c.id, ROUTERS.c.host).outerjoin_from(FLOATING, ROUTERS)
    query = query.where(FLOATING.c.port_id == port_id)
    if address is not None:
        query = query.where(FLOATING.c.fixed_ip_address == address)
    for row in change.rows(query):
        change.set(FLOATING, row.id, UNASSOCIATED)
        change.touch(hosts=[row.host or ""])


def _check_policy(caller: NetworkCaller, network: DbRow, body: Body, rule: str) -> None:
    """Refuse attributes that the caller may not set.

    Only the project of the network, an admin or a service may set mac_address and
    port_security_enabled. Only an admin or a service may set a device_owner that begins with
    "network:".

    Args:
        caller: The caller.
        network: The row of the port's network.
        body: The attributes in the request.
        rule: "create_port" or "update_port", for the message.

    Raises:
        Fault: 403, with the attribute in the message.
    """
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
    old_addresses = [(fixed["subnet_id"], fixed["ip_address"]) for fixed in row.fixed_ips]
    router = row.device_owner in ROUTER_OWNERS
    new_addresses = choose_addresses(
        change.connection, row.network_id, mac_address, requested, old_addresses, router=router
    )
    for subnet, address in set(old_addresses) - set(new_addresses):
        disassociate(change, row.id, address)
        change.execute(
            delete(ADDRESSES).where(ADDRESSES.c.subnet_id == subnet, ADDRESSES.c.address == address)
        )
    store(
        change.connection, row.id, [fixed for fixed in new_addresses if fixed not in old_addresses]
    )


def _add_to_groups(change: Change, key: str, groups: list[str]) -> None:
    if groups:
        rows = [{"port_id": key, "group_id": group} for group in groups]
        change.execute(insert(GROUPS).values(rows))


def _rebind(change: Change, row: DbRow, host: str, columns: Body) -> Body:
    """Return the columns to store for a port that moves to `host`, and remove inactive bindings.

    The result is empty, and the bindings stay, if the port is already bound to `host`, or unbound
    and to be unbound. A failed binding is repeated. If an ACTIVE port of a server is unbound, add
    the event network-vif-unplugged.

    Args:
        change: The transaction.
        row: The port's row.
        host: The new host, or "" to unbind the port.
        columns: The other new values of the port.
    """
    if host == row.host and row.vif_type in ("bridge", "unbound"):
        return {}
    remove_inactive_bindings(change, row.id)
    change.execute(delete(schema.arrivals).where(schema.arrivals.c.port_id == row.id))
    change.touch(hosts=[host])
    if host:
        return bind(change, host, columns.get("admin_state_up", row.admin_state_up))
    if row.status == "ACTIVE" and is_of_server(row):
        change.add_event("network-vif-unplugged", row.device_id, row.id)
    return dict(UNBOUND)
