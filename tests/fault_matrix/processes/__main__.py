# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test faults -- --tier 1 [-k CELL] [--database KIND] [--minutes N] [--go-on FILE]``.

Run the cells with real processes, in one cloud for each kind of database. Cells that kill
conductors run first, because a new conductor judges no silent host for a while. Afterwards, cells
that make a host unreachable or restart the broker run one by one, beside the other cells.

FILE gets one line per cell, so that a later run can continue an interrupted run. A failed cell runs
once more alone at the end. The summary counts the first run.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from common import __version__
from deploy.environment import VENV
from deploy.one_machine.cloud import processes
from tests.fault_matrix.cells import Cell, Kind, cells
from tests.fault_matrix.processes.blast_radius import Bystander, line, problems
from tests.fault_matrix.processes.choice import assign_to_worlds, order_cells, select_runnable
from tests.fault_matrix.processes.faults import PLANS, explain_exclusion
from tests.fault_matrix.processes.run import Outcome, is_rough, run, slow
from tests.fault_matrix.processes.world import KINDS, World, world
from tests.waiting import is_true_within

REPORT_SECONDS, JUDGE_SECONDS, AGAIN_SECONDS = 30, 60, 120
#: Share of the time for the cells that kill or suspend conductors.
FIRST_PART = 0.45
FILE = Path("/tmp/kilonova-faults-tier-1.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected cells, and return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="./deploy/test faults -- --tier 1")
    parser.add_argument(
        "-k", dest="name", default="", help="only cells whose id contains this text"
    )
    parser.add_argument("--kind", choices=[str(kind) for kind in Kind])
    parser.add_argument("--database", choices=KINDS, help="only with this database")
    parser.add_argument("--minutes", type=float, default=90, help="time after which no cell begins")
    parser.add_argument(
        "--jobs", type=int, default=4, help="number of parallel cells in each cloud"
    )
    parser.add_argument("--most", type=int, default=0, help="only the first cells of the order")
    parser.add_argument("--go-on", dest="file", type=Path, help="continue the run of this file")
    options = parser.parse_args(arguments)
    runnable_cells = select_runnable(cells())
    selected_cells = [
        cell
        for cell in order_cells(runnable_cells)
        if options.name in cell.id and options.kind in (None, str(cell.kind))
    ]
    selected_cells = selected_cells[: options.most or None]
    path = options.file or FILE
    if options.file is None:
        path.unlink(missing_ok=True)
    earlier_outcomes = (
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    )
    finished = {outcome["cell"] for outcome in earlier_outcomes}
    kinds = (options.database,) if options.database else KINDS
    shares = assign_to_worlds([cell for cell in selected_cells if cell.id not in finished], kinds)
    _print_selection(runnable_cells, selected_cells, finished)
    outcomes = [
        Outcome(**{key: outcome[key] for key in _FIELDS if key in outcome})
        for outcome in earlier_outcomes
        if "cell" in outcome
    ]
    outcomes += _run_worlds(shares, options, path)
    return _print_summary(selected_cells, outcomes)


_FIELDS = ("cell", "world", "seconds", "problem", "story", "tries")
#: In place of a cell's id: the outcome of the final check of a cloud.
END = "(the whole cloud at its end)"
#: Before a cell's id: the outcome of a repetition.
AGAIN = "(alone) "
#: In place of a cell's id: the outcome of the bystander.
BESIDE = "(a bystander)"


def _print_selection(
    runnable_cells: Sequence[Cell], selected_cells: Sequence[Cell], finished: set[str]
) -> None:
    reasons = Counter(explain_exclusion(cell) for cell in cells() if explain_exclusion(cell))
    print(
        f"{len(runnable_cells)} of {len(cells())} cells can run with processes. Selected: {len(selected_cells)}"
    )
    for reason, count in reasons.most_common():
        print(f"    not: {count:4} {reason}")
    if finished:
        print(f"    {len(finished)} of them are in the file")
    sys.stdout.flush()


# --- running ---
class CellQueue(Enum):
    """The queues of a world. Cells of the queue HOSTS run one by one."""

    CONDUCTORS, HOSTS, OTHERS = range(3)


def _run_worlds(
    shares: dict[str, list[Cell]], options: argparse.Namespace, path: Path
) -> list[Outcome]:
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    until = time.monotonic() + options.minutes * 60
    workers = [
        context.Process(target=_run_world, args=(kind, share, options.jobs, until, results))
        for kind, share in shares.items()
        if share
    ]
    for worker in workers:
        worker.start()
    outcomes: list[Outcome] = []
    reported = time.monotonic()
    total = sum(map(len, shares.values()))
    try:
        with path.open("a") as file:
            while any(worker.is_alive() for worker in workers) or not results.empty():
                try:
                    outcome = results.get(timeout=1)
                    outcomes.append(outcome)
                    print(json.dumps(asdict(outcome)), file=file, flush=True)
                    _print_problem(outcome)
                except queue.Empty:
                    pass
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    wrong = sum(bool(outcome.problem) for outcome in outcomes)
                    print(f"{datetime.now(UTC):%H:%M:%S} {len(outcomes)}/{total}, {wrong} failed")
                    sys.stdout.flush()
    finally:
        for worker in workers:
            worker.terminate() if worker.is_alive() else None
        for worker in workers:
            worker.join()
    return outcomes


def _print_problem(outcome: Outcome) -> None:
    if outcome.problem:
        replay = f"./deploy/test faults -- --tier 1 --database {outcome.world} -k {outcome.cell}"
        print(f"{outcome.cell} ({outcome.world})\n    {outcome.problem}\n    {replay}", flush=True)


def _run_world(kind: str, share: list[Cell], jobs: int, until: float, results: Any) -> None:
    """Run the cells of one world in a separate process."""
    is_over = threading.Event()

    def end(*arguments: object) -> None:
        is_over.set()
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, end)
    # The parent process handles SIGINT, and sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    try:
        with world(kind) as running_world:
            _run_share(running_world, share, jobs, until, results, is_over)
    except Exception as problem:  # noqa: BLE001  # reported as an outcome
        results.put(Outcome(END, kind, 0, f"{type(problem).__name__}: {problem}"[:900]))
    finally:
        if not is_over.is_set():
            results.close()
            results.join_thread()
        # Threads may still wait, so leave without joining them.
        os._exit(is_over.is_set())


