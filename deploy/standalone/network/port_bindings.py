# SPDX-License-Identifier: Apache-2.0
"""/v2.0/ports/{id}/bindings: the hosts that a server's port is bound to (Neutron's extension
binding-extended).

One binding is active: it is the port's own binding:host_id and stands in the port's row. The others
are wired as it is, so that a server that moves while it runs finds its port where it arrives;
`activate` makes another the active one. For admins and services. What must stay true: at most one
active binding a port, at most one binding a port and host, and an inactive one changes nothing of
what the port shows.
"""

from collections.abc import Callable
from typing import Any

import falcon
from sqlalchemy import Connection, delete, insert, select, update

from deploy.standalone.database import DbRow, DbValues
from deploy.standalone.listing import values_of
from deploy.standalone.network import schema
from deploy.standalone.network.attributes import ID, PROFILE, REQUIRED, Attribute, Attributes
from deploy.standalone.network.bindings import bind, shown_binding, withdraw
from deploy.standalone.network.caller import NetworkCaller
from deploy.standalone.network.fabric import Change, Fabric
from deploy.standalone.network.faults import fault
from deploy.standalone.network.resource import NOT_FILTERS, NetworkResource, fields
from deploy.standalone.resource import Body
from deploy.standalone.schemas import one_of, text
from deploy.standalone.web import answer, read_object

INACTIVE = schema.inactive_bindings
OF_BINDING = ("host", "bound_at", "vif_type", "vnic_type", "profile")
FILTERS = ("host", "status", "vif_type", "vnic_type")
BINDING = Attributes(
    {
        "host": Attribute(text(minLength=1), REQUIRED, put=False),
        "vnic_type": Attribute(one_of("normal"), "normal"),
        "profile": Attribute(PROFILE, {}),
        "project_id": Attribute(ID, put=False),
    }
)


class PortBindings:
    """GET and POST .../bindings; GET, PUT and DELETE .../bindings/{host}; PUT
    .../bindings/{host}/activate."""

    def __init__(self, fabric: Fabric, ports: NetworkResource) -> None:
        self._fabric, self._ports = fabric, ports

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        """All of them, the active one first."""
        unknown = sorted(req.params.keys() - {*FILTERS, *NOT_FILTERS})
        if unknown:
            raise fault(
                "HTTPBadRequest", why=f"['{unknown[0][:64]}'] is invalid attribute for filtering"
            )
        with self._fabric.database.read() as connection:
            found = _all(connection, self._port(connection, req, key, "get"))
        met = [
            one
            for one in found
            if all(
                one[name] in values_of(req.params, name) for name in FILTERS if name in req.params
            )
        ]
        answer(resp, {"bindings": [fields(req, one) for one in met]})

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        """One more, inactive; the answer waits, as a port's does, until the host has wired it."""
        body = _body(req, new=True)
        with self._fabric.change() as change:
            port = self._port(change.connection, req, key, "create")
            host = body["host"]
            if any(one["host"] == host for one in _all(change.connection, port)):
                raise fault("PortBindingAlreadyExists", id=port.id, host=host)
            bound = bind(change, host, port.admin_state_up)
            if bound["vif_type"] != "bridge":
                raise fault("PortBindingError", id=port.id, host=host)
            change.execute(
                insert(INACTIVE).values(
                    port_id=port.id,
                    host=host,
                    bound_at=bound["bound_at"],
                    vif_type=bound["vif_type"],
                    vnic_type=body["vnic_type"],
                    profile=body["profile"],
                    is_wired=bound["status"] == "ACTIVE",
                )
            )
            change.execute(insert(schema.arrivals).values(port_id=port.id, host=host))
            change.touch(networks=[port.network_id], hosts=[host])
        self._fabric.settle(change)
        self.on_get_one(req, resp, key, host)
        resp.status = falcon.HTTP_201

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str, host: str) -> None:
        """One of them."""
        with self._fabric.database.read() as connection:
            found = _one(connection, self._port(connection, req, key, "get"), host)
        answer(resp, {"binding": fields(req, found)})

    def on_put_one(self, req: falcon.Request, resp: falcon.Response, key: str, host: str) -> None:
        """Change what the binding's user keeps of it: profile and vnic_type."""
        body = _body(req, new=False)

        def turn(change: Change, port: DbRow, found: Body) -> None:
            if found["status"] == "ACTIVE":
                change.set(schema.ports, port.id, body)
            elif body:
                change.execute(update(INACTIVE).where(*_at(port, host)).values(body))

        self._turn(req, key, host, turn)
        self.on_get_one(req, resp, key, host)

    def on_put_activate(
        self, req: falcon.Request, resp: falcon.Response, key: str, host: str
    ) -> None:
        """Make it the active one; the one that was stays, inactive."""

        def turn(change: Change, port: DbRow, found: Body) -> None:
            if found["status"] == "ACTIVE":
                raise fault("PortBindingAlreadyActive", id=port.id, host=host)
            _activate(change, port, host)

        self._turn(req, key, host, turn)
        self.on_get_one(req, resp, key, host)

    def on_delete_one(
        self, req: falcon.Request, resp: falcon.Response, key: str, host: str
    ) -> None:
        """Give an inactive one up."""

        def turn(change: Change, port: DbRow, found: Body) -> None:
            if found["status"] == "ACTIVE":
                raise fault("PortBindingInUse", id=port.id, host=host)
            withdraw(change, port.id, INACTIVE.c.host == host)

        self._turn(req, key, host, turn)
        resp.status = falcon.HTTP_204

    def _turn(
        self, req: falcon.Request, key: str, host: str, turn: Callable[[Change, DbRow, Body], None]
    ) -> None:
        with self._fabric.change() as change:
            port = self._port(change.connection, req, key, "update")
            turn(change, port, _one(change.connection, port, host))

    def _port(self, connection: Connection, req: falcon.Request, key: str, verb: str) -> DbRow:
        caller: NetworkCaller = req.context.caller
        caller.require_admin(f"(rule:{verb}_port_binding)")
        port = self._ports.find(connection, caller, key)
        if not port.device_owner.startswith("compute:"):
            raise fault(
                "BadRequest", what="port", why=f"port {port.id} is no server's (compute:...)"
            )
        return port


