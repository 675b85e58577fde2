# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test [all | ci | RING ...] [-- PYTEST ARGUMENTS]``: install what tests need, run them,
clean up; ``./deploy/test tempest [GROUP ...]``: the same with Tempest; ``./deploy/test clients
[SUITE ...]``: with the clients' own functional suites; ``./deploy/test newcomer [FORM ...]``: both
commands of the README on an empty Debian.

Without a word: the default set. ``all`` is every test; ``ci`` the default set and the slice that
the commit draws, which is what ``.ci/run`` calls. What is in which set, and which tests share a
process, is said in deploy/testing/plan.py. Each job gets the private servers that it names there;
they end with the command. With arguments of pytest the rings run one after the other, in the
foreground.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from deploy import environment, packages
from deploy.progress import Failure, main, say, steps
from deploy.servers import Servers
from deploy.testing import plan
from deploy.testing.jobs import NO_TESTS, Jobs, Result, pytest_command, work_of_children
from deploy.testing.plan import (
    ALL,
    CI,
    JOBS,
    LIMITS_MINUTES,
    RINGS,
    SLICES,
    Job,
    Slice,
    slice_of_commit,
)

LONGEST = 15  # tests that are named at the end
ENVIRON = {"KILONOVA_TEST": "1"}


class Environment(ExitStack):
    """What a job's process finds in its environment: the URLs of its servers, which no other job
    has, since tests remove what is not theirs alone. Leaving it stops them all."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._lock = folder, threading.Lock()

    def of(self, job: Job) -> dict[str, str]:
        """Start the job's servers."""
        environ = {**os.environ, **ENVIRON}
        if job.servers:
            with self._lock:
                servers = self.enter_context(Servers(self._folder / job.name))
                for kind in job.servers:
                    environ[f"KILONOVA_TEST_{kind.upper()}_URL"] = servers.start(kind)
        return environ


def run(arguments: Sequence[str]) -> int:
    """Parse the command line and do it."""
    names, more = _split(arguments)
    folder = Path(tempfile.mkdtemp(prefix="kn-test-", dir="/tmp"))
    jobs = _jobs(names)
    slices = _slices(names)
    _install({job.ring for job in jobs}, slices, folder / "install.log")
    began = time.monotonic()
    folder.chmod(0o755)  # users of the servers' own reach what is theirs below it
    with Environment(folder) as found:
        if more or {*plan.ALONE} & {*jobs}:
            return _in_the_foreground(jobs, more, found, folder)
        chosen = [part for one in slices for part in ("--slice", one)]
        side_by_side = Jobs(
            folder,
            lambda job, report: pytest_command(job, report, "--job", job.name, *chosen),
            found.of,
        )
        results = []
        for result in side_by_side.run(plan.longest_first(jobs)):
            results.append(result)
            _tell(result, f"{len(results)}/{len(jobs)}")
    return _summary(results, names, time.monotonic() - began, folder)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, more = list(arguments[:at]), list(arguments[at + 1 :])
    if names[:1] in ([plan.TEMPEST.name], [plan.CLIENTS.name], [plan.NEWCOMER.name]):
        return names[:1], names[1:] + more
    sets = [name for name in names if name in LIMITS_MINUTES or name in SLICES]
    if set(names) - {*RINGS, *LIMITS_MINUTES, *SLICES} or sets and (len(names) > 1 or more):
        raise Failure(
            f"Not understood: {' '.join(arguments)}",
            f"./deploy/test [{'|'.join([*LIMITS_MINUTES, *SLICES])}], or ./deploy/test "
            f"{'|'.join(RINGS)} ... [-- arguments of pytest, for instance -k name]",
        )
    return names, more


def _jobs(names: Sequence[str]) -> list[Job]:
    """Those of the rings that are named, of all when none is."""
    rings = {name for name in names if name in RINGS} or {job.ring for job in JOBS}
    return [job for job in (*JOBS, *plan.ALONE) if job.ring in rings]


def _slices(names: Sequence[str]) -> tuple[Slice, ...]:
    """What of the jobs runs; a ring that is named runs whole."""
    word = names[0] if names else Slice.DEFAULT
    if word == ALL or word in RINGS:
        return tuple(Slice)
    if word == CI:
        drawn = slice_of_commit(_commit())
        say(
            f"Besides the default set, this commit draws the slice {drawn}, one of {', '.join(SLICES)}."
        )
        return Slice.DEFAULT, drawn
    return (Slice(word),)


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=packages.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Failure(
            f"The commit is not known: {done.stderr.strip()}",
            "Run this in a clone of the repository, or name a slice: ./deploy/test "
            + "|".join(SLICES),
        )
    return done.stdout.strip()


