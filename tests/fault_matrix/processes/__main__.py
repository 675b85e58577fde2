# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test faults -- --tier 1 [-k CELL] [--database KIND] [--minutes N] [--go-on FILE]``:
the cells that can be, with real processes, in one cloud for each kind of database.

First those of which conductors die, then those in which hosts are lost, one by one, beside the
others: a conductor that was just started judges no host.

What came of each cell is a line of FILE, so that a run that was ended goes on where it was. A cell
that failed is run once more alone at the end; the figure counts its first run.
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
#: Of the time, for the cells of which conductors die.
FIRST_PART = 0.45
FILE = Path("/tmp/kilonova-faults-tier-1.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them and say what failed; the status is 1 then."""
    parser = argparse.ArgumentParser(prog="./deploy/test faults -- --tier 1")
    parser.add_argument("-k", dest="name", default="", help="cells whose id has this in it")
    parser.add_argument("--kind", choices=[str(kind) for kind in Kind])
    parser.add_argument("--database", choices=KINDS, help="only with this one")
    parser.add_argument("--minutes", type=float, default=90, help="then no more cells are begun")
    parser.add_argument("--jobs", type=int, default=4, help="cells side by side in each cloud")
    parser.add_argument("--most", type=int, default=0, help="so many cells, the first of the order")
    parser.add_argument("--go-on", dest="file", type=Path, help="not those that this file has")
    options = parser.parse_args(arguments)
    every = select_runnable(cells())
    chosen = [
        cell
        for cell in order_cells(every)
        if options.name in cell.id and options.kind in (None, str(cell.kind))
    ]
    chosen = chosen[: options.most or None]
    path = options.file or FILE
    if options.file is None:
        path.unlink(missing_ok=True)
    before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {one["cell"] for one in before}
    kinds = (options.database,) if options.database else KINDS
    shares = assign_to_worlds([cell for cell in chosen if cell.id not in done], kinds)
    _report_selection(every, chosen, done)
    outcomes = [
        Outcome(**{key: one[key] for key in _FIELDS if key in one})
        for one in before
        if "cell" in one
    ]
    outcomes += _run(shares, options, path)
    return _sum_up(chosen, outcomes)


_FIELDS = ("cell", "world", "seconds", "problem", "story", "tries")
#: What the end of a world is called, in place of a cell.
END = "(the whole cloud at its end)"
AGAIN = "(alone) "
#: What a bystander saw meanwhile is called, in place of a cell.
BESIDE = "(a bystander)"


def _report_selection(every: Sequence[Cell], chosen: Sequence[Cell], done: set[str]) -> None:
    out = Counter(explain_exclusion(cell) for cell in cells() if explain_exclusion(cell))
    print(f"{len(every)} of {len(cells())} cells can be run with processes; chosen: {len(chosen)}")
    for why, count in out.most_common():
        print(f"    not: {count:4} {why}")
    if done:
        print(f"    {len(done)} of them have been run")
    sys.stdout.flush()


# --- running ---
class Line(Enum):
    """Cells that wait for one another."""

    CONDUCTORS, HOSTS, OTHERS = range(3)


def _run(shares: dict[str, list[Cell]], options: argparse.Namespace, path: Path) -> list[Outcome]:
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    until = time.monotonic() + options.minutes * 60
    workers = [
        context.Process(target=_serve, args=(kind, share, options.jobs, until, results))
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
                    one = results.get(timeout=1)
                    outcomes.append(one)
                    print(json.dumps(asdict(one)), file=file, flush=True)
                    _report(one)
                except queue.Empty:
                    pass
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    wrong = sum(bool(one.problem) for one in outcomes)
                    print(f"{datetime.now(UTC):%H:%M:%S} {len(outcomes)}/{total}, {wrong} failed")
                    sys.stdout.flush()
    finally:
        for worker in workers:
            worker.terminate() if worker.is_alive() else None
        for worker in workers:
            worker.join()
    return outcomes


def _report(one: Outcome) -> None:
    if one.problem:
        replay = f"./deploy/test faults -- --tier 1 --database {one.world} -k {one.cell}"
        print(f"{one.cell} ({one.world})\n    {one.problem}\n    {replay}", flush=True)


def _serve(kind: str, share: list[Cell], jobs: int, until: float, results: Any) -> None:
    """One world's part, in a process of its own."""
    over = threading.Event()

    def end(*what: object) -> None:
        over.set()
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process tells of it
    logging.disable(logging.CRITICAL)
    try:
        with world(kind) as made:
            _play(made, share, jobs, until, results, over)
    except Exception as problem:  # noqa: BLE001  # reported as an outcome
        results.put(Outcome(END, kind, 0, f"{type(problem).__name__}: {problem}"[:900]))
    finally:
        if not over.is_set():
            results.close()
            results.join_thread()
        os._exit(over.is_set())  # whatever its threads wait for


def _play(
    made: World, share: list[Cell], jobs: int, until: float, results: Any, over: threading.Event
) -> None:
    lines = {line: queue.SimpleQueue[Cell]() for line in Line}
    for cell in share:
        lines[_line(cell)].put(cell)
    failed: list[Cell] = []

    def work(line: Line, until: float) -> None:
        while time.monotonic() < until and not over.is_set():
            try:
                cell = lines[line].get_nowait()
            except queue.Empty:
                return
            outcome = run(made, cell)
            if outcome.problem:
                failed.append(cell)
            results.put(outcome)

    first = time.monotonic() + FIRST_PART * max(0.0, until - time.monotonic())
    bystander = Bystander(made)
    bystander.start()
    for phase, end in (((Line.CONDUCTORS,), first), ((Line.HOSTS, Line.OTHERS), until)):
        _side_by_side(work, [line for line in phase for _ in range(_width(line, jobs))], end)
    _side_by_side(work, [Line.CONDUCTORS] * jobs, until)
    for cell in failed:
        if time.monotonic() < until + AGAIN_SECONDS:
            again = run(made, cell)
            results.put(replace(again, cell=AGAIN + again.cell))
    results.put(_beside(made, bystander))
    results.put(_end(made))


def _line(cell: Cell) -> Line:
    plan = PLANS[cell.kind](cell)
    assert plan is not None, cell.id
    if is_rough(cell, plan) or plan.broker:
        return Line.HOSTS
    return Line.CONDUCTORS if plan.strikes_conductors else Line.OTHERS


def _width(line: Line, jobs: int) -> int:
    return 1 if line is Line.HOSTS else jobs


def _side_by_side(work: Callable[[Line, float], None], lines: list[Line], end: float) -> None:
    threads = [threading.Thread(target=work, args=(line, end), daemon=True) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _beside(made: World, bystander: Bystander) -> Outcome:
    """What was seen of the faults by whom none struck."""
    seen = bystander.end()
    print(f"{made.kind}: {line(seen)}", flush=True)
    wrong = problems(seen, slow())
    return Outcome(BESIDE, made.kind, 0, "; ".join(wrong)[:900], line(seen))


def _end(made: World) -> Outcome:
    """The doctor, of everything; nothing ran twice, no fence was passed."""
    began = time.monotonic()
    last: list[str] = []

    def is_well() -> bool:
        done = subprocess.run(
            [VENV / "bin/kilonova", "doctor"],
            env=processes.make_environment(made.cloud),
            capture_output=True,
            text=True,
            check=False,
        )
        last[:] = [done.stdout.strip(), done.stderr.strip()]
        return done.returncode == 0 and last[0] == "all is well"

    wrong = [*made.doubled, *made.folder.violations()]
    if not is_true_within(is_well, JUDGE_SECONDS, 1):
        wrong += last
    return Outcome(END, made.kind, time.monotonic() - began, "; ".join(wrong)[:900])


# --- the figure ---
def _sum_up(chosen: Sequence[Cell], outcomes: Sequence[Outcome]) -> int:
    first = {one.cell: one for one in outcomes if not one.cell.startswith("(")}
    again = {one.cell.removeprefix(AGAIN): one for one in outcomes if one.cell.startswith(AGAIN)}
    for kind in Kind:
        of_kind = [cell for cell in chosen if cell.kind is kind]
        ran = [first[cell.id] for cell in of_kind if cell.id in first]
        if of_kind:
            well = sum(not one.problem for one in ran)
            print(f"{kind:<12} {well:5} of {len(ran):5} passed, of {len(of_kind)}")
    for name in KINDS:
        ran = [one for one in first.values() if one.world == name]
        seconds = sorted(one.seconds for one in ran)
        if ran:
            well = sum(not one.problem for one in ran)
            half = seconds[len(seconds) // 2]
            print(f"{name:<12} {well:5} of {len(ran):5} passed, a cell {half:.1f} s (median)")
    wrong = [one for one in first.values() if one.problem]
    if more := sum(one.tries > 1 for one in first.values()):
        print(f"    {more} were begun again: another cell's fault came before theirs")
    for one in wrong:
        alone = again.get(one.cell)
        word = "not run again" if alone is None else "failed alone too" if alone.problem else ""
        print(f"    failed: {one.cell} ({one.world}); {word or 'passed alone'}")
    for one in outcomes:
        if one.cell == BESIDE:
            print(f"    beside, {one.world}: {one.story}")
    ends = [one for one in outcomes if one.cell in (END, BESIDE) and one.problem]
    for one in ends:
        print(f"    {one.world}: {one.cell}: {one.problem}")
    passed = len(first) - len(wrong)
    share = 100 * passed / len(first) if first else 0.0
    print(
        f"tier 1: {passed}/{len(first)} = {share:.1f} % of the cells that were run, of "
        f"{len(chosen)} · version {__version__} · {datetime.now(UTC).date()}"
    )
    return 1 if wrong or ends else 0


if __name__ == "__main__":
    sys.exit(main())
