# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test faults [-- -k CELL] [--seed S] [--kind KIND] [--drawn]``: the fault matrix, on
every processor.

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

import sqlalchemy as sa

from tests import statements
from tests.fault_matrix.cells import Kind, cells, commit, drawn
from tests.fault_matrix.known import KNOWN, WAIVED, waived
from tests.fault_matrix.run import Outcome, run

CHUNK = 8
PROGRESS_SECONDS = 20  #: between two lines that say how far it is


def main() -> int:
    """Run them and say what failed; the status is 1 then."""
    if sys.argv[1:3] == ["--tier", "1"]:
        from tests.fault_matrix.processes.__main__ import main as with_processes

        return with_processes(sys.argv[3:])
    parser = argparse.ArgumentParser(prog="./deploy/test faults --")
    parser.add_argument("--tier", choices=("0", "1"), default="0", help="1: with real processes")
    parser.add_argument("-k", dest="name", default="", help="cells whose id has this in it")
    parser.add_argument("--kind", choices=[str(kind) for kind in Kind])
    parser.add_argument("--drawn", action="store_true", help="those that the commit draws")
    parser.add_argument("--one-of", type=int, default=1, metavar="N", help="each N-th of them")
    parser.add_argument("--seed", type=int, default=0, help="changes who is at work first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-v", dest="long", action="store_true", help="whole stories of failures")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sa.event.listen(sa.Engine, "engine_connect", statements.share)
    chosen = [
        cell
        for cell in (drawn(cells(), commit()) if options.drawn else cells())
        if options.name in cell.id
        and options.kind in (None, str(cell.kind))
        and not waived(cell.id)
    ]
    chosen = chosen[:: options.one_of]
    began = time.monotonic()
    if len(chosen) == 1:
        outcomes = [run(chosen[0], options.seed)]
        options.long = True
        _tell(outcomes[0], options)
    else:
        with ProcessPoolExecutor(options.jobs) as pool:
            outcomes, told = [], began
            for one in pool.map(partial(run, seed=options.seed), chosen, chunksize=CHUNK):
                outcomes.append(one)
                _tell(one, options)
                if time.monotonic() - told >= PROGRESS_SECONDS:
                    told = time.monotonic()
                    _say_how_far(outcomes, len(chosen), told - began)
    _sum_up(outcomes)
    print(f"{time.monotonic() - began:.0f} s on {options.jobs} processors, seed {options.seed}")
    return 1 if any(one.problem for one in outcomes) else 0


def _tell(one: Outcome, options: argparse.Namespace) -> None:
    if not one.problem:
        return
    seed = f" --seed {options.seed}" if options.seed else ""
    print(f"{one.cell.id}\n    {one.problem}\n    ./deploy/test faults -- -k {one.cell.id}{seed}")
    if options.long:
        print(one.story)
    sys.stdout.flush()


def _say_how_far(outcomes: list[Outcome], every: int, seconds: float) -> None:
    failed = sum(bool(one.problem) for one in outcomes)
    left = seconds * (every - len(outcomes)) / len(outcomes)
    print(
        f"{len(outcomes)} of {every} cells, {failed} failed, {seconds:.0f} s; about {left:.0f} s left",
        file=sys.stderr,
        flush=True,
    )


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
        f"git {commit()[:9]} · {datetime.now(UTC).date()}"
    )
    for part, why in WAIVED.items():
        print(f"    waived: {sum(part in cell for cell in out)} {part}: {why}")


if __name__ == "__main__":
    sys.exit(main())
