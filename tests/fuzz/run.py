# SPDX-License-Identifier: Apache-2.0
"""Send the requests of a seed in order and report those with faulty answers.

All services are reset every ``BLOCK`` requests. To repeat one request, it is enough to begin with
its block.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.fuzz import requests, verdict
from tests.fuzz.requests import Request
from tests.surface.world import World

BLOCK = 100


@dataclass(frozen=True)
class Failure:
    """A request and the faults of its answer."""

    seed: int
    number: int
    request: Request
    faults: tuple[str, ...]
    logged: str

    @property
    def kind(self) -> tuple[str, ...]:
        """The service and the faults. One failure of each kind is enough for a report."""
        return (self.request.operation.service, *(fault[:120] for fault in self.faults))

    def __str__(self) -> str:
        return (
            f"{'; '.join(self.faults)}\n  ./deploy/test fuzz -- --seed {self.seed} --only {self.number}\n"
            f"  {self.request}"
        )


def find_failures(world: World, seed: int, numbers: Iterable[int]) -> Iterator[Failure]:
    """Send these requests of the seed and yield the failures."""
    log = verdict.Log()
    root = logging.getLogger()
    root.addHandler(log)
    before = b""
    try:
        for number in numbers:
            if number % BLOCK == 0:
                before = b""
                for site in world.sites.values():
                    site.reset()
            request = requests.make(world, seed, number)
            log.take()
            try:
                answer = requests.send(world.sites[request.operation.service], request)
                faults = verdict.faults(world, request, answer, logged := log.take(), before)
            except Exception as problem:  # noqa: BLE001 - each uncaught exception is a failure
                faults, logged = [f"raised {type(problem).__name__}: {problem}"[:300]], log.take()
            if request.persona not in verdict.TENANTS:
                before += request.text
            if faults:
                yield Failure(seed, number, request, tuple(faults), logged)
    finally:
        root.removeHandler(log)


def failures_of(world: World, seed: int, number: int) -> list[Failure]:
    """Send a request after the earlier requests of its block and return its failures."""
    numbers = range(number // BLOCK * BLOCK, number + 1)
    return [failure for failure in find_failures(world, seed, numbers) if failure.number == number]
