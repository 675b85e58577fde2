# SPDX-License-Identifier: Apache-2.0
"""The place of a port: bound to a host it is wired there, and ACTIVE once that host has applied a
revision with it.

`bind` is the one place that decides what a binding means. A host without a living host part fails
the binding; without hosts altogether (`--no-hosts`) every binding is good at once. A port may have
more, inactive bindings (port_bindings.py): it is wired on those hosts too.
"""

from sqlalchemy import ColumnElement, delete, select

from deploy.one_machine.services.database import DbRow, DbValues
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.fabric import Change
from deploy.one_machine.services.network.host.names import bridge
from deploy.one_machine.services.resource import Body

ROUTER_OWNERS = ("network:router_interface", "network:router_gateway")
UNBOUND: DbValues = {"host": "", "vif_type": "unbound", "status": "DOWN", "bound_at": 0}
"""The columns of a port that is nowhere."""


def bind(change: Change, host: str, is_up: bool = True) -> Body:
    """The columns of a port that is bound to `host` by this change; its maker waits for the
    host."""
    if not change.fabric.settings.has_hosts:
        return {
            "host": host,
            "vif_type": "bridge",
            "status": "ACTIVE" if is_up else "DOWN",
            "bound_at": 0,
        }
    if not change.fabric.hosts.is_alive(host):
        return {"host": host, "vif_type": "binding_failed", "status": "DOWN", "bound_at": 0}
    change.bound[host] = change.revision()
    change.touch(hosts=[host])
    return {"host": host, "vif_type": "bridge", "status": "DOWN", "bound_at": change.revision()}


def bind_to_carrier(change: Change, host: str) -> Body:
    """The columns of a router's port: bound to the host that carries the router, if it has one or
    needs none."""
    return bind(change, host) if host or not change.fabric.settings.has_hosts else {}


def shown_binding(row: DbValues) -> Body:
    """What only admins and services see of a port."""
    is_bound = row["vif_type"] == "bridge"
    details = {"port_filter": True, "bridge_name": bridge(row["network_id"])} if is_bound else {}
    return {"binding:vif_type": row["vif_type"], "binding:vif_details": details}


def withdraw(change: Change, port_id: str, *rules: ColumnElement[bool]) -> None:
    """Give the inactive bindings of a port up, all or those that meet `rules`."""
    inactive, arrivals = schema.inactive_bindings, schema.arrivals
    hosts = change.scalars(
        delete(inactive).where(inactive.c.port_id == port_id, *rules).returning(inactive.c.host)
    )
    if hosts:
        change.execute(
            delete(arrivals).where(arrivals.c.port_id == port_id, arrivals.c.host.in_(hosts))
        )
        network = select(schema.ports.c.network_id).where(schema.ports.c.id == port_id)
        change.touch(networks=change.scalars(network), hosts=hosts)


def is_of_server(row: DbRow) -> bool:
    """Is this the port of a server?"""
    return bool(row.device_id) and row.device_owner.startswith("compute:")


def notify_changed(change: Change, row: DbRow) -> None:
    """The compute service looks again at what it knows of this port."""
    if is_of_server(row):
        change.add_event("network-changed", row.device_id, row.id)
