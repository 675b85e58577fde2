# SPDX-License-Identifier: Apache-2.0
"""The verbs: what a host can be told to do with a guest, each repeatable, and the one function that runs them.

``run`` is a plain function of (journal, driver, command): called by the worker threads of
``compute_agent.service`` and by the tests. A verb is *level* (its state can be checked, so doing it again is
harmless) or *once* (it is journalled before its effect and never repeated).
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common import errors
from common.models import Command, DomainState, GuestSpec, ImageRef, Interface, Result
from common.wire import from_wire
from compute_agent.journal import Journal
from compute_agent.virt.driver import ABORTED, Cancelled, Driver, ImageReader, ImageWriter, Peer, Run, VerbFailed

log = logging.getLogger(__name__)
FaultPoint = Callable[[str, str, str], None]
#: Opens a guest's files at another host: (address of its transfer service, server, secret).
PeerOpener = Callable[[str, str, str], Peer]


def no_peer(address: str, server: str, secret: str) -> Peer:
    """This host reaches no other."""
    raise errors.Unavailable("This host does not reach others; see [migration] of its configuration.")


@dataclass(frozen=True)
class Tools:
    """What a verb works with."""

    driver: Driver
    read_image: ImageReader
    write_image: Callable[[str], ImageWriter]
    run: Run
    peer: PeerOpener = no_peer


@dataclass(frozen=True)
class Verb:
    """One row of the table. ``starts``: it may start a guest, so it needs a fresh lease. ``once``: see above.
    ``insists``: it is wanted until it succeeds, so that no failure is definite and none is reported. ``decides``: what
    it says decides which of two hosts runs a guest, so that only its own words are a failure; what nobody foresaw is
    tried again. ``builds``: it makes disks of an image, so only so many run at a time. ``copies``: it moves whole
    disks, which takes minutes, so that it never gets the last worker; every build does. ``moves``: it lets a running
    guest go to another host, so only so many run at a time, and it is journalled that it was begun: until then it can
    be called off at once. ``waits``: most of its time it waits for what the guest does, so it occupies no worker."""

    do: Callable[[Tools, Command], DomainState | dict[str, Any] | None]
    starts: bool = False
    once: bool = False
    insists: bool = False
    decides: bool = False
    builds: bool = False
    copies: bool = False
    moves: bool = False
    lapses: bool = False
    waits: bool = False


def _spec(command: Command) -> GuestSpec:
    return from_wire(GuestSpec, command.args["guest"])


def _ensure_guest(tools: Tools, command: Command) -> DomainState:
    return tools.driver.ensure_guest(_spec(command), tools.read_image, tools.run)


def _ensure_running(tools: Tools, command: Command) -> DomainState:
    return tools.driver.ensure_running(command.server, command.fence, tools.run)


def _ensure_stopped(tools: Tools, command: Command) -> DomainState:
    return tools.driver.ensure_stopped(command.server, command.fence, float(command.args["timeout"]), tools.run)


def _reboot(tools: Tools, command: Command) -> DomainState:
    return tools.driver.reboot(command.server, command.fence, float(command.args["timeout"]), tools.run)


def _ensure_absent(tools: Tools, command: Command) -> None:
    tools.driver.ensure_absent(command.server, command.fence, bool(command.args.get("keep_files", False)))


def _ensure_paused(tools: Tools, command: Command) -> DomainState:
    return tools.driver.ensure_paused(command.server, command.fence, tools.run)


def _ensure_suspended(tools: Tools, command: Command) -> DomainState:
    return tools.driver.ensure_suspended(command.server, command.fence, tools.run)


def _rebuild(tools: Tools, command: Command) -> DomainState:
    return tools.driver.rebuild(_spec(command), tools.read_image, bool(command.args["runs"]), tools.run,
                                bool(command.args.get("keep_ephemeral", False)))


def _rescue(tools: Tools, command: Command) -> DomainState:
    image = from_wire(ImageRef, command.args["image"])
    return tools.driver.rescue(_spec(command), image, tools.read_image, tools.run)


def _unrescue(tools: Tools, command: Command) -> DomainState:
    return tools.driver.unrescue(_spec(command), tools.run)


def _attach_interface(tools: Tools, command: Command) -> DomainState:
    interface = from_wire(Interface, command.args["interface"])
    return tools.driver.attach_interface(command.server, command.fence, interface, tools.run)


def _detach_interface(tools: Tools, command: Command) -> DomainState:
    interface = from_wire(Interface, command.args["interface"])
    return tools.driver.detach_interface(command.server, command.fence, interface, tools.run)


def _snapshot(tools: Tools, command: Command) -> dict[str, Any]:
    writer = tools.write_image(command.args["image_id"])
    return {"size": tools.driver.snapshot(command.server, command.fence, writer, tools.run)}


def _inject_nmi(tools: Tools, command: Command) -> None:
    tools.driver.inject_nmi(command.server)


def _set_password(tools: Tools, command: Command) -> None:
    tools.driver.set_password(command.server, command.args["user"], command.args["admin_pass"])


def _offer(tools: Tools, command: Command) -> dict[str, Any]:
    return tools.driver.offer(command.server, command.fence, command.args["secret"], tools.run)


def _peer(tools: Tools, command: Command) -> Peer:
    return tools.peer(command.args["from"], command.server, command.args["secret"])


def _peer_unless_shared(tools: Tools, command: Command) -> Peer | None:
    return None if command.args["from"] is None else _peer(tools, command)


def _prepare(tools: Tools, command: Command) -> dict[str, Any]:
    return tools.driver.prepare(_spec(command), _peer_unless_shared(tools, command), tools.read_image, tools.run)


def _receive(tools: Tools, command: Command) -> dict[str, Any]:
    return tools.driver.receive(_spec(command), _peer_unless_shared(tools, command), tools.read_image, tools.run)


def _resize_here(tools: Tools, command: Command) -> DomainState:
    return tools.driver.resize_here(_spec(command), bool(command.args["runs"]), tools.run)


def _settle_resize(tools: Tools, command: Command) -> DomainState:
    return tools.driver.settle_resize(_spec(command), bool(command.args["back"]), int(command.args["resized"]),
                                      tools.run)


def _install(tools: Tools, command: Command) -> DomainState:
    return tools.driver.install(_spec(command), bool(command.args["runs"]), tools.run)


def _prepare_arrival(tools: Tools, command: Command) -> dict[str, Any]:
    return tools.driver.prepare_arrival(_spec(command), _peer(tools, command), bool(command.args["shared"]),
                                        command.args["cpu"], tools.read_image, tools.run)


def _live_migrate(tools: Tools, command: Command) -> dict[str, Any]:
    return tools.driver.live_migrate(_spec(command), command.args["to"], bool(command.args["shared"]), tools.run)


def _arrived(tools: Tools, command: Command) -> DomainState:
    return tools.driver.arrived(_spec(command), tools.run)


#: ``arrived`` starts nothing: the guest runs already when it is looked for. ``live_migrate`` does, at its destination.
VERBS: dict[str, Verb] = {
    "ensure_guest": Verb(_ensure_guest, starts=True, builds=True, copies=True),
    "ensure_running": Verb(_ensure_running, starts=True),
    "ensure_stopped": Verb(_ensure_stopped, waits=True),
    "reboot": Verb(_reboot, starts=True, waits=True),
    "ensure_paused": Verb(_ensure_paused),
    "ensure_suspended": Verb(_ensure_suspended),
    "rebuild": Verb(_rebuild, starts=True, builds=True, copies=True),
    "rescue": Verb(_rescue, starts=True, builds=True, copies=True),
    "unrescue": Verb(_unrescue, starts=True),
    "attach_interface": Verb(_attach_interface),
    "detach_interface": Verb(_detach_interface),
    "snapshot": Verb(_snapshot, copies=True),
    "inject_nmi": Verb(_inject_nmi, once=True),
    "set_password": Verb(_set_password, once=True),
    "ensure_absent": Verb(_ensure_absent, insists=True),
    "offer": Verb(_offer),
    "prepare": Verb(_prepare, copies=True, lapses=True),
    "receive": Verb(_receive, copies=True, lapses=True),
    "install": Verb(_install, starts=True),
    "resize_here": Verb(_resize_here, starts=True, copies=True),
    "settle_resize": Verb(_settle_resize, lapses=True),
    "prepare_arrival": Verb(_prepare_arrival, copies=True, lapses=True),
    "live_migrate": Verb(_live_migrate, starts=True, copies=True, moves=True, decides=True),
    "arrived": Verb(_arrived, decides=True),
}


def nothing(verb: str, step: str, where: str) -> None:
    """The fault point of ordinary operation."""


def run(journal: Journal, tools: Tools, command: Command, fault_point: FaultPoint = nothing,
        table: Mapping[str, Verb] = VERBS) -> Result | None:
    """Carry a command out and journal its result; None when it was cancelled or cannot be done just now: then
    nothing is reported, and the conductor sends it again if it still wants it. So it does with a verb of a later
    release, which is refused and not journalled: the agent that comes next may know it."""
    verb = table.get(command.verb)
    if verb is None:
        log.warning("%s of server %s is refused: this agent does not know it", command.verb, command.server)
        return _ended(command, "refused", error=f"its agent does not know {command.verb} and must be upgraded.")
    if verb.once and journal.has_begun(command.key):
        return _journalled(journal, _ended(command, "unknown", error="It was begun before a crash."))
    if verb.once or verb.moves:
        journal.begin(command.key)
    fault_point(command.verb, command.step, "before")
    try:
        result = _ended(command, "done", _told(verb.do(tools, command)))
    except Cancelled:
        log.info("%s of server %s was cancelled by a later action", command.verb, command.server)
        return None
    except errors.Unavailable as problem:
        log.warning("%s of server %s waits: %s", command.verb, command.server, problem)
        return None
    except Exception as problem:
        if verb.insists or verb.decides and not isinstance(problem, VerbFailed):
            log.exception("%s of server %s did not succeed; it is tried again", command.verb, command.server)
            return None
        result = _failed(command, problem)
    fault_point(command.verb, command.step, "after")
    return _journalled(journal, result)


def _failed(command: Command, problem: Exception) -> Result:
    """What is told of a failure: the verb's own words, or for one that nobody foresaw only that there was one."""
    if isinstance(problem, VerbFailed):
        log.warning("%s of server %s failed: %s %s", command.verb, command.server, problem, problem.details)
        return _ended(command, "failed", error=str(problem), details=problem.details, retryable=problem.retryable)
    if isinstance(problem, errors.Problem):
        log.warning("%s of server %s failed: %s", command.verb, command.server, problem)
        return _ended(command, "failed", error=problem.text, details=str(problem.__cause__ or ""))
    log.error("%s of server %s failed unexpectedly", command.verb, command.server, exc_info=problem)
    return _ended(command, "failed", error="The host failed unexpectedly; its log says more.",
                  details=f"{type(problem).__name__}: {problem}", retryable=True)


def _told(outcome: DomainState | dict[str, Any] | None) -> dict[str, Any]:
    """What a verb returned, as the result's data."""
    if isinstance(outcome, DomainState):
        return {"power_state": outcome.power_state}
    return outcome or {}


def called_off(journal: Journal, command: Command) -> Result:
    """A migration that somebody aborted before it was begun."""
    return _journalled(journal, _ended(command, "failed", error=ABORTED))


def _ended(command: Command, status: str, data: dict[str, Any] | None = None, error: str = "", details: str = "",
           retryable: bool = False) -> Result:
    return Result(command.key, command.server, command.fence, status, data or {}, error, details, retryable)


def _journalled(journal: Journal, result: Result) -> Result:
    journal.end(result)
    return result
