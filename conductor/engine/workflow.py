# SPDX-License-Identifier: Apache-2.0
"""Workflows: straight lines of steps, and the registry of all workflows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, Unpack

from common.domain.wire import from_wire
from common.store.engine import Connection
from common.store.rows import ActionRow, BlockDeviceRow, PlacedServerRow
from conductor.engine.action_args import ActionArgs
from conductor.engine.action_data import ActionData, StepFailed
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import AnyRun, Run, RunFacts
from conductor.engine.step import AnyStep, Step, StepEvents

#: The names of a workflow and of a step.
StepKey = tuple[str, str]


def keep_state(tx: Connection, engine: Engine, run: AnyRun, problem: StepFailed) -> None:
    """Do nothing. The default of ``Workflow.failed``, which keeps the state of the server."""


WorkflowArgs = TypeVar("WorkflowArgs", bound=ActionArgs)
WorkflowData = TypeVar("WorkflowData", bound=ActionData)


@dataclass(frozen=True)
class Workflow(Generic[WorkflowArgs, WorkflowData]):
    """The steps of an action, in a straight line."""

    #: The name in ``states.Action.workflow`` and in the row of an action.
    name: str
    #: The type of the action's arguments.
    args: type[WorkflowArgs]
    #: The type of the data that steps leave for later steps.
    data: type[WorkflowData]
    #: The steps in their order.
    steps: tuple[Step[WorkflowArgs, WorkflowData], ...]
    #: Sets the server's state when the action has failed. May restart the action by
    #: ``run.continue_at``.
    failed: Callable[[Connection, Engine, Run[WorkflowArgs, WorkflowData], StepFailed], None] = (
        keep_state
    )
    #: Conductors leave actions of a higher version to newer conductors.
    version: int = 1

    def index(self, step: str | None) -> int:
        """Return the position of a step.

        Args:
            step: The name of the step. None: the step with which an action begins, which
                is the first whose ``by_name`` is False.

        Raises:
            LookupError: This release has no such step.
        """
        for number, candidate in enumerate(self.steps):
            if step == candidate.name or (step is None and not candidate.by_name):
                return number
        raise LookupError(f"workflow {self.name} has no step {step} in this release")

    def run(
        self,
        action: ActionRow,
        server: PlacedServerRow,
        volumes: Sequence[BlockDeviceRow],
        **more: Unpack[RunFacts],
    ) -> Run[WorkflowArgs, WorkflowData]:
        """Return the run of an action of this workflow.

        Args:
            action: The row of the action.
            server: The row of the action's server.
            volumes: The server's volumes.
            more: Further fields of the run, which the caller has read or collected.

        Raises:
            TypeError, ValueError: The row has no arguments, or no data, of this workflow.
        """
        if not isinstance(action.args, dict) or not isinstance(action.data, dict):
            raise TypeError(f"the arguments or the data of action {action.id} are not a dictionary")
        return Run(
            action,
            server,
            from_wire(self.args, action.args),
            from_wire(self.data, action.data),
            volumes,
            **more,
        )


AnyWorkflow = Workflow[Any, Any]


class Workflows(dict[str, AnyWorkflow]):
    """The workflows of a release by name, with indexes of their steps' declarations.

    Invariant: a step with a call has the same lane in all workflows.
    """

    def knows(self, action: ActionRow) -> bool:
        """Return True if this release has the action's workflow, in its version or a newer one."""
        workflow = self.get(action.workflow)
        return workflow is not None and workflow.version >= action.version

    @cached_property
    def versions(self) -> dict[str, int]:
        """Name of each workflow -> its version."""
        return {name: workflow.version for name, workflow in self.items()}

    @cached_property
    def lanes(self) -> dict[Lane, list[str]]:
        """Lane of a service or hook -> sorted names of the steps with a call or undo call there."""
        steps: dict[Lane, set[str]] = defaultdict(set)
        for _, step in self._steps():
            if step.call or step.undo_call:
                steps[step.lane].add(step.name)
        return {lane: sorted(names) for lane, names in steps.items()}

    @cached_property
    def lane_of(self) -> dict[str, Lane]:
        """Name of each step with a call or undo call, in all workflows -> the lane of the call."""
        return {step: lane for lane, steps in self.lanes.items() for step in steps}

    @cached_property
    def steps_with_calls(self) -> list[str]:
        """The sorted names of the steps with a call or undo call, in all workflows."""
        return sorted(self.lane_of)

    @cached_property
    def events(self) -> dict[StepKey, StepEvents]:
        """(workflow, step) -> the notifications of the step."""
        return {(workflow, step.name): step.events for workflow, step in self._steps()}

    @cached_property
    def failing_with_host(self) -> list[StepKey]:
        """(workflow, step) of each command that counts as failed when its host goes down."""
        return self._keys(lambda step: step.fails_when_host_down)

    @cached_property
    def taking_controls(self) -> list[StepKey]:
        """(workflow, step) of each command that can be aborted, or completed by force."""
        return self._keys(lambda step: step.takes_controls)

    @cached_property
    def reading_source(self) -> list[StepKey]:
        """(workflow, step) of each command that reads files on the host that the server leaves."""
        return self._keys(lambda step: step.reads_source)

    def _steps(self) -> Iterator[tuple[str, AnyStep]]:
        for name, workflow in self.items():
            for step in workflow.steps:
                yield name, step

    def _keys(self, matches: Callable[[AnyStep], bool]) -> list[StepKey]:
        return sorted((name, step.name) for name, step in self._steps() if matches(step))
