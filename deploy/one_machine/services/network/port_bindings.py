# SPDX-License-Identifier: Apache-2.0
"""/v2.0/ports/{id}/bindings: the hosts of a server's port (Neutron's extension binding-extended).

The active binding is in the port's row, as its binding:host_id. Inactive bindings are wired in the
same way, so that a live-migrated server finds its port at the destination. `activate` makes an
inactive binding active. Only admins and services may use this. Invariant: a port has at most one
active binding and at most one binding for each host. An inactive binding does not change the view
of the port.
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
from deploy.one_machine.services.network.bindings import (
    bind,
    remove_inactive_bindings,
    view_binding,
)
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Change, Fabric
from deploy.one_machine.services.network.faults import bad_request, fault
from deploy.one_machine.services.network.ports import PortsApi
from deploy.one_machine.services.network.resource import NOT_FILTERS, select_fields, unknown_filter
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
    """GET and POST .../bindings, DELETE .../bindings/{host}, PUT .../bindings/{host}/activate."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        """Answer with the bindings that match the query's filters, the active binding first."""
        if unknown := sorted(req.params.keys() - {*FILTERS, *NOT_FILTERS}):
            raise unknown_filter(unknown[0])
        with self._service.database.read() as connection:
            bindings = _list_bindings(connection, _port(connection, req, key, "get"))
        for name in req.params.keys() & set(FILTERS):
            bindings = [
                binding for binding in bindings if binding[name] in values_of(req.params, name)
            ]
        answer(resp, {"bindings": [select_fields(req, binding) for binding in bindings]})

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        """Create an inactive binding, and wait up to `wait_seconds` until the port is wired.

        The answer is 201 also after a timeout, 409 if the port has a binding to the host, and 500
        if the host has no living network agent.
        """
        body = BINDING.validate(
            read_object(req, "binding"), "binding", req.context.caller, new=True
        )
        with self._service.change() as change:
            port = _port(change.connection, req, key, "create")
            host = body["host"]
            if any(binding["host"] == host for binding in _list_bindings(change.connection, port)):
                raise fault("PortBindingAlreadyExists", id=port.id, host=host)
            bound = bind(change, host, port.admin_state_up)
            if bound["vif_type"] != "bridge":
                raise fault("PortBindingError", id=port.id, host=host)
            place = {"port_id": port.id, "host": host}
            columns = {name: (body | bound)[name] for name in OF_BINDING if name != "host"}
            is_wired = bound["status"] == "ACTIVE"
            change.execute(insert(INACTIVE).values(place | columns | {"is_wired": is_wired}))
            change.execute(insert(schema.arrivals).values(place))
            change.touch(networks=[port.network_id], hosts=[host])
        self._service.settle(change)
        self._answer(req, resp, key, host)
        resp.status = falcon.HTTP_201

    def on_put_activate(
        self, req: falcon.Request, resp: falcon.Response, key: str, host: str
    ) -> None:
        """Make an inactive binding active, and the active binding inactive.

        The answer is 409 if the binding is active already.
        """

        def check_and_activate(change: Change, port: DbRow, binding: Body) -> None:
            if binding["status"] == "ACTIVE":
                raise fault("PortBindingAlreadyActive", id=port.id, host=host)
            _activate(change, port, host)

        self._change_binding(req, key, host, check_and_activate)
        self._answer(req, resp, key, host)

    def on_delete_one(
        self, req: falcon.Request, resp: falcon.Response, key: str, host: str
    ) -> None:
        """Delete an inactive binding. Refuse to delete the active binding (409)."""

        def check_and_delete(change: Change, port: DbRow, binding: Body) -> None:
            if binding["status"] == "ACTIVE":
                raise fault("PortBindingInUse", id=port.id, host=host)
            remove_inactive_bindings(change, port.id, INACTIVE.c.host == host)

        self._change_binding(req, key, host, check_and_delete)
        resp.status = falcon.HTTP_204

    def _answer(self, req: falcon.Request, resp: falcon.Response, key: str, host: str) -> None:
        with self._service.database.read() as connection:
            binding = _find_binding(connection, _port(connection, req, key, "get"), host)
        answer(resp, {"binding": select_fields(req, binding)})

    def _change_binding(
        self,
        req: falcon.Request,
        key: str,
        host: str,
        change_binding: Callable[[Change, DbRow, Body], None],
    ) -> None:
        with self._service.change() as change:
            port = _port(change.connection, req, key, "update")
            change_binding(change, port, _find_binding(change.connection, port, host))


def _port(connection: Connection, req: falcon.Request, key: str, verb: str) -> DbRow:
    caller: NetworkCaller = req.context.caller
    caller.require_admin(f"(rule:{verb}_port_binding)")
    port = PortsApi().find(connection, caller, key)
    if not port.device_owner.startswith("compute:"):
        why = f"port {port.id} belongs to no server, because its device_owner does not begin with compute:"
        raise bad_request("port", why)
    return port


def _conditions(port: DbRow, host: str) -> tuple[Any, Any]:
    return INACTIVE.c.port_id == port.id, INACTIVE.c.host == host


def _list_bindings(connection: Connection, port: DbRow) -> list[Body]:
    rows = connection.execute(
        select(INACTIVE).where(INACTIVE.c.port_id == port.id).order_by(INACTIVE.c.host)
    ).all()
    active = [_view(port._mapping, port.network_id, "ACTIVE")] if port.host else []
    return active + [_view(row._mapping, port.network_id, "INACTIVE") for row in rows]


def _find_binding(connection: Connection, port: DbRow, host: str) -> Body:
    binding = next((row for row in _list_bindings(connection, port) if row["host"] == host), None)
    if binding is None:
        raise fault("PortBindingNotFound", id=port.id, host=host)
    return binding


def _view(row: DbValues, network_id: str, status: str) -> Body:
    details = view_binding({"vif_type": row["vif_type"], "network_id": network_id})
    view = {name: row[name] for name in ("host", "vif_type", "vnic_type", "profile")}
    return view | {"vif_details": details["binding:vif_details"], "status": status}


def _activate(change: Change, port: DbRow, host: str) -> None:
    """Make the port's inactive binding to `host` active, and any active binding inactive.

    Hosts need no new revision, because the descriptions of both hosts contain the port. The port is
    ACTIVE if `host` has wired it and admin_state_up is True, otherwise DOWN.
    """
    row = change.execute(delete(INACTIVE).where(*_conditions(port, host)).returning(INACTIVE)).one()
    if port.host:
        former = {name: port._mapping[name] for name in OF_BINDING}
        change.execute(
            insert(INACTIVE).values(port_id=port.id, is_wired=port.status == "ACTIVE", **former)
        )
    columns = {name: row._mapping[name] for name in OF_BINDING}
    status = "ACTIVE" if row.is_wired and port.admin_state_up else "DOWN"
    change.set(schema.ports, port.id, columns | {"status": status})
