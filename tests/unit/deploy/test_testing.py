# SPDX-License-Identifier: Apache-2.0
"""The sets and jobs of ./deploy/test.

The tests cover the assignment of tests, the results of jobs, and the end of interrupted runs.
"""

from __future__ import annotations

import os
import subprocess
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
    """Return the tests that this run collected."""
    return request.session.items


def test_slices_and_jobs_contain_each_collected_test_once(items: list[pytest.Item]) -> None:
    assert {slice_of(item) for item in items} <= set(Slice)
    assert {job_of_item(item) for item in items} <= {*JOBS}
    assert len({item.nodeid for item in items}) == len(items)


@pytest.mark.parametrize("ring", sorted({*RINGS} - {job.ring for job in ALONE}))
def test_jobs_of_ring_divide_its_tests_completely(ring: str) -> None:
    jobs = [job for job in JOBS if job.ring == ring]
    uses: list[tuple[Collection[str], Collection[str]]] = [(set(), set()), (set(), GUEST)]
    uses += [(job.fixtures, {job.mark}) for job in jobs] + [(job.fixtures, set()) for job in jobs]
    for fixtures, marks in uses:
        assert job_of(ring, fixtures, marks) in jobs
    assert len({job.name for job in JOBS}) == len(JOBS)


def test_contract_tests_of_moves_guests_services_stores_have_a_job_each() -> None:
    job_names = [
        job_of("contract", fixtures, marks).name
        for fixtures, marks in (
            ({"pair", "tmp_path"}, GUEST),
            ({"rig"}, GUEST),
            ({"pair"}, set()),
            ({"store", "servers"}, set()),
        )
    ]
    assert job_names == [
        "contract-moves",
        "contract-guests",
        "contract-services",
        "contract-databases",
    ]


def test_tests_with_debian_guests_belong_to_separate_job() -> None:
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


def test_jobs_start_longest_first() -> None:
    assert {*longest_first(JOBS)} == {*JOBS} and all(job.seconds for job in JOBS)
    assert [
        job.name
        for job in longest_first(
            [Job("unit", "a", seconds=1), Job("unit", "b"), Job("unit", "c", seconds=3)]
        )
    ] == ["c", "a", "b"]


class MarkedItem:
    """A collected test with the mark ``slice``."""

    nodeid = "tests/api/test_x.py::test_x"

    def __init__(self, *names: object) -> None:
        self._mark = pytest.mark.slice(*names).mark

    def get_closest_marker(self, name: str) -> pytest.Mark:
        assert name == "slice"
        return self._mark


def test_slice_mark_without_exactly_one_known_slice_ends_collection() -> None:
    assert slice_of(MarkedItem("guests")) is Slice.GUESTS  # type: ignore[arg-type]
    for names in ((), ("gests",), ("guests", "moves")):
        with pytest.raises(pytest.UsageError, match=r"test_x: slice.* is none of default, guests"):
            slice_of(MarkedItem(*names))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    [["frobnicate"], ["all", "unit"], ["guests", "moves"], ["ci"], ["moves", "--", "-k", "x"]],
)
def test_test_command_refuses_unknown_and_conflicting_arguments(words: list[str]) -> None:
    with pytest.raises(Failure, match="Invalid arguments"):
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


def make_jobs(folder: Path, code: dict[str, str]) -> Jobs:
    """Return Jobs that run the Python code given for each job's name."""

    def line(job: Job, report: Path) -> Sequence[str]:
        return [sys.executable, "-c", code[job.name], str(report)]

    return Jobs(folder, line, lambda job: {**os.environ, "MINE": job.name})


def run_jobs(jobs: Jobs, *names: str) -> dict[str, Result]:
    return {result.job.name: result for result in jobs.run([job(name) for name in names])}


