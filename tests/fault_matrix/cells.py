# SPDX-License-Identifier: Apache-2.0
"""The cells of the fault matrix, made from the registry: which faults a step can meet follows from
what the step declares, so that a new step brings its cells with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from common.domain import states
from conductor.engine.step import AnyStep
from conductor.steps.cleanups import REMEDIES
from conductor.workflows import WORKFLOWS


class Kind(StrEnum):
    """What a fault happens to."""

    ACCEPT = "accept"  # the transaction that earns the 202
    TRANSACTION = "transaction"  # a step's own part of a transaction
    SCHEDULE = "schedule"  # a question to the scheduler
    COMMAND = "command"  # a command to a host
    EXTERNAL = "external"  # a call to a service
    UNDO = "undo"  # the way back of a step
    CLEANUP = "cleanup"  # what a neighbour has still to remove
    DEBT = "debt"  # what a host has still to remove, which was dead
    PAIR = "pair"  # another action comes while this one is in hand


_DATABASE = (
    "database-drops-before-commit",
    "database-commits-unanswered",
    "database-loses-commit-unanswered",
    "database-deadlock",
    "database-restarts",
    "database-lock-times-out",
)
_COMMANDED = (
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
#: Of debts of a server that is there.
_OF_SERVERS_THERE = ("delete-while-removing", "moves-back-while-removing")
#: Workflows that leave a debt when their host is dead.
INDEBTED = ("confirm_resize", "evacuate", "delete")
#: What can go wrong, by kind.
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
    Kind.COMMAND: _COMMANDED,
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
    Kind.DEBT: (
        "remover-kill-before",
        "remover-kill-mid",
        "remover-kill-after",
        "removal-refused",
        "collector-kill-mid",
        "collector-kill-after",
        "remover-sleeps-past-lease",
        "registers-while-removing",
        *_OF_SERVERS_THERE,
    ),
    Kind.PAIR: (),  # each has the name of the second action
}


@dataclass(frozen=True)
class Cell:
    """One fault at one place."""

    workflow: str
    step: str
    kind: Kind
    fault: str

    @property
    def id(self) -> str:
        return f"{self.workflow}/{self.step}/{self.fault}"


def kinds_of(step: AnyStep) -> Iterator[Kind]:
    """What a step is made of, by its own fields."""
    if step.prepare:
        yield Kind.SCHEDULE
    if step.call:
        yield Kind.EXTERNAL
    if step.command:
        yield Kind.COMMAND
    if step.apply or step.on_result:
        yield Kind.TRANSACTION


def has_undo(step: AnyStep) -> bool:
    """Is there a way back from it?"""
    return bool(step.undo or step.undo_call or step.undo_command)


#: The requests that begin a workflow, by its name, as scenarios have them; a workflow that another
#: one goes over to is asked for by the other's name.
ASKED = {
    str(row.workflow): row.key + (f":{row.when[1]}" if row.when else "")
    for row in reversed(states.ACTIONS)
    if row.workflow
}


def cells() -> list[Cell]:
    """All of them, in the order of the registry."""
    return [*_accepts(), *_steps(), *_cleanups(), *_debts(), *_pairs()]


def _accepts() -> Iterator[Cell]:
    for name in ASKED:
        for fault in FAULTS[Kind.ACCEPT]:
            yield Cell(name, "accept", Kind.ACCEPT, fault)


def _steps() -> Iterator[Cell]:
    for workflow in WORKFLOWS.values():
        for step in workflow.steps:
            for kind in (*kinds_of(step), *([Kind.UNDO] if has_undo(step) else [])):
                for fault in FAULTS[kind]:
                    yield Cell(workflow.name, step.name, kind, fault)


def _cleanups() -> Iterator[Cell]:
    for kind in REMEDIES:
        for fault in FAULTS[Kind.CLEANUP]:
            yield Cell("cleanup", kind, Kind.CLEANUP, fault)


def _debts() -> Iterator[Cell]:
    for workflow in INDEBTED:
        for fault in FAULTS[Kind.DEBT]:
            if workflow != "delete" or fault not in _OF_SERVERS_THERE:
                yield Cell("debts", workflow, Kind.DEBT, fault)


def _pairs() -> Iterator[Cell]:
    for first in WORKFLOWS:
        for second in ASKED:
            yield Cell(first, "then", Kind.PAIR, second)
