# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of workflows: Step, Workflow, and Run (one action on its way).

Workflows are straight lines of steps. A step works in the runner's transaction (``apply``, after an
optional ``prepare`` outside it that has no effect), or calls an external service (``call``), or is
a command to a host (``command``), whose result ``on_result`` takes in. Its undo is written beside
it; effects on hosts are undone by leaving a debt, so an undo never has to reach a host. A Run only
collects what is to be written; ``conductor.runner`` writes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any, Generic, TypedDict, TypeVar, Unpack, cast

from common import errors, verbs
from common.action_args import ActionArgs
from common.clock import Clock
from common.command_key import CommandKey, CommandKind
from common.json_types import JsonMapping, JsonObject
from common.models import Command, FailureReason, HardwareAssignment, Result, Selection
from common.store.engine import Connection, Store, moment, now
from common.store.placement.allocations import FailedBuildLimit
from common.store.rows import ActionRow, BlockDeviceRow, LockedActionRow, PlacedServerRow
from common.vault import Vault
from common.verbs import EnsureAbsent, Verb
from common.wire import from_wire, to_wire
from conductor.automatic_evacuation import EvacuationPolicy
from conductor.external_services import ImageApi, Messaging, NetworkApi, ShareApi, VolumeApi
from conductor.heartbeats import Heartbeats

#: Tries, in about twenty seconds, after which a silent service holds no cleaning up.
MAX_CLEANING_TRIES = 8
T = TypeVar("T")


class Lane(StrEnum):
    """Which thread advances a step: INSIDE those without a call, each other one those that call its
    service."""

    INSIDE = "inside"
    IMAGE = "image"
    NETWORK = "network"
    SHARE = "share"
    VOLUME = "volume"
    FENCING = "fencing"


CallPool = Callable[[str, Callable[[Any], None], Sequence[Any]], list[Exception | None]]


def one_by_one(
    lane: str, call: Callable[[T], None], members: Sequence[T]
) -> list[Exception | None]:
    """Make each call to this lane's service; what each raised, or None. The process makes several
    at a time."""
    raised: list[Exception | None] = []
    for member in members:
        try:
            call(member)
            raised.append(None)
        except Exception as problem:  # noqa: BLE001  # the caller tells one kind from the other
            raised.append(problem)
    return raised


def no_fault(action: str, step: str, where: str) -> None:
    """The fault point of ordinary operation: nothing happens."""


def no_wake(lane: str) -> None:
    """Where whoever calls ``runner.advance`` looks again anyway."""


@dataclass
class Engine:
    """What the plain functions of the conductor work with."""

    store: Store
    clock: Clock
    messaging: Messaging
    owner: str  #: names this conductor in leases
    batch: int = 64  #: actions that are taken at a time
    max_attempts: int = 3  #: hosts on which a server is tried
    shutdown_timeout: float = 60  #: seconds that a guest has to power off
    host_silence: int = 30  #: seconds after which a host counts as down
    images: ImageApi | None = None
    networks: NetworkApi | None = None
    shares: ShareApi | None = None
    share_timeout: int = 60  #: seconds for the rule that lets a host mount a share
    volumes: VolumeApi | None = None
    volume_timeout: int = 600  #: seconds for the volumes that a server is made with
    vif_plugging_timeout: int = 300  #: seconds for the ports of a guest that starts
    vif_plugging_is_fatal: bool = True
    call_pool: CallPool = one_by_one  #: makes the calls of a lane
    vault: Vault = field(default_factory=lambda: Vault(""))
    failed_build_limit: FailedBuildLimit = FailedBuildLimit()  #: with hosts on which builds fail
    default_zone: str = "nova"
    shelved_offload_time: int = 0  #: seconds; 0: at once, negative: never
    reclaim_interval: int = 0  #: seconds after which soft-deleted servers are deleted
    resize_confirm_window: int = 0  #: seconds after which resizes are confirmed
    allow_resize_to_same_host: bool = False
    #: Makes sure that a host's guests are dead; raises a Problem.
    fence_host: Callable[[str], None] | None = None
    evacuation: EvacuationPolicy | None = None  #: hosts that went down are evacuated by themselves
    #: By lane, where a call takes longer.
    lease_micros: Mapping[str, int] = field(default_factory=dict)
    #: whose rows are locked -> until, see retries
    locked_servers: dict[str, float] = field(default_factory=dict)
    #: whose reports are taken in alone -> until
    odd_hosts: dict[str, float] = field(default_factory=dict)
    heartbeats: Heartbeats = field(init=False)
    fault_point: Callable[[str, str, str], None] = no_fault
    #: called after a commit that left something due at once, with its lane
    wake: Callable[[str], None] = no_wake

    def __post_init__(self) -> None:
        self.heartbeats = Heartbeats(self.store, self.clock)


