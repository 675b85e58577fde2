# SPDX-License-Identifier: Apache-2.0
"""Verbs: what is reported of each way in which one can end, and what is never done twice."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import errors
from common.domain.models import Command
from common.domain.verbs import VERBS, Verb
from common.domain.wire import from_wire, to_wire
from compute_agent import verbs
from compute_agent.journal import Journal
from compute_agent.verb_context import MAX_DETAILS_CHARS, Cancelled, VerbContext, VerbFailed
from compute_agent.verbs import CarryOut, Outcome, Tools, carry_out
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.script import Fail, Slow
from tests.verbs import new_command, new_verb


class Rig:
    """A journal and a hypervisor with one guest."""

    def __init__(self) -> None:
        self.journal = Journal(":memory:")
        self.driver = MemoryDriver()
        self.carry_out: CarryOut = carry_out
        self.cancelled = False
        self.stored: list[bytes] = []
        self.points: list[tuple[str, str, str]] = []
        assert self.run("ensure_guest", "build") is not None

    def run(self, name: str, step: str = "step", attempt: int = 1) -> Any:
        tools = Tools(
            self.driver,
            lambda image: iter(()),
            lambda image: self.stored.extend,
            VerbContext(lambda name: None, lambda: self.cancelled),
        )
        return verbs.run(
            self.journal,
            tools,
            new_command(name, step=step, attempt=attempt, fence=2),
            new_verb(name),
            lambda *point: self.points.append(point),
            self.carry_out,
        )


def failing(problem: Exception) -> Any:
    """The result of a verb that raises this."""
    rig = Rig()
    rig.carry_out = raising(problem)
    return rig.run("ensure_paused")


def raising(problem: BaseException) -> CarryOut:
    def carry_out(tools: Tools, command: Command, verb: Verb) -> Outcome:
        raise problem

    return carry_out


@pytest.mark.parametrize(
    ("verb", "data"),
    [
        ("ensure_guest", {"power_state": RUNNING}),
        ("ensure_running", {"power_state": RUNNING}),
        ("ensure_stopped", {"power_state": SHUTDOWN}),
        ("reboot", {"power_state": RUNNING}),
        ("ensure_absent", {}),
        ("ensure_paused", {"power_state": PAUSED}),
        ("ensure_suspended", {"power_state": SHUTDOWN}),
        ("rebuild", {"power_state": RUNNING}),
        ("rescue", {"power_state": RUNNING}),
        ("unrescue", {"power_state": RUNNING}),
        ("attach_interface", {"power_state": RUNNING}),
        ("detach_interface", {"power_state": RUNNING}),
        ("inject_nmi", {}),
        ("set_password", {}),
    ],
)
def test_each_verb_can_be_done_twice(verb: str, data: dict[str, Any]) -> None:
    rig = Rig()
    rig.driver.host.guests["s"].has_agent = True
    for attempt in (1, 2):
        ended = rig.run(verb, attempt=attempt)
        assert (ended.key, ended.server, ended.fence, ended.status, ended.data) == (
            f"do/a/step/{attempt}",
            "s",
            2,
            "done",
            data,
        )
        assert rig.journal.find(ended.key) == ended
        assert to_wire(from_wire(VERBS[verb].Result, ended.data)) == ended.data
    assert rig.points[-2:] == [(verb, "step", "before"), (verb, "step", "after")]


def test_shares_change_while_the_guest_is_off() -> None:
    rig = Rig()
    for verb in ("attach_share", "detach_share"):
        assert rig.run(verb, "while it runs").status == "failed"
    rig.run("ensure_stopped")
    for verb, data in (("attach_share", {"power_state": SHUTDOWN}), ("detach_share", {})):
        for attempt in (1, 2):
            ended = rig.run(verb, attempt=attempt)
            assert (ended.status, ended.data) == ("done", data)
    rig.run("ensure_absent")
    assert rig.run("detach_share", "when it is gone").status == "done"
    assert rig.run("attach_share", "when it is gone").status == "failed"


def test_volumes_change_while_the_guest_runs() -> None:
    rig = Rig()
    for verb, data in (
        ("attach_volume", {"power_state": RUNNING}),
        ("extend_volume", {}),
        ("copy_volume", {"power_state": RUNNING}),
        ("keep_volume", {"power_state": RUNNING}),
        ("switch_volume", {"power_state": RUNNING}),
        ("snapshot_volume", {"power_state": RUNNING}),
        ("merge_volume", {"power_state": RUNNING}),
        ("detach_volume", {"power_state": RUNNING}),
    ):
        for attempt in (1, 2):
            ended = rig.run(verb, attempt=attempt)
            assert (ended.status, ended.data) == ("done", data)
    assert rig.run("disconnect_volumes", "while it runs").status == "failed"
    rig.run("ensure_stopped")
    assert rig.run("disconnect_volumes").status == "done"
    rig.run("ensure_absent")
    for verb, status in (("detach_volume", "done"), ("attach_volume", "failed")):
        assert rig.run(verb, "when it is gone").status == status


def test_a_snapshot_tells_how_many_bytes_it_stored() -> None:
    rig = Rig()
    ended = rig.run("snapshot")
    assert ended.status == "done"
    assert ended.data == {"size": len(b"".join(rig.stored))} != {"size": 0}


def test_every_row_of_the_table_is_tried_above() -> None:
    assert set(VERBS) == {
        "ensure_guest",
        "ensure_running",
        "ensure_stopped",
        "reboot",
        "ensure_absent",
        "ensure_paused",
        "ensure_suspended",
        "rebuild",
        "rescue",
        "unrescue",
        "inject_nmi",
        "set_password",
        "snapshot",
        "attach_interface",
        "detach_interface",
        "attach_share",
        "detach_share",
        "attach_volume",
        "detach_volume",
        "disconnect_volumes",
        "extend_volume",
        "copy_volume",
        "switch_volume",
        "keep_volume",
        "snapshot_volume",
        "merge_volume",
        "offer",
        "prepare",
        "receive",
        "install",
        "prepare_arrival",
        "live_migrate",
        "arrived",
        "resize_here",
        "settle_resize",
        "control_migration",
    }


def test_whatever_may_start_a_guest_says_so() -> None:
    assert {name for name, verb in VERBS.items() if verb.starts_guest} == {
        "ensure_guest",
        "ensure_running",
        "reboot",
        "rebuild",
        "rescue",
        "unrescue",
        "install",
        "resize_here",
        "live_migrate",
    }


def test_whatever_makes_disks_of_an_image_counts_as_a_build() -> None:
    assert {name for name, verb in VERBS.items() if verb.builds} == {
        "ensure_guest",
        "rebuild",
        "rescue",
    }


def test_what_cannot_be_looked_at_is_done_once() -> None:
    assert {name for name, verb in VERBS.items() if verb.runs_once} == {
        "inject_nmi",
        "set_password",
    }


def test_a_once_verb_found_begun_is_unknown_and_not_repeated() -> None:
    rig = Rig()
    # kill -9 after the effect
    rig.carry_out = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.run("inject_nmi")
    assert rig.journal.find("do/a/step/1") is None
    rig.carry_out = carry_out
    for _ in range(2):
        ended = rig.run("inject_nmi")
        assert ended.status == "unknown"
        assert rig.journal.find("do/a/step/1") == ended
    assert ("inject_nmi", "s") not in rig.driver.host.calls


def test_a_once_verb_is_done_again_only_by_a_new_attempt() -> None:
    rig = Rig()
    assert [rig.run("inject_nmi", attempt=attempt).status for attempt in (1, 2)] == ["done", "done"]
    assert rig.driver.host.calls.count(("inject_nmi", "s")) == 2


def test_a_definite_failure_is_reported_in_the_drivers_words() -> None:
    rig = Rig()
    rig.driver.host.script["ensure_running"] = [Fail("No disk.", retryable=True, details="ENOSPC")]
    ended = rig.run("ensure_running")
    assert (ended.status, ended.error, ended.details, ended.retryable) == (
        "failed",
        "No disk.",
        "ENOSPC",
        True,
    )
    assert rig.journal.find(ended.key) == ended


def test_a_problem_is_a_definite_failure_with_its_cause_for_the_operator() -> None:
    problem = errors.BadRequest("The image is hostile.")
    problem.__cause__ = OSError("backing file")
    ended = failing(problem)
    assert (ended.status, ended.error, ended.details, ended.retryable) == (
        "failed",
        "The image is hostile.",
        "backing file",
        False,
    )


@pytest.mark.parametrize(
    "problem", [VerbFailed("No.", details="x" * 10_000_000), ValueError("x" * 10_000_000)]
)
def test_what_a_guests_side_says_of_a_failure_is_cut_off(
    problem: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    ended = failing(problem)
    assert 1000 < len(ended.details) <= MAX_DETAILS_CHARS
    if isinstance(problem, VerbFailed):
        assert max(len(record.getMessage()) for record in caplog.records) < 2 * MAX_DETAILS_CHARS


@pytest.mark.parametrize(
    "problem", [errors.Unavailable("libvirt is away"), errors.NoAnswer("nobody"), Cancelled()]
)
def test_what_cannot_be_known_or_was_cancelled_is_not_reported(problem: Exception) -> None:
    rig = Rig()
    rig.carry_out = raising(problem)
    assert rig.run("ensure_paused") is None
    assert rig.journal.find("do/a/step/1") is None
    assert rig.points[-1] == ("ensure_paused", "step", "before")


def test_an_unexpected_error_tells_the_tenant_nothing_and_lets_another_host_try() -> None:
    ended = failing(ValueError("/secret/path"))
    assert (ended.status, ended.retryable) == ("failed", True)
    assert "secret" not in ended.error
    assert ended.details == "ValueError: /secret/path"


@pytest.mark.parametrize(
    "problem",
    [
        Fail("busy"),
        VerbFailed("busy"),
        errors.Problem(),
        errors.Unavailable("away"),
        ValueError("bug"),
        OSError("disk"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_a_removal_never_fails_for_good(problem: Any) -> None:
    """A debt is answered again from the journal: a failure written there would keep it for ever."""
    rig = Rig()
    if isinstance(problem, Fail):
        rig.driver.host.script["ensure_absent"] = [problem]
        assert rig.run("ensure_absent") is None
    else:
        rig.carry_out = raising(problem)
        assert rig.run("ensure_absent") is None
        rig.carry_out = carry_out
    assert rig.journal.find("do/a/step/1") is None
    assert rig.run("ensure_absent").status == "done"
    assert rig.driver.domains() == []


@pytest.mark.parametrize("verb", ["live_migrate", "arrived"])
@pytest.mark.parametrize(
    "problem",
    [VerbFailed("It is still here."), ValueError("bug"), OSError("disk")],
    ids=lambda problem: type(problem).__name__,
)
def test_only_a_verbs_own_words_say_which_host_has_a_guest(verb: str, problem: Exception) -> None:
    """Else one that has moved would be taken for one that has not, and removed."""
    rig = Rig()
    rig.carry_out = raising(problem)
    ended = rig.run(verb)
    assert (ended is not None) == isinstance(problem, VerbFailed)
    assert (rig.journal.find("do/a/step/1") is not None) == isinstance(problem, VerbFailed)


def test_a_cancelled_verb_stops_within_moments() -> None:
    rig = Rig()
    rig.driver.host.script["ensure_stopped"] = [Slow(30)]
    rig.cancelled = True
    assert rig.run("ensure_stopped") is None
    assert rig.driver.domains()[0].power_state == RUNNING
