# SPDX-License-Identifier: Apache-2.0
"""The cells of the fault matrix, generated from the registry of workflows.

The declaration of a step decides which faults the step can meet, so a new step adds cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from common.domain import states
from conductor.engine.step import AnyStep
from conductor.steps.cleanups import REMEDIES
from conductor.workflows import WORKFLOWS


class Kind(StrEnum):
    """The place of a fault."""

    #: The transaction that accepts an action.
    ACCEPT = "accept"
    #: A transaction of a step.
    TRANSACTION = "transaction"
    #: A request to the scheduler.
    SCHEDULE = "schedule"
    #: A command to a host.
    COMMAND = "command"
    #: A call of an external service.
    EXTERNAL = "external"
    #: The undo of a step.
    UNDO = "undo"
    #: A pending cleanup at an external service.
    CLEANUP = "cleanup"
    #: A pending cleanup on a host that was down.
    REMOVAL = "removal"
    #: Another action, requested while this action is in progress.
    PAIR = "pair"


_DATABASE = (
    "database-drops-before-commit",
    "database-commits-unanswered",
    "database-loses-commit-unanswered",
    "database-deadlock",
    "database-restarts",
    "database-lock-times-out",
)
_OF_COMMANDS = (
    "agent-kill-before",
    "agent-kill-mid",
    "agent-kill-after",
    "conductor-kill-waiting",
    "agent-sleeps-past-lease",
    "broker-restarts",
    "request-lost",
    "reply-lost",
    "duplicated",
    "comes-after-newer-fence",
    "hypervisor-refuses",
    "hypervisor-hangs",
    "hypervisor-restarts",
    "host-gone",
    "partition-past-lease",
    "no-space",
    "delete-while-commanded",
)
#: Faults of a host's pending cleanup that need an existing server.
_OF_EXISTING_SERVERS = ("delete-while-removing", "moves-back-while-removing")
#: Workflows that leave a pending cleanup if their host is down.
WORKFLOWS_WITH_CLEANUPS = ("confirm_resize", "evacuate", "delete")
#: The faults of each kind.
FAULTS: dict[Kind, tuple[str, ...]] = {
    Kind.ACCEPT: (
        "api-kill-before-commit",
        "api-kill-after-commit",
        "api-kill-after-reply",
        *_DATABASE,
        "client-retries",
        "conflicting-request",
    ),
    Kind.TRANSACTION: (
        "conductor-kill-before",
        "conductor-kill-mid",
        "conductor-kill-after",
        "conductor-sleeps-past-lease",
        *_DATABASE,
        "delete-before-commit",
    ),
    Kind.SCHEDULE: (
        "scheduler-kill-before",
        "scheduler-kill-mid",
        "scheduler-kill-after",
        "broker-restarts-while-asked",
        "question-lost",
        "answer-lost",
        "question-doubled",
        "answer-late",
        "no-host",
        "delete-while-asked",
    ),
    Kind.COMMAND: _OF_COMMANDS,
    Kind.EXTERNAL: (
        "caller-kill-before",
        "caller-kill-mid",
        "caller-kill-after",
        "service-refuses",
        "service-silent",
        "service-did-it-unanswered",
        "service-answers-half",
        "service-answers-late",
        "service-does-it-late",
        "service-away",
        "event-doubled",
        "delete-while-called",
    ),
    Kind.UNDO: ("undo-kill-mid", "undo-refused", "undo-repeated"),
    Kind.CLEANUP: (
        "cleaner-kill-before",
        "cleaner-kill-mid",
        "cleaner-kill-after",
        "cleaning-refused",
        "cleaning-forbidden",
        "cleaning-silent",
        "cleaning-unanswered",
        "cleaning-answered-by-half",
        "cleaning-done-late",
        "delete-while-cleaning",
    ),
    Kind.REMOVAL: (
        "remover-kill-before",
        "remover-kill-mid",
        "remover-kill-after",
        "removal-refused",
        "collector-kill-mid",
        "collector-kill-after",
        "remover-sleeps-past-lease",
        "registers-while-removing",
        *_OF_EXISTING_SERVERS,
    ),
    # The fault of a pair is the workflow of the second action.
    Kind.PAIR: (),
}


@dataclass(frozen=True)
class Cell:
    """One fault at one step of one workflow."""

    workflow: str
    step: str
    kind: Kind
    fault: str

    @property
    def id(self) -> str:
        return f"{self.workflow}/{self.step}/{self.fault}"


def list_kinds(step: AnyStep) -> Iterator[Kind]:
    """Yield the kinds of faults that a step can meet, by its declaration. Undo is left out."""
    if step.prepare:
        yield Kind.SCHEDULE
    if step.call:
        yield Kind.EXTERNAL
    if step.command:
        yield Kind.COMMAND
    if step.apply or step.on_result:
        yield Kind.TRANSACTION


def has_undo(step: AnyStep) -> bool:
    """Return True if the step declares an undo."""
    return bool(step.undo or step.undo_call or step.undo_command)


#: Workflow -> the request that begins the workflow, in the form of ``Scenario.ask``. Workflows that
#: start only by a switch from another workflow are left out.
REQUESTS = {
    str(row.workflow): row.key + (f":{row.when[1]}" if row.when else "")
    for row in reversed(states.ACTIONS)
    if row.workflow
}


def cells() -> list[Cell]:
    """Return all cells in the order of the registry."""
    return [
        *_yield_accept_cells(),
        *_yield_step_cells(),
        *_yield_cleanup_cells(),
        *_yield_host_cleanup_cells(),
        *_yield_pairs(),
    ]


def _yield_accept_cells() -> Iterator[Cell]:
    for name in REQUESTS:
        for fault in FAULTS[Kind.ACCEPT]:
            yield Cell(name, "accept", Kind.ACCEPT, fault)


def _yield_step_cells() -> Iterator[Cell]:
    for workflow in WORKFLOWS.values():
        for step in workflow.steps:
            for kind in (*list_kinds(step), *([Kind.UNDO] if has_undo(step) else [])):
                for fault in FAULTS[kind]:
                    yield Cell(workflow.name, step.name, kind, fault)


def _yield_cleanup_cells() -> Iterator[Cell]:
    for kind in REMEDIES:
        for fault in FAULTS[Kind.CLEANUP]:
            yield Cell("cleanup", kind, Kind.CLEANUP, fault)


def _yield_host_cleanup_cells() -> Iterator[Cell]:
    for workflow in WORKFLOWS_WITH_CLEANUPS:
        for fault in FAULTS[Kind.REMOVAL]:
            if workflow != "delete" or fault not in _OF_EXISTING_SERVERS:
                yield Cell("removals", workflow, Kind.REMOVAL, fault)


def _yield_pairs() -> Iterator[Cell]:
    for first in WORKFLOWS:
        for second in REQUESTS:
            yield Cell(first, "then", Kind.PAIR, second)