def _install(rings: set[str], slices: Sequence[Slice], log: Path) -> None:
    needs: list[tuple[str, Callable[[], str | None]]] = [
        ("Debian packages", lambda: packages.install(packages.for_test(), log)),
        ("Python environment", lambda: environment.make(environment.TEST, log)),
    ]
    if plan.TEMPEST.ring in rings or "e2e" in rings and plan.TEMPEST_SLICE in slices:
        needs.append(("Tempest", lambda: environment.make_tempest(log)))
    if plan.INSTALL.ring in rings:
        machines = packages.for_deb() + packages.MACHINES
        needs.append(("machines to install on", lambda: packages.install(machines, log)))
    if plan.NEWCOMER.ring in rings:
        needs.append(("containers", lambda: packages.install(packages.MACHINES, log)))
    if plan.CINDER.ring in rings:
        needs.append(("Cinder", lambda: environment.make_cinder(log)))
    if plan.CLIENTS.ring in rings:
        needs.append(("clients and their suites", lambda: environment.make_clients(log)))
    if "lint" in rings:
        needs.append(("Sphinx", lambda: environment.make_docs(log)))
        needs.append(("promtool", lambda: packages.unpack_promtool(log)))
    if "contract" in rings:
        needs.append(("Placement's own tests", lambda: environment.make_oracle(log)))
        needs.append(("samples of Nova's notifications", lambda: environment.make_samples(log)))
    if rings & {"api", "contract", "e2e", plan.CLIENTS.ring}:
        needs.append(("Nova's own schemas", lambda: environment.make_nova(log)))
    steps(needs)


def _in_the_foreground(
    jobs: Sequence[Job], more: Sequence[str], found: Environment, folder: Path
) -> int:
    """Each ring in one process, which says itself what it does."""
    failed = []
    for ring in dict.fromkeys(job.ring for job in jobs):
        whole = [job for job in jobs if job.ring == ring]
        environ = {name: value for job in whole for name, value in found.of(job).items()}
        say(f"{ring} …")
        process = subprocess.Popen(
            [str(part) for part in pytest_command(whole[0], None, *more)],
            stdin=subprocess.DEVNULL,
            env=environ,
            cwd=packages.ROOT,
        )
        try:
            status = process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait()
        if status not in (0, NO_TESTS):
            failed.append(ring)
    if failed:
        say(f"\nFAILED: {', '.join(failed)}. The servers' logs are in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


def _tell(result: Result, number: str) -> None:
    counts = f"{result.passed} passed" + f", {result.failed} failed" * bool(result.failed)
    say(f"[{number}] {result.job.name:<20} {result.word:<9} {counts} in {result.seconds:.0f} s")
    if not result.is_well:
        say(result.failures())


def _summary(results: Sequence[Result], names: Sequence[str], seconds: float, folder: Path) -> int:
    cases = sorted(
        (case for result in results for case in result.cases), key=lambda case: -case.seconds
    )
    say("\nlongest tests" if cases else "")
    for case in cases[:LONGEST]:
        say(f"{case.seconds:8.1f} s  {case.name}")
    reasons: dict[str, int] = {}
    for case in cases:
        if case.skipped is not None:
            reasons[case.skipped] = reasons.get(case.skipped, 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda one: -one[1]):
        say(f"{count:8} skipped: {reason}")
    if path := os.environ.get("KILONOVA_TEST_SKIPPED"):
        skips = [f"{case.name}\t{case.skipped}\n" for case in cases if case.skipped is not None]
        Path(path).write_text("".join(sorted(skips)))
    limit = LIMITS_MINUTES.get(names[0] if names else Slice.DEFAULT)
    allowed = f", of {limit} that it may take" if limit else ""
    say(f"\n{seconds / 60:.1f} minutes{allowed}; {work_of_children() / 60:.1f} of a processor's")
    passed, failed = (
        sum(result.passed for result in results),
        sum(result.failed for result in results),
    )
    wrong = [result.job.name for result in results if not result.is_well]
    if wrong:
        say(f"FAILED: {', '.join(wrong)}. The logs of jobs and servers are in {folder}.")
    say(f"{passed} passed, {failed} failed, {sum(reasons.values())} skipped")
    if wrong:
        return 1
    shutil.rmtree(folder)
    return 0


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.exit(main(lambda: run(sys.argv[1:])))
