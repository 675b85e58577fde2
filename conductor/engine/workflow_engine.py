# SPDX-License-Identifier: Apache-2.0
"""The engine with the registry of workflows and the state kept between rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common.notifications.events import Notice
from common.service.notification_options import NotificationSettings
from conductor.engine.engine import Chore, Engine, Lane
from conductor.engine.heartbeats import Heartbeats
from conductor.engine.run import AnyRun
from conductor.engine.workflow import Workflows

T = TypeVar("T")
CallPool = Callable[[Lane, Callable[[Any], None], Sequence[Any]], list[Exception | None]]


def call_one_by_one(
    lane: Lane, call: Callable[[T], None], members: Sequence[T]
) -> list[Exception | None]:
    """Call a function for each member, one after the other. The default of ``call_pool``.

    Returns:
        For each member the exception that its call raised, or None. The lane is ignored.
    """
    raised: list[Exception | None] = []
    for member in members:
        try:
            call(member)
            raised.append(None)
        except Exception as problem:  # noqa: BLE001  # the caller sorts errors by their type
            raised.append(problem)
    return raised


def pass_fault_point(workflow: str, step: str, where: str) -> None:
    """Do nothing. Tests replace this function to crash the conductor at a fault point."""


@dataclass(kw_only=True)
class WorkflowEngine(Engine):
    """The engine that advances workflows."""

    #: All workflows of this release.
    workflows: Workflows
    #: Returns the notifications about runs, for the outbox.
    notices: Callable[[Workflows, Sequence[AnyRun], NotificationSettings], list[Notice]]
    #: Actions that are taken at a time.
    batch: int = 64
    #: Makes the calls of a lane.
    call_pool: CallPool = call_one_by_one
    #: Leases of lanes with long calls, in microseconds.
    lease_micros: Mapping[str, int] = field(default_factory=dict)
    #: Seconds after which soft-deleted servers are deleted. 0: never.
    reclaim_interval: int = 0
    #: Seconds after which resizes are confirmed. 0: never.
    resize_confirm_window: int = 0
    #: Further work of the sweep, see ``conductor.engine.sweep``.
    chores: Sequence[Chore] = ()
    #: Servers that another transaction has locked, and until when they are set aside.
    locked_servers: dict[str, float] = field(default_factory=dict)
    #: Hosts with separate processing of their reports, and until when.
    odd_hosts: dict[str, float] = field(default_factory=dict)
    #: Answers heartbeats from memory.
    heartbeats: Heartbeats = field(init=False)
    #: Called with a workflow, a step and a point in the step. Tests crash the conductor there.
    fault_point: Callable[[str, str, str], None] = pass_fault_point

    def __post_init__(self) -> None:
        self.heartbeats = Heartbeats(self.store, self.clock)
