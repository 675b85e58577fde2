# SPDX-License-Identifier: Apache-2.0
"""Which steps are done in which lane, and what else follows from the steps' declarations alone.

Used by ``conductor.runner``, ``service`` and ``sweep``. A lane is a service's, with the steps that
call it, or ``Lane.INSIDE``, for all others.
"""

from __future__ import annotations

from collections import defaultdict

from conductor.saga import Lane
from conductor.workflows import WORKFLOWS

INSIDE = Lane.INSIDE
_STEPS = [(workflow.name, step) for workflow in WORKFLOWS.values() for step in workflow.steps]


def _lanes() -> dict[str, list[str]]:
    """The steps of each service's lane."""
    found: dict[str, set[str]] = defaultdict(set)
    for _, step in _STEPS:
        if step.call or step.undo_call:
            found[step.lane].add(step.name)
    return {lane: sorted(steps) for lane, steps in found.items()}


LANES = _lanes()
LANE_OF = {step: lane for lane, steps in LANES.items() for step in steps}
STEPS_WITH_CALLS = sorted(LANE_OF)
EVENTS = {(workflow, step.name): step.events for workflow, step in _STEPS}
#: (workflow, step) whose command a host that goes down has failed.
FAILING_WITH_HOST = sorted(
    (workflow, step.name) for workflow, step in _STEPS if step.fails_when_host_down
)
#: (workflow, step) whose command needs what a host has that the server leaves.
READING_SOURCE = sorted((workflow, step.name) for workflow, step in _STEPS if step.reads_source)
