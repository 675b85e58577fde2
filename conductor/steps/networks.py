# SPDX-License-Identifier: Apache-2.0
"""The ports of servers: the steps that create, unshelve, attach, detach, delete and moves share.

Kilonova creates a port with the server's id. So after a crash or a lost response, a query for the
server's ports finds all of them. Ports of users are only bound and unbound. A repeated step looks
for the ports of its first try before it creates new ones. Whether a port is wired is always read
from the network service. The service's event only causes an earlier read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

from common.clients.network import MADE, find_unsupported_request, is_made
from common.domain import errors, states
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.domain.json_types import JsonObject
from common.domain.models import OVS_HYBRID, Interface
from common.domain.wire import from_wire, to_wire
from common.store.cleanups import BINDING, DELETED, GONE_PORT, LATE_PORTS, PORT, PORTS
from common.store.engine import Connection
from common.store.rows import CleanupRow, ServerRow
from common.store.servers import actions
from conductor.engine import late_calls
from conductor.engine.action_args import ActionArgs, NetworkArgs
from conductor.engine.action_data import ActionData
from conductor.engine.engine import Engine, Lane
from conductor.engine.external_services import NetworkApi
from conductor.engine.run import AnyRun, Run
from conductor.engine.step import Step

Port = JsonObject
FIRST_POLL_MICROS, MAX_POLL_MICROS = SECOND // 4, 4 * SECOND
#: Values of binding:vif_type that hosts can plug.
BOUND = ("bridge", "ovs")
DETACH = states.row("detach_interface")
UNBOUND = {"device_id": "", "device_owner": "", "binding:host_id": ""}


@dataclass(kw_only=True)
class PortData(ActionData):
    """Data that the steps about ports leave for later steps."""

    #: The server's interfaces as the network service reports them.
    plugged: list[JsonObject] | None = None
    #: True if the guest starts paused, because the interfaces are not wired yet.
    paused: bool = False
    #: Time of the first check whether the interfaces are wired, in microseconds.
    plug_since: int | None = None
    #: True if late interfaces do not fail the action any more.
    no_way_back: bool = False
    #: The destination of a move.
    dest: str | None = None
    #: The source of a move.
    source: str | None = None
    #: Availability zone of ``dest``.
    zone: str | None = None
    #: The interfaces as bound to ``dest``.
    arriving: list[JsonObject] | None = None


@dataclass(kw_only=True)
class InterfaceData(PortData):
    """Data that the attach of an interface leaves for later steps."""

    #: The new interface. The API reads this.
    interface: JsonObject | None = None


PortRun = Run[ActionArgs, PortData]
#: The run of an action with requested interfaces.
RequestRun = Run[NetworkArgs, PortData]


def interfaces_of(run: AnyRun) -> list[Interface]:
    """Return the server's interfaces, with the changes of this run."""
    stored = run.changes.get("interfaces", run.server.interfaces)
    return [from_wire(Interface, interface) for interface in stored or ()]


def service(engine: Engine) -> NetworkApi:
    """Return the client of the network service.

    Raises:
        Unavailable: This conductor has no client of the network service.
    """
    if engine.networks is None:
        raise errors.Unavailable("This conductor has no network service.")
    return engine.networks


