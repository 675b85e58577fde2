# SPDX-License-Identifier: Apache-2.0
"""Run the jobs of ./deploy/test in parallel, and collect their results.

Each job is a process with a log and a report. Two more jobs than CPUs run at a time, because most
jobs wait for guests, timeouts and disks. When the command ends early, jobs are interrupted and
remove their clouds.
"""

from __future__ import annotations

import os
import queue
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from deploy.environment import PYTHON
from deploy.packages import ROOT
from deploy.progress import say

if TYPE_CHECKING:
    from deploy.testing.plan import Job

NO_TESTS = 5  # pytest's exit status
SIDE_BY_SIDE = (os.cpu_count() or 1) + 2
#: Seconds between two lines of progress, and for a job to remove its clouds.
PROGRESS_SECONDS, TEAR_DOWN_SECONDS = 60, 180
FAILURES = re.compile(r"^=+ (FAILURES|ERRORS) =+$", re.MULTILINE)
#: One letter per finished test in pytest's output.
PROGRESS = re.compile(rb"^([.FEsxX]+)(?: *\[ *\d+%\])?$", re.MULTILINE)
#: Attributes ``file`` of test cases exist in this format of pytest's report only.
REPORT_FORMAT = "junit_family=xunit1"


@dataclass(frozen=True)
class Case:
    """One test that ran.

    Attributes:
        id: The test's id in pytest, for example "tests/unit/test_x.py::test_y[1]".
        seconds: The duration.
        skipped: Why the test was skipped, or None.
        failed: True if the test, or the collection of the file, failed.
    """

    id: str
    seconds: float
    skipped: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class FailedTest:
    """A failed test, and the command that repeats the test."""

    #: The test's id, or the name of a job that failed without a failed test.
    what: str
    command: str


@dataclass
class Result:
    """The result of a job: pytest's exit status, durations and counts."""

    job: Job
    folder: Path
    status: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the job's process and of the children it waited for
    cases: list[Case] = field(default_factory=list)
    has_report: bool = False

    @property
    def log(self) -> Path:
        return self.folder / f"{self.job.name}.log"

    @property
    def report(self) -> Path:
        return self.folder / f"{self.job.name}.xml"

    @property
    def skipped_cases(self) -> list[Case]:
        return [case for case in self.cases if case.skipped is not None]

    @property
    def passed_count(self) -> int:
        if not self.has_report:
            return int(self.is_well)
        return sum(not case.failed and case.skipped is None for case in self.cases)

    @property
    def failed_count(self) -> int:
        return len(self.failed_tests())

    @property
    def word(self) -> str:
        return {0: "passed", NO_TESTS: "no tests"}.get(self.status, "FAILED")

    @property
    def is_well(self) -> bool:
        return self.status in (0, NO_TESTS)

    def read(self) -> None:
        """Set ``cases`` and ``has_report`` from pytest's report if it exists and is valid."""
        try:
            cases = ElementTree.parse(self.report).iter("testcase")  # noqa: S314 - written by our pytest
        except (FileNotFoundError, ElementTree.ParseError):
            return
        self.has_report = True
        self.cases = [_read_case(case) for case in cases]

    def failed_tests(self) -> list[FailedTest]:
        """Return the failed tests. A job that failed without a failed test counts as one test."""
        ring = f"./deploy/test {self.job.ring}"
        tests = [
            FailedTest(case.id, f"{ring} -- {shlex.quote(case.id)}")
            for case in self.cases
            if case.failed
        ]
        if not tests and not self.is_well:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            reason = f"status {self.status}: {''.join(last) or 'no output'}"
            tests = [FailedTest(f"{self.job.name} ({reason})", ring)]
        return tests

    def failures(self) -> str:
        """Return the log from pytest's first list of failures or errors to the end.

        Without such a list, return the last 20,000 characters.
        """
        text = self.log.read_text(errors="replace")
        first = FAILURES.search(text)
        return text[first.start() :] if first else text[-20_000:]

    def finished_tests(self) -> int:
        """Return about how many tests have finished so far, by the letters of pytest in the log.

        A test whose teardown fails counts twice.
        """
        return sum(map(len, PROGRESS.findall(self.log.read_bytes())))


def _read_case(element: ElementTree.Element) -> Case:
    file, module = element.get("file", ""), element.get("classname", "")
    test_id = file  # the whole file, if pytest could not collect the file
    if module:
        classes = module.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
        test_id = "::".join([file, *filter(None, classes.split(".")), element.get("name", "")])
    skip = element.find("skipped")
    return Case(
        test_id,
        float(element.get("time", 0)),
        None if skip is None else skip.get("message", ""),
        element.find("failure") is not None or element.find("error") is not None,
    )


