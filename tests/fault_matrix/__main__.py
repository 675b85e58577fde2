# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test faults [-- -k CELL] [--seed S] [--kind KIND] [--default] [--twice]``: the fault
matrix, on every processor; ``--soak LIVES``: servers' lives by chance.

Prints how many of its cells passed, and for each that did not one line and the command that runs it
again.
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
from tests.fault_matrix.known import KNOWN, WAIVED, waived
from tests.fault_matrix.run import Outcome, run
from tests.fault_matrix.soak import live

CHUNK = 8
PROGRESS_SECONDS = 20  #: between two lines that say how far it is


def main() -> int:
    """Run them and say what failed; the status is 1 then."""
    if sys.argv[1:3] == ["--tier", "1"]:
        from tests.fault_matrix.processes.__main__ import main as with_processes

        return with_processes(sys.argv[3:])
    _with_fixed_hashes()
    parser = argparse.ArgumentParser(prog="./deploy/test faults --")
    parser.add_argument("--tier", choices=("0", "1"), default="0", help="1: with real processes")
    parser.add_argument("-k", dest="name", default="", help="cells whose id has this in it")
    parser.add_argument("--kind", choices=[str(kind) for kind in Kind])
    parser.add_argument("--default", action="store_true", help="only cells of the default set")
    parser.add_argument("--one-of", type=int, default=1, metavar="N", help="each N-th of them")
    parser.add_argument("--seed", type=int, default=0, help="changes who is at work first")
    parser.add_argument("--twice", action="store_true", help="a second fault follows, by the seed")
    parser.add_argument("--soak", type=int, metavar="LIVES", help="so many lives, and no cells")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-v", dest="long", action="store_true", help="whole stories of failures")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    statements.share()
    if options.soak is not None:
        return _soak(options)
    chosen = [
        cell
        for cell in (default_cells(cells()) if options.default else cells())
        if options.name in cell.id
        and options.kind in (None, str(cell.kind))
        and not waived(cell.id)
    ]
    chosen = chosen[:: options.one_of]
    began = time.monotonic()
    if len(chosen) == 1:
        outcomes = [run(chosen[0], options.seed, options.twice)]
        options.long = True
        _tell(outcomes[0], options)
    else:
        with ProcessPoolExecutor(options.jobs) as pool:
            outcomes, progress = [], Progress("cells", len(chosen))
            todo = partial(run, seed=options.seed, twice=options.twice)
            for one in pool.map(todo, chosen, chunksize=CHUNK):
                outcomes.append(one)
                _tell(one, options)
                progress.is_over(one.problem)
    _sum_up(outcomes)
    print(f"{time.monotonic() - began:.0f} s on {options.jobs} processors, seed {options.seed}")
    return 1 if any(one.problem for one in outcomes) else 0


def _tell(one: Outcome, options: argparse.Namespace) -> None:
    if not one.problem:
        return
    twice = " --twice" if options.twice else ""
    seed = f" --seed {options.seed}" if options.seed else ""
    print(f"{one.cell.id}{f' and {one.second.id}' if one.second else ''}\n    {one.problem}")
    print(f"    ./deploy/test faults -- -k {one.cell.id}{twice}{seed}")
    if options.long:
        print(one.story)
    sys.stdout.flush()


class Progress:
    """Says now and then how far it is."""

    def __init__(self, what: str, every: int) -> None:
        self._what, self._every, self._done, self._failed = what, every, 0, 0
        self._began = self._said = time.monotonic()

    def is_over(self, problem: str) -> None:
        """One of them."""
        self._done += 1
        self._failed += bool(problem)
        at = time.monotonic()
        if at - self._said < PROGRESS_SECONDS:
            return
        self._said, seconds = at, at - self._began
        left = seconds * (self._every - self._done) / self._done
        print(
            f"{self._done} of {self._every} {self._what}, {self._failed} failed, {seconds:.0f} s; "
            f"about {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def _soak(options: argparse.Namespace) -> int:
    """Lives, each of the next seed; 1 when one of them failed."""
    began, seeds = time.monotonic(), range(options.seed, options.seed + options.soak)
    lives, progress = [], Progress("lives", options.soak)
    with ProcessPoolExecutor(options.jobs) as pool:
        for life in pool.map(live, seeds):
            lives.append(life)
            progress.is_over(life.problem)
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


def _sum_up(outcomes: list[Outcome]) -> None:
    wrong = [one for one in outcomes if one.problem]
    for kind in Kind:
        of_kind = [one for one in outcomes if one.cell.kind is kind]
        if of_kind:
            well = sum(not one.problem for one in of_kind)
            print(f"{kind:<12} {well:5} of {len(of_kind):5}")
    kinds = Counter((one.cell.fault if one.cell.kind is not Kind.PAIR else "pair") for one in wrong)
    for fault, count in kinds.most_common():
        print(f"    failed: {count:4} {fault}")
    known = sum(one.cell.id in KNOWN for one in wrong)
    passed, every = len(outcomes) - len(wrong), len(outcomes)
    share = 100 * passed / every if every else 0.0
    out = [cell.id for cell in cells() if waived(cell.id)]
    print(
        f"FMC {passed}/{every} = {share:.1f} % · known to fail {known} · waived {len(out)} · "
        f"version {__version__} · {datetime.now(UTC).date()}"
    )
    if followed := sum(one.followed for one in outcomes):
        print(f"a second fault was injected in {followed} of them")
    for part, why in WAIVED.items():
        print(f"    waived: {sum(part in cell for cell in out)} {part}: {why}")


def _with_fixed_hashes() -> None:
    """Begin anew, so that sets are walked in the same order when a seed is played again."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "tests.fault_matrix", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    sys.exit(main())