# --- create and bind ---
def create_ports(engine: Engine, run: RequestRun) -> None:
    """Create the requested ports, and bind them and the user's ports to the server's host.

    The interfaces are stored in the data of the run. Ports of an earlier try are used. The run
    fails if the host cannot bind or plug a port, or if no host supports a port's request.

    Raises:
        Conflict: Another device uses one of the user's ports.
        NotFound: One of the user's ports does not exist.
        Problem: The service refuses for another reason.
        Unavailable: The service does not answer.
    """
    late_calls.expect_late_result(run, LATE_PORTS)
    networks, requests = service(engine), run.args.networks
    # Only an earlier try can have left ports.
    existing = networks.ports(run.server.id) if run.is_repeated else []
    used_ports = {request["port"] for request in requests if request.get("port")} | _ports_before(
        run
    )
    spare = [port for port in existing if port["id"] not in used_ports]
    ports: dict[int, JsonObject] = {}
    for number, request in enumerate(requests):
        if request.get("port"):
            ports[number] = _bind_user_port(networks, run, request["port"])
            continue
        port = next((port for port in spare if _fits(port, request)), None)
        if port is not None:
            spare.remove(port)
            ports[number] = networks.update(port["id"], _binding(networks, run, run.host))
    missing = [number for number in range(len(requests)) if number not in ports]
    if missing:
        new_ports = networks.create([_new(networks, run, requests[number]) for number in missing])
        ports |= dict(zip(missing, new_ports, strict=True))
    run.data.plugged = _check_interfaces(
        networks,
        run,
        [ports[number] for number in range(len(requests))],
        [request.get("tag") or "" for request in requests],
        str(run.host),
        are_new=len(missing) == len(requests),
    )


def _bind_user_port(networks: NetworkApi, run: PortRun, port_id: str) -> Port:
    """Bind a user's port to the server's host, and return the port.

    Raises:
        Conflict: Another device uses the port.
        NotFound: The port does not exist.
    """
    owner = networks.port(port_id).get("device_id")
    if owner and owner != run.server.id:
        raise errors.Conflict(f"Port {port_id} is still in use.")
    return networks.update(port_id, _binding(networks, run, run.host))


def rebind(engine: Engine, run: PortRun) -> None:
    """Bind the server's ports to its host, as ``rebind_to`` does."""
    assert run.host is not None
    rebind_to(engine, run, run.host)


def rebind_to(engine: Engine, run: PortRun, host: str) -> None:
    """Bind the server's ports to a host, which need not be the server's host.

    Deleted ports are ignored. The interfaces are stored in ``run.data.plugged``. The run fails if
    the host cannot use a port. In an undo this and a refusal do not fail the step. After a refusal
    a pending cleanup binds the ports to the server's host.

    Raises:
        Problem: The service refuses. Not raised in an undo.
        Unavailable: The service does not answer, and in an undo tries are left.
    """
    with run.cleanup_on_failure(PORTS, run.server.id) if run.is_undoing else nullcontext():
        _rebind(engine, run, host)


def _rebind(engine: Engine, run: PortRun, host: str) -> None:
    networks, ports, tags = service(engine), [], []
    for interface in interfaces_of(run):
        try:
            networks.unbind_at(
                interface.port, host
            )  # A superseded move may have left this binding.
            ports.append(networks.update(interface.port, _binding(networks, run, host)))
            tags.append(interface.tag)
        except errors.NotFound:
            continue
    run.data.plugged = _check_interfaces(networks, run, ports, tags, host, are_new=False)


def _check_interfaces(
    networks: NetworkApi,
    run: PortRun,
    ports: Sequence[Port],
    tags: Sequence[str],
    host: str,
    *,
    are_new: bool,
) -> list[JsonObject]:
    """Return the interfaces of bound ports, and fail the run if the host cannot use a port.

    Invariant: the step fails before a guest is plugged or started, if the host cannot bind a port
    or would bypass its security groups, or if no host supports its request. An undo skips
    these checks.

    Args:
        networks: The client of the network service.
        run: The run.
        ports: The ports after their binding to the host.
        tags: The tag of each port's interface, in the order of ``ports``, or "".
        host: The host.
        are_new: True if all ports were created by this call, and so have no floating IPs.
    """
    interfaces = networks.described(ports, floating=not are_new)
    failed = {
        port["id"]: port.get("binding:vif_type")
        for port in ports
        if port.get("binding:vif_type") not in BOUND
    }
    if failed and not run.is_undoing:
        run.fail(
            f"The network service cannot bind port {', '.join(failed)} on this host.",
            f"binding:vif_type is {', '.join(map(str, failed.values()))}; check that the agent of the network "
            f"service runs on {host}",
            retryable=True,
        )
    if not run.is_undoing:
        _check_plugging(run, interfaces, host)
        _check_requests(run, ports)
    return [
        to_wire(interface) | {"tag": tag} for interface, tag in zip(interfaces, tags, strict=True)
    ]


