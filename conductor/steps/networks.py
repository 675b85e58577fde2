# SPDX-License-Identifier: Apache-2.0
"""The ports of servers: the steps that create, unshelve, attach, detach, delete and moves share.

A port that Kilonova made carries the server's id from its first moment, so what a crash or a lost
answer left is found by asking for the server's ports; a port that its user made is only bound and
unbound. The step that makes ports looks first when it may have been tried before. That a port is
wired is asked, not remembered: the network service's event only makes the question come sooner.
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
BOUND = ("bridge", "ovs")  #: values of binding:vif_type
DETACH = states.row("detach_interface")
UNBOUND = {"device_id": "", "device_owner": "", "binding:host_id": ""}


@dataclass(kw_only=True)
class PortData(ActionData):
    """What the steps about ports leave."""

    #: the server's interfaces, as the network service has them
    plugged: list[JsonObject] | None = None
    paused: bool = False  #: the guest starts paused, because they are not wired yet
    plug_since: int | None = None  #: when the action first looked whether they are, µs
    no_way_back: bool = False  #: that they are not wired in time fails nothing any more
    dest: str | None = None  #: of a server that moves: the host it goes to
    source: str | None = None  #: the host it leaves
    zone: str | None = None  #: availability zone of ``dest``
    arriving: list[JsonObject] | None = None  #: the interfaces as they are bound to ``dest``


@dataclass(kw_only=True)
class InterfaceData(PortData):
    """What attaching an interface leaves."""

    interface: JsonObject | None = None  #: the one that was made; the API reads it


PortRun = Run[ActionArgs, PortData]
RequestRun = Run[NetworkArgs, PortData]  #: of an action that asks for interfaces


def interfaces_of(run: AnyRun) -> list[Interface]:
    """The server's interfaces, counting what this transaction is about to write."""
    kept = run.changes.get("interfaces", run.server.interfaces)
    return [from_wire(Interface, one) for one in kept or ()]


def service(engine: Engine) -> NetworkApi:
    """The network service.

    Raises:
        Unavailable: this conductor knows of none.
    """
    if engine.networks is None:
        raise errors.Unavailable("This conductor has no network service.")
    return engine.networks


# --- making and binding ---
def create_ports(engine: Engine, run: RequestRun) -> None:
    """Make the ports that are asked for and bind them, and those of the user, to the server's
    host."""
    late_calls.expect_late_result(run, LATE_PORTS)
    networks, requests = service(engine), run.args.networks
    there = networks.ports(run.server.id) if run.is_repeated else []  # a first try has left nothing
    taken = {request["port"] for request in requests if request.get("port")} | _ports_before(run)
    spare = [port for port in there if port["id"] not in taken]
    found: dict[int, JsonObject] = {}
    for number, request in enumerate(requests):
        if request.get("port"):
            found[number] = _bind_user_port(networks, run, request["port"])
            continue
        port = next((port for port in spare if _fits(port, request)), None)
        if port is not None:
            spare.remove(port)
            found[number] = networks.update(port["id"], _binding(networks, run, run.host))
    missing = [number for number in range(len(requests)) if number not in found]
    if missing:
        made = networks.create([_new(networks, run, requests[number]) for number in missing])
        found |= dict(zip(missing, made, strict=True))
    run.data.plugged = _described(
        networks,
        run,
        [found[number] for number in range(len(requests))],
        [request.get("tag") or "" for request in requests],
        str(run.host),
        are_new=len(missing) == len(requests),
    )


def _bind_user_port(networks: NetworkApi, run: PortRun, port_id: str) -> Port:
    """Bind a port of the user, if no other server has it meanwhile."""
    user = networks.port(port_id).get("device_id")
    if user and user != run.server.id:
        raise errors.Conflict(f"Port {port_id} is still in use.")
    return networks.update(port_id, _binding(networks, run, run.host))


def rebind(engine: Engine, run: PortRun) -> None:
    """Bind the server's ports to the host where it is now; one that its user has removed is
    gone."""
    assert run.host is not None
    rebind_to(engine, run, run.host)