@dataclass(kw_only=True)
class Failure:
    """How the failure of an action stands in its journal."""

    text: str
    details: str = ""
    retryable: bool = False
    status: int | None = None
    reason: FailureReason = FailureReason.UNSPECIFIED


class StepFailed(Exception):
    """A definite failure of a step. ``str()`` is safe for the tenant; ``details`` is for the
    operator; ``retryable``: another host may succeed; ``status`` is that of an external service's
    refusal; ``reason``: what decisions go by."""

    def __init__(
        self,
        text: str,
        details: str = "",
        retryable: bool = False,
        status: int | None = None,
        reason: FailureReason = FailureReason.UNSPECIFIED,
    ) -> None:
        super().__init__(text)
        self.details = details
        self.retryable = retryable
        self.status = status
        self.reason = reason


@dataclass(kw_only=True)
class ActionData:
    """What steps leave for later steps, in the action's journal; each workflow declares what its
    own leave.

    Lists and dictionaries are replaced, never changed in place. None, or the default, is not
    written.
    """

    after: str | None = None  #: the action that this one has superseded
    abort: str | None = None  #: an operator ends the action, and why
    problem: Failure | None = None  #: what failed first
    #: step -> why it could not be undone
    undo_failures: dict[str, str] = field(default_factory=dict)
    left_undone: str | None = None  #: what an external service has still to remove, and why
    polls: int = 0  #: how often steps that wait have looked

    def add_undo_failure(self, step: str, why: str) -> None:
        """The undo of this step has failed definitely."""
        self.undo_failures = {**self.undo_failures, step: why}

    def clear_undo_failures(self) -> None:
        """They were dealt with."""
        self.undo_failures = {}


Args = TypeVar("Args", bound=ActionArgs, covariant=True)
Data = TypeVar("Data", bound=ActionData, covariant=True)


def journal(data: ActionData, stored: JsonMapping) -> JsonObject:
    """The data as the journal has it, with what ``stored`` has of a later release."""
    plain, default = to_wire(data), _default(cast(Hashable, type(data)))
    kept = {name: value for name, value in stored.items() if name not in default}
    return kept | {name: value for name, value in plain.items() if value != default[name]}


@cache
def _default(kind: Any) -> JsonObject:
    return dict(to_wire(kind()))


class Known(TypedDict, total=False):
    """What a burst has found out before its transaction."""

    selection: Selection | None
    problem: StepFailed | None
    cleanups: list[JsonObject]
    volume_changes: dict[str, JsonObject | None]
    shares: Sequence[str]
    woken: bool
    began: float


