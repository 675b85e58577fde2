# SPDX-License-Identifier: Apache-2.0
"""Interfaces of a server that exists: attach, detach; and which security groups guard its ports.

A port is made and bound before the guest sees it and removed after the guest has let go of it, so that no frame ever
passes without rules. The API waits for the step that its caller wants to know of.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import errors
from common.models import Result
from common.store.engine import Connection
from conductor import networks
from conductor.saga import Engine, Run, Step, Workflow


def _open(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.set(interfaces=run.server.interfaces or [])


def _plugged(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.data["interface"] = run.data["plugged"][0]


def _attach(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "attach_interface", {"interface": run.data["interface"]}


def _attached(tx: Connection, run: Run, result: Result) -> None:
    run.set(interfaces=[*(run.server.interfaces or ()), run.data["interface"]])


ATTACH_INTERFACE = Workflow("attach_interface", steps=(
    Step("open", "from here on the end of the server looks for ports", apply=_open),
    Step("networks", "before the guest, so that its rules are there first", outside=networks.plug, apply=_plugged,
         undo_outside=networks.withdraw, neighbour=networks.NETWORK),
    Step("attach", "the API waits for this", command=_attach, done=_attached),
))


def _found(run: Run) -> dict[str, Any]:
    wanted: str = run.action.args["port"]
    return next((one for one in run.server.interfaces or () if one["port"] == wanted), {"port": wanted})


def _detach(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "detach_interface", {"interface": _found(run)}


def _let_go(engine: Engine, run: Run) -> None:
    networks.detach(engine, run, run.action.args["port"])


def _detached(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.set(interfaces=[one for one in run.server.interfaces or () if one["port"] != run.action.args["port"]])


DETACH_INTERFACE = Workflow("detach_interface", steps=(
    Step("detach", "first: while the guest has it, its rules stay", command=_detach, pivot=True),
    Step("unplug", "after the guest has let go of it", outside=_let_go, apply=_detached, neighbour=networks.NETWORK),
))


def _change(engine: Engine, run: Run) -> None:
    """Each port's groups with the one added or removed; what the ports are then is left for the transaction."""
    service, group, adds = networks.service(engine), run.action.args["group"], _adds(run)
    ports = service.ports(run.server.id)
    if not ports:
        raise errors.BadRequest(f"Server {run.server.id} has no ports that a security group could guard.")
    if not adds and not any(group in port["security_groups"] for port in ports):
        raise errors.NotFound(f"Security group {run.action.args['name']} is not associated with server "
                              f"{run.server.id}.")
    for number, port in enumerate(ports):
        before = port["security_groups"]
        after = [*before, group] if adds and group not in before else before if adds else \
            [one for one in before if one != group]
        if after != before:
            ports[number] = service.update(port["id"], {"security_groups": after})
    networks.describe(service, run, ports)


def _adds(run: Run) -> bool:
    return bool(run.action.workflow == ADD_SECURITY_GROUP.name)


_CHANGE = Step("change", "the API waits for this", outside=_change, apply=networks.written, neighbour=networks.NETWORK)
ADD_SECURITY_GROUP = Workflow("add_security_group", steps=(_CHANGE,))
REMOVE_SECURITY_GROUP = Workflow("remove_security_group", steps=(_CHANGE,))