def _body(req: falcon.Request, *, new: bool) -> Body:
    return BINDING.checked(read_object(req, "binding"), "binding", req.context.caller, new=new)


def _at(port: DbRow, host: str) -> tuple[Any, Any]:
    return INACTIVE.c.port_id == port.id, INACTIVE.c.host == host


def _all(connection: Connection, port: DbRow) -> list[Body]:
    more = connection.execute(
        select(INACTIVE).where(INACTIVE.c.port_id == port.id).order_by(INACTIVE.c.host)
    ).all()
    active = [_shown(port._mapping, port.network_id, "ACTIVE")] if port.host else []
    return active + [_shown(row._mapping, port.network_id, "INACTIVE") for row in more]


def _one(connection: Connection, port: DbRow, host: str) -> Body:
    found = next((one for one in _all(connection, port) if one["host"] == host), None)
    if found is None:
        raise fault("PortBindingNotFound", id=port.id, host=host)
    return found


def _shown(row: DbValues, network_id: str, status: str) -> Body:
    details = shown_binding({"vif_type": row["vif_type"], "network_id": network_id})
    return {
        "host": row["host"],
        "vif_type": row["vif_type"],
        "vif_details": details["binding:vif_details"],
        "vnic_type": row["vnic_type"],
        "profile": row["profile"],
        "status": status,
    }


def _activate(change: Change, port: DbRow, host: str) -> None:
    """Exchange the two. Hosts need no new revision: they have wired both."""
    row = change.execute(delete(INACTIVE).where(*_at(port, host)).returning(INACTIVE)).one()
    if port.host:
        before = {name: port._mapping[name] for name in OF_BINDING}
        change.execute(
            insert(INACTIVE).values(port_id=port.id, is_wired=port.status == "ACTIVE", **before)
        )
    is_active = row.is_wired and port.admin_state_up
    change.set(
        schema.ports,
        port.id,
        {name: row._mapping[name] for name in OF_BINDING}
        | {"status": "ACTIVE" if is_active else "DOWN"},
    )
