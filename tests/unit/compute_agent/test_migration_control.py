# SPDX-License-Identifier: Apache-2.0
"""The agent's rules for servers that move: how many leave at a time, what is requested of them,
what must be off first."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.domain.command_key import CommandKey, CommandKind
from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import Command, Control, FailureReason, Result, SyncAnswer
from common.domain.verbs import control_command
from compute_agent.journal import Journal
from compute_agent.sync import LEASE_SECONDS, Work
from tests.unit.compute_agent.test_sync import Rig, command, taken
from tests.verbs import new_command


def moving(action: str) -> Command:
    return new_command("live_migrate", action, "migrate", server=action, session=5)


def control(requested: str, of: str = "a", session: int = 5, fence: int = 1) -> Command:
    migration = CommandKey(CommandKind.DO, of, "migrate", 1)
    return control_command(migration, Control(requested), server=of, fence=fence, session=session)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def begun(rig: Rig) -> Work:
    work = rig.agent.take()
    assert work is not None
    return work


def results(rig: Rig) -> dict[str, Result]:
    return {result.key: result for result in rig.exchange().results}


def test_one_live_migration_at_a_time_and_the_others_say_that_they_wait(rig: Rig) -> None:
    rig.agent.accept([moving("a"), moving("b"), command("stop", "s", verb="ensure_stopped")])
    first = begun(rig)
    first.progress = CommandProgress(CommandPhase.MIGRATING)
    assert taken(rig.agent) == ["stop"]
    assert rig.exchange().phases == {
        "do/a/migrate/1": CommandProgress(CommandPhase.MIGRATING),
        "do/b/migrate/1": CommandProgress(CommandPhase.QUEUED),
        "do/stop/step/1": CommandProgress(CommandPhase.QUEUED),
    }
    rig.finish(first)
    assert taken(rig.agent) == ["b"]


def test_as_many_live_migrations_as_the_host_is_told() -> None:
    rig = Rig(migrations=2)
    rig.agent.accept([moving("a"), moving("b"), moving("c")])
    assert taken(rig.agent) == ["a", "b"]


def test_how_far_a_migration_is_is_told_when_it_is_asked(rig: Rig) -> None:
    rig.agent.accept([moving("a")])
    work = begun(rig)
    assert rig.exchange().moved == {}
    work.measured = {"memory_total": 3, "memory_remaining": 1}
    assert rig.agent.request(False, None, None).moved == {}
    assert rig.exchange().moved == {"do/a/migrate/1": {"memory_total": 3, "memory_remaining": 1}}
    rig.finish(work)
    assert rig.exchange().moved == {}


def test_a_wish_reaches_the_migration_that_runs_and_is_answered_at_once(rig: Rig) -> None:
    rig.agent.accept([moving("a")])
    work = begun(rig)
    for _ in range(2):
        rig.agent.accept([control("complete")])
        assert work.requested is Control.COMPLETE
    assert rig.agent.has_news()
    told = results(rig)["control/a/complete/1"]
    assert (told.status, told.server, told.data) == ("done", "a", {"in_hand": True})
    assert rig.exchange().results == [], "what was acknowledged is forgotten"
    assert not work.cancelled


def test_nothing_follows_an_abort(rig: Rig) -> None:
    rig.agent.accept([moving("a")])
    work = begun(rig)
    rig.agent.accept([control("abort"), control("complete")])
    assert work.requested is Control.ABORT


def test_an_abort_of_one_that_waits_ends_it_at_once_and_for_good(rig: Rig) -> None:
    rig.agent.accept([moving("a"), moving("b")])
    first = begun(rig)
    rig.agent.accept([control("abort", of="b")])
    told = results(rig)
    assert told["control/b/abort/1"].status == "done"
    ended = told["do/b/migrate/1"]
    assert (ended.status, ended.reason, ended.retryable) == ("failed", FailureReason.ABORTED, False)
    rig.finish(first)
    rig.agent.accept([control("abort", of="b"), moving("b")])
    assert rig.agent.take() is None, "a command that was late is answered again"
    assert results(rig)["do/b/migrate/1"] == ended


def test_a_wish_for_what_is_not_in_hand_is_done_and_does_nothing(rig: Rig) -> None:
    rig.agent.accept([control("abort", of="unknown")])
    told = results(rig)["control/unknown/abort/1"]
    assert (told.status, told.data) == ("done", {"in_hand": False})
    assert rig.exchange().working == []


def test_a_wish_passes_the_same_checks_as_any_command(rig: Rig) -> None:
    rig.agent.accept([new_command("live_migrate", "a", "migrate", server="a", fence=3, session=5)])
    work = begun(rig)
    rig.agent.accept([control("abort", fence=2), control("abort", session=4, fence=3)])
    assert work.requested is None
    assert {key: result.status for key, result in results(rig).items()} == {
        "control/a/abort/1": "refused"
    }


def test_a_migration_that_an_agent_had_begun_before_it_died_is_looked_after_and_not_called_off(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "agent.db")
    journal.begin("do/b/migrate/1")
    rig = Rig(journal)
    rig.agent.accept([moving("a"), moving("b")])
    first = begun(rig)
    rig.agent.accept([control("abort", of="b")])
    assert set(results(rig)) == {"control/b/abort/1"}, "nobody knows yet where the guest is"
    joined = begun(rig)
    assert (first.command.key.owner, joined.command.key.owner, joined.requested) == (
        "a",
        "b",
        Control.ABORT,
    )
    journal.close()


def test_nothing_is_started_before_what_must_not_run_is_off(rig: Rig) -> None:
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
    assert taken(rig.agent) == ["end"], "what belongs to a server whose plug is being pulled waits"
    rig.agent.record_stop("x", True)
    rig.agent.record_stop("y", False)
    assert taken(rig.agent) == ["look"]
    assert rig.agent.take_stop() == "y", "it is tried again"
    rig.agent.record_stop("y", True)
    assert rig.agent.take_stop() is None
    assert taken(rig.agent) == ["start"]


def test_what_would_start_it_is_let_go_of_first(rig: Rig) -> None:
    rig.agent.accept([command("run", "x"), command("again", "x")])
    work = begun(rig)
    rig.exchange(SyncAnswer(6, stop=["x"]), registration=True)
    assert work.cancelled
    assert rig.agent.take_stop() is None
    rig.agent.record_result(work, None)
    assert rig.agent.take_stop() == "x"
    rig.agent.record_stop("x", True)
    assert rig.agent.take() is None


def test_the_newest_registration_says_what_must_be_off(rig: Rig) -> None:
    rig.exchange(SyncAnswer(6, stop=["x", "y"]), registration=True)
    server = rig.agent.take_stop()
    rig.exchange(SyncAnswer(6))
    assert rig.agent.take_stop() is not None, "an ordinary answer changes nothing"
    rig.exchange(SyncAnswer(7, stop=[]), registration=True)
    assert server is not None
    rig.agent.record_stop(server, False)
    assert rig.agent.take_stop() is None


def test_plugs_are_pulled_without_a_lease(rig: Rig) -> None:
    rig.exchange(SyncAnswer(6, stop=["x"]), registration=True)
    rig.clock.seconds += LEASE_SECONDS
    assert rig.agent.take_stop() == "x"
