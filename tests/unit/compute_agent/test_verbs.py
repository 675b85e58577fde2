# SPDX-License-Identifier: Apache-2.0
"""Verbs run by ``verbs.run`` with the memory driver: results, failures, and repetition."""

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
from tests.log_lines import rendered_lines
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


def run_failing_verb(problem: Exception) -> Any:
    """Run a verb that raises this error, and return the result."""
    rig = Rig()
    rig.carry_out = make_failing(problem)
    return rig.run("ensure_paused")


def make_failing(problem: BaseException) -> CarryOut:
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
def test_verb_repeated_in_second_attempt_is_done_with_same_result(
    verb: str, data: dict[str, Any]
) -> None:
    rig = Rig()
    rig.driver.host.guests["s"].has_agent = True
    for attempt in (1, 2):
        result = rig.run(verb, attempt=attempt)
        assert (result.key, result.server, result.fence, result.status, result.data) == (
            f"do/a/step/{attempt}",
            "s",
            2,
            "done",
            data,
        )
        assert rig.journal.find(result.key) == result
        assert to_wire(from_wire(VERBS[verb].Result, result.data)) == result.data
    assert rig.points[-2:] == [(verb, "step", "before"), (verb, "step", "after")]


def test_share_verbs_require_stopped_guest() -> None:
    rig = Rig()
    for verb in ("attach_share", "detach_share"):
        assert rig.run(verb, "while it runs").status == "failed"
    rig.run("ensure_stopped")
    for verb, data in (("attach_share", {"power_state": SHUTDOWN}), ("detach_share", {})):
        for attempt in (1, 2):
            result = rig.run(verb, attempt=attempt)
            assert (result.status, result.data) == ("done", data)
    rig.run("ensure_absent")
    assert rig.run("detach_share", "when it is gone").status == "done"
    assert rig.run("attach_share", "when it is gone").status == "failed"


def test_volume_verbs_except_disconnect_volumes_succeed_while_guest_runs() -> None:
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
            result = rig.run(verb, attempt=attempt)
            assert (result.status, result.data) == ("done", data)
    assert rig.run("disconnect_volumes", "while it runs").status == "failed"
    rig.run("ensure_stopped")
    assert rig.run("disconnect_volumes").status == "done"
    rig.run("ensure_absent")
    for verb, status in (("detach_volume", "done"), ("attach_volume", "failed")):
        assert rig.run(verb, "when it is gone").status == status


def test_snapshot_result_has_number_of_stored_bytes() -> None:
    rig = Rig()
    result = rig.run("snapshot")
    assert result.status == "done"
    assert result.data == {"size": len(b"".join(rig.stored))} != {"size": 0}


def test_verbs_table_has_exactly_listed_verbs() -> None:
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


def test_only_listed_verbs_are_marked_starts_guest() -> None:
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


def test_only_listed_verbs_are_marked_builds() -> None:
    assert {name for name, verb in VERBS.items() if verb.builds} == {
        "ensure_guest",
        "rebuild",
        "rescue",
    }


def test_only_listed_verbs_are_marked_runs_once() -> None:
    assert {name for name, verb in VERBS.items() if verb.runs_once} == {
        "inject_nmi",
        "set_password",
    }


def test_runs_once_verb_begun_before_kill_ends_unknown_and_is_not_repeated() -> None:
    rig = Rig()
    # As if the agent was killed by SIGKILL after the effect.
    rig.carry_out = make_failing(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.run("inject_nmi")
    assert rig.journal.find("do/a/step/1") is None
    rig.carry_out = carry_out
    for _ in range(2):
        result = rig.run("inject_nmi")
        assert result.status == "unknown"
        assert rig.journal.find("do/a/step/1") == result
    assert ("inject_nmi", "s") not in rig.driver.host.calls


def test_runs_once_verb_runs_again_in_new_attempt() -> None:
    rig = Rig()
    assert [rig.run("inject_nmi", attempt=attempt).status for attempt in (1, 2)] == ["done", "done"]
    assert rig.driver.host.calls.count(("inject_nmi", "s")) == 2


def test_verb_failure_is_reported_with_message_of_driver() -> None:
    rig = Rig()
    rig.driver.host.script["ensure_running"] = [Fail("No disk.", retryable=True, details="ENOSPC")]
    result = rig.run("ensure_running")
    assert (result.status, result.error, result.details, result.retryable) == (
        "failed",
        "No disk.",
        "ENOSPC",
        True,
    )
    assert rig.journal.find(result.key) == result


def test_verb_raising_bad_request_fails_unretryable_with_cause_in_details() -> None:
    problem = errors.BadRequest("The image is hostile.")
    problem.__cause__ = OSError("backing file")
    result = run_failing_verb(problem)
    assert (result.status, result.error, result.details, result.retryable) == (
        "failed",
        "The image is hostile.",
        "backing file",
        False,
    )


@pytest.mark.parametrize(
    "problem", [VerbFailed("No.", details="x" * 10_000_000), ValueError("x" * 10_000_000)]
)
def test_verb_failure_details_are_truncated(
    problem: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    result = run_failing_verb(problem)
    assert 1000 < len(result.details) <= MAX_DETAILS_CHARS
    if isinstance(problem, VerbFailed):
        assert max(map(len, rendered_lines(caplog))) < 2 * MAX_DETAILS_CHARS


@pytest.mark.parametrize(
    "problem", [errors.Unavailable("libvirt is away"), errors.NoAnswer("nobody"), Cancelled()]
)
def test_verb_reports_no_result_when_unavailable_or_cancelled(problem: Exception) -> None:
    rig = Rig()
    rig.carry_out = make_failing(problem)
    assert rig.run("ensure_paused") is None
    assert rig.journal.find("do/a/step/1") is None
    assert rig.points[-1] == ("ensure_paused", "step", "before")


def test_unexpected_verb_error_is_hidden_from_tenant_and_retryable() -> None:
    result = run_failing_verb(ValueError("/secret/path"))
    assert (result.status, result.retryable) == ("failed", True)
    assert "secret" not in result.error
    assert result.details == "ValueError: /secret/path"


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
def test_failed_ensure_absent_reports_no_result_and_succeeds_when_repeated(problem: Any) -> None:
    """A pending cleanup is answered again from the journal, where a failure would be final."""
    rig = Rig()
    if isinstance(problem, Fail):
        rig.driver.host.script["ensure_absent"] = [problem]
        assert rig.run("ensure_absent") is None
    else:
        rig.carry_out = make_failing(problem)
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
def test_live_migration_verbs_report_verb_failed_but_no_unexpected_error(
    verb: str, problem: Exception
) -> None:
    """Otherwise the conductor could remove a guest that has moved."""
    rig = Rig()
    rig.carry_out = make_failing(problem)
    result = rig.run(verb)
    assert (result is not None) == isinstance(problem, VerbFailed)
    assert (rig.journal.find("do/a/step/1") is not None) == isinstance(problem, VerbFailed)


def test_cancelled_ensure_stopped_has_no_result_and_guest_keeps_running() -> None:
    rig = Rig()
    rig.driver.host.script["ensure_stopped"] = [Slow(30)]
    rig.cancelled = True
    assert rig.run("ensure_stopped") is None
    assert rig.driver.domains()[0].power_state == RUNNING
