# SPDX-License-Identifier: Apache-2.0
"""/v2.0/kilonova/hosts: the API for hosts, which get descriptions and report applied revisions.

A host authenticates with a key instead of a token, and only acts for itself. The long poll is the
heartbeat. It waits until the host's revision differs from the revision that the host has seen. A
report makes the host's ports ACTIVE up to the applied revision, and ends the waits of the requests
that created these ports.
"""

import hmac

import falcon
from sqlalchemy import select, update
from sqlalchemy.dialects.sqlite import insert

from compute_api.metadata.proxy_headers import host_key
from deploy.one_machine.services.database import DbRow, DbSelect
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.attributes import (
    ADDRESS,
    REQUIRED,
    Attribute,
    Attributes,
    number,
)
from deploy.one_machine.services.network.bindings import is_of_server
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.description import describe
from deploy.one_machine.services.network.fabric import Change, Fabric
from deploy.one_machine.services.network.faults import fault, malformed
from deploy.one_machine.services.network.host_keys import HEADER, wiring_key
from deploy.one_machine.services.resource import Body, Handler, moment
from deploy.one_machine.services.schemas import TRUTH
from deploy.one_machine.services.web import answer, read_json

AS_SERVICE = NetworkCaller("", frozenset({"service"}))
HOSTS, PORTS, INACTIVE = schema.hosts, schema.ports, schema.inactive_bindings
MAX_WAIT_SECONDS = 30


REPORT = Attributes(
    {
        "revision": Attribute(number(0, 10**12), REQUIRED),
        "tunnel_address": Attribute(ADDRESS),
        "external_gateway": Attribute(TRUTH),
        # Port -> reason.
        "failed": Attribute({"type": "object", "additionalProperties": {"type": "string"}}),
    }
)


class HostApi(Handler[Fabric]):
    """GET /v2.0/kilonova/hosts/{name}/description and PUT /v2.0/kilonova/hosts/{name}.

    GET has the parameters `seen`, the host's present revision, and `wait` in seconds. The response
    is 304 if the revision is still `seen`. PUT reports the revision that the host has applied.
    """

    def on_get_description(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        self._require_key(req, name)
        seen = req.get_param_as_int("seen", default=-1)
        wait = req.get_param_as_int("wait", default=0, min_value=0)
        self._register(name)
        self._service.hosts.await_other_revision(name, seen, min(wait, MAX_WAIT_SECONDS))
        self._service.hosts.note_contact(name)
        with self._service.database.read() as connection:
            host = connection.execute(_host(name)).first()
            if host is None:
                raise fault("HostNotFound", id=name)
            if host.changed == seen:
                resp.status = falcon.HTTP_304
                return
            answer(resp, describe(connection, host, self._service.settings.dns))

    def on_put(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        self._require_key(req, name)
        report = REPORT.validate(read_json(req), "host", AS_SERVICE, new=True)
        self._register(name)
        with self._service.change() as change:
            host = change.execute(_host(name)).one()
            _store_report(change, host, report)
            _bind_late(change, name)
            _update_ports(change, name, report["revision"], report.get("failed", {}))
        self._service.hosts.acknowledge(name, report["revision"])
        resp.status = falcon.HTTP_204

    def _require_key(self, req: falcon.Request, name: str) -> None:
        """Refuse a request without the key of this host.

        Raises:
            HTTPUnauthorized: The key is wrong or missing, or the service has no `host_secret`.
        """
        secret, key = self._service.settings.host_secret, req.get_header(HEADER) or ""
        if not secret or not hmac.compare_digest(
            wiring_key(host_key(secret, name)).encode(), key.encode()
        ):
            raise falcon.HTTPUnauthorized(
                description=f"The header {HEADER} does not have the key of host {name[:255]!r}."
            )

    def _register(self, name: str) -> None:
        """Record a contact of the host.

        A new host gets a row first, so that ports can be bound to it.

        Raises:
            Fault: 400, the name of a new host is too long.
        """
        if self._service.hosts.silence(name) is None:
            if len(name) > 255:
                raise malformed("The name of a host must have at most 255 characters")
            with self._service.change() as change:
                change.execute(
                    insert(HOSTS)
                    .values(name=name, changed=0, created_at=moment())
                    .on_conflict_do_nothing()
                )
                change.touch(hosts=[name])
        self._service.hosts.note_contact(name)


def _host(name: str) -> DbSelect:
    return select(HOSTS).where(HOSTS.c.name == name)


def _store_report(change: Change, host: DbRow, report: Body) -> None:
    """Store the applied revision of a host's report, and any tunnel address and gateway flag.

    If the tunnel address or the gateway flag changed, this host and all hosts of its networks get a
    new revision. If the host is or was a gateway, so do the hosts of all external networks.
    """
    changes = {
        name: report[name]
        for name in ("tunnel_address", "external_gateway")
        if name in report and report[name] != getattr(host, name)
    }
    if changes:
        local_networks = select(schema.PLACES.c.network_id).filter_by(host=host.name).distinct()
        external_networks = select(schema.networks.c.id).where(schema.networks.c.external)
        change.touch(networks=change.scalars(local_networks), hosts=[host.name])
        if host.external_gateway or changes.get("external_gateway"):
            change.touch(networks=change.scalars(external_networks))
    change.execute(
        update(HOSTS)
        .where(HOSTS.c.name == host.name)
        .values(changes | {"acknowledged": report["revision"]})
    )


def _bind_late(change: Change, name: str) -> None:
    """Bind the host's ports whose binding failed because the host was silent.

    The ports stay DOWN. The hosts of their networks get a new revision.
    """
    failed_networks = select(PORTS.c.network_id).filter_by(host=name, vif_type="binding_failed")
    if networks := change.scalars(failed_networks):
        statement = update(PORTS).filter_by(host=name, vif_type="binding_failed")
        change.execute(statement.values(vif_type="bridge", bound_at=change.revision()))
        change.touch(networks=networks, hosts=[name])


def _update_ports(change: Change, name: str, revision: int, failed: dict[str, str]) -> None:
    """Set wired ports to ACTIVE and failed ports to DOWN.

    Ports that were bound after `revision`, or whose admin_state_up is False, stay DOWN. For each
    server's port whose status changes, add an event network-vif-plugged, completed or failed. For
    an inactive binding that is not newer than `revision`, store whether the host has wired it.

    Args:
        change: The transaction.
        name: The host.
        revision: The revision that the host has applied.
        failed: Port -> the reason why the host could not wire the port.
    """
    local_ports = update(PORTS).filter_by(host=name, vif_type="bridge").returning(PORTS)
    down_ports = local_ports.where(PORTS.c.status == "DOWN", PORTS.c.admin_state_up)
    applied = down_ports.where(PORTS.c.bound_at <= revision, PORTS.c.id.not_in(failed))
    wired_ports = change.rows(applied.values(status="ACTIVE"))
    failed_ports = local_ports.where(PORTS.c.status == "ACTIVE", PORTS.c.id.in_(failed))
    lost_ports = change.rows(failed_ports.values(status="DOWN"))
    change.execute(
        update(INACTIVE)
        .where(INACTIVE.c.host == name, INACTIVE.c.bound_at <= revision)
        .values(is_wired=INACTIVE.c.port_id.not_in(failed))
    )
    for port in filter(is_of_server, wired_ports):
        change.add_event("network-vif-plugged", port.device_id, port.id)
    for port in filter(is_of_server, lost_ports):
        change.add_event("network-vif-plugged", port.device_id, port.id, "failed")
