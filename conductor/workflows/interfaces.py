# SPDX-License-Identifier: Apache-2.0
"""Interfaces of a server that exists: attach, detach; and which security groups guard its ports.

A port is made and bound before the guest sees it and removed after the guest has let go of it, so
that no frame ever passes without rules. The API waits for the step that its caller wants to know
of.
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
def _open(tx: Connection, engine: Engine, runs: Sequence[AnyRun]) -> None:
    for run in runs:
        run.set(interfaces=run.server.interfaces or [])


def _plugged(tx: Connection, engine: Engine, runs: Sequence[AttachRun]) -> None:
    for run in runs:
        assert run.data.plugged, "one port was made"
        run.data.interface = run.data.plugged[0]


def _attach(engine: Engine, run: AttachRun) -> AttachInterface:
    return AttachInterface(interface=from_wire(Interface, run.data.interface or {}))


def _attached(tx: Connection, run: AttachRun, result: Result) -> None:
    run.set(interfaces=[*(run.server.interfaces or ()), run.data.interface])


ATTACH_INTERFACE = Workflow(
    "attach_interface",
    args=NetworkArgs,
    data=InterfaceData,
    steps=(
        Step("open", "from here on the end of the server looks for ports", apply=_open),
        Step(
            "networks",
            "before the guest, so that its rules are there first",
            call=networks.create_ports,
            apply=_plugged,
            undo_call=networks.undo_ports,
            lane=Lane.NETWORK,
        ),
        Step("attach", "the API waits for this", command=_attach, on_result=_attached),
    ),
)


# --- detach ---
def _interface(run: DetachRun) -> Interface:
    rows = (row for row in run.server.interfaces or () if row["port"] == run.args.port)
    return from_wire(Interface, next(rows, {"port": run.args.port}))


def _detach(engine: Engine, run: DetachRun) -> DetachInterface:
    return DetachInterface(interface=_interface(run))


def _release_port(engine: Engine, run: DetachRun) -> None:
    networks.detach(engine, run, run.args.port)


def _detached(tx: Connection, engine: Engine, runs: Sequence[DetachRun]) -> None:
    for run in runs:
        run.set(
            interfaces=[one for one in run.server.interfaces or () if one["port"] != run.args.port]
        )


DETACH_INTERFACE = Workflow(
    "detach_interface",
    args=DetachInterfaceArgs,
    data=ActionData,
    steps=(
        Step(
            "detach", "first: while the guest has it, its rules stay", command=_detach, pivot=True
        ),
        Step(
            "unplug",
            "after the guest has let go of it",
            call=_release_port,
            apply=_detached,
            lane=Lane.NETWORK,
        ),
    ),
)


# --- security groups ---
def _change(engine: Engine, run: SecurityGroupRun) -> None:
    """Each port's groups with the one added or removed."""
    service, group, adds = (
        networks.service(engine),
        run.args.group,
        run.action.workflow == ADD_SECURITY_GROUP.name,
    )
    ports = service.ports(run.server.id)
    if not ports:
        raise errors.BadRequest(
            f"Server {run.server.id} has no ports that a security group could guard."
        )
    if (
        not adds
        and not run.is_repeated  # by an earlier try, of which nothing was written
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
            else [one for one in before if one != group]
        )
        if after != before:
            ports[number] = service.update(port["id"], {"security_groups": after})
    networks.describe(service, run, ports)


_CHANGE = Step(
    "change",
    "the API waits for this",
    call=_change,
    apply=networks.store_interfaces,
    lane=Lane.NETWORK,
)
ADD_SECURITY_GROUP = Workflow(
    "add_security_group", args=SecurityGroupArgs, data=PortData, steps=(_CHANGE,)
)
REMOVE_SECURITY_GROUP = Workflow(
    "remove_security_group", args=SecurityGroupArgs, data=PortData, steps=(_CHANGE,)
)
