# SPDX-License-Identifier: Apache-2.0
"""What a neighbour's refusal means: before the pivot a failure, after it and on the way back a pending cleanup."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from common.store.cleanups import PORTS
from conductor import endings, networks
from conductor.saga import Engine, Run, Step, Workflow
from conductor.workflows import WORKFLOWS

#: The calls to neighbours that stand after the point of no return, and so can fail nothing.
AFTER_THE_PIVOT = {
    "backup": ["rotate"], "shelve": ["unbind"], "offload": ["unbind"], "unshelve": ["forget"],
    "unshelve_here": ["forget"], "detach_interface": ["unplug"], "resize": ["plug"], "migrate": ["plug"],
    "revert_resize": ["plug"], "live_migrate": ["activate", "let_go"], "delete": ["unplug", "release", "forget"]}


@dataclass
class Head:
    """What of an action's row is read here."""

    workflow: str = "stop"
    phase: str = "do"
    id: str = "action"
    host: str | None = None
    sends: int = 0
    attempt: int = 1
    next_seq: int = 1
    locked_at: int = 0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Server:
    """What of a server's row is read here."""

    id: str = "server"
    project_id: str = "project"
    host: str = "h1"


def run(phase: str = "do") -> Run:
    made = Run(Head(phase=phase), Server(), {"problem": {"text": "It broke.", "details": "",  # type: ignore[arg-type]
                                                         "retryable": False}})
    made.fail("It is in use.")
    return made


def call(engine: Engine, run: Run) -> None:
    """What a step asks of a neighbour."""


def story(neighbour: str = networks.NETWORK, **more: Any) -> Workflow:
    return Workflow("stop", (Step("pivot", "no way back", pivot=True),
                             Step("call", "it may be refused", outside=call, neighbour=neighbour, **more)))


def test_calls_after_the_pivot_are_known() -> None:
    found = {}
    for name, workflow in WORKFLOWS.items():
        pivots = [number for number, step in enumerate(workflow.steps) if step.pivot]
        found[name] = [step.name for step in workflow.steps[pivots[0] + 1:] if step.outside] if pivots else []
    assert {name: steps for name, steps in found.items() if steps} == AFTER_THE_PIVOT


@pytest.mark.parametrize(("neighbour", "pending"), [(networks.NETWORK, [PORTS]), ("image", [])])
def test_a_refusal_after_the_pivot_fails_nothing(neighbour: str, pending: list[str]) -> None:
    made = run()
    endings.overlook(story(neighbour), 1, [made])
    assert (made.problem, made.overlooked, made.left_undone) == (None, "It is in use.", "It is in use.")
    assert [(row["kind"], row["target"], row["why"]) for row in made.pending] == [
        (kind, "server", "It is in use.") for kind in pending]


def test_other_refusals_are_failures() -> None:
    before = Workflow("stop", (Step("call", "before", outside=call), Step("pivot", "no way back", pivot=True)))
    here = Workflow("stop", (Step("pivot", "no way back", pivot=True), Step("here", "no call")))
    for workflow, index in ((before, 0), (here, 1)):
        made = run()
        endings.overlook(workflow, index, [made])
        assert (str(made.problem), made.pending) == ("It is in use.", [])


def test_a_refusal_on_the_way_back_is_no_error() -> None:
    told: list[Any] = []
    workflow = Workflow("stop", (Step("call", "it is undone by a call", undo_outside=call,
                                      neighbour=networks.NETWORK),),
                        failed=lambda tx, engine, run, problem: told.append((str(problem), dict(run.data))))
    made = run("undo")
    endings.undone(None, None, workflow, 0, made, "It is in use.")  # type: ignore[arg-type]  # no row is written
    [(problem, data)] = told
    assert (problem, "undo_failed" in data) == ("It broke.", False)
    assert [row["kind"] for row in made.pending] == [PORTS]
    assert [(event["event"], event["message"]) for event in made.events] == [("undone", "It is in use.")]