@dataclass
class Run(Generic[Args, Data]):
    """One action within one transaction: what is known of it, and what will be written."""

    action: ActionRow
    server: PlacedServerRow
    args: Args
    data: Data
    volumes: Sequence[BlockDeviceRow] = ()  #: the server's, as they were read; see ``volumes.of``
    shares: Sequence[str] = ()  #: the ids of the server's, as they were read
    selection: Selection | None = None  #: the scheduler's proposal
    problem: StepFailed | None = None  #: the present step has failed
    paused: bool = False  #: the present step is not over
    woken: bool = False  #: since it was taken; see ``store.actions.wake``
    head: JsonObject = field(default_factory=dict)  #: changes of the action's row
    changes: JsonObject = field(default_factory=dict)  #: changes of the server's row
    events: list[JsonObject] = field(default_factory=list)  #: of the journal
    commands: list[tuple[str, Command]] = field(default_factory=list)  #: host, command
    claimed: HardwareAssignment | None = None  #: what this transaction's claim got
    build_verdicts: list[tuple[str, int]] = field(default_factory=list)  #: for ``allocations``
    migration_changes: JsonObject = field(default_factory=dict)  #: of the action's migration
    #: for external services, see ``store.cleanups``
    cleanups: list[JsonObject] = field(default_factory=list)
    #: Of rows of ``volumes``, by uuid; None: it is removed.
    volume_changes: dict[str, JsonObject | None] = field(default_factory=dict)
    is_left_off: bool = False  #: the action has failed, and the undo that starts the guest too
    began: float = field(default_factory=time.monotonic)  #: with this step; seconds
    ignored_refusal: str = ""  #: what a service said when it refused this step, which fails nothing

    @property
    def locked_at(self) -> int:
        """When the transaction that writes this locked the action."""
        return cast(LockedActionRow, self.action).locked_at

    @property
    def attempt(self) -> int:
        return int(self.head.get("attempt", self.action.attempt))

    @property
    def host(self) -> str | None:
        """Where the server is, counting what this transaction is about to write."""
        host: str | None = self.changes.get("host", self.server.host)
        return host

    @property
    def fence(self) -> int:
        """The server's fence, counting what this transaction is about to write."""
        return int(self.head.get("fence", self.action.fence))

    def copy_data_to(self, other: AnyRun) -> None:
        """Set in the data of the same action, as it is by now, what a call or ``prepare`` has
        changed here."""
        before = from_wire(type(self.data), self.action.data)
        for one in fields(before):
            if (value := getattr(self.data, one.name)) != getattr(before, one.name):
                setattr(other.data, one.name, value)

    def raise_fence(self) -> None:
        """The server's place changes: whoever acts under the old fence is refused from now on."""
        self.head["fence"] = self.changes["fence"] = self.fence + 1

    def set(self, **values: object) -> None:
        """Change the server."""
        self.changes.update(values)

    def has_volumes(self) -> bool:
        """Has the server any?"""
        return bool(self.volumes)

    def set_volume(self, row: BlockDeviceRow, **values: object) -> None:
        """Change one of the server's volumes; a call may do that too."""
        self.volume_changes[row.uuid] = {**(self.volume_changes.get(row.uuid) or {}), **values}

    def remove_volumes(self, rows: Iterable[BlockDeviceRow]) -> None:
        """The server does not have these volumes any more."""
        self.volume_changes.update(dict.fromkeys((row.uuid for row in rows), None))
        kept = [self.volume_changes.get(row.uuid, {}) is not None for row in self.volumes]
        self.set(volumes=sum(kept))

    def set_migration(self, **values: object) -> None:
        """Change the record of the migration."""
        self.migration_changes.update(values)

    @property
    def assignment(self) -> HardwareAssignment | None:
        """Which parts of its host the guest holds, counting what this transaction has claimed."""
        if "host" in self.changes:
            return self.claimed
        return (
            from_wire(HardwareAssignment, self.server.assignment)
            if self.server.assignment
            else None
        )

    @property
    def is_repeated(self) -> bool:
        """May this step have been tried before? Its effect outside may be there already."""
        return self.action.owner is not None or self.action.sends > 0 or self.action.attempt > 1

    @property
    def is_undoing(self) -> bool:
        """Is the action on its way back?"""
        return bool(self.head.get("phase", self.action.phase) == "undo")

    def secrets(self, engine: Engine) -> JsonObject:
        """What was sealed when the action was accepted."""
        return engine.vault.open(self.action.secrets) if self.action.secrets else {}

    def continue_at(self, step: str | None, **head: object) -> None:
        """A conductor should go on at this step, at once, which was not tried yet."""
        head = {"state": "due", "due_at": now(), "step": step, "sends": 0, **head}
        self.head.update(owner=None, lease_until=None, **head)

    def go_to(self, step: str) -> None:
        """Leave the step as it is; this one comes first."""
        self.paused = True
        self.continue_at(step)

    def switch_workflow(self, workflow: str) -> None:
        """Another workflow goes on from here: one that has a step of the same name."""
        self.paused = True
        self.head.update(state="due", due_at=now(), workflow=workflow, owner=None, lease_until=None)

    def fail(
        self,
        text: str,
        details: str = "",
        retryable: bool = False,
        status: int | None = None,
        reason: FailureReason = FailureReason.UNSPECIFIED,
    ) -> None:
        """This step definitely failed."""
        self.problem = StepFailed(text, details, retryable, status, reason)

    def add_cleanup(
        self, kind: str, target: str, why: str, place: str = "", **args: object
    ) -> None:
        """An external service has this still to remove, or to put right; the action goes on without
        it."""
        self.cleanups.append(
            {
                "kind": kind,
                "target": target,
                "place": place,
                "args": args,
                "why": why,
                "server_id": self.server.id,
                "project_id": self.server.project_id,
            }
        )

    @contextmanager
    def cleanup_on_failure(
        self, kind: str, target: str, place: str = "", **args: object
    ) -> Iterator[None]:
        """Calls that clean up at an external service, after the pivot or on the way back. What it
        refuses, or does not answer for too long, is written down as a pending cleanup."""
        try:
            yield
        except errors.Unavailable as problem:
            if self.action.sends < MAX_CLEANING_TRIES:
                raise
            self.add_cleanup(kind, target, problem.text, place, **args)
        except errors.Problem as problem:
            self.add_cleanup(kind, target, problem.text, place, **args)

    @property
    def cleanup_message(self) -> str | None:
        """Why this step left something to a pending cleanup; None: it did not."""
        texts = dict.fromkeys([*(one["why"] for one in self.cleanups), self.ignored_refusal])
        return " ".join(filter(None, texts)) or None

    def retry_in(self, micros: int) -> None:
        """Leave the step as it is and look again later; at once when something has happened
        meanwhile."""
        self.paused = True
        self.head.update(
            state="due", due_at=now() + (0 if self.woken else micros), owner=None, lease_until=None
        )

    def record_event(
        self,
        step: str,
        event: str,
        host: str | None = None,
        message: str | None = None,
        details: str | None = None,
    ) -> None:
        """Add an event to the journal; the action is locked."""
        seq = int(self.head.get("next_seq", self.action.next_seq))
        self.head["next_seq"] = seq + 1
        self.events.append(
            {
                "action_id": self.action.id,
                "seq": seq,
                "step": step,
                "attempt": self.attempt,
                "event": event,
                "host": host,
                "message": message,
                "details": details,
                "at": self.locked_at,
            }
        )

    def command(self, host: str, kind: CommandKind, step: str, verb: Verb) -> None:
        """Send a command when the transaction has committed. ``flush`` sets the session."""
        command = verbs.encode(
            verb,
            CommandKey(kind, self.action.id, step, self.attempt),
            server=self.server.id,
            fence=self.fence,
            request_id=self.action.request_id,
        )
        self.commands.append((host, command))


