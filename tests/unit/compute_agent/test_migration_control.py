# SPDX-License-Identifier: Apache-2.0
"""The agent's rules for live migrations: their number, control commands, guests to stop first."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.domain.command_key import CommandKey, CommandKind
from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import Command, Control, FailureReason, Result, SyncAnswer
from common.domain.verbs import control_command
from compute_agent.journal import Journal
from compute_agent.sync import LEASE_SECONDS, Work
from tests.unit.compute_agent.test_sync import Rig, command, take_all
from tests.verbs import new_command


def new_migration(action: str) -> Command:
    return new_command("live_migrate", action, "migrate", server=action, session=5)


def new_control(requested: str, of: str = "a", session: int = 5, fence: int = 1) -> Command:
    migration = CommandKey(CommandKind.DO, of, "migrate", 1)
    return control_command(migration, Control(requested), server=of, fence=fence, session=session)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def take_work(rig: Rig) -> Work:
    work = rig.agent.take()
    assert work is not None
    return work


def report_results(rig: Rig) -> dict[str, Result]:
    return {result.key: result for result in rig.exchange().results}


def test_agent_runs_one_live_migration_and_reports_others_as_queued(rig: Rig) -> None:
    rig.agent.accept(
        [new_migration("a"), new_migration("b"), command("stop", "s", verb="ensure_stopped")]
    )
    first = take_work(rig)
    first.progress = CommandProgress(CommandPhase.MIGRATING)
    assert take_all(rig.agent) == ["stop"]
    assert rig.exchange().phases == {
        "do/a/migrate/1": CommandProgress(CommandPhase.MIGRATING),
        "do/b/migrate/1": CommandProgress(CommandPhase.QUEUED),
        "do/stop/step/1": CommandProgress(CommandPhase.QUEUED),
    }
    rig.finish(first)
    assert take_all(rig.agent) == ["b"]


def test_agent_runs_configured_number_of_live_migrations() -> None:
    rig = Rig(migrations=2)
    rig.agent.accept([new_migration("a"), new_migration("b"), new_migration("c")])
    assert take_all(rig.agent) == ["a", "b"]


def test_live_migration_bytes_are_reported_only_in_requests_for_commands(rig: Rig) -> None:
    rig.agent.accept([new_migration("a")])
    work = take_work(rig)
    assert rig.exchange().moved == {}
    work.measured = {"memory_total": 3, "memory_remaining": 1}
    assert rig.agent.request(False, None, None).moved == {}
    assert rig.exchange().moved == {"do/a/migrate/1": {"memory_total": 3, "memory_remaining": 1}}
    rig.finish(work)
    assert rig.exchange().moved == {}


def test_control_command_reaches_running_migration_and_is_done_at_once(rig: Rig) -> None:
    rig.agent.accept([new_migration("a")])
    work = take_work(rig)
    for _ in range(2):
        rig.agent.accept([new_control("complete")])
        assert work.requested is Control.COMPLETE
    assert rig.agent.has_news()
    result = report_results(rig)["control/a/complete/1"]
    assert (result.status, result.server, result.data) == ("done", "a", {"in_hand": True})
    assert rig.exchange().results == [], "what was acknowledged is forgotten"
    assert not work.cancelled


def test_control_complete_after_abort_is_ignored(rig: Rig) -> None:
    rig.agent.accept([new_migration("a")])
    work = take_work(rig)
    rig.agent.accept([new_control("abort"), new_control("complete")])
    assert work.requested is Control.ABORT


def test_abort_of_queued_migration_fails_it_permanently(rig: Rig) -> None:
    rig.agent.accept([new_migration("a"), new_migration("b")])
    first = take_work(rig)
    rig.agent.accept([new_control("abort", of="b")])
    reported = report_results(rig)
    assert reported["control/b/abort/1"].status == "done"
    failure = reported["do/b/migrate/1"]
    assert (failure.status, failure.reason, failure.retryable) == (
        "failed",
        FailureReason.ABORTED,
        False,
    )
    rig.finish(first)
    rig.agent.accept([new_control("abort", of="b"), new_migration("b")])
    assert rig.agent.take() is None, "a command that was late is answered again"
    assert report_results(rig)["do/b/migrate/1"] == failure


def test_control_command_for_unknown_migration_is_done_without_effect(rig: Rig) -> None:
    rig.agent.accept([new_control("abort", of="unknown")])
    result = report_results(rig)["control/unknown/abort/1"]
    assert (result.status, result.data) == ("done", {"in_hand": False})
    assert rig.exchange().working == []


def test_control_command_with_old_fence_or_session_has_no_effect(rig: Rig) -> None:
    rig.agent.accept([new_command("live_migrate", "a", "migrate", server="a", fence=3, session=5)])
    work = take_work(rig)
    rig.agent.accept([new_control("abort", fence=2), new_control("abort", session=4, fence=3)])
    assert work.requested is None
    assert {key: result.status for key, result in report_results(rig).items()} == {
        "control/a/abort/1": "refused"
    }


def test_abort_of_begun_migration_after_restart_reaches_resumed_migration(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "agent.db")
    journal.begin("do/b/migrate/1")
    rig = Rig(journal)
    rig.agent.accept([new_migration("a"), new_migration("b")])
    first = take_work(rig)
    rig.agent.accept([new_control("abort", of="b")])
    assert set(report_results(rig)) == {"control/b/abort/1"}, "nobody knows yet where the guest is"
    resumed = take_work(rig)
    assert (first.command.key.owner, resumed.command.key.owner, resumed.requested) == (
        "a",
        "b",
        Control.ABORT,
    )
    journal.close()


def test_agent_starts_no_guest_before_forbidden_guests_are_stopped(rig: Rig) -> None:
    rig.exchange(
        SyncAnswer(
            6,
            stop=["x", "y"],
            commands=[
                command("start", "s", session=6),
                command("end", "t", session=6, verb="ensure_stopped"),
                command("look", "x", session=6, verb="offer"),
            ],
        ),
        registration=True,
    )
    stops = {rig.agent.take_stop(), rig.agent.take_stop()}
    assert stops == {"x", "y"}
    assert rig.agent.take_stop() is None
    assert take_all(rig.agent) == ["end"], (
        "commands of a server wait while the agent powers off its guest"
    )
    rig.agent.record_stop("x", True)
    rig.agent.record_stop("y", False)
    assert take_all(rig.agent) == ["look"]
    assert rig.agent.take_stop() == "y", "it is tried again"
    rig.agent.record_stop("y", True)
    assert rig.agent.take_stop() is None
    assert take_all(rig.agent) == ["start"]


def test_agent_cancels_commands_of_forbidden_guest_before_stopping_it(rig: Rig) -> None:
    rig.agent.accept([command("run", "x"), command("again", "x")])
    work = take_work(rig)
    rig.exchange(SyncAnswer(6, stop=["x"]), registration=True)
    assert work.cancelled
    assert rig.agent.take_stop() is None
    rig.agent.record_result(work, None)
    assert rig.agent.take_stop() == "x"
    rig.agent.record_stop("x", True)
    assert rig.agent.take() is None


def test_latest_registration_replaces_list_of_guests_to_stop(rig: Rig) -> None:
    rig.exchange(SyncAnswer(6, stop=["x", "y"]), registration=True)
    server = rig.agent.take_stop()
    rig.exchange(SyncAnswer(6))
    assert rig.agent.take_stop() is not None, "an ordinary answer changes nothing"
    rig.exchange(SyncAnswer(7, stop=[]), registration=True)
    assert server is not None
    rig.agent.record_stop(server, False)
    assert rig.agent.take_stop() is None


def test_agent_stops_forbidden_guest_without_lease(rig: Rig) -> None:
    rig.exchange(SyncAnswer(6, stop=["x"]), registration=True)
    rig.clock.seconds += LEASE_SECONDS
    assert rig.agent.take_stop() == "x"
