# SPDX-License-Identifier: Apache-2.0
"""Attach and detach interfaces, and add and remove security groups of a server's ports.

A port is created and bound before the guest gets the interface, and deleted after the guest has
released the interface. So the rules of the port apply to every frame. The API waits for the step
that decides the response.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.domain import errors
from common.domain.models import Interface, Result
from common.domain.verbs import AttachInterface, DetachInterface
from common.domain.wire import from_wire
from common.store.engine import Connection
from conductor.engine.action_args import DetachInterfaceArgs, NetworkArgs, SecurityGroupArgs
from conductor.engine.action_data import ActionData
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import AnyRun, Run
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.steps import networks
from conductor.steps.networks import InterfaceData, PortData

AttachRun = Run[NetworkArgs, InterfaceData]
DetachRun = Run[DetachInterfaceArgs, ActionData]
SecurityGroupRun = Run[SecurityGroupArgs, PortData]


# --- attach ---
def _open_interfaces(tx: Connection, engine: Engine, runs: Sequence[AnyRun]) -> None:
    for run in runs:
        run.set(interfaces=run.server.interfaces or [])


def _store_port(tx: Connection, engine: Engine, runs: Sequence[AttachRun]) -> None:
    for run in runs:
        assert run.data.plugged, "the call has created a port"
        run.data.interface = run.data.plugged[0]


def _attach_command(engine: Engine, run: AttachRun) -> AttachInterface:
    return AttachInterface(interface=from_wire(Interface, run.data.interface or {}))


def _record_attached(tx: Connection, run: AttachRun, result: Result) -> None:
    run.set(interfaces=[*(run.server.interfaces or ()), run.data.interface])


ATTACH_INTERFACE = Workflow(
    "attach_interface",
    args=NetworkArgs,
    data=InterfaceData,
    steps=(
        Step(
            "open",
            "From here on a delete of the server also deletes ports.",
            apply=_open_interfaces,
        ),
        Step(
            "networks",
            "Before the guest, so that the port's rules exist first.",
            call=networks.create_ports,
            apply=_store_port,
            undo_call=networks.undo_ports,
            lane=Lane.NETWORK,
        ),
        Step(
            "attach",
            "The API waits for this step.",
            command=_attach_command,
            on_result=_record_attached,
        ),
    ),
)


# --- detach ---
def _read_interface(run: DetachRun) -> Interface:
    rows = (row for row in run.server.interfaces or () if row["port"] == run.args.port)
    return from_wire(Interface, next(rows, {"port": run.args.port}))


def _detach_command(engine: Engine, run: DetachRun) -> DetachInterface:
    return DetachInterface(interface=_read_interface(run))


def _release_port(engine: Engine, run: DetachRun) -> None:
    networks.detach(engine, run, run.args.port)


def _remove_interface(tx: Connection, engine: Engine, runs: Sequence[DetachRun]) -> None:
    for run in runs:
        run.set(
            interfaces=[row for row in run.server.interfaces or () if row["port"] != run.args.port]
        )


DETACH_INTERFACE = Workflow(
    "detach_interface",
    args=DetachInterfaceArgs,
    data=ActionData,
    steps=(
        Step(
            "detach",
            "Before the port, because its rules must hold while the guest has the interface.",
            command=_detach_command,
            pivot=True,
        ),
        Step(
            "unplug",
            "After the guest has released the interface.",
            call=_release_port,
            apply=_remove_interface,
            lane=Lane.NETWORK,
        ),
    ),
)


# --- security groups ---
def _change_groups(engine: Engine, run: SecurityGroupRun) -> None:
    """Add the security group to every port of the server, or remove the group from each port.

    A port that needs no change is left alone.

    Raises:
        BadRequest: The server has no ports.
        NotFound: No port has the group that is to be removed. Not raised in a repeated try.
    """
    service, group, adds = (
        networks.service(engine),
        run.args.group,
        run.action.workflow == ADD_SECURITY_GROUP.name,
    )
    ports = service.ports(run.server.id)
    if not ports:
        raise errors.BadRequest(
            f"Server {run.server.id} has no ports to which a security group could apply."
        )
    if (
        not adds
        # An earlier attempt may have removed the group without a record.
        and not run.is_repeated
        and not any(group in port["security_groups"] for port in ports)
    ):
        raise errors.NotFound(
            f"Security group {run.args.name} is not associated with server {run.server.id}."
        )
    for number, port in enumerate(ports):
        before = port["security_groups"]
        after = (
            [*before, group]
            if adds and group not in before
            else before
            if adds
            else [name for name in before if name != group]
        )
        if after != before:
            ports[number] = service.update(port["id"], {"security_groups": after})
    networks.describe(service, run, ports)


_CHANGE = Step(
    "change",
    "The API waits for this step.",
    call=_change_groups,
    apply=networks.store_interfaces,
    lane=Lane.NETWORK,
)
ADD_SECURITY_GROUP = Workflow(
    "add_security_group", args=SecurityGroupArgs, data=PortData, steps=(_CHANGE,)
)
REMOVE_SECURITY_GROUP = Workflow(
    "remove_security_group", args=SecurityGroupArgs, data=PortData, steps=(_CHANGE,)
)
