# SPDX-License-Identifier: Apache-2.0
"""The tables of the network service.

* `ports.bound_at` is the revision of the change that bound the port. A host that has applied this
  revision has wired the port.
* `hosts.changed` is the revision of the last change that concerns the host.
* `counter` provides increasing revisions.
* `addresses` has the port of each address. The primary key makes an address unique in a subnet.
* A port's active binding is in its own row, and the others in `inactive_bindings`. PLACES contains
  all.
* `arrivals` has the hosts for which a second binding of a port was created. A guest arrives or has
  arrived there with open connections.
"""

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    func,
    select,
    union_all,
)
from sqlalchemy.sql.schema import SchemaItem

from deploy.one_machine.services.quotas import SetLimits

METADATA = MetaData()


def _resource_table(name: str, *columns: SchemaItem) -> Table:
    """Return the table of a resource of the API, with the columns that all resources have."""
    return Table(
        name,
        METADATA,
        Column("id", String, primary_key=True),
        Column("project_id", String, nullable=False, index=True),
        Column("name", String, nullable=False, default=""),
        Column("description", String, nullable=False, default=""),
        *columns,
        Column("tags", JSON, nullable=False, default=list),
        Column("revision_number", Integer, nullable=False, default=0),
        Column("created_at", String, nullable=False),
        Column("updated_at", String, nullable=False),
    )


def _boolean(name: str, default: bool) -> Column[bool]:
    return Column(name, Boolean, nullable=False, default=default)


def _list(name: str) -> Column[list[object]]:
    return Column(name, JSON, nullable=False, default=list)


def _text(name: str) -> Column[str]:
    return Column(name, String, nullable=False, default="")


networks = _resource_table(
    "networks",
    _boolean("admin_state_up", True),
    _boolean("shared", False),
    _boolean("external", False),
    _boolean("is_default", False),
    _boolean("port_security_enabled", True),
    Column("mtu", Integer, nullable=False),
    Column("vni", Integer, nullable=False, unique=True),
    _text("dns_domain"),
)

subnets = _resource_table(
    "subnets",
    Column("network_id", ForeignKey("networks.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("ip_version", Integer, nullable=False),
    Column("cidr", String, nullable=False),
    Column("gateway_ip", String),
    _boolean("enable_dhcp", True),
    Column("ipv6_address_mode", String),
    Column("ipv6_ra_mode", String),
    _list("allocation_pools"),
    _list("dns_nameservers"),
    _list("host_routes"),
)

ports = _resource_table(
    "ports",
    Column("network_id", ForeignKey("networks.id"), nullable=False, index=True),
    Column("mac_address", String, nullable=False),
    _boolean("admin_state_up", True),
    Column("status", String, nullable=False, default="DOWN"),
    Column("device_id", String, nullable=False, default="", index=True),
    _text("device_owner"),
    Column("host", String, nullable=False, default="", index=True),
    Column("bound_at", Integer, nullable=False, default=0),
    Column("vif_type", String, nullable=False, default="unbound"),
    Column("vnic_type", String, nullable=False, default="normal"),
    Column("profile", JSON, nullable=False, default=dict),
    _boolean("port_security_enabled", True),
    _list("allowed_address_pairs"),
    _text("dns_name"),
    UniqueConstraint("network_id", "mac_address"),
)

inactive_bindings = Table(
    "inactive_bindings",
    METADATA,
    Column("port_id", ForeignKey("ports.id", ondelete="CASCADE"), primary_key=True),
    Column("host", String, primary_key=True, index=True),
    Column("bound_at", Integer, nullable=False),
    Column("vif_type", String, nullable=False),
    Column("vnic_type", String, nullable=False),
    Column("profile", JSON, nullable=False),
    _boolean("is_wired", False),
)

arrivals = Table(
    "arrivals",
    METADATA,
    Column("port_id", ForeignKey("ports.id", ondelete="CASCADE"), primary_key=True),
    Column("host", String, primary_key=True, index=True),
)

PLACES = union_all(
    select(ports.c.id.label("port_id"), ports.c.network_id, ports.c.host).where(
        ports.c.vif_type == "bridge"
    ),
    select(inactive_bindings.c.port_id, ports.c.network_id, inactive_bindings.c.host)
    .join_from(inactive_bindings, ports)
    .where(inactive_bindings.c.vif_type == "bridge"),
).subquery("places")
"""The ports that each host wires, through active and inactive bindings."""

addresses = Table(
    "addresses",
    METADATA,
    Column("subnet_id", ForeignKey("subnets.id", ondelete="CASCADE"), primary_key=True),
    Column("address", String, primary_key=True),
    Column("port_id", ForeignKey("ports.id", ondelete="CASCADE"), nullable=False, index=True),
    Index("addresses_by_address", "address"),
)

#: An address of a port as the API shows it.
FIXED_IP = func.json_object("subnet_id", addresses.c.subnet_id, "ip_address", addresses.c.address)

port_groups = Table(
    "port_groups",
    METADATA,
    Column("port_id", ForeignKey("ports.id", ondelete="CASCADE"), primary_key=True),
    Column("group_id", ForeignKey("security_groups.id"), primary_key=True),
    Index("port_groups_by_group", "group_id"),
)

security_groups = _resource_table("security_groups", _boolean("stateful", True))

# One default group for each project, also if several first requests run concurrently.
Index(
    "one_default_group",
    security_groups.c.project_id,
    unique=True,
    sqlite_where=security_groups.c.name == "default",
)

security_group_rules = _resource_table(
    "security_group_rules",
    Column(
        "security_group_id",
        ForeignKey("security_groups.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("direction", String, nullable=False),
    Column("ethertype", String, nullable=False),
    Column("protocol", String),
    Column("port_range_min", Integer),
    Column("port_range_max", Integer),
    Column("remote_ip_prefix", String),
    Column("remote_group_id", ForeignKey("security_groups.id", ondelete="CASCADE"), index=True),
)

routers = _resource_table(
    "routers",
    _boolean("admin_state_up", True),
    _boolean("enable_snat", True),
    _list("routes"),
    Column("host", String, nullable=False, default="", index=True),
)

floating_ips = _resource_table(
    "floating_ips",
    Column("floating_network_id", ForeignKey("networks.id"), nullable=False),
    Column("floating_ip_address", String, nullable=False, index=True),
    Column("floating_port_id", ForeignKey("ports.id"), nullable=False, index=True),
    Column("port_id", ForeignKey("ports.id"), index=True),
    Column("fixed_ip_address", String),
    Column("router_id", ForeignKey("routers.id"), index=True),
    _text("dns_name"),
    _text("dns_domain"),
)

quotas = SetLimits(METADATA)

hosts = Table(
    "hosts",
    METADATA,
    Column("name", String, primary_key=True),
    Column("tunnel_address", String),
    _boolean("external_gateway", False),
    Column("changed", Integer, nullable=False),
    Column("acknowledged", Integer, nullable=False, default=0),
    Column("created_at", String, nullable=False),
)

counter = Table(
    "counter",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("revision", Integer, nullable=False),
)

events = Table(
    "events",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", String, nullable=False),
    Column("server", String, nullable=False),
    Column("tag", String),
    Column("status", String, nullable=False, default="completed"),
    Column("created", Integer, nullable=False),
)
