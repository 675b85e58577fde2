# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test [all | SLICE | RING ...] [-- PYTEST ARGUMENTS]``: run tests.

The command installs the tests' dependencies, runs the tests, and cleans up.
Without arguments: the default set, which ``.ci/run`` calls. ``all`` runs every test. A slice is a
part of the rest, a ring a folder below tests/. The rings that run only by name take arguments of
their own: ``./deploy/test tempest [GROUP ...]``, ``clients [SUITE ...]``, ``newcomer [FORM ...]``.
deploy/testing/plan.py has the sets, the jobs and their budgets. Each job gets the private servers
that the table names. The servers end with the command. With arguments of pytest, the rings run one
after the other in the foreground.
"""

from __future__ import annotations

import os
import resource
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
from deploy.testing import plan, speed, summary
from deploy.testing.jobs import NO_TESTS, Jobs, Result, pytest_command
from deploy.testing.plan import JOBS, LIMITS_MINUTES, RINGS, SLICES, Job, Set, Slice
from deploy.testing.servers import Servers

#: Without a fixed seed of hashes, a soak of the fault matrix takes another course in each run.
#: Without bytecode files, each process of a test compiles the product again.
ENVIRON = {"KILONOVA_TEST": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": ""}
#: Rings whose arguments need no ``--`` before them.
WITH_ARGUMENTS = (plan.TEMPEST.name, plan.CLIENTS.name, plan.NEWCOMER.name)


class Environment(ExitStack):
    """Starts the servers of each job, and stops them all at exit.

    Each job finds the URLs of the servers in environment variables. No two jobs share a server,
    because tests remove everything that a server contains.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._lock = folder, threading.Lock()

    def of(self, job: Job) -> dict[str, str]:
        """Start the job's servers, and return the environment variables of the job.

        This process's environment is included. Each server's URL is in KILONOVA_TEST_KIND_URL, for
        example KILONOVA_TEST_MARIADB_URL.

        Raises:
            Failure: A server does not start.
        """
        environ = {**os.environ, **ENVIRON}
        if job.servers:
            with self._lock:
                servers = self.enter_context(Servers(self._folder / job.name))
                for kind in job.servers:
                    environ[f"KILONOVA_TEST_{kind.upper()}_URL"] = servers.start(kind)
        return environ


def run(arguments: Sequence[str]) -> int:
    """Parse the command line, install the requirements, run the tests, and return the exit status.

    Raises:
        Failure: The arguments are invalid, an installation fails, or a server does not start.
    """
    names, more = _split(arguments)
    folder = Path(tempfile.mkdtemp(prefix="kn-test-", dir="/tmp"))
    jobs, slices = _jobs(names), _slices(names)
    _install({job.ring for job in jobs}, slices, folder / "install.log")
    folder.chmod(0o755)  # The servers' users reach their folders below it.
    if more or {*plan.ALONE} & {*jobs}:
        with Environment(folder) as servers:
            return _in_the_foreground(jobs, more, servers, folder)
    scale, cpu_before, began = speed.measure(), _cpu_of_children(), time.monotonic()
    chosen = [part for name in slices for part in ("--slice", name)]
    results = []
    with Environment(folder) as servers:
        side_by_side = Jobs(
            folder,
            lambda job, report: pytest_command(job, report, "--job", job.name, *chosen),
            servers.of,
        )
        for result in side_by_side.run(plan.longest_first(jobs)):
            results.append(result)
            _report(result, f"{len(results)}/{len(jobs)}")
    minutes, cpu_seconds = (time.monotonic() - began) / 60, _cpu_of_children() - cpu_before
    # The speed of a shared machine changes within minutes. The slower measurement counts.
    scale = max(scale, speed.measure())
    return summarize(results, names, minutes, cpu_seconds, scale, folder)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, more = list(arguments[:at]), list(arguments[at + 1 :])
    if names and names[0] in WITH_ARGUMENTS:
        return names[:1], names[1:] + more
    sets = [name for name in names if name in (*LIMITS_MINUTES, *SLICES)]
    if {*names} - {*RINGS, *LIMITS_MINUTES, *SLICES} or (sets and (len(names) > 1 or more)):
        raise Failure(
            f"Invalid arguments: {' '.join(arguments)}",
            f"Run ./deploy/test [{'|'.join([*LIMITS_MINUTES, *SLICES])}], or ./deploy/test "
            f"{'|'.join(RINGS)} ... [-- arguments of pytest, for instance -k name]",
        )
    return names, more


def _jobs(names: Sequence[str]) -> list[Job]:
    """Return the jobs of a set, a slice or the named rings.

    The set ``default`` has the jobs with a budget in this set. ``all`` and the slices have the jobs
    of every ring that does not run only by name.
    """
    if _set_of(names) is Set.DEFAULT:
        return [job for job in JOBS if job.budget.default]
    rings = {name for name in names if name in RINGS} or {job.ring for job in JOBS}
    return [job for job in (*JOBS, *plan.ALONE) if job.ring in rings]


def _set_of(names: Sequence[str]) -> Set | None:
    """Return the set whose budgets apply, or None for a slice, which has no budget.

    The budgets of a ring are those of ``all``.
    """
    name = names[0] if names else Set.DEFAULT
    return None if name in SLICES else Set.DEFAULT if name == Set.DEFAULT else Set.ALL


