# SPDX-License-Identifier: Apache-2.0
"""Runs: one action within one transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypedDict, TypeVar, Unpack, cast

from common.domain import errors, verbs
from common.domain.command_key import CommandKey, CommandKind
from common.domain.json_types import JsonObject
from common.domain.models import Command, FailureReason, HardwareAssignment, Selection
from common.domain.statuses import ActionPhase, ActionState, MigrationStatus, StepEvent
from common.domain.verbs import EnsureAbsent, Verb
from common.domain.wire import from_wire
from common.store.engine import now
from common.store.rows import ActionRow, BlockDeviceRow, LockedActionRow, PlacedServerRow
from conductor.engine.action_args import ActionArgs
from conductor.engine.action_data import ActionData, StepFailed
from conductor.engine.engine import Engine

#: Tries, in about twenty seconds, after which a silent service no longer delays an action.
MAX_CLEANING_TRIES = 8
Args = TypeVar("Args", bound=ActionArgs, covariant=True)
Data = TypeVar("Data", bound=ActionData, covariant=True)


class MigrationChanges(TypedDict, total=False):
    """Changed columns of the record of a migration."""

    #: How far the migration is.
    status: MigrationStatus
    #: The destination. None: not claimed, or released.
    dest_host: str | None


class RunFacts(TypedDict, total=False):
    """Facts that a burst has collected before the transaction. The fields are those of ``Run``."""

    selection: Selection | None
    problem: StepFailed | None
    cleanups: list[JsonObject]
    volume_changes: dict[str, JsonObject | None]
    shares: Sequence[str]
    woken: bool
    began: float


@dataclass
class Run(Generic[Args, Data]):
    """One action within one transaction: its rows as they were read, and the changes to write.

    ``conductor.engine.flush`` writes the changes.
    """

    #: The rows of the action and its server.
    action: ActionRow
    server: PlacedServerRow
    #: The arguments of the action.
    args: Args
    #: The data that steps leave for later steps.
    data: Data
    #: The server's volumes as they were read, see ``volumes.of``.
    volumes: Sequence[BlockDeviceRow] = ()
    #: The ids of the server's shares.
    shares: Sequence[str] = ()
    #: The scheduler's proposal.
    selection: Selection | None = None
    #: The failure of the current step.
    problem: StepFailed | None = None
    #: True if the current step is not over.
    paused: bool = False
    #: True if ``common.store.servers.actions.wake`` was called since the action was taken.
    woken: bool = False
    #: Changed columns of the action's row.
    head: JsonObject = field(default_factory=dict)
    #: Changed columns of the server's row.
    changes: JsonObject = field(default_factory=dict)
    #: New events of the journal.
    events: list[JsonObject] = field(default_factory=list)
    #: Commands to send, each with its host.
    commands: list[tuple[str, Command]] = field(default_factory=list)
    #: The parts of the host that this transaction has claimed.
    claimed: HardwareAssignment | None = None
    #: Successes and failures of builds, see ``allocations.judge``.
    build_verdicts: list[tuple[str, int]] = field(default_factory=list)
    #: Changes of the action's migration.
    migration_changes: MigrationChanges = field(default_factory=MigrationChanges)
    #: Pending cleanups at external services, see ``common.store.cleanups``.
    cleanups: list[JsonObject] = field(default_factory=list)
    #: Changes of rows of ``volumes`` by uuid. None: the row is removed.
    volume_changes: dict[str, JsonObject | None] = field(default_factory=dict)
    #: True if the action has failed, and the undo that starts the guest has failed too.
    is_left_off: bool = False
    #: When the current step began, in seconds of the monotonic clock.
    began: float = field(default_factory=time.monotonic)
    #: The refusal of a service that does not fail this step.
    ignored_refusal: str = ""

    @property
    def locked_at(self) -> int:
        """The time at which this transaction locked the action, in µs of the database's clock."""
        return cast(LockedActionRow, self.action).locked_at

    @property
    def attempt(self) -> int:
        """The number of the action's current attempt, from 1 on, with the changes of this run."""
        return int(self.head.get("attempt", self.action.attempt))

    @property
    def host(self) -> str | None:
        """The server's host, with the changes of this run, or None."""
        host: str | None = self.changes.get("host", self.server.host)
        return host

    @property
    def fence(self) -> int:
        """The server's fence, with the changes of this run."""
        return int(self.head.get("fence", self.action.fence))

    def copy_data_to(self, other: AnyRun) -> None:
        """Copy the fields that a call or ``prepare`` has changed in this run's data.

        Args:
            other: A run of the same action, as the action is now.
        """
        before = from_wire(type(self.data), self.action.data)
        for data_field in fields(before):
            if (value := getattr(self.data, data_field.name)) != getattr(before, data_field.name):
                setattr(other.data, data_field.name, value)

    def raise_fence(self) -> None:
        """Raise the fence by 1. Hosts that know the new fence refuse commands under the old one."""
        self.head["fence"] = self.changes["fence"] = self.fence + 1

    def set(self, **values: object) -> None:
        """Collect changed columns of the server's row, which ``flush.write`` writes."""
        self.changes.update(values)

    def has_volumes(self) -> bool:
        """Return True if the server had a volume when its rows were read."""
        return bool(self.volumes)

    def set_volume(self, row: BlockDeviceRow, **values: object) -> None:
        """Collect changed columns of a volume's row, which ``flush.write`` writes.

        The ``call`` of a step may use this too.
        """
        self.volume_changes[row.uuid] = {**(self.volume_changes.get(row.uuid) or {}), **values}

    def remove_volumes(self, rows: Iterable[BlockDeviceRow]) -> None:
        """Let ``flush.write`` remove rows of volumes and set the server's number of volumes."""
        self.volume_changes.update(dict.fromkeys((row.uuid for row in rows), None))
        remaining = [self.volume_changes.get(row.uuid, {}) is not None for row in self.volumes]
        self.set(volumes=sum(remaining))

    def set_migration(self, **values: Unpack[MigrationChanges]) -> None:
        """Collect changed columns of the action's migration, which ``flush.write`` writes."""
        self.migration_changes.update(values)

    @property
    def assignment(self) -> HardwareAssignment | None:
        """The guest's hardware assignment, or None.

        If this run sets the server's host, this is the assignment that the run has claimed.
        """
        if "host" in self.changes:
            return self.claimed
        return (
            from_wire(HardwareAssignment, self.server.assignment)
            if self.server.assignment
            else None
        )

    @property
    def is_repeated(self) -> bool:
        """True if the step may have been tried before, so that the effect may exist already."""
        return self.action.owner is not None or self.action.sends > 0 or self.action.attempt > 1

    @property
    def is_undoing(self) -> bool:
        """True if the action is being undone."""
        return bool(self.head.get("phase", self.action.phase) == ActionPhase.UNDO)

    def secrets(self, engine: Engine) -> JsonObject:
        """Return the decrypted secrets of the action's request, {} without secrets.

        Raises:
            Unavailable: The conductor has no key that decrypts the secrets.
        """
        return engine.vault.open(self.action.secrets) if self.action.secrets else {}

    def continue_at(self, step: str | None, **head: object) -> None:
        """Make the action due at once at a step, without tries so far.

        Args:
            step: The name of the step. None: the step with which the workflow begins.
            head: Further changed columns of the action's row.
        """
        head = {"state": ActionState.DUE, "due_at": now(), "step": step, "sends": 0, **head}
        self.head.update(owner=None, lease_until=None, **head)

    def go_to(self, step: str) -> None:
        """Interrupt the current step, and make the action due at another step."""
        self.paused = True
        self.continue_at(step)

    def switch_workflow(self, workflow: str) -> None:
        """Continue with another workflow, at its step with the name of the current step."""
        self.paused = True
        self.head.update(
            state=ActionState.DUE, due_at=now(), workflow=workflow, owner=None, lease_until=None
        )

    def fail(
        self,
        text: str,
        details: str = "",
        retryable: bool = False,
        status: int | None = None,
        reason: FailureReason = FailureReason.UNSPECIFIED,
    ) -> None:
        """Record the definite failure of the current step, with the fields of ``Failure``.

        The function returns normally. After the step the runner begins the undo, or after the pivot
        ends the action as failed. A failure of a ``call`` after the pivot, or of an undo, becomes a
        message of the step (``runner.ignore_refusals``, ``runner.continue_undo``).
        """
        self.problem = StepFailed(text, details, retryable, status, reason)

    def add_cleanup(
        self, kind: str, target: str, why: str, place: str = "", **args: object
    ) -> None:
        """Leave work at an external service to a pending cleanup. The action continues.

        Args:
            kind: A kind of ``common.store.cleanups``.
            target: The id of the object at the service.
            why: The reason why the work is not done yet. "" keeps the cleanup out of the message of
                the action.
            place: The second part of the cleanup's key. The kind defines whether this is a host, an
                address, a volume id or "".
            args: Further facts for the cleanup.
        """
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
        """Turn a failure of the block into a pending cleanup.

        The block calls an external service after the pivot or in an undo, where a refusal must not
        fail the action. A refusal adds the cleanup at once. If the service does not answer, the
        step is repeated up to ``MAX_CLEANING_TRIES`` times, and then the cleanup is added. The
        arguments are those of ``add_cleanup``.

        Raises:
            Unavailable: The service does not answer, and tries are left.
        """
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
        """The reasons of the pending cleanups and refusals of this step in one text, or None."""
        texts = dict.fromkeys([*(row["why"] for row in self.cleanups), self.ignored_refusal])
        return " ".join(filter(None, texts)) or None

    def retry_in(self, micros: int) -> None:
        """Make the action due again at this step in ``micros`` µs, or at once if it was woken."""
        self.paused = True
        self.head.update(
            state=ActionState.DUE,
            due_at=now() + (0 if self.woken else micros),
            owner=None,
            lease_until=None,
        )

    def record_event(
        self,
        step: str,
        event: StepEvent,
        host: str | None = None,
        message: str | None = None,
        details: str | None = None,
    ) -> None:
        """Add an event to the run, which ``flush.write`` appends to the action's journal.

        The caller has locked the action.
        """
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
        """Add a command for a host. ``conductor.engine.flush`` sends it after the commit.

        Args:
            host: The host.
            kind: DO for a step, UNDO for its undo.
            step: The name of the step.
            verb: The operation and its arguments.
        """
        command = verbs.encode(
            verb,
            CommandKey(kind, self.action.id, step, self.attempt),
            server=self.server.id,
            fence=self.fence,
            request_id=self.action.request_id,
        )
        self.commands.append((host, command))


AnyRun = Run[Any, Any]


def cleanup_command(server: str, fence: int, session: int = 0, *, keep_files: bool) -> Command:
    """Return the command that removes a guest which a server left on a host.

    No action waits for the command. The conductor repeats the command until the host has removed
    the guest.

    Args:
        server: The id of the server.
        fence: The fence of the command, which is part of its key.
        session: The host's session, or 0 if the caller sets it later.
        keep_files: True to keep the guest's files, because another host uses them.
    """
    verb = EnsureAbsent(keep_files=keep_files)
    key = CommandKey(CommandKind.CLEANUP, server, verb.name, fence)
    return verbs.encode(verb, key, server=server, fence=fence, session=session)
