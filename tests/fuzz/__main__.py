# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test fuzz -- [--seed S] [--requests N] [--raw N] [--only M | --only-raw M]``.

Send generated requests to all routes, then requests as raw bytes to the worker of all services.
Print the seed, and for each kind of failure one request with the command that repeats the request.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz import raw, run
from tests.surface.world import World

REQUESTS, RAW = 50_000, 10_000
#: Maximum number of kinds of failures to print.
SHOWN = 30
#: Number of requests between two progress lines.
EVERY = 5_000


def main() -> int:
    """Send the requests, print the failures and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="./deploy/test fuzz --")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument(
        "--only", type=int, help="judge only this request, after the earlier requests of its block"
    )
    parser.add_argument("--raw", type=int, default=RAW, metavar="N", help="number of raw requests")
    parser.add_argument("--only-raw", type=int, metavar="NUMBER", help="only this raw request")
    options = parser.parse_args()
    if options.only_raw is not None:
        return _raw(options.seed, range(options.only_raw, options.only_raw + 1))
    logging.basicConfig(handlers=[logging.NullHandler()], level=logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="kn-fuzz-") as folder, World(Path(folder)) as world:
        if options.only is not None:
            return _repeat_request(world, options.seed, options.only)
        failed = _send_all(world, options.seed, options.requests)
    return _raw(options.seed, range(options.raw)) or failed


def _repeat_request(world: World, seed: int, number: int) -> int:
    failures = run.failures_of(world, seed, number)
    for failure in failures:
        print(failure, failure.logged, sep="\n")
    if not failures:
        print(f"Request {number} of seed {seed} is answered as it may be.")
    return 1 if failures else 0


def _send_all(world: World, seed: int, most: int) -> int:
    start, kinds = time.monotonic(), Counter[tuple[str, ...]]()
    print(
        f"{most} requests over {len(world.operations) + len(world.signed)} operations, seed {seed}",
        flush=True,
    )
    for first in range(0, most, EVERY):
        for failure in run.find_failures(world, seed, range(first, min(first + EVERY, most))):
            kinds[failure.kind] += 1
            if kinds[failure.kind] == 1 and len(kinds) <= SHOWN:
                print(f"\n{failure}", flush=True)
        print(f"{min(first + EVERY, most)} requests, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{kinds.total()} failures of {len(kinds)} kinds")
    return 1 if kinds else 0


def _raw(seed: int, numbers: range) -> int:
    start, failures = time.monotonic(), 0
    with raw.serving() as port:
        wrong = raw.ambiguous(port)
        for number in numbers:
            if fault := raw.wrong_of(port, seed, number):
                failures += 1
                if failures <= SHOWN:
                    print(f"\n{fault}\n  ./deploy/test fuzz -- --seed {seed} --only-raw {number}")
    print("".join(f"\n{ambiguity}" for ambiguity in wrong), end="\n" * bool(wrong))
    print(
        f"{len(raw.REFUSED)} ambiguous requests and {len(numbers)} by chance as bytes, "
        f"{failures + len(wrong)} failures, {time.monotonic() - start:.0f} s"
    )
    return 1 if failures or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
