# SPDX-License-Identifier: Apache-2.0
"""The agent's part of the verbs: ``run`` carries out one command and journals the result.

``carry_out`` calls the driver for each class of ``common.domain.verbs``. The worker threads of
``compute_agent.service`` and the tests call ``run``, which starts no thread. Every verb can be
repeated, except those with ``runs_once``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.models import Command, DomainState, FailureReason, Result
from common.domain.verbs import (
    Arrived,
    AttachInterface,
    AttachShare,
    AttachVolume,
    CopiedFiles,
    CopyVolume,
    Destination,
    DetachInterface,
    DetachShare,
    DetachVolume,
    DisconnectVolumes,
    EnsureAbsent,
    EnsureGuest,
    EnsurePaused,
    EnsureRunning,
    EnsureStopped,
    EnsureSuspended,
    ExtendVolume,
    GuestState,
    InjectNmi,
    Install,
    KeepVolume,
    LiveMigrate,
    MergeVolume,
    Migrated,
    Offer,
    Prepare,
    PrepareArrival,
    Reboot,
    Rebuild,
    Receive,
    Rescue,
    ResizeHere,
    SetPassword,
    SettleResize,
    Snapshot,
    SnapshotVolume,
    StoredImage,
    SwitchVolume,
    Unrescue,
    Verb,
)
from common.domain.wire import from_wire, to_wire
from common.service.log import get_logger
from compute_agent.journal import Journal
from compute_agent.verb_context import (
    MAX_DETAILS_CHARS,
    MAX_ERROR_CHARS,
    Cancelled,
    ImageReader,
    ImageWriter,
    MigrationAborted,
    Peer,
    VerbContext,
    VerbFailed,
)
from compute_agent.virt.driver import Driver, VolumeMerge

log = get_logger(__name__)
FaultPoint = Callable[[str, str, str], None]
#: Opens a guest's files at another host: (address of the transfer service, server, secret).
PeerOpener = Callable[[str, str, str], Peer]


def no_peer(address: str, server: str, secret: str) -> Peer:
    """Raise Unavailable. This is the ``PeerOpener`` of an agent without access to other hosts."""
    raise errors.Unavailable(
        "This host cannot read files of other hosts; see [migration] in its configuration."
    )


@dataclass(frozen=True)
class Tools:
    """The resources that a verb uses.

    Attributes:
        driver: The driver of the hypervisor.
        read_image: Opens an image of the image service for reading.
        write_image: Returns the writer of an image, by the image's id.
        context: The calls that the verb may make to the agent.
        peer: Opens a guest's files at another host.
    """

    driver: Driver
    read_image: ImageReader
    write_image: Callable[[str], ImageWriter]
    context: VerbContext
    peer: PeerOpener = no_peer


Outcome = DomainState | StoredImage | CopiedFiles | Destination | Migrated | None
CarryOut = Callable[[Tools, Command, Verb], Outcome]


def carry_out(tools: Tools, command: Command, verb: Verb) -> Outcome:
    """Call the method of the driver for this verb.

    Returns:
        The data for the result, or None if the verb has none.

    Raises:
        VerbFailed: The verb failed definitely.
        Problem: Another service refuses a request, for example the image gateway.
        Unavailable: The hypervisor, the image service or another host does not answer, or this host
            may not start guests now.
        Cancelled: The verb was cancelled.
        Exception: The driver failed unexpectedly.
    """
    driver, read_image, context = tools.driver, tools.read_image, tools.context
    server, fence = command.server, command.fence
    match verb:
        # --- power ---
        case EnsureGuest():
            return driver.ensure_guest(verb.guest, read_image, context)
        case EnsureRunning():
            return driver.ensure_running(server, fence, context, verb.has)
        case EnsureStopped():
            return driver.ensure_stopped(server, fence, verb.timeout, context)
        case Reboot():
            return driver.reboot(server, fence, verb.timeout, context, verb.has)
        case EnsurePaused():
            return driver.ensure_paused(server, fence, context)
        case EnsureSuspended():
            return driver.ensure_suspended(server, fence, context)
        case EnsureAbsent():
            driver.ensure_absent(server, fence, verb.keep_files)
        case InjectNmi():
            driver.inject_nmi(server)
        case SetPassword():
            driver.set_password(server, verb.user, verb.admin_pass)
        # --- images ---
        case Rebuild():
            return driver.rebuild(verb.guest, read_image, verb.runs, context, verb.keep_ephemeral)
        case Rescue():
            return driver.rescue(verb.guest, verb.image, read_image, context)
        case Unrescue():
            return driver.unrescue(verb.guest, context)
        case Snapshot():
            writer = tools.write_image(verb.image_id)
            return StoredImage(size=driver.snapshot(server, fence, writer, context))
        # --- interfaces, shares and volumes ---
        case AttachInterface():
            return driver.attach_interface(server, fence, verb.interface, context)
        case DetachInterface():
            return driver.detach_interface(server, fence, verb.interface, context)
        case AttachShare():
            return driver.attach_share(server, fence, verb.share, context)
        case DetachShare():
            driver.detach_share(server, fence, verb.share, context)
        case AttachVolume():
            return driver.attach_volume(server, fence, verb.volume, context)
        case DetachVolume():
            return driver.detach_volume(server, fence, verb.volume, context)
        case DisconnectVolumes():
            driver.disconnect_volumes(server, fence)
        case ExtendVolume():
            driver.extend_volume(server, verb.volume, context)
        case CopyVolume():
            return driver.copy_volume(server, fence, verb.volume, context)
        case SwitchVolume():
            return driver.switch_volume(server, fence, verb.volume, context)
        case KeepVolume():
            return driver.keep_volume(server, fence, verb.volume, context)
        case SnapshotVolume():
            return driver.snapshot_volume(server, fence, verb.volume, context)
        case MergeVolume():
            merge = VolumeMerge(verb.file, verb.into)
            return driver.merge_volume(server, fence, verb.volume, merge, context)
        # --- moves ---
        case Offer():
            return from_wire(CopiedFiles, driver.offer(server, fence, verb.secret, context))
        case Prepare():
            driver.prepare(verb.guest, _peer(tools, server, verb), read_image, context)
        case Receive():
            peer = _peer(tools, server, verb)
            return from_wire(CopiedFiles, driver.receive(verb.guest, peer, read_image, context))
        case Install():
            return driver.install(verb.guest, verb.runs, context)
        case ResizeHere():
            return driver.resize_here(verb.guest, verb.runs, context)
        case SettleResize():
            return driver.settle_resize(verb.guest, verb.back, verb.resized, context)
        case PrepareArrival():
            details = driver.prepare_incoming(
                verb.guest,
                tools.peer(verb.source, server, verb.secret),
                verb.shared,
                verb.cpu,
                read_image,
                context,
                verb.source.rpartition(":")[0].strip("[]"),
            )
            return Destination(details=details)
        case LiveMigrate():
            figures = driver.live_migrate(verb.guest, verb.to.details, verb.shared, context)
            return from_wire(Migrated, figures)
        case Arrived():
            return driver.finish_incoming(verb.guest, context)
        case _:
            raise TypeError(f"no method of the driver carries out the verb {verb.name}")
    return None


def _peer(tools: Tools, server: str, verb: Prepare | Receive) -> Peer | None:
    """Return the guest's files at the source, or None if both hosts share the storage.

    A verb for shared storage has no ``source``.
    """
    return None if verb.source is None else tools.peer(verb.source, server, verb.secret)


def nothing(verb: str, step: str, where: str) -> None:
    """Do nothing. This is the fault point of ``run`` outside of tests.

    Args:
        verb: Name of the verb.
        step: Label of the step in the command's key.
        where: "before" or "after" the effect.
    """


def run(
    journal: Journal,
    tools: Tools,
    command: Command,
    verb: Verb,
    fault_point: FaultPoint = nothing,
    carry_out: CarryOut = carry_out,
) -> Result | None:
    """Carry out a command and journal the result.

    If a verb with ``runs_once`` was begun before, it is not repeated, and the result has the status
    "unknown".

    Args:
        journal: Stores the result, and the begin of verbs that run once or migrate.
        tools: The resources that the verb uses.
        command: The command.
        verb: The parsed verb of the command.
        fault_point: Called before and after the effect, for tests.
        carry_out: The function that calls the driver.

    Returns:
        The result. None if the command was cancelled, cannot be carried out now, or must be
        repeated until it succeeds. The conductor then sends the command again if it is still valid.

    Raises:
        sqlite3.Error: The journal cannot be written.
    """
    key = str(command.key)
    if verb.runs_once and journal.has_begun(key):
        return _store_result(
            journal,
            _build_result(
                command,
                "unknown",
                error="The agent stopped while the command ran, so its outcome is unknown.",
            ),
        )
    if verb.runs_once or verb.migrates:
        journal.begin(key)
    fault_point(command.verb, command.key.label, "before")
    try:
        result = _build_result(command, "done", _data_of(carry_out(tools, command, verb)))
    except Cancelled:
        log.info("a command was cancelled", verb=command.verb, server=command.server)
        return None
    except errors.Unavailable as problem:
        log.warning("a command waits", verb=command.verb, server=command.server, problem=problem)
        return None
    except Exception as problem:
        if verb.retries_until_done or (
            verb.is_authoritative and not isinstance(problem, VerbFailed)
        ):
            log.exception(
                "a command failed; the conductor repeats it",
                verb=command.verb,
                server=command.server,
            )
            return None
        result = _build_failure(command, problem)
    fault_point(command.verb, command.key.label, "after")
    return _store_result(journal, result)


def _build_failure(command: Command, problem: Exception) -> Result:
    """Build the result of a failed verb and log the failure. The caller journals the result.

    After an unexpected exception, the tenant's text contains no details, and the result is
    retryable.
    """
    if isinstance(problem, VerbFailed):
        log.warning(
            "a command failed",
            verb=command.verb,
            server=command.server,
            problem=problem,
            details=problem.details,
        )
        return _build_result(
            command,
            "failed",
            error=str(problem),
            details=problem.details,
            retryable=problem.retryable,
            reason=problem.reason,
        )
    if isinstance(problem, errors.Problem):
        log.warning("a command failed", verb=command.verb, server=command.server, problem=problem)
        return _build_result(
            command, "failed", error=problem.text, details=str(problem.__cause__ or "")
        )
    log.error(
        "a command failed unexpectedly", verb=command.verb, server=command.server, exc_info=problem
    )
    return _build_result(
        command,
        "failed",
        error="The host failed unexpectedly; its log says more.",
        details=f"{type(problem).__name__}: {problem}",
        retryable=True,
    )


def _data_of(outcome: Outcome) -> JsonObject:
    if isinstance(outcome, DomainState):
        return dict(to_wire(GuestState(power_state=outcome.power_state)))
    return {} if outcome is None else dict(to_wire(outcome))


def abort_before_begin(journal: Journal, command: Command) -> Result:
    """Journal and return the result of a live migration that was aborted before it began."""
    return _store_result(journal, _build_failure(command, MigrationAborted()))


def _build_result(
    command: Command,
    status: str,
    data: JsonObject | None = None,
    error: str = "",
    details: str = "",
    retryable: bool = False,
    reason: FailureReason = FailureReason.UNSPECIFIED,
) -> Result:
    return Result(
        str(command.key),
        command.server,
        command.fence,
        status,
        data or {},
        error[:MAX_ERROR_CHARS],
        details[:MAX_DETAILS_CHARS],
        retryable,
        reason,
    )


def _store_result(journal: Journal, result: Result) -> Result:
    journal.end(result)
    return result