AnyRun = Run[Any, Any]


def fault_of(tx: Connection, problem: StepFailed) -> JsonObject:
    """The fault that a server in ERROR shows; its time in microseconds, as everywhere in the
    database."""
    return {"code": 500, "message": str(problem), "details": problem.details, "created": moment(tx)}


def cleanup_command(server: str, fence: int, session: int = 0, *, keep_files: bool) -> Command:
    """Return the command that removes a guest which a server left on a host.

    No action waits for the command. It is sent until the host has removed the guest.
    """
    verb = EnsureAbsent(keep_files=keep_files)
    key = CommandKey(CommandKind.CLEANUP, server, verb.name, fence)
    return verbs.encode(verb, key, server=server, fence=fence, session=session)


@dataclass(frozen=True)
class StepEvents:
    """Names of the notifications about a step."""

    started: tuple[str, ...] = ()
    succeeded: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


StepArgs = TypeVar("StepArgs", bound=ActionArgs, contravariant=True)
StepData = TypeVar("StepData", bound=ActionData, contravariant=True)


@dataclass(frozen=True)
class Step(Generic[StepArgs, StepData]):
    """One step: all that is known of it. It works in the transaction, or calls a service first, or
    is a command."""

    name: str
    why: str  #: why it stands where it stands, in a sentence
    #: Is the step part of this action? None: always.
    condition: Callable[[Run[StepArgs, StepData]], bool] | None = None
    #: Outside the transaction, and without any effect; in the lane INSIDE.
    prepare: Callable[[Engine, Sequence[Run[StepArgs, StepData]]], None] | None = None
    #: In the transaction.
    apply: Callable[[Connection, Engine, Sequence[Run[StepArgs, StepData]]], None] | None = None
    #: Calls an external service: journalled as started before, beside others, in the lane of the
    #: service, which is the same for all steps of this name. It can be repeated and may call
    #: ``run.fail``; then ``apply``. After the pivot a refusal fails nothing, see
    #: ``runner.ignore_refusals``.
    call: Callable[[Engine, Run[StepArgs, StepData]], None] | None = None
    lane: Lane = Lane.IMAGE
    #: A command to a host.
    command: Callable[[Engine, Run[StepArgs, StepData]], Verb] | None = None
    #: The host of the command; None: the server's.
    host_of: Callable[[Run[StepArgs, StepData]], str | None] | None = None
    #: In the transaction that sends the command.
    on_start: Callable[[Connection, Sequence[Run[StepArgs, StepData]]], None] | None = None
    #: In the transaction that takes the command's result in.
    on_result: Callable[[Connection, Run[StepArgs, StepData], Result], None] | None = None
    #: The command starts no guest: a host that goes down meanwhile has definitely failed it.
    fails_when_host_down: bool = False
    #: Proof that the host's guests are dead is as good as the command's success.
    done_when_host_dead: bool = False
    #: The command needs what the host has that the server leaves.
    reads_source: bool = False
    #: Its failure is not the chosen host's: another host would not help.
    fails_on_any_host: bool = False
    #: Removes in the transaction what the step made.
    undo: Callable[[Connection, Engine, Run[StepArgs, StepData]], None] | None = None
    #: Removes on the host what the step made.
    undo_command: Callable[[Engine, Run[StepArgs, StepData]], Verb] | None = None
    #: Removes at the service what the step made.
    undo_call: Callable[[Engine, Run[StepArgs, StepData]], None] | None = None
    #: Its undo starts the guest that the action stopped: where it has failed, the guest is off.
    undo_starts_guest: bool = False
    #: There is no way back from here.
    pivot: bool = False
    #: An action begins behind it, and comes to it by ``Run.go_to`` alone.
    by_name: bool = False
    #: What is told of it, beside what is told of the whole action
    #: (``common.notifications.events``).
    events: StepEvents = StepEvents()

    def host(self, run: Run[StepArgs, StepData]) -> str | None:
        """Where its command goes, and the one that undoes it."""
        return self.host_of(run) if self.host_of is not None else run.host

    def is_skipped(self, run: Run[StepArgs, StepData]) -> bool:
        """Is the step no part of this action?"""
        return self.condition is not None and not self.condition(run)


