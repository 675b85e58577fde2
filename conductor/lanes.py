# SPDX-License-Identifier: Apache-2.0
"""Which steps are done in which lane, and what else follows from the steps' declarations alone.

Used by ``conductor.runner``, ``service`` and ``sweep``. A lane is a neighbour's, with the steps that call it, or
INSIDE, for all others.
"""
from __future__ import annotations

from collections import defaultdict

from conductor.workflows import WORKFLOWS

INSIDE = "inside"


def _lanes() -> dict[str, list[str]]:
    """The steps of each neighbour's lane."""
    found: dict[str, set[str]] = defaultdict(set)
    for workflow in WORKFLOWS.values():
        for step in workflow.steps:
            if step.outside or step.undo_outside:
                found[step.neighbour].add(step.name)
    return {neighbour: sorted(steps) for neighbour, steps in found.items()}


LANES = _lanes()
LANE_OF = {step: lane for lane, steps in LANES.items() for step in steps}
OUTSIDE_STEPS = sorted(LANE_OF)
#: (workflow, step) whose command a host that goes down has failed.
ABANDONED = sorted((workflow.name, step.name) for workflow in WORKFLOWS.values() for step in workflow.steps
                   if step.abandon)
#: (workflow, step) whose command needs what a host has that the server leaves.
READING = sorted((workflow.name, step.name) for workflow in WORKFLOWS.values() for step in workflow.steps
                 if step.reads_source)
