# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that selects the tests of one job, of some slices, or all.

    pytest tests/e2e --job e2e-lab --slice default --slice moves

A wrong mark ends the collection, so every test is in exactly one slice and in exactly one job.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.testing.plan import JOBS, Job, Slice, job_of

TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kilonova")
    group.addoption("--job", choices=[job.name for job in JOBS], help="only the tests of this job")
    group.addoption(
        "--slice",
        action="append",
        choices=[str(part) for part in Slice],
        dest="slices",
        help="only tests of this slice; may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "slice(name): the set that it is in, else the default one; a test's own "
        "mark counts, then its case's, then its file's",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without tests of this job."""
    only = next((job for job in JOBS if job.name == config.getoption("job")), None)
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if only and is_test and not only.reads(collection_path.name) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests outside the requested job and slices."""
    only, slices = config.getoption("job"), config.getoption("slices")
    selected, left_out = [], []
    for item in items:
        # Check all tests, so that a wrong mark is found regardless of the selection.
        part, job = slice_of(item), job_of_item(item)
        if part is Slice.DEFAULT and not job.budget.default and job in JOBS:
            raise pytest.UsageError(
                f"{item.nodeid}: the job {job.name} does not run in the default set, because "
                "deploy/testing/plan.py has no budget for that"
            )
        if not job.reads(item.path.name):
            raise pytest.UsageError(
                f"{item.nodeid}: the job {job.name} does not read this file; see Job.files in "
                "deploy/testing/plan.py"
            )
        is_selected = (slices is None or part in slices) and (only is None or job.name == only)
        (selected if is_selected else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = selected


def runs_slice(config: pytest.Config, *parts: Slice) -> bool:
    """Return True if this process runs tests of any of these slices."""
    slices = config.getoption("slices")
    return slices is None or not set(parts).isdisjoint(slices)


def slice_of(item: pytest.Item) -> Slice:
    """Return the slice of a test.

    Raises:
        pytest.UsageError: The test's mark does not name a slice.
    """
    mark = item.get_closest_marker("slice")
    if mark is None:
        return Slice.DEFAULT
    try:
        [name] = mark.args
        return Slice(name)
    except ValueError as problem:
        raise pytest.UsageError(
            f"{item.nodeid}: slice{mark.args} is none of {', '.join(Slice)}"
        ) from problem


def job_of_item(item: pytest.Item) -> Job:
    """Return the job of a test."""
    ring = item.path.relative_to(TESTS).parts[0]
    fixtures = getattr(item, "fixturenames", ())
    marks = {mark.name for mark in item.iter_markers()}
    return job_of(ring, fixtures, marks)
