# SPDX-License-Identifier: Apache-2.0
"""The CPU budget of ./deploy/test: the printed lines, and the failure of runs above the budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.testing import plan
from deploy.testing import test as command
from deploy.testing.jobs import Case, Result
from deploy.testing.plan import Budget, Job, Set
from deploy.testing.summary import budget_lines

JOB = Job("unit", "unit-x", budget=Budget(default=60, all=120))


def _make_result(folder: Path, cpu_seconds: float) -> Result:
    case = Case("tests/unit/test_x.py::test_y", 1.0)
    return Result(JOB, folder, seconds=30, cpu_seconds=cpu_seconds, cases=[case], has_report=True)


def test_budget_lines_scale_budgets_to_the_machine(tmp_path: Path) -> None:
    lines = [
        line.split() for line in budget_lines([_make_result(tmp_path, 90)], 30, Set.DEFAULT, 2.0)
    ]
    assert lines[1] == ["unit-x", "1", "0.5", "1.5", "2.0"]
    assert lines[2] == ["servers", "0.5", f"{plan.SERVERS.default * 2 / 60:.1f}"]


@pytest.mark.parametrize(
    ("ci", "names", "share", "status"),
    [
        ("true", [], 1.29, 0),
        ("true", [], 1.31, 1),
        ("true", ["all"], 1.31, 1),
        ("", [], 1.31, 0),
        # A single ring has no budget, because only sets have one.
        ("true", ["unit"], 1.31, 0),
    ],
)
def test_run_in_ci_fails_when_set_exceeds_cpu_budget_by_over_30_percent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ci: str,
    names: list[str],
    share: float,
    status: int,
) -> None:
    monkeypatch.setenv("CI", ci)
    chosen = Set.ALL if names else Set.DEFAULT
    cpu_seconds = share * 1.5 * (JOB.budget.of(chosen) + plan.SERVERS.of(chosen))
    result = _make_result(tmp_path, cpu_seconds)
    (tmp_path / "run").mkdir()
    assert command.summarize([result], names, 1.0, cpu_seconds, 1.5, tmp_path / "run") == status
    assert capsys.readouterr().out.splitlines()[-1] == f"1 passed, {status} failed, 0 skipped"
