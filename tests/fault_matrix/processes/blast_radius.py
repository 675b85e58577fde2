# SPDX-License-Identifier: Apache-2.0
"""The observations of a client whose host has no faults.

The client reads from the API, and pauses and unpauses a server in turns. A killed API answers no
request until it runs again. Then the client repeats the read, and the silence is counted
separately.
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
#: The paths of reads, in turns. ``server`` is the bystander's server.
READS = ("/servers/{server}", "/servers/detail?limit=20", "/flavors")
TURNS = (("pause", states.PAUSED), ("unpause", states.ACTIVE))


@dataclass
class Observations:
    """The observations, in seconds.

    Attributes:
        reads: Durations of answered reads.
        silences: Durations of stretches without an answer.
        operations: Durations of operations.
        wrong: Texts about wrong answers and states.
    """

    reads: list[float] = field(default_factory=list)
    silences: list[float] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Bystander:
    """The client without faults. It observes from ``start`` to ``end``."""

    def __init__(self, world: World) -> None:
        self._trial = Trial(world, "pause", "pause", CALM)
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._read, self._operate)
        ]
        self.observations = Observations()

    def start(self) -> None:
        self._trial.prepare()
        for thread in self._threads:
            thread.start()

    def end(self) -> Observations:
        """Stop the client, remove its server, and return the observations."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._trial.remove()
        return self.observations

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
                self.observations.silences.append(ended - silent_since)
                silent_since = None
            turn += 1
            self.observations.reads.append(ended - began)
            if answer.status != 200:
                self.observations.wrong.append(f"{path} is answered with {answer.status}")

    def _operate(self) -> None:
        """Pause and unpause the server. Each operation begins after the end of the last."""
        turn = 0
        while not self._over.wait(TURN_SECONDS):
            operation, state = TURNS[turn % len(TURNS)]
            try:
                await_true(
                    lambda operation=operation, state=state: self._is_requested(operation, state),
                    LOCAL_SECONDS,
                    f"{operation} is accepted",
                    0.1,
                )
                began = time.monotonic()
                is_true_within(self._trial.is_quiet, 4 * LOCAL_SECONDS, 0.05)
                self.observations.operations.append(time.monotonic() - began)
                if (vm_state := self._trial.read_row().vm_state) != state:
                    self.observations.wrong.append(f"after {operation}: {self._trial.story()}")
                turn = 1 if vm_state == states.PAUSED else 0
            except AssertionError as problem:
                self.observations.wrong.append(str(problem))

    def _is_requested(self, operation: str, state: str) -> bool:
        """Request the operation, and return True if it is accepted, in progress or done.

        It may be in progress or done because the answer to an earlier request was lost.
        """
        if self._trial.send(operation).is_accepted or not self._trial.is_quiet():
            return True
        return bool(self._trial.read_row().vm_state == state)


def problems(observations: Observations, slow: float) -> list[str]:
    """Return the violated limits, and the wrong answers and states.

    Args:
        observations: The observations of the client.
        slow: Factor for the limits, see ``run.slow``.
    """
    texts = list(observations.wrong)
    if not observations.reads or not observations.operations:
        texts.append(
            f"too few observations: {len(observations.reads)} reads, {len(observations.operations)} operations"
        )
    for name, seconds, limit in (
        ("99 of 100 reads", compute_percentile(observations.reads, 0.99), READ_SECONDS),
        ("a silence", max(observations.silences, default=0), SILENCE_SECONDS),
        ("an operation", max(observations.operations, default=0), LOCAL_SECONDS),
    ):
        if seconds > limit * slow:
            texts.append(f"{name} took {seconds:.1f} s, more than {limit * slow:.1f}")
    return texts


def compute_percentile(seconds: list[float], share: float) -> float:
    """Return a percentile, or 0 for an empty list."""
    values = sorted(seconds)
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def line(observations: Observations) -> str:
    """Return the observations as a line of the report."""
    return (
        f"{len(observations.reads)} reads, "
        f"p50 {1000 * compute_percentile(observations.reads, 0.5):.0f} ms, "
        f"p99 {1000 * compute_percentile(observations.reads, 0.99):.0f} ms; "
        f"the API was silent {len(observations.silences)} times, "
        f"{max(observations.silences, default=0):.1f} s at most; {len(observations.operations)} operations, "
        f"{max(observations.operations, default=0):.1f} s at most"
    )
