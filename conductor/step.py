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

from common.action_args import ActionArgs
from common.json_types import JsonObject
from common.models import Result
from common.store.engine import Connection
from conductor.action_data import ActionData
from conductor.engine import Engine, Lane
from conductor.run import Run


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
Verb = tuple[str, JsonObject]  #: a verb of the agent and its arguments


@dataclass(frozen=True)
class Step(Generic[StepArgs, StepData]):
    """One step: all that is known of it. It works in the transaction, or calls a service first, or
    is a command."""

    #: The name of the step in the journal.
    name: str
    #: Why the step has its place in the workflow, in a sentence.
    why: str
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
    #: The lane of the service that ``call`` and ``undo_call`` call.
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
    #: After this step the action is not undone any more.
    pivot: bool = False
    #: A control (abort or complete) can be requested while the command runs.
    takes_controls: bool = False
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