def rebind_to(engine: Engine, run: PortRun, host: str) -> None:
    """Bind the server's ports to this host, which need not be the server's yet or any more.

    On the way back a host that cannot bind now holds nobody up: the network service binds when it
    hears of it again.
    """
    with run.cleanup_on_failure(PORTS, run.server.id) if run.is_undoing else nullcontext():
        _rebind(engine, run, host)


def _rebind(engine: Engine, run: PortRun, host: str) -> None:
    networks, ports, tags = service(engine), [], []
    for one in interfaces_of(run):
        try:
            networks.unbind_at(one.port, host)  # what a move that was superseded has left there
            ports.append(networks.update(one.port, _binding(networks, run, host)))
            tags.append(one.tag)
        except errors.NotFound:
            continue
    run.data.plugged = _described(networks, run, ports, tags, host, are_new=False)


def _described(
    networks: NetworkApi,
    run: PortRun,
    ports: Sequence[Port],
    tags: Sequence[str],
    host: str,
    *,
    are_new: bool,
) -> list[JsonObject]:
    """The interfaces that these ports are; a port that cannot be bound to this host is the host's
    failure.

    Invariant: a port that the host would plug past its security groups, or that requests what no
    host has, fails the step before a guest is plugged or started.
    """
    described = networks.described(ports, floating=not are_new)
    failed = {
        port["id"]: port.get("binding:vif_type")
        for port in ports
        if port.get("binding:vif_type") not in BOUND
    }
    if failed and not run.is_undoing:
        run.fail(
            f"The network service cannot bind port {', '.join(failed)} on this host.",
            f"binding:vif_type is {', '.join(map(str, failed.values()))}; does its host part run on {host}?",
            retryable=True,
        )
    if not run.is_undoing:
        _check_plugging(run, described, host)
        _check_requests(run, ports)
    return [to_wire(one) | {"tag": tag} for one, tag in zip(described, tags, strict=True)]


def _check_requests(run: PortRun, ports: Sequence[Port]) -> None:
    for port in ports:
        request = find_unsupported_request(port)
        if request:
            run.fail(f"Port {port['id']} cannot be used: no host supports its {request}.")


def _check_plugging(run: PortRun, described: Sequence[Interface], host: str) -> None:
    hybrid = [one.port for one in described if one.vif_type == OVS_HYBRID]
    if hybrid:
        run.fail(
            f"This host cannot plug port {', '.join(hybrid)}: the network service asks for "
            "ovs_hybrid_plug, without which security groups would have no effect.",
            f"on {host}, set firewall_driver = openvswitch for Neutron's Open vSwitch agent",
            retryable=True,
        )


# --- two hosts at a time: a server that moves while it runs ---
def bind_at_destination(engine: Engine, run: PortRun) -> None:
    """Bind the server's ports to the destination too: they are wired there before the guest comes,
    and still here."""
    networks, dest, ports, tags = service(engine), _destination(run), [], []
    held = {port["id"]: port for port in networks.ports(run.server.id)}
    for one in interfaces_of(run):
        try:
            if one.port in held:
                also = networks.bind_also(held[one.port], dest) or {}
                ports.append(
                    held[one.port]
                    | {
                        f"binding:{name}": also[name]
                        for name in ("vif_type", "vif_details")
                        if name in also
                    }
                )
                tags.append(one.tag)
        except errors.NotFound:
            continue
    run.data.arriving = _described(networks, run, ports, tags, dest, are_new=False)


def _destination(run: PortRun) -> str:
    assert run.data.dest is not None, "a destination was claimed before"
    return run.data.dest


def activate_at_destination(engine: Engine, run: PortRun) -> None:
    """The guest runs at the destination: that is the place of its ports from now on."""
    dest = _destination(run)
    for one in interfaces_of(run):
        with run.cleanup_on_failure(PORT, one.port, run.data.source or ""):
            activate_at(service(engine), one.port, dest)
    with run.cleanup_on_failure(PORTS, run.server.id):
        held, owner = service(engine).ports(run.server.id), _owner(run, dest)
        for port in held:
            if port.get("device_owner") != owner:
                _change(service(engine), port, {"device_owner": owner})
        describe(service(engine), run, held)