def _run_share(
    running_world: World,
    share: list[Cell],
    jobs: int,
    until: float,
    results: Any,
    is_over: threading.Event,
) -> None:
    queues = {line: queue.SimpleQueue[Cell]() for line in CellQueue}
    for cell in share:
        queues[_choose_queue(cell)].put(cell)
    failed: list[Cell] = []

    def work(line: CellQueue, until: float) -> None:
        while time.monotonic() < until and not is_over.is_set():
            try:
                cell = queues[line].get_nowait()
            except queue.Empty:
                return
            outcome = run(running_world, cell)
            if outcome.problem:
                failed.append(cell)
            results.put(outcome)

    first = time.monotonic() + FIRST_PART * max(0.0, until - time.monotonic())
    bystander = Bystander(running_world)
    bystander.start()
    for phase, end in (
        ((CellQueue.CONDUCTORS,), first),
        ((CellQueue.HOSTS, CellQueue.OTHERS), until),
    ):
        _run_threads(work, [line for line in phase for _ in range(_count_threads(line, jobs))], end)
    _run_threads(work, [CellQueue.CONDUCTORS] * jobs, until)
    for cell in failed:
        if time.monotonic() < until + AGAIN_SECONDS:
            repetition = run(running_world, cell)
            results.put(replace(repetition, cell=AGAIN + repetition.cell))
    results.put(_judge_bystander(running_world, bystander))
    results.put(_judge_cloud(running_world))


def _choose_queue(cell: Cell) -> CellQueue:
    plan = PLANS[cell.kind](cell)
    assert plan is not None, cell.id
    if is_rough(cell, plan) or plan.broker:
        return CellQueue.HOSTS
    return CellQueue.CONDUCTORS if plan.disturbs_conductors else CellQueue.OTHERS