AnyStep = Step[Any, Any]


def keep_state(tx: Connection, engine: Engine, run: AnyRun, problem: StepFailed) -> None:
    """The usual end of a failed action: the server keeps the state it had."""


WorkflowArgs = TypeVar("WorkflowArgs", bound=ActionArgs)
WorkflowData = TypeVar("WorkflowData", bound=ActionData)


@dataclass(frozen=True)
class Workflow(Generic[WorkflowArgs, WorkflowData]):
    """What it is given, what its steps leave, its steps, and what its failure means for the
    server."""

    name: str
    args: type[WorkflowArgs]
    data: type[WorkflowData]
    steps: tuple[Step[WorkflowArgs, WorkflowData], ...]
    #: May begin it again by ``run.continue_at``.
    failed: Callable[[Connection, Engine, Run[WorkflowArgs, WorkflowData], StepFailed], None] = (
        keep_state
    )
    version: int = 1

    def index(self, step: str | None) -> int:
        """Where a step stands; None is the beginning.

        Raises:
            LookupError: there is no such step in this release.
        """
        for number, known in enumerate(self.steps):
            if step == known.name or (step is None and not known.by_name):
                return number
        raise LookupError(f"{self.name} has no step {step} in this release")

    def run(
        self,
        action: ActionRow,
        server: PlacedServerRow,
        volumes: Sequence[BlockDeviceRow],
        **more: Unpack[Known],
    ) -> Run[WorkflowArgs, WorkflowData]:
        """An action of this workflow, as its row has it; ``volumes``: of the server.

        Raises:
            TypeError, ValueError: the row has no arguments, or no data, of this workflow.
        """
        if not isinstance(action.args, dict) or not isinstance(action.data, dict):
            raise TypeError("its arguments or its data are no dictionary")
        return Run(
            action,
            server,
            from_wire(self.args, action.args),
            from_wire(self.data, action.data),
            volumes,
            **more,
        )
