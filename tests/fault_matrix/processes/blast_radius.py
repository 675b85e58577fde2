# SPDX-License-Identifier: Apache-2.0
"""What somebody sees meanwhile whom no fault strikes: reads, and a server on a host that nobody
touches, which is paused and unpaused in turns.

An API process that is killed answers nobody until it runs again: a read is repeated as a client
does, and such silences are counted by themselves.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from common.domain import states
from tests.fault_matrix.outcome import LOCAL_SECONDS
from tests.fault_matrix.processes.trial import UNANSWERED, Trial
from tests.fault_matrix.processes.world import CALM, World
from tests.waiting import await_true, is_true_within

READS_A_SECOND, READ_SECONDS, SILENCE_SECONDS, TURN_SECONDS = 5, 1.0, 20.0, 0.5
#: What is asked in turns: ``server`` is the bystander's.
READS = ("/servers/{server}", "/servers/detail?limit=20", "/flavors")
TURNS = (("pause", states.PAUSED), ("unpause", states.ACTIVE))


@dataclass
class Seen:
    """Seconds: of reads that were answered, of stretches in which none was, of operations."""

    reads: list[float] = field(default_factory=list)
    silences: list[float] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Bystander:
    """Looks on from ``start`` to ``end``."""

    def __init__(self, world: World) -> None:
        self._trial = Trial(world, "pause", "pause", CALM)
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=one, daemon=True) for one in (self._read, self._operate)
        ]
        self.seen = Seen()

    def start(self) -> None:
        self._trial.prepare()
        for one in self._threads:
            one.start()

    def end(self) -> Seen:
        """Its server is removed."""
        self._over.set()
        for one in self._threads:
            one.join()
        self._trial.remove()
        return self.seen

    def _read(self) -> None:
        turn, silent_since = 0, None
        while not self._over.wait(1 / READS_A_SECOND):
            began = time.monotonic()
            path = READS[turn % len(READS)].format(server=self._trial.server)
            answer = self._trial.call("GET", path)
            ended = time.monotonic()
            if answer.status in UNANSWERED:
                silent_since = silent_since or began
                continue
            if silent_since is not None:
                self.seen.silences.append(ended - silent_since)
                silent_since = None
            turn += 1
            self.seen.reads.append(ended - began)
            if answer.status != 200:
                self.seen.wrong.append(f"{path} is answered with {answer.status}")

    def _operate(self) -> None:
        """One after another; the next one begins when the last one has ended."""
        turn = 0
        while not self._over.wait(TURN_SECONDS):
            wanted, state = TURNS[turn % len(TURNS)]
            try:
                await_true(
                    lambda wanted=wanted, state=state: self._is_asked(wanted, state),
                    LOCAL_SECONDS,
                    wanted,
                    0.1,
                )
                began = time.monotonic()
                is_true_within(self._trial.is_quiet, 4 * LOCAL_SECONDS, 0.05)
                self.seen.operations.append(time.monotonic() - began)
                if (found := self._trial.read_row().vm_state) != state:
                    self.seen.wrong.append(f"after {wanted}: {self._trial.story()}")
                turn = 1 if found == states.PAUSED else 0
            except AssertionError as problem:
                self.seen.wrong.append(str(problem))

    def _is_asked(self, wanted: str, state: str) -> bool:
        """Accepted, or in hand or done already: the answer to an earlier request was lost."""
        if self._trial.send(wanted).is_accepted or not self._trial.is_quiet():
            return True
        return bool(self._trial.read_row().vm_state == state)


def problems(seen: Seen, slow: float) -> list[str]:
    """What does not hold. ``slow``: how many times as long as on an idle machine things take."""
    wrong = list(seen.wrong)
    if not seen.reads or not seen.operations:
        wrong.append(
            f"looked on in vain: {len(seen.reads)} reads, {len(seen.operations)} operations"
        )
    for what, seconds, limit in (
        ("99 of 100 reads", percentile(seen.reads, 0.99), READ_SECONDS),
        ("a silence", max(seen.silences, default=0), SILENCE_SECONDS),
        ("an operation", max(seen.operations, default=0), LOCAL_SECONDS),
    ):
        if seconds > limit * slow:
            wrong.append(f"{what} took {seconds:.1f} s, more than {limit * slow:.1f}")
    return wrong


def percentile(seconds: list[float], share: float) -> float:
    """0 of nothing."""
    found = sorted(seconds)
    return found[min(len(found) - 1, int(share * len(found)))] if found else 0.0


def line(seen: Seen) -> str:
    """For whoever reads the report."""
    return (
        f"{len(seen.reads)} reads, p50 {1000 * percentile(seen.reads, 0.5):.0f} ms, "
        f"p99 {1000 * percentile(seen.reads, 0.99):.0f} ms; the API was silent {len(seen.silences)} times, "
        f"{max(seen.silences, default=0):.1f} s at most; {len(seen.operations)} operations, "
        f"{max(seen.operations, default=0):.1f} s at most"
    )
