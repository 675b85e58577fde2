# SPDX-License-Identifier: Apache-2.0
"""The sets and jobs of ./deploy/test: every test is in one of each, what ran is counted, and
nothing runs on."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from deploy.packages import ROOT
from deploy.progress import Failure
from deploy.testing import test as command
from deploy.testing.jobs import (
    REPORT_FORMAT,
    SIDE_BY_SIDE,
    FailedTest,
    Jobs,
    Result,
    pytest_command,
)
from deploy.testing.plan import (
    ALONE,
    JOBS,
    LIMITS_MINUTES,
    RINGS,
    SLICES,
    Job,
    Slice,
    job_of,
    longest_first,
)
from tests.selection import job_of_item, slice_of
from tests.waiting import await_true

TESTS = Path(__file__).parents[2]
GUEST = {"kvm_or_tcg"}


@pytest.fixture
def items(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """What this run has collected, and is therefore in a slice and in a job."""
    return request.session.items


def test_every_collected_test_is_in_one_slice_and_one_job(items: list[pytest.Item]) -> None:
    assert {slice_of(item) for item in items} <= set(Slice)
    assert {job_of_item(item) for item in items} <= {*JOBS}
    assert len({item.nodeid for item in items}) == len(items)


@pytest.mark.parametrize("ring", sorted({*RINGS} - {job.ring for job in ALONE}))
def test_jobs_of_a_ring_leave_no_test_out_and_share_none(ring: str) -> None:
    jobs = [job for job in JOBS if job.ring == ring]
    uses: list[tuple[Collection[str], Collection[str]]] = [(set(), set()), (set(), GUEST)]
    uses += [(job.fixtures, {job.mark}) for job in jobs] + [(job.fixtures, set()) for job in jobs]
    for fixtures, marks in uses:
        assert job_of(ring, fixtures, marks) in jobs
    assert len({job.name for job in JOBS}) == len(JOBS)


def test_job_of_a_guest_that_moves_is_not_that_of_others() -> None:
    found = [
        job_of("contract", fixtures, marks).name
        for fixtures, marks in (
            ({"pair", "tmp_path"}, GUEST),
            ({"rig"}, GUEST),
            ({"pair"}, set()),
            ({"store", "servers"}, set()),
        )
    ]
    assert found == ["contract-moves", "contract-guests", "contract-services", "contract-databases"]


def test_guests_that_boot_for_minutes_have_a_cloud_of_their_own() -> None:
    assert [
        job_of("e2e", fixtures, set()).name
        for fixtures in ({"debians", "cloud", "first_up"}, {"cloud", "first_up"})
    ] == ["e2e-debian", "e2e-cloud"]


def test_job_of_network_hosts_reads_only_their_files() -> None:
    networks = next(job for job in JOBS if job.name == "contract-networks")
    assert [networks.reads(name) for name in ("test_network_host_life.py", "test_store.py")] == [
        True,
        False,
    ]


def test_jobs_are_started_the_longest_first() -> None:
    assert {*longest_first(JOBS)} == {*JOBS} and all(job.seconds for job in JOBS)
    assert [
        job.name
        for job in longest_first(
            [Job("unit", "a", seconds=1), Job("unit", "b"), Job("unit", "c", seconds=3)]
        )
    ] == ["c", "a", "b"]


class Marked:
    """A test with this mark."""

    nodeid = "tests/api/test_x.py::test_x"

    def __init__(self, *names: object) -> None:
        self._mark = pytest.mark.slice(*names).mark

    def get_closest_marker(self, name: str) -> pytest.Mark:
        assert name == "slice"
        return self._mark


def test_mark_that_names_no_slice_ends_the_collection() -> None:
    assert slice_of(Marked("guests")) is Slice.GUESTS  # type: ignore[arg-type]
    for names in ((), ("gests",), ("guests", "moves")):
        with pytest.raises(pytest.UsageError, match=r"test_x: slice.* is none of default, guests"):
            slice_of(Marked(*names))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    [["frobnicate"], ["all", "unit"], ["guests", "moves"], ["ci"], ["moves", "--", "-k", "x"]],
)
def test_words_that_mean_nothing_together_are_refused(words: list[str]) -> None:
    with pytest.raises(Failure, match="Not understood"):
        command.run(words)


def test_tox_has_an_environment_for_each_set_and_ring() -> None:
    """The environment of the ring "lint" is tox's own."""
    lines = (ROOT / "tox.ini").read_text().splitlines()
    [names] = [
        line.removeprefix("[testenv:{").removesuffix("}]")
        for line in lines
        if line.startswith("[testenv:{")
    ]
    assert sorted(names.split(",")) == sorted({*LIMITS_MINUTES, *SLICES, *RINGS} - {"lint"})


# --- jobs side by side ---
def job(name: str) -> Job:
    return Job("unit", name)


def running(folder: Path, code: dict[str, str]) -> Jobs:
    """Jobs that run this Python."""

    def line(job: Job, report: Path) -> Sequence[str]:
        return [sys.executable, "-c", code[job.name], str(report)]

    return Jobs(folder, line, lambda job: {**os.environ, "MINE": job.name})


def results(jobs: Jobs, *names: str) -> dict[str, Result]:
    return {result.job.name: result for result in jobs.run([job(name) for name in names])}


