# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test faults [-- -k CELL] [--seed S] [--kind KIND] [--default] [--twice]``.

Run the cells of the fault matrix on all processors. With ``--soak LIVES``, run random lives of
servers instead. Print the share of cells that passed, and for each failed cell the problem and a
command that repeats the cell.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial

from common import __version__
from tests import statements
from tests.fault_matrix.cells import Kind, cells
from tests.fault_matrix.default_set import default_cells
from tests.fault_matrix.known import KNOWN, WAIVED, find_waiver
from tests.fault_matrix.run import Outcome, run
from tests.fault_matrix.soak import run_life

CHUNK = 8
#: Seconds between two lines of progress.
PROGRESS_SECONDS = 20


def main() -> int:
    """Run the selected cells or lives, and return 1 if one failed."""
    if sys.argv[1:3] == ["--tier", "1"]:
        from tests.fault_matrix.processes.__main__ import main as run_with_processes

        return run_with_processes(sys.argv[3:])
    _restart_with_fixed_hashes()
    parser = argparse.ArgumentParser(prog="./deploy/test faults --")
    parser.add_argument("--tier", choices=("0", "1"), default="0", help="1: with real processes")
    parser.add_argument(
        "-k", dest="name", default="", help="only cells whose id contains this text"
    )
    parser.add_argument("--kind", choices=[str(kind) for kind in Kind])
    parser.add_argument("--default", action="store_true", help="only cells of the default set")
    parser.add_argument("--one-of", type=int, default=1, metavar="N", help="only every N-th cell")
    parser.add_argument("--seed", type=int, default=0, help="changes the order of the processes")
    parser.add_argument(
        "--twice", action="store_true", help="inject a second fault, drawn by the seed"
    )
    parser.add_argument(
        "--soak", type=int, metavar="LIVES", help="run so many lives instead of cells"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "-v", dest="long", action="store_true", help="print the tracebacks of failures"
    )
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    statements.share()
    if options.soak is not None:
        return _run_lives(options)
    selected = [
        cell
        for cell in (default_cells(cells()) if options.default else cells())
        if options.name in cell.id
        and options.kind in (None, str(cell.kind))
        and not find_waiver(cell.id)
    ]
    selected = selected[:: options.one_of]
    began = time.monotonic()
    if len(selected) == 1:
        outcomes = [run(selected[0], options.seed, options.twice)]
        options.long = True
        _print_problem(outcomes[0], options)
    else:
        with ProcessPoolExecutor(options.jobs) as pool:
            outcomes, progress = [], Progress("cells", len(selected))
            run_cell = partial(run, seed=options.seed, twice=options.twice)
            for outcome in pool.map(run_cell, selected, chunksize=CHUNK):
                outcomes.append(outcome)
                _print_problem(outcome, options)
                progress.count(outcome.problem)
    _print_summary(outcomes)
    print(f"{time.monotonic() - began:.0f} s on {options.jobs} processors, seed {options.seed}")
    return 1 if any(outcome.problem for outcome in outcomes) else 0


def _print_problem(outcome: Outcome, options: argparse.Namespace) -> None:
    if not outcome.problem:
        return
    twice = " --twice" if options.twice else ""
    seed = f" --seed {options.seed}" if options.seed else ""
    print(
        f"{outcome.cell.id}{f' and {outcome.second.id}' if outcome.second else ''}\n    {outcome.problem}"
    )
    print(f"    ./deploy/test faults -- -k {outcome.cell.id}{twice}{seed}")
    if options.long:
        print(outcome.story)
    sys.stdout.flush()


class Progress:
    """Prints the progress of a run every ``PROGRESS_SECONDS``."""

    def __init__(self, unit: str, total: int) -> None:
        self._unit, self._total, self._done, self._failed = unit, total, 0, 0
        self._began = self._reported_at = time.monotonic()

    def count(self, problem: str) -> None:
        """Count a cell or life, and print the progress if a line is due."""
        self._done += 1
        self._failed += bool(problem)
        at = time.monotonic()
        if at - self._reported_at < PROGRESS_SECONDS:
            return
        self._reported_at, seconds = at, at - self._began
        left = seconds * (self._total - self._done) / self._done
        print(
            f"{self._done} of {self._total} {self._unit}, {self._failed} failed, {seconds:.0f} s; "
            f"about {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def _run_lives(options: argparse.Namespace) -> int:
    """Run a life for each seed, and return 1 if one failed."""
    began, seeds = time.monotonic(), range(options.seed, options.seed + options.soak)
    lives, progress = [], Progress("lives", options.soak)
    with ProcessPoolExecutor(options.jobs) as pool:
        for life in pool.map(run_life, seeds):
            lives.append(life)
            progress.count(life.problem)
            if life.problem:
                print(f"life {life.seed}\n    {life.problem}")
                print(f"    ./deploy/test faults -- --soak 1 --seed {life.seed}", flush=True)
                if options.long or options.soak == 1:
                    print(life.story)
    failed = sum(bool(life.problem) for life in lives)
    print(
        f"soak {len(lives) - failed}/{len(lives)} lives · {sum(life.requests for life in lives)} requests · "
        f"{sum(life.faults for life in lives)} faults · seeds {seeds.start} to {seeds.stop - 1} · "
        f"version {__version__} · {datetime.now(UTC).date()}"
    )
    print(f"{time.monotonic() - began:.0f} s on {options.jobs} processors")
    return 1 if failed else 0


def _print_summary(outcomes: list[Outcome]) -> None:
    failures = [outcome for outcome in outcomes if outcome.problem]
    for kind in Kind:
        outcomes_of_kind = [outcome for outcome in outcomes if outcome.cell.kind is kind]
        if outcomes_of_kind:
            passed_of_kind = sum(not outcome.problem for outcome in outcomes_of_kind)
            print(f"{kind:<12} {passed_of_kind:5} of {len(outcomes_of_kind):5}")
    kinds = Counter(
        (outcome.cell.fault if outcome.cell.kind is not Kind.PAIR else "pair")
        for outcome in failures
    )
    for fault, count in kinds.most_common():
        print(f"    failed: {count:4} {fault}")
    known = sum(outcome.cell.id in KNOWN for outcome in failures)
    passed, total = len(outcomes) - len(failures), len(outcomes)
    share = 100 * passed / total if total else 0.0
    waived_cells = [cell.id for cell in cells() if find_waiver(cell.id)]
    print(
        f"FMC {passed}/{total} = {share:.1f} % · known to fail {known} · waived {len(waived_cells)} · "
        f"version {__version__} · {datetime.now(UTC).date()}"
    )
    if followed := sum(outcome.followed for outcome in outcomes):
        print(f"a second fault was injected in {followed} cells")
    for part, reason in WAIVED.items():
        print(f"    waived: {sum(part in cell for cell in waived_cells)} {part}: {reason}")


def _restart_with_fixed_hashes() -> None:
    """Restart Python with a fixed hash seed, so that a seed repeats the order of sets."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "tests.fault_matrix", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    sys.exit(main())