def test_job_results_have_outcome_word_status_and_log(tmp_path: Path) -> None:
    outcomes = run_jobs(
        make_jobs(
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
    assert {name: (outcome.word, outcome.is_well) for name, outcome in outcomes.items()} == {
        "good": ("passed", True),
        "bad": ("FAILED", False),
        "empty": ("no tests", True),
    }
    assert (
        outcomes["good"].log.read_text() == "I am good\n" and outcomes["bad"].failures() == "no\n"
    )
    assert (outcomes["bad"].passed_count, outcomes["bad"].failed_count) == (0, 1)
    assert outcomes["bad"].failed_tests() == [
        FailedTest("bad (status 1: no)", "./deploy/test unit")
    ]


def test_job_cpu_seconds_include_its_process(tmp_path: Path) -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass"
    busy = run_jobs(make_jobs(tmp_path, {"busy": code}), "busy")["busy"]
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
    mixed = _run_test_file(tmp_path, CASES)
    assert (
        mixed.passed_count,
        mixed.failed_count,
        [case.skipped for case in mixed.skipped_cases],
    ) == (
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
    broken = _run_test_file(tmp_path, "import nowhere_to_be_found")
    assert not broken.is_well
    assert broken.failed_tests() == [
        FailedTest("test_cases.py", "./deploy/test unit -- test_cases.py")
    ]


def test_named_test_runs_instead_of_its_whole_ring() -> None:
    test = "tests/unit/test_x.py::test_y"
    assert pytest_command(job("one"), None, test)[3:] == ["-q", test]
    assert pytest_command(job("one"), None, "-k", "y")[3:] == ["-q", "tests/unit", "-k", "y"]


def _run_test_file(folder: Path, text: str) -> Result:
    (folder / "test_cases.py").write_text(text)
    options = ["-q", "-p", "no:cacheprovider", "-o", REPORT_FORMAT, "--rootdir", str(folder)]
    code = f"import sys, pytest; sys.exit(pytest.main([*{options!r}, '--junitxml', sys.argv[1]]))"
    code = (
        f"import os; os.chdir({str(folder)!r}); os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'; "
        + code
    )
    return run_jobs(make_jobs(folder, {"mixed": code}), "mixed")["mixed"]


def test_jobs_run_raises_failure_when_environment_of_job_fails(tmp_path: Path) -> None:
    def refuse(job: Job) -> dict[str, str]:
        raise Failure("no server", "start one")

    jobs = Jobs(tmp_path, lambda job, report: [sys.executable, "-c", ""], refuse)
    with pytest.raises(Failure, match="no server"):
        list(jobs.run([job("one")]))


def test_jobs_close_interrupts_running_jobs_and_starts_no_more(tmp_path: Path) -> None:
    waiting_code = (
        "import sys, signal, pathlib\n"
        "def tidy(*_): pathlib.Path(sys.argv[1]).write_text('tidied'); sys.exit(2)\n"
        "signal.signal(signal.SIGINT, tidy)\n"
        "pathlib.Path(sys.argv[1] + '.begun').touch()\n"
        "while True: signal.pause()\n"
    )
    names = [f"waits-{number}" for number in range(2 * SIDE_BY_SIDE)]
    # The quick job is a process of its own, so it watches for the files of the others.
    jobs = make_jobs(
        tmp_path,
        {
            **dict.fromkeys(names, waiting_code),
            "quick": "import pathlib, time\n"
            f"while not list(pathlib.Path({str(tmp_path)!r}).glob('*.begun')): time.sleep(0.01)",
        },
    )
    run = jobs.run([job("quick"), *map(job, names)])
    assert next(run).job.name == "quick"

    def list_begun() -> list[Path]:
        return list(tmp_path.glob("*.begun"))

    # A Python interpreter can miss a signal while it starts.
    await_true(lambda: len(list_begun()) == SIDE_BY_SIDE, 60, list_begun)
    run.close()
    tidied = [path for path in tmp_path.glob("*.xml") if path.read_text() == "tidied"]
    assert len(tidied) == len(list_begun()) == SIDE_BY_SIDE


def test_job_can_be_interrupted_when_the_command_runs_in_the_background() -> None:
    """A shell ignores SIGINT in a background command, and processes inherit that."""
    code = (
        "import signal, subprocess, sys\n"
        "from deploy.testing.test import handle_signals\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "handle_signals()\n"
        "sys.exit(subprocess.call([sys.executable, '-c', 'import signal, sys; "
        "sys.exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)']))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