def _slices(names: Sequence[str]) -> tuple[Slice, ...]:
    chosen = _set_of(names)
    if chosen is None:
        return (Slice(names[0]),)
    return (Slice.DEFAULT,) if chosen is Set.DEFAULT else tuple(Slice)


def _install(rings: set[str], slices: Sequence[Slice], log: Path) -> None:
    needs: list[tuple[str, Callable[[], str | None]]] = [
        ("Debian packages", lambda: packages.install(packages.for_test(), log)),
        ("Python environment", lambda: environment.make(environment.TEST, log)),
    ]
    if plan.TEMPEST.ring in rings or ("e2e" in rings and plan.TEMPEST_SLICE in slices):
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
        if plan.CEILOMETER_SLICE in slices:
            needs.append(("Ceilometer", lambda: environment.make_ceilometer(log)))
    if rings & {"api", "contract", "e2e", plan.CLIENTS.ring, plan.UPGRADE.ring}:
        needs.append(("Nova's own schemas", lambda: environment.make_nova(log)))
    steps(needs)


def _in_the_foreground(
    jobs: Sequence[Job], more: Sequence[str], servers: Environment, folder: Path
) -> int:
    """Run the rings one after the other, each in one process that prints to the terminal.

    Return 1 if any ring fails, else 0. ``folder`` is removed after a success.
    """
    failed = []
    for ring in dict.fromkeys(job.ring for job in jobs):
        whole = [job for job in jobs if job.ring == ring]
        environ = {name: value for job in whole for name, value in servers.of(job).items()}
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


def _report(result: Result, number: str) -> None:
    counts = f"{result.passed_count} passed" + f", {result.failed_count} failed" * bool(
        result.failed_count
    )
    say(
        f"[{number}] {result.job.name:<20} {result.word:<9} {counts} in {result.seconds:.0f} s, "
        f"{result.cpu_seconds:.0f} s of CPU"
    )
    if not result.is_well:
        say(result.failures())


def summarize(
    results: Sequence[Result],
    names: Sequence[str],
    minutes: float,
    cpu_seconds: float,
    scale: float,
    folder: Path,
) -> int:
    """Print the summary, with a line of counts at the end, and return the exit status.

    The status is 1 if a test or job failed, or if in a CI a set used more than ``TOLERANCE`` times
    its CPU budget, else 0. If KILONOVA_TEST_SKIPPED names a file, the skipped tests are written to
    this file.

    Args:
        results: The results of all jobs.
        names: The set, slice or rings of the command line.
        minutes: Duration of the run.
        cpu_seconds: CPU-seconds of the jobs and their servers.
        scale: Factor by which the budgets are multiplied, from ``deploy.testing.speed``.
        folder: The folder with the logs, which is removed after a success.
    """
    chosen, name = _set_of(names), names[0] if names else Set.DEFAULT
    for line in ("", "longest tests", *summary.longest_lines(results)):
        say(line)
    for line in ("", *summary.skip_lines(results), ""):
        say(line)
    if path := os.environ.get("KILONOVA_TEST_SKIPPED"):
        Path(path).write_text("".join(sorted(summary.skipped_tests(results))))
    servers_cpu = cpu_seconds - sum(result.cpu_seconds for result in results)
    for line in summary.budget_lines(results, servers_cpu, chosen, scale):
        say(line)
    budget = (
        plan.SERVERS.of(chosen) + sum(r.job.budget.of(chosen) for r in results) if chosen else 0
    )
    allowed = f", of {LIMITS_MINUTES[Set(name)]} on two idle CPUs" if name in LIMITS_MINUTES else ""
    say(
        f"\n{minutes:.1f} minutes{allowed}. {cpu_seconds / 60:.1f} CPU minutes"
        + f", budget {budget * scale / 60:.1f}: {budget / 60:.1f} on the reference machine, "
        f"this machine takes {scale:.2f} times as long." * bool(budget)
    )
    is_over = bool(
        name in LIMITS_MINUTES and cpu_seconds > budget * scale * plan.TOLERANCE and _is_ci()
    )
    failed = [line for result in results for line in result.failed_tests()]
    if failed or is_over:
        say(f"\nThe logs of jobs and servers are in {folder}.")
    if is_over:
        say(
            f"FAILED The tests used more than {plan.TOLERANCE:.0%} of the CPU budget. Make the tests cheaper."
        )
    for test in failed:
        say(f"FAILED {test.what}    {test.command}")
    skipped = sum(len(result.skipped_cases) for result in results)
    say(
        f"{sum(r.passed_count for r in results)} passed, {len(failed) + is_over} failed, {skipped} skipped"
    )
    if failed or is_over:
        return 1
    shutil.rmtree(folder)
    return 0


def _is_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")


def _cpu_of_children() -> float:
    """Return the CPU-seconds of all children that this process has waited for so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def handle_signals() -> None:
    """Let SIGTERM and SIGINT interrupt this process, so that the jobs remove their clouds.

    A shell starts a command in the background with SIGINT ignored, and the jobs would inherit that.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    handle_signals()
    sys.exit(main(lambda: run(sys.argv[1:])))