def _count_threads(line: CellQueue, jobs: int) -> int:
    return 1 if line is CellQueue.HOSTS else jobs


def _run_threads(
    work: Callable[[CellQueue, float], None], lines: list[CellQueue], end: float
) -> None:
    threads = [threading.Thread(target=work, args=(line, end), daemon=True) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _judge_bystander(running_world: World, bystander: Bystander) -> Outcome:
    """Return the outcome of the client without faults."""
    observations = bystander.end()
    print(f"{running_world.kind}: {line(observations)}", flush=True)
    violations = problems(observations, slow())
    return Outcome(BESIDE, running_world.kind, 0, "; ".join(violations)[:900], line(observations))


def _judge_cloud(running_world: World) -> Outcome:
    """Check the whole cloud.

    The doctor has no finding, no server ran twice, and no host accepted an older fence.
    """
    began = time.monotonic()
    output: list[str] = []

    def is_well() -> bool:
        process = subprocess.run(
            [VENV / "bin/kilonova", "doctor"],
            env=processes.make_environment(running_world.cloud),
            capture_output=True,
            text=True,
            check=False,
        )
        output[:] = [process.stdout.strip(), process.stderr.strip()]
        return process.returncode == 0 and output[0] == "all is well"

    violations = [*running_world.doubled, *running_world.folder.violations()]
    if not is_true_within(is_well, JUDGE_SECONDS, 1):
        violations += output
    return Outcome(END, running_world.kind, time.monotonic() - began, "; ".join(violations)[:900])


# --- the summary ---
def _print_summary(selected_cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> int:
    first = {outcome.cell: outcome for outcome in outcomes if not outcome.cell.startswith("(")}
    again = {
        outcome.cell.removeprefix(AGAIN): outcome
        for outcome in outcomes
        if outcome.cell.startswith(AGAIN)
    }
    for kind in Kind:
        cells_of_kind = [cell for cell in selected_cells if cell.kind is kind]
        outcomes_here = [first[cell.id] for cell in cells_of_kind if cell.id in first]
        if cells_of_kind:
            passed_here = sum(not outcome.problem for outcome in outcomes_here)
            print(
                f"{kind:<12} {passed_here:5} of {len(outcomes_here):5} passed, of {len(cells_of_kind)}"
            )
    for name in KINDS:
        outcomes_here = [outcome for outcome in first.values() if outcome.world == name]
        seconds = sorted(outcome.seconds for outcome in outcomes_here)
        if outcomes_here:
            passed_here = sum(not outcome.problem for outcome in outcomes_here)
            median = seconds[len(seconds) // 2]
            print(
                f"{name:<12} {passed_here:5} of {len(outcomes_here):5} passed, a cell {median:.1f} s (median)"
            )
    failures = [outcome for outcome in first.values() if outcome.problem]
    if repeated := sum(outcome.tries > 1 for outcome in first.values()):
        print(
            f"    {repeated} needed several attempts, because the fault of another cell came first"
        )
    for outcome in failures:
        alone = again.get(outcome.cell)
        result = "not run again" if alone is None else "failed alone too" if alone.problem else ""
        print(f"    failed: {outcome.cell} ({outcome.world}); {result or 'passed alone'}")
    for outcome in outcomes:
        if outcome.cell == BESIDE:
            print(f"    beside, {outcome.world}: {outcome.story}")
    ends = [outcome for outcome in outcomes if outcome.cell in (END, BESIDE) and outcome.problem]
    for outcome in ends:
        print(f"    {outcome.world}: {outcome.cell}: {outcome.problem}")
    passed = len(first) - len(failures)
    share = 100 * passed / len(first) if first else 0.0
    print(
        f"tier 1: {passed}/{len(first)} = {share:.1f} % of the cells that ran, of "
        f"{len(selected_cells)} · version {__version__} · {datetime.now(UTC).date()}"
    )
    return 1 if failures or ends else 0


if __name__ == "__main__":
    sys.exit(main())
