# SPDX-License-Identifier: Apache-2.0
"""A few cells of the fault matrix with real processes, so that what runs them is kept whole, and
what such cells have found stays mended, and what a bystander sees meanwhile. All of them:
``./deploy/test faults -- --tier 1``."""

from __future__ import annotations

import pytest

from tests.fault_matrix.cells import cells
from tests.fault_matrix.processes.blast_radius import Bystander, line, problems
from tests.fault_matrix.processes.run import run, slow
from tests.fault_matrix.processes.world import world

pytestmark = pytest.mark.slice("operations")
CELLS = (
    "stop/stop/conductor-kill-mid",
    "resize/install/agent-kill-mid",
    "pause/pause/request-lost",
    "suspend/accept/api-kill-after-commit",
    "create/accept/client-retries",
    "rebuild/rebuild/delete-while-commanded",
    "live_migrate/connect_there/service-did-it-unanswered",
)


def test_processes_die_at_their_points() -> None:
    every = {cell.id: cell for cell in cells()}
    with world("sqlite") as made:
        bystander = Bystander(made)
        bystander.start()
        try:
            outcomes = [run(made, every[cell]) for cell in CELLS]
        finally:
            seen = bystander.end()
        assert [one for one in outcomes if one.problem] == []
        assert problems(seen, slow()) == [], line(seen)
        assert made.findings() == []
        assert [*made.doubled, *made.folder.violations()] == []