def _check_requests(run: PortRun, ports: Sequence[Port]) -> None:
    for port in ports:
        request = find_unsupported_request(port)
        if request:
            run.fail(f"Port {port['id']} cannot be used: no host supports its {request}.")


def _check_plugging(run: PortRun, interfaces: Sequence[Interface], host: str) -> None:
    hybrid = [interface.port for interface in interfaces if interface.vif_type == OVS_HYBRID]
    if hybrid:
        run.fail(
            f"This host cannot plug port {', '.join(hybrid)}: the network service requires "
            "ovs_hybrid_plug, without which security groups would have no effect.",
            f"on {host}, set firewall_driver = openvswitch for Neutron's Open vSwitch agent",
            retryable=True,
        )


# --- live migration: ports on two hosts ---
def bind_at_destination(engine: Engine, run: PortRun) -> None:
    """Bind the server's ports to the destination, in addition to the source.

    The ports are wired at the destination before the guest arrives, and stay wired at the source.
    If the service binds a port to one host only, the port is not bound ahead. Deleted ports are
    ignored. The interfaces at the destination are stored in ``run.data.arriving``. The run fails if
    the destination cannot use a port.
    """
    networks, dest, ports, tags = service(engine), _destination(run), [], []
    current_ports = {port["id"]: port for port in networks.ports(run.server.id)}
    for interface in interfaces_of(run):
        try:
            if interface.port in current_ports:
                binding = networks.bind_also(current_ports[interface.port], dest) or {}
                ports.append(
                    current_ports[interface.port]
                    | {
                        f"binding:{name}": binding[name]
                        for name in ("vif_type", "vif_details")
                        if name in binding
                    }
                )
                tags.append(interface.tag)
        except errors.NotFound:
            continue
    run.data.arriving = _check_interfaces(networks, run, ports, tags, dest, are_new=False)


def _destination(run: PortRun) -> str:
    assert run.data.dest is not None, "the move has claimed a destination"
    return run.data.dest


def activate_at_destination(engine: Engine, run: PortRun) -> None:
    """Make the bindings to the destination active, because the guest runs there.

    The device_owner of the ports is updated too, and the interfaces are stored in
    ``run.data.plugged``. A refusal becomes a pending cleanup.
    """
    dest = _destination(run)
    for interface in interfaces_of(run):
        with run.cleanup_on_failure(PORT, interface.port, run.data.source or ""):
            activate_at(service(engine), interface.port, dest)
    with run.cleanup_on_failure(PORTS, run.server.id):
        ports, owner = service(engine).ports(run.server.id), _owner(run, dest)
        for port in ports:
            if port.get("device_owner") != owner:
                _change(service(engine), port, {"device_owner": owner})
        describe(service(engine), run, ports)


def activate_at(networks: NetworkApi, port_id: str, host: str) -> None:
    """Make the port's binding to a host the active binding.

    If this binding is missing, the port itself is bound to the host. A missing port is ignored.
    """
    try:
        networks.activate(port_id, host)
    except errors.NotFound:
        # If the port exists, only its second binding is missing.
        port = _find_port(networks, port_id)
        if port is not None and port.get("binding:host_id") != host:
            networks.update(port_id, {"binding:host_id": host})


def unbind_destination(engine: Engine, run: PortRun) -> None:
    """Remove the bindings of the server's ports to the destination, where no guest has arrived.

    An active binding stays. A refusal becomes a pending cleanup.
    """
    _unbind_at(engine, run, run.data.dest)


