# SPDX-License-Identifier: Apache-2.0
"""Steps: the parts of a workflow.

A step works in the runner's transaction (``apply``, after an optional ``prepare`` outside the
transaction, without effect), calls an external service (``call``), or is a command to a host
(``command``), whose result ``on_result`` processes. The undo of a step is declared beside it.
Effects on hosts are undone by a pending cleanup, so an undo never has to reach a host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from common.domain.models import Result
from common.domain.verbs import Verb
from common.store.engine import Connection
from conductor.engine.action_args import ActionArgs
from conductor.engine.action_data import ActionData
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import Run


@dataclass(frozen=True)
class StepEvents:
    """Names of the notifications about a step."""

    #: When the step starts.
    started: tuple[str, ...] = ()
    #: When the step has succeeded.
    succeeded: tuple[str, ...] = ()
    #: When the step has failed.
    failed: tuple[str, ...] = ()


StepArgs = TypeVar("StepArgs", bound=ActionArgs, contravariant=True)
StepData = TypeVar("StepData", bound=ActionData, contravariant=True)


@dataclass(frozen=True)
class Step(Generic[StepArgs, StepData]):
    """The declaration of a step.

    A step works in the runner's transaction, calls an external service before this transaction, or
    is a command to a host.
    """

    #: The name of the step in the journal.
    name: str
    #: Why the step has its place in the workflow, in a sentence.
    why: str
    #: Returns True if the step is part of the action. None: always.
    condition: Callable[[Run[StepArgs, StepData]], bool] | None = None
    #: Runs before the transaction, without effect, in the lane INSIDE.
    prepare: Callable[[Engine, Sequence[Run[StepArgs, StepData]]], None] | None = None
    #: Runs in the transaction.
    apply: Callable[[Connection, Engine, Sequence[Run[StepArgs, StepData]]], None] | None = None
    #: Calls an external service, in the lane of the service, before ``apply``. The journal has
    #: recorded the start. The call may be repeated, and may call ``run.fail``. After the pivot a
    #: refusal does not fail the action, see ``runner.ignore_refusals``.
    call: Callable[[Engine, Run[StepArgs, StepData]], None] | None = None
    #: The lane of the service that ``call`` and ``undo_call`` call.
    lane: Lane = Lane.IMAGE
    #: Returns the command to a host.
    command: Callable[[Engine, Run[StepArgs, StepData]], Verb] | None = None
    #: Returns the host of the command and its undo. None: the server's host.
    host_of: Callable[[Run[StepArgs, StepData]], str | None] | None = None
    #: Runs in the transaction that sends the command.
    on_start: Callable[[Connection, Sequence[Run[StepArgs, StepData]]], None] | None = None
    #: Runs in the transaction that processes the result of the command.
    on_result: Callable[[Connection, Run[StepArgs, StepData], Result], None] | None = None
    #: True if the command starts no guest, so that it has failed when its host goes down.
    fails_when_host_down: bool = False
    #: True if the command counts as done once the host's guests are proved to be dead.
    done_when_host_dead: bool = False
    #: True if the command needs the files on the host that the server leaves.
    reads_source: bool = False
    #: True if the failure does not depend on the host, so that no other host is tried.
    fails_on_any_host: bool = False
    #: Undoes the step in the transaction.
    undo: Callable[[Connection, Engine, Run[StepArgs, StepData]], None] | None = None
    #: Returns the command that undoes the step on the host.
    undo_command: Callable[[Engine, Run[StepArgs, StepData]], Verb] | None = None
    #: Undoes the step at the service.
    undo_call: Callable[[Engine, Run[StepArgs, StepData]], None] | None = None
    #: True if the undo starts the guest that the action stopped. If it fails, the guest is off.
    undo_starts_guest: bool = False
    #: True if the action is not undone any more after this step.
    pivot: bool = False
    #: True if an abort or a completion can be requested while the command runs.
    takes_controls: bool = False
    #: True if no action begins with the step. ``Run.go_to`` leads to the step, or to one before it.
    by_name: bool = False
    #: Notifications about the step, beside those about the action
    #: (``common.notifications.events``).
    events: StepEvents = StepEvents()

    def host(self, run: Run[StepArgs, StepData]) -> str | None:
        """Return the host of the step's command and of its undo, or None without a host."""
        return self.host_of(run) if self.host_of is not None else run.host

    def is_skipped(self, run: Run[StepArgs, StepData]) -> bool:
        """Return True if the step is not part of the action."""
        return self.condition is not None and not self.condition(run)


AnyStep = Step[Any, Any]