def activate_at(networks: NetworkApi, port_id: str, host: str) -> None:
    """The port's binding to this host is the active one."""
    try:
        networks.activate(port_id, host)
    except errors.NotFound:
        port = _found(networks, port_id)
        # its second binding is gone, not itself
        if port is not None and port.get("binding:host_id") != host:
            networks.update(port_id, {"binding:host_id": host})


def unbind_destination(engine: Engine, run: PortRun) -> None:
    """The server's ports are not bound to the destination any more, where nothing has come."""
    _unbind_at(engine, run, run.data.dest)


def unbind_source(engine: Engine, run: PortRun) -> None:
    """The server's ports are not bound to the host any more that it has left."""
    _unbind_at(engine, run, run.data.source)


def _unbind_at(engine: Engine, run: PortRun, host: str | None) -> None:
    for one in interfaces_of(run):
        if host is not None:
            with run.cleanup_on_failure(BINDING, one.port, host):
                service(engine).unbind_at(one.port, host)


def _found(networks: NetworkApi, port_id: str) -> Port | None:
    try:
        return networks.port(port_id)
    except errors.NotFound:
        return None


def store_interfaces(tx: Connection, engine: Engine, runs: Sequence[PortRun]) -> None:
    """Write what became of the ports of a guest that runs, or that is off."""
    for run in runs:
        if run.data.plugged is not None:
            run.set(interfaces=run.data.plugged)


def _ports_before(run: RequestRun) -> set[str]:
    """The ports that the server had before this action."""
    requested = {request.get("port") for request in run.args.networks}
    return {one["port"] for one in run.server.interfaces or ()} - requested


def _binding(networks: NetworkApi, run: PortRun, host: str | None) -> JsonObject:
    name = {"dns_name": dns_name(run.server.hostname)} if networks.names_guests() else {}
    return {
        "device_id": run.server.id,
        "device_owner": _owner(run, host),
        "binding:host_id": host,
        **name,
    }


def dns_name(hostname: str) -> str:
    """A server's name as network services take one: labels of letters, digits and, within, hyphens.

    A hostname that is one is taken as it is, with all its labels. One whose last label is a number
    would be taken for an address: it becomes a single label.
    """
    labels = [re.sub("[^A-Za-z0-9-]", "-", label)[:63].strip("-") for label in hostname.split(".")]
    found = [label for label in labels if label]
    if len(found) > 1 and found[-1].isdecimal():
        found = ["-".join(found)[:63].strip("-")]
    return ".".join(found)


def _owner(run: PortRun, host: str | None) -> str:
    """What the ports of a server of this host's zone have for an owner; ``run.data`` has a
    destination's zone."""
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


# --- letting go ---
def delete_ports(engine: Engine, run: AnyRun) -> None:
    """Remove the ports that were made for the server, and unbind its user's own."""
    _clean(engine, run, lambda port: True, release_port)


def undo_ports(engine: Engine, run: RequestRun) -> None:
    """Remove or unbind what this action has made or bound; ports that the server had before
    stay."""
    kept = _ports_before(run)
    _clean(engine, run, lambda port: port["id"] not in kept, release_port)


def _clean(
    engine: Engine,
    run: AnyRun,
    concerns: Callable[[Port], bool],
    change: Callable[[NetworkApi, Port], None],
) -> None:
    """Do this to those ports of the server; what cannot be done is remembered, port by port."""
    ports: list[Port] = []
    with run.cleanup_on_failure(PORTS, run.server.id):
        ports = service(engine).ports(run.server.id)
    for port in filter(concerns, ports):
        with run.cleanup_on_failure(PORT, port["id"]):
            change(service(engine), port)


def release_port(networks: NetworkApi, port: Port) -> None:
    """Remove a port of ours, unbind one of the user's; gone is fine."""
    if is_made(port):
        networks.delete(port["id"])
        return
    _change(networks, port, UNBOUND | ({"dns_name": ""} if networks.names_guests() else {}))


def unbind(engine: Engine, run: AnyRun) -> None:
    """The server's ports are on no host any more; they stay the server's."""
    _clean(
        engine,
        run,
        lambda port: True,
        lambda networks, port: _change(networks, port, {"binding:host_id": ""}),
    )


def detach(engine: Engine, run: AnyRun, port_id: str) -> None:
    """A port of the server is not its any more."""
    _clean(engine, run, lambda port: port["id"] == port_id, release_port)