class Jobs:
    """Run jobs in their order, at most ``SIDE_BY_SIDE`` at a time.

    Args:
        folder: The folder for logs and reports.
        command: Returns the command line of a job that writes a report to this path.
        environment: Returns the environment of a job. Called when the job starts, because it may
            start servers.
    """

    def __init__(
        self,
        folder: Path,
        command: Callable[[Job, Path], Sequence[str | Path]],
        environment: Callable[[Job], Mapping[str, str]],
    ) -> None:
        self._folder, self._command, self._environment = folder, command, environment
        self._running: dict[str, tuple[Result, subprocess.Popen[bytes]]] = {}
        self._lock, self._ending = threading.Lock(), False
        self._ended: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Run the jobs, and yield each result when its job ends.

        At most ``SIDE_BY_SIDE`` jobs run at a time. An exception at the start of a job, for example
        of its servers, is raised here. After an exception, or if the caller closes the iterator
        early, the running jobs are interrupted and the other jobs do not start.
        """
        waiting = iter(jobs)
        workers = [
            threading.Thread(target=self._work, args=(waiting,))
            for _ in range(min(SIDE_BY_SIDE, len(jobs)))
        ]
        for worker in workers:
            worker.start()
        try:
            for _ in jobs:
                yield self._next()
        finally:
            self._end()
            for worker in workers:
                worker.join()

    def _next(self) -> Result:
        while True:
            try:
                ended = self._ended.get(timeout=PROGRESS_SECONDS)
            except queue.Empty:
                with self._lock:
                    progress = [
                        f"{name} {result.finished_tests()}"
                        for name, (result, _) in self._running.items()
                    ]
                say(f"        … finished tests: {', '.join(progress)}")
                continue
            if isinstance(ended, Exception):
                raise ended
            return ended

    def _work(self, waiting: Iterator[Job]) -> None:
        while True:
            with self._lock:
                job = None if self._ending else next(waiting, None)
            if job is None:
                return
            try:
                self._ended.put(self._run(job))
            except Exception as problem:  # noqa: BLE001 - raised again where the results are awaited
                self._ended.put(problem)

    def _run(self, job: Job) -> Result:
        result = Result(job, self._folder)
        environ = dict(self._environment(job))
        began = time.monotonic()
        with result.log.open("wb") as log:
            with self._lock:
                if self._ending:
                    return result
                process = subprocess.Popen(
                    [str(part) for part in self._command(job, result.report)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    cwd=ROOT,
                    start_new_session=True,
                )
                self._running[job.name] = result, process
            result.status, result.cpu_seconds = _wait_with_usage(process)
        with self._lock:
            del self._running[job.name]
        result.seconds = time.monotonic() - began
        result.read()
        return result

    def _end(self) -> None:
        """Start no more jobs, interrupt the running jobs, and wait until they have ended.

        Jobs that have not ended after ``TEAR_DOWN_SECONDS`` are killed.
        """
        with self._lock:
            self._ending = True
            processes = [process for _, process in self._running.values()]
        for process in processes:
            _signal(process, signal.SIGINT)
        deadline = time.monotonic() + TEAR_DOWN_SECONDS
        while any(process.returncode is None for process in processes):
            if time.monotonic() > deadline:
                for process in processes:
                    _signal(process, signal.SIGKILL)
                return
            time.sleep(0.05)  # Each process is awaited by the thread that runs its job.


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Not Popen.send_signal: that method may take the exit status from ``_wait_with_usage``.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _wait_with_usage(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait for the process, and return its exit status and CPU-seconds.

    The CPU-seconds include the children that the process has waited for.
    """
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def pytest_command(job: Job, report: Path | None, *more: str) -> list[str | Path]:
    """Return the command line of a job, which runs pytest or the job's module.

    Args:
        job: The job.
        report: Path of the report that pytest writes, or None for a run in the foreground. Modules
            write no report.
        more: More arguments. If any begins with tests/, only these tests run instead of the whole
            ring. A module gets the arguments only in the foreground.
    """
    if job.module:
        return [PYTHON, "-m", job.module, *(() if report else more)]
    written = [] if report is None else [f"--junitxml={report}", "-o", REPORT_FORMAT]
    names_tests = any(word.startswith("tests/") for word in more)
    ring = [] if names_tests else [f"tests/{job.ring}"]
    return [PYTHON, "-m", "pytest", "-q", *ring, *written, *more]
