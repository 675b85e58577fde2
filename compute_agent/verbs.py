# SPDX-License-Identifier: Apache-2.0
"""The functions of the verbs, and ``run``, which carries out one command.

``common.verbs`` has the table of what is known of each verb. ``run`` is called by the worker
threads of ``compute_agent.service`` and by the tests. It takes a journal, the verb's tools and a
command, and starts no thread. Every verb can be repeated, but for those whose row says ``once``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common import errors
from common.json_types import JsonObject
from common.models import (
    AttachedShare,
    AttachedVolume,
    Belongings,
    Command,
    DomainState,
    FailureReason,
    GuestSpec,
    ImageRef,
    Interface,
    Result,
)
from common.verbs import VERBS as TABLE
from common.verbs import VerbFacts
from common.wire import from_wire
from compute_agent.journal import Journal
from compute_agent.virt.driver import (
    MAX_DETAILS_CHARS,
    MAX_ERROR_CHARS,
    Cancelled,
    Driver,
    ImageReader,
    ImageWriter,
    MigrationAborted,
    Peer,
    VerbContext,
    VerbFailed,
    VolumeMerge,
)

log = logging.getLogger(__name__)
WAITS = "%s of server %s waits: %s"  #: in the log: no guest was started
FaultPoint = Callable[[str, str, str], None]
#: Opens a guest's files at another host: (address of its transfer service, server, secret).
PeerOpener = Callable[[str, str, str], Peer]


def no_peer(address: str, server: str, secret: str) -> Peer:
    """This host reaches no other."""
    raise errors.Unavailable(
        "This host does not reach others; see [migration] of its configuration."
    )


@dataclass(frozen=True)
class Tools:
    """What a verb works with."""

    driver: Driver
    read_image: ImageReader
    write_image: Callable[[str], ImageWriter]
    context: VerbContext
    peer: PeerOpener = no_peer


Handler = Callable[[Tools, Command], DomainState | JsonObject | None]


@dataclass(frozen=True)
class Verb:
    """How this agent runs a verb: its function, and its row of the table."""

    do: Handler
    facts: VerbFacts = VerbFacts()


def _spec(command: Command) -> GuestSpec:
    return from_wire(GuestSpec, command.args["guest"])


def _has(command: Command) -> Belongings | None:
    """What the guest may have when it starts; a conductor of an earlier release does not say."""
    has = command.args.get("has")
    return None if has is None else from_wire(Belongings, has)


def _ensure_guest(tools: Tools, command: Command) -> DomainState:
    return tools.driver.ensure_guest(_spec(command), tools.read_image, tools.context)


def _ensure_running(tools: Tools, command: Command) -> DomainState:
    return tools.driver.ensure_running(command.server, command.fence, tools.context, _has(command))


def _ensure_stopped(tools: Tools, command: Command) -> DomainState:
    return tools.driver.ensure_stopped(
        command.server, command.fence, float(command.args["timeout"]), tools.context
    )


def _reboot(tools: Tools, command: Command) -> DomainState:
    return tools.driver.reboot(
        command.server, command.fence, float(command.args["timeout"]), tools.context, _has(command)
    )


def _ensure_absent(tools: Tools, command: Command) -> None:
    tools.driver.ensure_absent(
        command.server, command.fence, bool(command.args.get("keep_files", False))
    )


def _ensure_paused(tools: Tools, command: Command) -> DomainState:
    return tools.driver.ensure_paused(command.server, command.fence, tools.context)


def _ensure_suspended(tools: Tools, command: Command) -> DomainState:
    return tools.driver.ensure_suspended(command.server, command.fence, tools.context)


def _rebuild(tools: Tools, command: Command) -> DomainState:
    return tools.driver.rebuild(
        _spec(command),
        tools.read_image,
        bool(command.args["runs"]),
        tools.context,
        bool(command.args.get("keep_ephemeral", False)),
    )


def _rescue(tools: Tools, command: Command) -> DomainState:
    image = from_wire(ImageRef, command.args["image"])
    return tools.driver.rescue(_spec(command), image, tools.read_image, tools.context)


def _unrescue(tools: Tools, command: Command) -> DomainState:
    return tools.driver.unrescue(_spec(command), tools.context)


def _attach_interface(tools: Tools, command: Command) -> DomainState:
    interface = from_wire(Interface, command.args["interface"])
    return tools.driver.attach_interface(command.server, command.fence, interface, tools.context)


def _detach_interface(tools: Tools, command: Command) -> DomainState:
    interface = from_wire(Interface, command.args["interface"])
    return tools.driver.detach_interface(command.server, command.fence, interface, tools.context)


def _attach_share(tools: Tools, command: Command) -> DomainState:
    share = from_wire(AttachedShare, command.args["share"])
    return tools.driver.attach_share(command.server, command.fence, share, tools.context)


def _detach_share(tools: Tools, command: Command) -> None:
    share = from_wire(AttachedShare, command.args["share"])
    tools.driver.detach_share(command.server, command.fence, share, tools.context)


def _volume(command: Command) -> AttachedVolume:
    return from_wire(AttachedVolume, command.args["volume"])


def _attach_volume(tools: Tools, command: Command) -> DomainState:
    return tools.driver.attach_volume(
        command.server, command.fence, _volume(command), tools.context
    )


def _detach_volume(tools: Tools, command: Command) -> DomainState | None:
    return tools.driver.detach_volume(
        command.server, command.fence, _volume(command), tools.context
    )


def _disconnect_volumes(tools: Tools, command: Command) -> None:
    tools.driver.disconnect_volumes(command.server, command.fence)


def _extend_volume(tools: Tools, command: Command) -> None:
    tools.driver.extend_volume(command.server, _volume(command), tools.context)


def _copy_volume(tools: Tools, command: Command) -> DomainState:
    return tools.driver.copy_volume(command.server, command.fence, _volume(command), tools.context)


def _switch_volume(tools: Tools, command: Command) -> DomainState | None:
    return tools.driver.switch_volume(
        command.server, command.fence, _volume(command), tools.context
    )


def _keep_volume(tools: Tools, command: Command) -> DomainState | None:
    return tools.driver.keep_volume(command.server, command.fence, _volume(command), tools.context)


def _snapshot_volume(tools: Tools, command: Command) -> DomainState:
    return tools.driver.snapshot_volume(
        command.server, command.fence, _volume(command), tools.context
    )


def _merge_volume(tools: Tools, command: Command) -> DomainState:
    merge = VolumeMerge(command.args["file"], command.args["into"])
    return tools.driver.merge_volume(
        command.server, command.fence, _volume(command), merge, tools.context
    )


def _snapshot(tools: Tools, command: Command) -> JsonObject:
    writer = tools.write_image(command.args["image_id"])
    return {"size": tools.driver.snapshot(command.server, command.fence, writer, tools.context)}


def _inject_nmi(tools: Tools, command: Command) -> None:
    tools.driver.inject_nmi(command.server)


def _set_password(tools: Tools, command: Command) -> None:
    tools.driver.set_password(command.server, command.args["user"], command.args["admin_pass"])


def _offer(tools: Tools, command: Command) -> JsonObject:
    return tools.driver.offer(command.server, command.fence, command.args["secret"], tools.context)


def _peer(tools: Tools, command: Command) -> Peer:
    return tools.peer(command.args["from"], command.server, command.args["secret"])


def _peer_unless_shared(tools: Tools, command: Command) -> Peer | None:
    return None if command.args["from"] is None else _peer(tools, command)


def _prepare(tools: Tools, command: Command) -> JsonObject:
    return tools.driver.prepare(
        _spec(command), _peer_unless_shared(tools, command), tools.read_image, tools.context
    )


def _receive(tools: Tools, command: Command) -> JsonObject:
    return tools.driver.receive(
        _spec(command), _peer_unless_shared(tools, command), tools.read_image, tools.context
    )


def _resize_here(tools: Tools, command: Command) -> DomainState:
    return tools.driver.resize_here(_spec(command), bool(command.args["runs"]), tools.context)


def _settle_resize(tools: Tools, command: Command) -> DomainState:
    return tools.driver.settle_resize(
        _spec(command), bool(command.args["back"]), int(command.args["resized"]), tools.context
    )


def _install(tools: Tools, command: Command) -> DomainState:
    return tools.driver.install(_spec(command), bool(command.args["runs"]), tools.context)


def _prepare_incoming(tools: Tools, command: Command) -> JsonObject:
    source = str(command.args["from"]).rpartition(":")[0].strip("[]")
    return tools.driver.prepare_incoming(
        _spec(command),
        _peer(tools, command),
        bool(command.args["shared"]),
        command.args["cpu"],
        tools.read_image,
        tools.context,
        source,
    )


def _live_migrate(tools: Tools, command: Command) -> JsonObject:
    return tools.driver.live_migrate(
        _spec(command), command.args["to"], bool(command.args["shared"]), tools.context
    )


def _finish_incoming(tools: Tools, command: Command) -> DomainState:
    return tools.driver.finish_incoming(_spec(command), tools.context)


HANDLERS: dict[str, Handler] = {
    "ensure_guest": _ensure_guest,
    "ensure_running": _ensure_running,
    "ensure_stopped": _ensure_stopped,
    "reboot": _reboot,
    "ensure_paused": _ensure_paused,
    "ensure_suspended": _ensure_suspended,
    "rebuild": _rebuild,
    "rescue": _rescue,
    "unrescue": _unrescue,
    "attach_interface": _attach_interface,
    "detach_interface": _detach_interface,
    "attach_share": _attach_share,
    "detach_share": _detach_share,
    "attach_volume": _attach_volume,
    "detach_volume": _detach_volume,
    "disconnect_volumes": _disconnect_volumes,
    "extend_volume": _extend_volume,
    "copy_volume": _copy_volume,
    "switch_volume": _switch_volume,
    "keep_volume": _keep_volume,
    "snapshot_volume": _snapshot_volume,
    "merge_volume": _merge_volume,
    "snapshot": _snapshot,
    "inject_nmi": _inject_nmi,
    "set_password": _set_password,
    "ensure_absent": _ensure_absent,
    "offer": _offer,
    "prepare": _prepare,
    "receive": _receive,
    "install": _install,
    "resize_here": _resize_here,
    "settle_resize": _settle_resize,
    "prepare_arrival": _prepare_incoming,
    "live_migrate": _live_migrate,
    "arrived": _finish_incoming,
}
VERBS: dict[str, Verb] = {name: Verb(HANDLERS[name], facts) for name, facts in TABLE.items()}


def nothing(verb: str, step: str, where: str) -> None:
    """The fault point of ordinary operation."""


def run(
    journal: Journal,
    tools: Tools,
    command: Command,
    fault_point: FaultPoint = nothing,
    table: Mapping[str, Verb] = VERBS,
) -> Result | None:
    """Carry a command out and journal its result. None: it was cancelled, or cannot be done now.
    Then nothing is reported, and the conductor sends the command again if it is still wanted. A
    verb of a later release is refused and not journalled, since an upgraded agent may know it."""
    verb = table.get(command.verb)
    if verb is None:
        log.warning(
            "%s of server %s is refused: this agent does not know it", command.verb, command.server
        )
        return _ended(
            command,
            "refused",
            reason=FailureReason.UNKNOWN_VERB,
            error=f"its agent does not know {command.verb} and must be upgraded.",
        )
    if verb.facts.once and journal.has_begun(command.key):
        return _journalled(
            journal, _ended(command, "unknown", error="It was begun before a crash.")
        )
    if verb.facts.once or verb.facts.migrates:
        journal.begin(command.key)
    fault_point(command.verb, command.step, "before")
    try:
        result = _ended(command, "done", _data_of(verb.do(tools, command)))
    except Cancelled:
        log.info("%s of server %s was cancelled by a later action", command.verb, command.server)
        return None
    except errors.Unavailable as problem:
        log.warning(WAITS, command.verb, command.server, problem)
        return None
    except Exception as problem:
        if verb.facts.retry_until_done or (
            verb.facts.authoritative and not isinstance(problem, VerbFailed)
        ):
            log.exception(
                "%s of server %s did not succeed; it is tried again", command.verb, command.server
            )
            return None
        result = _failed(command, problem)
    fault_point(command.verb, command.step, "after")
    return _journalled(journal, result)


def _failed(command: Command, problem: Exception) -> Result:
    """What is told of a failure: the verb's own words, or for one that nobody foresaw only that
    there was one."""
    if isinstance(problem, VerbFailed):
        log.warning(
            "%s of server %s failed: %s %s", command.verb, command.server, problem, problem.details
        )
        return _ended(
            command,
            "failed",
            error=str(problem),
            details=problem.details,
            retryable=problem.retryable,
            reason=problem.reason,
        )
    if isinstance(problem, errors.Problem):
        log.warning("%s of server %s failed: %s", command.verb, command.server, problem)
        return _ended(command, "failed", error=problem.text, details=str(problem.__cause__ or ""))
    log.error("%s of server %s failed unexpectedly", command.verb, command.server, exc_info=problem)
    return _ended(
        command,
        "failed",
        error="The host failed unexpectedly; its log says more.",
        details=f"{type(problem).__name__}: {problem}",
        retryable=True,
    )


def _data_of(outcome: DomainState | JsonObject | None) -> JsonObject:
    """What a verb returned, as the result's data."""
    if isinstance(outcome, DomainState):
        return {"power_state": outcome.power_state}
    return outcome or {}


def aborted(journal: Journal, command: Command) -> Result:
    """The result of a live migration that was aborted before it began."""
    return _journalled(journal, _failed(command, MigrationAborted()))


def _ended(
    command: Command,
    status: str,
    data: JsonObject | None = None,
    error: str = "",
    details: str = "",
    retryable: bool = False,
    reason: FailureReason = FailureReason.UNSPECIFIED,
) -> Result:
    return Result(
        command.key,
        command.server,
        command.fence,
        status,
        data or {},
        error[:MAX_ERROR_CHARS],
        details[:MAX_DETAILS_CHARS],
        retryable,
        reason,
    )


def _journalled(journal: Journal, result: Result) -> Result:
    journal.end(result)
    return result