def _change(networks: NetworkApi, port: Port, values: JsonObject) -> None:
    """Change a port, unless somebody has removed it meanwhile."""
    try:
        networks.update(port["id"], values)
    except errors.NotFound:
        return


def reconcile_port(networks: NetworkApi, port: Port, server: ServerRow | None) -> None:
    """Bring a port to what is recorded of its server (None: it is gone): at its host, on none, or
    let go."""
    if server is None or port["id"] not in {one["port"] for one in server.interfaces or ()}:
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
    """Begin the action that takes a deleted port out of its server.

    Raises:
        Unavailable: The action was begun.
        Conflict: The server's state does not allow it.
    """
    with suppress(errors.NotFound):
        if service(engine).port(row.target).get("device_id") == row.server_id:
            return
    server = look()
    if server is None or row.target not in {one["port"] for one in server.interfaces or ()}:
        return
    system = RequestContext.of_ourselves(server.project_id)
    engine.store.write(
        lambda tx: actions.begin(
            tx, DETACH, row.server_id, context=system, args={"port": row.target}
        )
    )
    raise errors.Unavailable("The server's host is taking the port out of the guest.")


# --- being wired ---
def read_interfaces(engine: Engine, run: PortRun) -> None:
    """What the network service says of the server's interfaces now."""
    networks = service(engine)
    describe(networks, run, networks.ports(run.server.id))


def describe(networks: NetworkApi, run: PortRun, ports: Sequence[Port]) -> None:
    """Leave for the transaction what these ports of the server are.

    A port that was deleted meanwhile stays until an action takes it out of the guest. Nothing waits
    for it to be wired.
    """
    before = interfaces_of(run)
    found = {one.port: one for one in networks.described(ports, floating=True)}
    for one in before:
        if one.port not in found:
            run.add_cleanup(GONE_PORT, one.port, DELETED)
    run.data.plugged = [
        to_wire(found.get(one.port, replace(one, active=True))) | {"tag": one.tag} for one in before
    ]


def await_plugged(tx: Connection, engine: Engine, runs: Sequence[PortRun]) -> None:
    """Go on when every interface is active; else look again, until it has taken too long."""
    for run in runs:
        if run.ignored_refusal:
            continue
        run.set(interfaces=run.data.plugged)
        if run.data.plug_since is None:
            run.data.plug_since = run.locked_at
        late = run.locked_at - run.data.plug_since >= engine.vif_plugging_timeout * SECOND
        missing = [one["port"] for one in run.data.plugged or () if not one["active"]]
        if missing and not late:
            run.retry_in(min(FIRST_POLL_MICROS * 2 ** min(run.data.polls, 8), MAX_POLL_MICROS))
            run.data.polls += 1
        elif missing and engine.vif_plugging_is_fatal and not run.data.no_way_back:
            run.fail(
                f"The network service has not wired port {', '.join(missing)} within "
                f"{engine.vif_plugging_timeout} seconds; try again, or ask the operator whether it works."
            )


def store_plugged(tx: Connection, engine: Engine, runs: Sequence[PortRun]) -> None:
    """Write what became of the ports; a guest whose interfaces are not wired yet starts paused."""
    for run in runs:
        run.set(interfaces=run.data.plugged)
        run.data.paused = bool(
            engine.vif_plugging_timeout and not all(one["active"] for one in run.data.plugged or ())
        )


def starts_paused(run: AnyRun) -> bool:
    """Has the guest been started paused?"""
    return isinstance(run.data, PortData) and run.data.paused


def asks_for_networks(run: RequestRun) -> bool:
    """Does the action ask for interfaces?"""
    return bool(run.args.networks)


def has_ports(run: AnyRun) -> bool:
    """May the server have ports? NULL says that it never had."""
    return run.server.interfaces is not None


def plug_step(condition: Callable[[AnyRun], bool]) -> Step[ActionArgs, PortData]:
    """The step of a guest that was started paused."""
    return Step(
        "plug",
        "the guest waits, paused, until its first frame would arrive and be filtered",
        call=read_interfaces,
        apply=await_plugged,
        lane=Lane.NETWORK,
        condition=condition,
    )


PLUG = plug_step(starts_paused)
