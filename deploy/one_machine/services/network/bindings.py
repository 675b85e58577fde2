# SPDX-License-Identifier: Apache-2.0
"""Bindings of ports to hosts.

A port that is bound to a host is wired there. It becomes ACTIVE once the host has applied a
revision with the port. Only `bind` decides the result of a binding. The binding fails if the host
has no living network agent. Without hosts (`--no-hosts`) every binding succeeds at once. A port may
have more, inactive bindings (port_bindings.py), and is wired on those hosts too.
"""

from sqlalchemy import ColumnElement, delete, select

from deploy.one_machine.services.database import DbRow, DbValues
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.fabric import Change
from deploy.one_machine.services.network.host.names import bridge
from deploy.one_machine.services.resource import Body

ROUTER_OWNERS = ("network:router_interface", "network:router_gateway")
UNBOUND: DbValues = {"host": "", "vif_type": "unbound", "status": "DOWN", "bound_at": 0}
"""The columns of a port without a host."""


def bind(change: Change, host: str, is_up: bool = True) -> Body:
    """Return the columns to store for a port that this change binds to `host`.

    A host with a living network agent gets a new revision at the end of the transaction. The
    columns are host, vif_type, status and bound_at. The vif_type is "binding_failed" if the
    host has no living network agent, and otherwise "bridge". The status is DOWN until the host
    reports the port as wired. After the transaction the request waits for this in `Fabric.settle`.
    In a cloud without hosts every binding succeeds, and the status follows from `is_up`.

    Args:
        change: The transaction.
        host: The name of the host.
        is_up: The port's admin_state_up.
    """
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
    """Return the columns of `bind` for a router's port.

    Args:
        change: The transaction.
        host: The host that carries the router. For "" the result is empty, unless the cloud has no
            hosts.
    """
    return bind(change, host) if host or not change.fabric.settings.has_hosts else {}


def view_binding(row: DbValues) -> Body:
    """Return the fields `binding:vif_type` and `binding:vif_details` of a port.

    The caller shows these fields only to admins and services.
    """
    is_bound = row["vif_type"] == "bridge"
    details = {"port_filter": True, "bridge_name": bridge(row["network_id"])} if is_bound else {}
    return {"binding:vif_type": row["vif_type"], "binding:vif_details": details}


def remove_inactive_bindings(change: Change, port_id: str, *rules: ColumnElement[bool]) -> None:
    """Remove the inactive bindings of a port that meet `rules`, and their rows in `arrivals`.

    If there were any, their hosts and the hosts of the network get a new revision at the end of
    the transaction.
    """
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
    """Return True if the port belongs to a server."""
    return bool(row.device_id) and row.device_owner.startswith("compute:")


def notify_changed(change: Change, row: DbRow) -> None:
    """Add an event, after which the compute service reads the port again.

    For a port without a server do nothing.
    """
    if is_of_server(row):
        change.add_event("network-changed", row.device_id, row.id)
