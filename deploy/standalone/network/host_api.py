# SPDX-License-Identifier: Apache-2.0
"""/v2.0/kilonova/hosts: where a host asks what it must wire, and says what it has wired. For services and admins.

Asking is the heartbeat. The question waits until the host's revision is another than the one it has seen. Telling
makes the host's ports ACTIVE, up to the revision that it has applied, and wakes whoever waits for them.
"""

from typing import Any

import falcon
from sqlalchemy import Row, Select, select, update
from sqlalchemy.dialects.sqlite import insert

from deploy.standalone.network import schema
from deploy.standalone.network.attributes import REQUIRED, Attribute, Body, address, checked, number, truth
from deploy.standalone.network.bindings import is_of_server
from deploy.standalone.network.description import describe
from deploy.standalone.network.fabric import Change, Fabric, moment
from deploy.standalone.network.faults import fault
from deploy.standalone.web import answer, read_json

HOSTS, PORTS, INACTIVE = schema.hosts, schema.ports, schema.inactive_bindings
WAIT_MAX = 30


def _reasons(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("it must be a dictionary of port ids and reasons")
    return {str(name)[:64]: str(reason)[:500] for name, reason in value.items()}


TOLD = {
    "revision": Attribute(number(0, 10**12), REQUIRED),
    "tunnel_address": Attribute(address),
    "external_gateway": Attribute(truth),
    "failed": Attribute(_reasons),
}


class HostApi:
    """GET /v2.0/kilonova/hosts/{name}/description and PUT /v2.0/kilonova/hosts/{name}."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def on_get_description(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        req.context.caller.require_admin("(rule:get_host_description)")
        seen = req.get_param_as_int("seen", default=-1)
        wait = req.get_param_as_int("wait", default=0, min_value=0)
        self._meet(name)
        self._fabric.hosts.await_other(name, seen, min(wait, WAIT_MAX))
        self._fabric.hosts.hear(name)
        with self._fabric.database.read() as connection:
            host = connection.execute(_host(name)).first()
            if host is None:
                raise fault("HostNotFound", id=name)
            if host.changed == seen:
                resp.status = falcon.HTTP_304
                return
            answer(resp, describe(connection, host, self._fabric.settings.dns))

    def on_put(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        req.context.caller.require_admin("(rule:update_host)")
        told = checked(read_json(req), TOLD, "host", req.context.caller, new=True)
        self._meet(name)
        with self._fabric.change() as change:
            host = change.connection.execute(_host(name)).one()
            _learn(change, host, told)
            _bind_late(change, name)
            _settle(change, name, told["revision"], told.get("failed", {}))
        self._fabric.hosts.acknowledge(name, told["revision"])
        resp.status = falcon.HTTP_204

    def _meet(self, name: str) -> None:
        """Hear this host; one that is new gets its row first, so that ports can be bound to it."""
        if self._fabric.hosts.silence(name) is None:
            if len(name) > 255:
                raise fault("HTTPBadRequest", why="The name of a host has at most 255 characters")
            with self._fabric.change() as change:
                change.connection.execute(insert(HOSTS).values(
                    name=name, changed=0, created_at=moment()).on_conflict_do_nothing())
                change.touch(hosts=[name])
        self._fabric.hosts.hear(name)


def _host(name: str) -> Select[Any]:
    return select(HOSTS).where(HOSTS.c.name == name)


def _learn(change: Change, host: Row[Any], told: Body) -> None:
    """Write down what the host says of itself; others learn where it is now."""
    news = {name: told[name] for name in ("tunnel_address", "external_gateway")
            if name in told and told[name] != getattr(host, name)}
    if news:
        here = select(schema.PLACES.c.network_id).where(schema.PLACES.c.host == host.name).distinct()
        outside = select(schema.networks.c.id).where(schema.networks.c.external)
        change.touch(networks=change.connection.execute(here).scalars(), hosts=[host.name])
        if host.external_gateway or news.get("external_gateway"):
            change.touch(networks=change.connection.execute(outside).scalars())
    change.connection.execute(update(HOSTS).where(HOSTS.c.name == host.name).values(
        news | {"acknowledged": told["revision"]}))


def _bind_late(change: Change, name: str) -> None:
    """Ports that were bound while the host was silent are bound now."""
    late = change.connection.execute(select(PORTS.c.id, PORTS.c.network_id).where(
        PORTS.c.host == name, PORTS.c.vif_type == "binding_failed")).all()
    if late:
        change.connection.execute(update(PORTS).where(PORTS.c.id.in_([port.id for port in late])).values(
            vif_type="bridge", bound_at=change.revision()))
        change.touch(networks=[port.network_id for port in late], hosts=[name])


def _settle(change: Change, name: str, revision: int, failed: dict[str, str]) -> None:
    """The ports that this revision holds are wired, but for those that failed."""
    here = [PORTS.c.host == name, PORTS.c.vif_type == "bridge"]
    shown = (PORTS.c.id, PORTS.c.device_id, PORTS.c.device_owner)
    wired = change.connection.execute(update(PORTS).where(
        *here, PORTS.c.status == "DOWN", PORTS.c.admin_state_up, PORTS.c.bound_at <= revision,
        PORTS.c.id.not_in(failed)).values(status="ACTIVE").returning(*shown)).all()
    lost = change.connection.execute(update(PORTS).where(
        *here, PORTS.c.status == "ACTIVE", PORTS.c.id.in_(failed)).values(status="DOWN").returning(*shown)).all()
    change.connection.execute(update(INACTIVE).where(INACTIVE.c.host == name, INACTIVE.c.bound_at <= revision).values(
        is_wired=INACTIVE.c.port_id.not_in(failed)))
    for port in filter(is_of_server, wired):
        change.tell("network-vif-plugged", port.device_id, port.id)
    for port in filter(is_of_server, lost):
        change.tell("network-vif-plugged", port.device_id, port.id, "failed")