def test_jobs_end_with_their_status_and_their_words(tmp_path: Path) -> None:
    found = results(
        running(
            tmp_path,
            {
                "good": "import os; print('I am', os.environ['MINE'])",
                "bad": "raise SystemExit('no')",
                "empty": "exit(5)",
            },
        ),
        "good",
        "bad",
        "empty",
    )
    assert {name: (one.word, one.is_well) for name, one in found.items()} == {
        "good": ("passed", True),
        "bad": ("FAILED", False),
        "empty": ("no tests", True),
    }
    assert found["good"].log.read_text() == "I am good\n" and found["bad"].failures() == "no\n"
    assert (found["bad"].passed, found["bad"].failed) == (0, 1)
    assert found["bad"].failed_tests() == [FailedTest("bad (status 1: no)", "./deploy/test unit")]


def test_job_cpu_seconds_include_its_process(tmp_path: Path) -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass"
    busy = results(running(tmp_path, {"busy": code}), "busy")["busy"]
    assert 0.5 <= busy.cpu_seconds < 2


CASES = """
import pytest
def test_good(): ...
@pytest.mark.parametrize("word", ["it's"])
def test_bad(word): assert 1 == 2
@pytest.mark.skip("no moon")
def test_skipped(): ...
@pytest.fixture
def broken(): raise OSError("gone")
class TestMany:
    def test_broken(self, broken): ...
"""


def test_report_lists_each_failed_test_with_its_command(tmp_path: Path) -> None:
    mixed = _run_file(tmp_path, CASES)
    assert (mixed.passed, mixed.failed, [case.skipped for case in mixed.skipped]) == (
        1,
        2,
        ["no moon"],
    )
    assert mixed.failed_tests() == [
        FailedTest(
            "test_cases.py::test_bad[it's]",
            """./deploy/test unit -- 'test_cases.py::test_bad[it'"'"'s]'""",
        ),
        FailedTest(
            "test_cases.py::TestMany::test_broken",
            "./deploy/test unit -- test_cases.py::TestMany::test_broken",
        ),
    ]
    assert mixed.finished_tests() == 4
    failures = mixed.failures()
    assert failures.startswith("=") and "assert 1 == 2" in failures and "OSError: gone" in failures


def test_report_lists_uncollectable_file_as_failed(tmp_path: Path) -> None:
    broken = _run_file(tmp_path, "import nowhere_to_be_found")
    assert not broken.is_well
    assert broken.failed_tests() == [
        FailedTest("test_cases.py", "./deploy/test unit -- test_cases.py")
    ]


def test_named_test_runs_instead_of_its_whole_ring() -> None:
    test = "tests/unit/test_x.py::test_y"
    assert pytest_command(job("one"), None, test)[3:] == ["-q", test]
    assert pytest_command(job("one"), None, "-k", "y")[3:] == ["-q", "tests/unit", "-k", "y"]


def _run_file(folder: Path, text: str) -> Result:
    (folder / "test_cases.py").write_text(text)
    options = ["-q", "-p", "no:cacheprovider", "-o", REPORT_FORMAT, "--rootdir", str(folder)]
    code = f"import sys, pytest; sys.exit(pytest.main([*{options!r}, '--junitxml', sys.argv[1]]))"
    code = (
        f"import os; os.chdir({str(folder)!r}); os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'; "
        + code
    )
    return results(running(folder, {"mixed": code}), "mixed")["mixed"]


def test_job_that_cannot_be_prepared_ends_the_run(tmp_path: Path) -> None:
    def refuse(job: Job) -> dict[str, str]:
        raise Failure("no server", "start one")

    jobs = Jobs(tmp_path, lambda job, report: [sys.executable, "-c", ""], refuse)
    with pytest.raises(Failure, match="no server"):
        list(jobs.run([job("one")]))


def test_run_that_is_given_up_interrupts_its_jobs_and_begins_no_more(tmp_path: Path) -> None:
    waits = (
        "import sys, signal, pathlib\n"
        "def tidy(*_): pathlib.Path(sys.argv[1]).write_text('tidied'); sys.exit(2)\n"
        "signal.signal(signal.SIGINT, tidy)\n"
        "pathlib.Path(sys.argv[1] + '.begun').touch()\n"
        "while True: signal.pause()\n"
    )
    names = [f"waits-{number}" for number in range(2 * SIDE_BY_SIDE)]
    # A job of its own process, which nobody can tell that another has begun.
    jobs = running(
        tmp_path,
        {
            **dict.fromkeys(names, waits),
            "quick": "import pathlib, time\n"
            f"while not list(pathlib.Path({str(tmp_path)!r}).glob('*.begun')): time.sleep(0.01)",
        },
    )
    run = jobs.run([job("quick"), *map(job, names)])
    assert next(run).job.name == "quick"

    def begun() -> list[Path]:
        return list(tmp_path.glob("*.begun"))

    # an interpreter that only starts may miss a signal
    await_true(lambda: len(begun()) == SIDE_BY_SIDE, 60, begun)
    run.close()
    tidied = [path for path in tmp_path.glob("*.xml") if path.read_text() == "tidied"]
    assert len(tidied) == len(begun()) == SIDE_BY_SIDE
