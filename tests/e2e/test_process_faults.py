# SPDX-License-Identifier: Apache-2.0
"""Some cells of the fault matrix with real processes, and the observations of another client.

The cells test the matrix itself, and defects that were found with such cells. All cells run with
``./deploy/test faults -- --tier 1``.
"""

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


def test_selected_cells_of_fault_matrix_pass_with_real_processes() -> None:
    cells_by_id = {cell.id: cell for cell in cells()}
    with world("sqlite") as faulty_cloud:
        bystander = Bystander(faulty_cloud)
        bystander.start()
        try:
            outcomes = [run(faulty_cloud, cells_by_id[cell]) for cell in CELLS]
        finally:
            observations = bystander.end()
        assert [outcome for outcome in outcomes if outcome.problem] == []
        assert problems(observations, slow()) == [], line(observations)
        assert faulty_cloud.findings() == []
        assert [*faulty_cloud.doubled, *faulty_cloud.folder.violations()] == []
