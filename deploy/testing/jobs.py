# SPDX-License-Identifier: Apache-2.0
"""Jobs of ./deploy/test side by side: each a process with a log and a report of its own; what came
of them.

Used by deploy/commands/test.py. As many run as there are processors and two more, since most wait:
for guests, silences and disks. When the command is ended, each job is interrupted and ends first:
it removes its clouds.
"""

from __future__ import annotations

import os
import queue
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from deploy.environment import PYTHON
from deploy.packages import ROOT
from deploy.progress import say

if TYPE_CHECKING:
    from deploy.testing.plan import Job

NO_TESTS = 5  # pytest's status
SIDE_BY_SIDE = (os.cpu_count() or 1) + 2
#: Seconds: between two lines that say how far the jobs are; what one may take to remove its clouds.
PROGRESS_SECONDS, TEAR_DOWN_SECONDS = 60, 180
FAILURES = re.compile(r"^=+ (FAILURES|ERRORS) =+$", re.MULTILINE)
#: What pytest writes of the tests that have ended, a letter each.
ENDED = re.compile(rb"^([.FEsxX]+)(?: *\[ *\d+%\])?$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One test that ran: its name, seconds, and why it was skipped."""

    name: str
    seconds: float
    skipped: str | None = None


@dataclass
class Result:
    """What came of a job."""

    job: Job
    folder: Path
    status: int = 0
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    cases: list[Case] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.job.name}.log"

    @property
    def report(self) -> Path:
        return self.folder / f"{self.job.name}.xml"

    @property
    def skipped(self) -> list[Case]:
        return [case for case in self.cases if case.skipped is not None]

    @property
    def word(self) -> str:
        return {0: "passed", NO_TESTS: "no tests"}.get(self.status, "FAILED")

    @property
    def is_well(self) -> bool:
        return self.status in (0, NO_TESTS)

    def read(self) -> None:
        """Take the figures from pytest's report, when it could write one."""
        try:
            cases = ElementTree.parse(self.report).iter("testcase")
        except (FileNotFoundError, ElementTree.ParseError):
            self.passed, self.failed = (1, 0) if self.is_well else (0, 1)
            return
        for case in cases:
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            skip = case.find("skipped")
            self.cases.append(
                Case(
                    name,
                    float(case.get("time", 0)),
                    None if skip is None else skip.get("message", ""),
                )
            )
            wrong = case.find("failure") is not None or case.find("error") is not None
            self.failed += wrong
            self.passed += not wrong and skip is None

    def failures(self) -> str:
        """The part of the log that tells what failed; all of it when pytest did not come so far."""
        text = self.log.read_text(errors="replace")
        found = FAILURES.search(text)
        return text[found.start() :] if found else text[-20_000:]

    def ended(self) -> int:
        """How many tests have ended so far, by its log."""
        return sum(map(len, ENDED.findall(self.log.read_bytes())))


class Jobs:
    """Runs jobs in their order, a few at a time. ``command`` makes a job's command line for a
    report's path; its environment is asked for when it starts, since that may take servers."""

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
        """Yields each result as soon as it is there."""
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
                        f"{name} {result.ended()}" for name, (result, _) in self._running.items()
                    ]
                say(f"        … tests that have ended: {', '.join(progress)}")
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
            result.status = process.wait()
        with self._lock:
            del self._running[job.name]
        result.seconds = time.monotonic() - began
        result.read()
        return result

    def _end(self) -> None:
        """Interrupt what still runs; what does not end then is killed."""
        with self._lock:
            self._ending = True
            left = [process for _, process in self._running.values()]
        for process in left:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + TEAR_DOWN_SECONDS
        for process in left:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def pytest_command(job: Job, report: Path | None, *more: str) -> list[str | Path]:
    """The command line of a job."""
    if job.module:
        return [PYTHON, "-m", job.module, *(() if report else more)]
    written = [] if report is None else [f"--junitxml={report}"]
    return [PYTHON, "-m", "pytest", "-q", f"tests/{job.ring}", *written, *more]


def work_of_children() -> float:
    """Seconds of CPU time that the jobs' processes have had, with the children that they waited
    for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