def unbind_source(engine: Engine, run: PortRun) -> None:
    """Remove the bindings of the server's ports to the source, after the guest has left.

    An active binding stays. A refusal becomes a pending cleanup.
    """
    _unbind_at(engine, run, run.data.source)


def _unbind_at(engine: Engine, run: PortRun, host: str | None) -> None:
    for interface in interfaces_of(run):
        if host is not None:
            with run.cleanup_on_failure(BINDING, interface.port, host):
                service(engine).unbind_at(interface.port, host)


def _find_port(networks: NetworkApi, port_id: str) -> Port | None:
    try:
        return networks.port(port_id)
    except errors.NotFound:
        return None


def store_interfaces(tx: Connection, engine: Engine, runs: Sequence[PortRun]) -> None:
    """Store the interfaces that the step's call has read, if any, in the server's row."""
    for run in runs:
        if run.data.plugged is not None:
            run.set(interfaces=run.data.plugged)


def _ports_before(run: RequestRun) -> set[str]:
    """Return the ids of the server's stored ports, without the ports that the action requests."""
    requested = {request.get("port") for request in run.args.networks}
    return {interface["port"] for interface in run.server.interfaces or ()} - requested


def _binding(networks: NetworkApi, run: PortRun, host: str | None) -> JsonObject:
    name = {"dns_name": dns_name(run.server.hostname)} if networks.names_guests() else {}
    return {
        "device_id": run.server.id,
        "device_owner": _owner(run, host),
        "binding:host_id": host,
        **name,
    }


def dns_name(hostname: str) -> str:
    """Return a server's name in the form that network services accept.

    A name consists of labels with up to 63 letters, digits and inner hyphens. Other characters
    become hyphens. A valid hostname stays unchanged, with all its labels. If the last label is a
    number, the name could be read as an address, so all labels are joined. For example,
    ``web_1.example`` becomes ``web-1.example``, and ``10.0.0.5`` becomes ``10-0-0-5``.
    """
    labels = [re.sub("[^A-Za-z0-9-]", "-", label)[:63].strip("-") for label in hostname.split(".")]
    valid_labels = [label for label in labels if label]
    if len(valid_labels) > 1 and valid_labels[-1].isdecimal():
        valid_labels = ["-".join(valid_labels)[:63].strip("-")]
    return ".".join(valid_labels)


def _owner(run: PortRun, host: str | None) -> str:
    """Return the device_owner of the server's ports, which contains the availability zone.

    ``host`` is the host to which the ports are bound. For the destination of a move, the zone is in
    ``run.data``, otherwise in the server's row. Without a zone, "nova" is used.
    """
    zone = run.data.zone if host and host == run.data.dest else None
    return f"compute:{zone or run.changes.get('availability_zone', run.server.availability_zone) or 'nova'}"


def _new(networks: NetworkApi, run: RequestRun, request: JsonObject) -> Port:
    port = {
        "network_id": request["network"],
        "project_id": run.server.project_id,
        "admin_state_up": True,
        "binding:profile": MADE,
        **_binding(networks, run, run.host),
    }
    if request.get("fixed_ip"):
        port["fixed_ips"] = [{"ip_address": request["fixed_ip"]}]
    if run.args.security_groups:
        port["security_groups"] = run.args.security_groups
    return port


def _fits(port: Port, request: JsonObject) -> bool:
    addresses = [fixed["ip_address"] for fixed in port["fixed_ips"]]
    return bool(
        port["network_id"] == request["network"]
        and is_made(port)
        and (not request.get("fixed_ip") or request["fixed_ip"] in addresses)
    )


# --- release ---
def delete_ports(engine: Engine, run: AnyRun) -> None:
    """Delete the server's ports that Kilonova created. Clear server and host of the user's ports.

    A refusal becomes a pending cleanup.
    """
    _change_ports(engine, run, lambda port: True, release_port)


