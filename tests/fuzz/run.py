# SPDX-License-Identifier: Apache-2.0
"""Requests of a seed, one after the other, and those whose answers may not be.

Every ``BLOCK`` requests all services are set back, so that one request is tried again by beginning
with its block.
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
    """A request, and what is wrong with its answer."""

    seed: int
    number: int
    request: Request
    faults: tuple[str, ...]
    logged: str

    @property
    def kind(self) -> tuple[str, ...]:
        """Of several alike one is enough."""
        return (self.request.operation.service, *(fault[:120] for fault in self.faults))

    def __str__(self) -> str:
        return (
            f"{'; '.join(self.faults)}\n  ./deploy/test fuzz -- --seed {self.seed} --only {self.number}\n"
            f"  {self.request}"
        )


def numbered(world: World, seed: int, numbers: Iterable[int]) -> Iterator[Failure]:
    """Send these requests of the seed, and say which failed."""
    log = verdict.Log()
    root = logging.getLogger()
    root.addHandler(log)
    before = b""
    try:
        for number in numbers:
            if number % BLOCK == 0:
                before = b""
                for site in world.sites.values():
                    site.set_back()
            request = requests.make(world, seed, number)
            log.taken()
            try:
                answer = requests.send(world.sites[request.operation.service], request)
                faults = verdict.faults(world, request, answer, logged := log.taken(), before)
            except Exception as problem:  # noqa: BLE001 - whatever an application lets through is a failure
                faults, logged = [f"raised {type(problem).__name__}: {problem}"[:300]], log.taken()
            if request.persona not in verdict.TENANTS:
                before += request.text
            if faults:
                yield Failure(seed, number, request, tuple(faults), logged)
    finally:
        root.removeHandler(log)


def one(world: World, seed: int, number: int) -> list[Failure]:
    """One request alone, after those of its block before it."""
    numbers = range(number // BLOCK * BLOCK, number + 1)
    return [failure for failure in numbered(world, seed, numbers) if failure.number == number]
