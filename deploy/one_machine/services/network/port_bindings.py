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
from sqlalchemy import Connection, delete, insert, select

from deploy.one_machine.services.database import DbRow, DbValues
from deploy.one_machine.services.listing import values_of
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.attributes import (
    ID,
    PROFILE,
    REQUIRED,
    Attribute,
    Attributes,
)
from deploy.one_machine.services.network.bindings import bind, shown_binding, withdraw
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Change, Fabric
from deploy.one_machine.services.network.faults import bad_request, fault
from deploy.one_machine.services.network.ports import PortsApi
from deploy.one_machine.services.network.resource import NOT_FILTERS, fields, unknown_filter
from deploy.one_machine.services.resource import Body, Handler
from deploy.one_machine.services.schemas import one_of, text
from deploy.one_machine.services.web import answer, read_object

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


class PortBindings(Handler[Fabric]):
    """GET and POST .../bindings; DELETE .../bindings/{host}; PUT .../bindings/{host}/activate."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        """All of them, the active one first."""
        if unknown := sorted(req.params.keys() - {*FILTERS, *NOT_FILTERS}):
            raise unknown_filter(unknown[0])
        with self._service.database.read() as connection:
            found = _all(connection, _port(connection, req, key, "get"))
        for name in req.params.keys() & set(FILTERS):
            found = [one for one in found if one[name] in values_of(req.params, name)]
        answer(resp, {"bindings": [fields(req, one) for one in found]})

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        """One more, inactive; the answer waits, as a port's does, until the host has wired it."""
        body = BINDING.validate(read_object(req, "binding"), "binding", req.context.caller, new=True)
        with self._service.change() as change:
            port = _port(change.connection, req, key, "create")
            host = body["host"]
            if any(one["host"] == host for one in _all(change.connection, port)):
                raise fault("PortBindingAlreadyExists", id=port.id, host=host)
            bound = bind(change, host, port.admin_state_up)
            if bound["vif_type"] != "bridge":
                raise fault("PortBindingError", id=port.id, host=host)
            place = {"port_id": port.id, "host": host}
            own = {name: (body | bound)[name] for name in OF_BINDING if name != "host"}
            is_wired = bound["status"] == "ACTIVE"
            change.execute(insert(INACTIVE).values(place | own | {"is_wired": is_wired}))
            change.execute(insert(schema.arrivals).values(place))
            change.touch(networks=[port.network_id], hosts=[host])
        self._service.settle(change)
        self._answer(req, resp, key, host)
        resp.status = falcon.HTTP_201

    def on_put_activate(
        self, req: falcon.Request, resp: falcon.Response, key: str, host: str
    ) -> None:
        """Make it the active one; the one that was stays, inactive."""

        def turn(change: Change, port: DbRow, found: Body) -> None:
            if found["status"] == "ACTIVE":
                raise fault("PortBindingAlreadyActive", id=port.id, host=host)
            _activate(change, port, host)

        self._turn(req, key, host, turn)
        self._answer(req, resp, key, host)

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

    def _answer(self, req: falcon.Request, resp: falcon.Response, key: str, host: str) -> None:
        with self._service.database.read() as connection:
            binding = _one(connection, _port(connection, req, key, "get"), host)
        answer(resp, {"binding": fields(req, binding)})

    def _turn(
        self, req: falcon.Request, key: str, host: str, turn: Callable[[Change, DbRow, Body], None]
    ) -> None:
        with self._service.change() as change:
            port = _port(change.connection, req, key, "update")
            turn(change, port, _one(change.connection, port, host))


def _port(connection: Connection, req: falcon.Request, key: str, verb: str) -> DbRow:
    caller: NetworkCaller = req.context.caller
    caller.require_admin(f"(rule:{verb}_port_binding)")
    port = PortsApi().find(connection, caller, key)
    if not port.device_owner.startswith("compute:"):
        why = f"port {port.id} is no server's (compute:...)"
        raise bad_request("port", why)
    return port


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
    shown = {name: row[name] for name in ("host", "vif_type", "vnic_type", "profile")}
    return shown | {"vif_details": details["binding:vif_details"], "status": status}


def _activate(change: Change, port: DbRow, host: str) -> None:
    """Exchange the two. Hosts need no new revision: they have wired both."""
    row = change.execute(delete(INACTIVE).where(*_at(port, host)).returning(INACTIVE)).one()
    if port.host:
        before = {name: port._mapping[name] for name in OF_BINDING}
        change.execute(
            insert(INACTIVE).values(port_id=port.id, is_wired=port.status == "ACTIVE", **before)
        )
    own = {name: row._mapping[name] for name in OF_BINDING}
    status = "ACTIVE" if row.is_wired and port.admin_state_up else "DOWN"
    change.set(schema.ports, port.id, own | {"status": status})