def undo_ports(engine: Engine, run: RequestRun) -> None:
    """Release the ports of this action, as ``delete_ports`` does.

    Ports that the server had before stay.
    """
    old_ports = _ports_before(run)
    _change_ports(engine, run, lambda port: port["id"] not in old_ports, release_port)


def _change_ports(
    engine: Engine,
    run: AnyRun,
    matches: Callable[[Port], bool],
    change: Callable[[NetworkApi, Port], None],
) -> None:
    """Change the matching ports of the server.

    A refusal becomes a pending cleanup of the port, or of all ports if they could not be listed.

    Raises:
        Unavailable: The service does not answer, and tries are left.
    """
    ports: list[Port] = []
    with run.cleanup_on_failure(PORTS, run.server.id):
        ports = service(engine).ports(run.server.id)
    for port in filter(matches, ports):
        with run.cleanup_on_failure(PORT, port["id"]):
            change(service(engine), port)


def release_port(networks: NetworkApi, port: Port) -> None:
    """Delete a port that Kilonova created, or clear server and host of a user's port.

    A missing port is no error.
    """
    if is_made(port):
        networks.delete(port["id"])
        return
    _change(networks, port, UNBOUND | ({"dns_name": ""} if networks.names_guests() else {}))


def unbind(engine: Engine, run: AnyRun) -> None:
    """Unbind the server's ports from their host. They stay ports of the server.

    A refusal becomes a pending cleanup.
    """
    _change_ports(
        engine,
        run,
        lambda port: True,
        lambda networks, port: _change(networks, port, {"binding:host_id": ""}),
    )


def detach(engine: Engine, run: AnyRun, port_id: str) -> None:
    """Delete one port of the server if Kilonova created it, otherwise clear server and host.

    A refusal becomes a pending cleanup. A port that the server does not have is ignored.
    """
    _change_ports(engine, run, lambda port: port["id"] == port_id, release_port)


def _change(networks: NetworkApi, port: Port, values: JsonObject) -> None:
    """Change a port, unless the port was deleted meanwhile."""
    try:
        networks.update(port["id"], values)
    except errors.NotFound:
        return


def reconcile_port(networks: NetworkApi, port: Port, server: ServerRow | None) -> None:
    """Bring a port to the state that the server's record requires.

    A port of the server is bound to the server's host, or to no host if the server has none. A port
    that is not in the record is released, and so is a port of a server that no longer exists
    (None).
    """
    if server is None or port["id"] not in {
        interface["port"] for interface in server.interfaces or ()
    }:
        release_port(networks, port)
        return
    if (port.get("binding:host_id") or "") == (server.host or ""):
        return
    if server.host:
        activate_at(networks, port["id"], server.host)
        _change(networks, port, {"device_owner": f"compute:{server.availability_zone or 'nova'}"})
    else:
        _change(networks, port, {"binding:host_id": ""})


def remove_gone_port(engine: Engine, row: CleanupRow, look: Callable[[], ServerRow | None]) -> None:
    """Begin the action that removes an interface from its server, because its port is gone.

    The port was deleted, or belongs to another device. Returns without an action if the port still
    belongs to the server, or if the server or its interface does not exist any more. Then the
    cleanup is complete.

    Args:
        engine: The conductor's engine.
        row: The pending cleanup. Its target is the id of the port.
        look: Reads the server. None: the server does not exist. Raises if an action has the server.

    Raises:
        Unavailable: The action has begun, and the next try of the cleanup checks the result. Or the
            service does not answer.
        Problem: The server's state does not permit the action.
    """
    with suppress(errors.NotFound):
        if service(engine).port(row.target).get("device_id") == row.server_id:
            return
    server = look()
    if server is None or row.target not in {
        interface["port"] for interface in server.interfaces or ()
    }:
        return
    system = RequestContext.of_ourselves(server.project_id)
    engine.store.write(
        lambda tx: actions.begin(
            tx, DETACH, row.server_id, context=system, args={"port": row.target}
        )
    )
    raise errors.Unavailable(
        f"The removal of port {row.target} from the guest of server {row.server_id} has begun."
    )


