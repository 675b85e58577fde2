# SPDX-License-Identifier: Apache-2.0
"""Names of queues that are left out because the broker does not answer about them."""

from __future__ import annotations

import pytest

from common.rpc import silent_names
from common.rpc.silent_names import LEFT_OUT_SECONDS, REFUSED_SECONDS, SilentNames

NAMES = ("q", "q/1", "q/2")


class Time:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(silent_names, "time", clock)
    return clock


def fail(names: SilentNames, name: str, time: Time, seconds: float, error: Exception) -> None:
    """Let a request with a limit of 5 s fail after these seconds."""
    with pytest.raises(type(error)), names.request(name, 5.0):
        time.now += seconds
        raise error


def test_name_without_answer_is_left_out_for_a_while(time: Time) -> None:
    names = SilentNames()
    fail(names, "q", time, 5.0, TimeoutError())
    assert names.list_usable(NAMES) == ["q/1", "q/2"]
    time.now += LEFT_OUT_SECONDS
    assert names.list_usable(NAMES) == list(NAMES)


@pytest.mark.parametrize(
    ("seconds", "error"), [(1.0, OSError("connection lost")), (5.0, ValueError("refused"))]
)
def test_name_stays_usable_after_early_or_other_failure(
    time: Time, seconds: float, error: Exception
) -> None:
    names = SilentNames()
    fail(names, "q", time, seconds, error)
    assert names.list_usable(NAMES) == list(NAMES)


def test_name_with_answer_is_usable_again(time: Time) -> None:
    names = SilentNames()
    fail(names, "q", time, 5.0, TimeoutError())
    with names.request("q", 5.0):
        pass
    assert names.list_usable(NAMES) == list(NAMES)


def test_silent_names_list_all_names_when_every_name_is_silent(time: Time) -> None:
    names = SilentNames()
    for name in NAMES:
        fail(names, name, time, 5.0, TimeoutError())
    assert names.list_usable(NAMES) == list(NAMES)


def test_silent_names_keep_silent_name_when_broker_has_one_node(time: Time) -> None:
    names = SilentNames(has_nodes=False)
    fail(names, "q", time, 5.0, TimeoutError())
    assert names.list_usable(NAMES) == list(NAMES)


def test_only_first_name_is_usable_after_refusal(time: Time) -> None:
    names = SilentNames()
    fail(names, "q", time, 5.0, TimeoutError())
    names.refuse()
    assert names.list_usable(NAMES) == ["q"]
    time.now += REFUSED_SECONDS
    assert names.list_usable(NAMES) == list(NAMES)