# --- wait until ports are wired ---
def read_interfaces(engine: Engine, run: PortRun) -> None:
    """Read the server's ports, and store the interfaces in the run's data (``describe``)."""
    networks = service(engine)
    describe(networks, run, networks.ports(run.server.id))


def describe(networks: NetworkApi, run: PortRun, ports: Sequence[Port]) -> None:
    """Store the server's interfaces in ``run.data.plugged``, as these ports describe them.

    A port that is not among the server's interfaces is left out. The interface of a port that was
    deleted meanwhile is kept, and counts as active, until a pending cleanup has removed the
    interface from the guest.
    """
    before = interfaces_of(run)
    interfaces = {
        interface.port: interface for interface in networks.described(ports, floating=True)
    }
    for interface in before:
        if interface.port not in interfaces:
            run.add_cleanup(GONE_PORT, interface.port, DELETED)
    run.data.plugged = [
        to_wire(interfaces.get(interface.port, replace(interface, active=True)))
        | {"tag": interface.tag}
        for interface in before
    ]


def await_plugged(tx: Connection, engine: Engine, runs: Sequence[PortRun]) -> None:
    """Continue when every interface is active. Until the time-out, poll again with growing pauses.

    After ``vif_plugging_timeout`` seconds the run fails if ``vif_plugging_is_fatal`` is set and the
    run can still be undone. Otherwise the run continues. A run whose read the service has refused
    continues at once. The read interfaces are stored in the server's row.
    """
    for run in runs:
        if run.ignored_refusal:
            continue
        run.set(interfaces=run.data.plugged)
        if run.data.plug_since is None:
            run.data.plug_since = run.locked_at
        is_late = run.locked_at - run.data.plug_since >= engine.vif_plugging_timeout * SECOND
        missing = [
            interface["port"] for interface in run.data.plugged or () if not interface["active"]
        ]
        if missing and not is_late:
            run.retry_in(min(FIRST_POLL_MICROS * 2 ** min(run.data.polls, 8), MAX_POLL_MICROS))
            run.data.polls += 1
        elif missing and engine.vif_plugging_is_fatal and not run.data.no_way_back:
            run.fail(
                f"The network service has not wired port {', '.join(missing)} within "
                f"{engine.vif_plugging_timeout} seconds. Try again, or ask the operator to check the service."
            )


def store_plugged(tx: Connection, engine: Engine, runs: Sequence[PortRun]) -> None:
    """Store the read interfaces. The guest will start paused if an interface is not wired yet.

    With a ``vif_plugging_timeout`` of 0 the guest never starts paused.
    """
    for run in runs:
        run.set(interfaces=run.data.plugged)
        run.data.paused = bool(
            engine.vif_plugging_timeout
            and not all(interface["active"] for interface in run.data.plugged or ())
        )


def starts_paused(run: AnyRun) -> bool:
    """Return True if the guest starts paused, because an interface was not wired yet."""
    return isinstance(run.data, PortData) and run.data.paused


def asks_for_networks(run: RequestRun) -> bool:
    """Return True if the action requests interfaces."""
    return bool(run.args.networks)


def has_ports(run: AnyRun) -> bool:
    """Return True if the server may have ports: ``interfaces`` in the server's row is not None."""
    return run.server.interfaces is not None


def plug_step(condition: Callable[[AnyRun], bool]) -> Step[ActionArgs, PortData]:
    """Return the step that waits for the ports of a guest that was started paused.

    An action for which ``condition`` is False skips the step.
    """
    return Step(
        "plug",
        "The guest stays paused until its frames arrive and are filtered.",
        call=read_interfaces,
        apply=await_plugged,
        lane=Lane.NETWORK,
        condition=condition,
    )


PLUG = plug_step(starts_paused)
