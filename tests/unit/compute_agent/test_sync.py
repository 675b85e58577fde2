# SPDX-License-Identifier: Apache-2.0
"""The agent's half of the exchange: which commands it takes in hand, what it tells, when it
registers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from common.domain.models import (
    Command,
    DomainState,
    FailureReason,
    HostInventory,
    Result,
    Sync,
    SyncAnswer,
)
from common.domain.verbs import EnsureStopped
from compute_agent.journal import Journal
from compute_agent.sync import (
    FULL_REPORT_SECONDS,
    LEASE_SECONDS,
    MAX_BUILDS,
    MAX_COPIES,
    MAX_MIGRATIONS,
    Agent,
    Work,
)
from tests.verbs import new_command

INVENTORY = HostInventory("memory", 1, "h1", 1, 1, 1)


class Hand:
    """A clock turned by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


class Rig:
    """An agent in session 5 with a fresh lease."""

    def __init__(
        self,
        journal: Journal | None = None,
        builds: int = MAX_BUILDS,
        copies: int = MAX_COPIES,
        migrations: int = MAX_MIGRATIONS,
    ) -> None:
        self.clock, self.journal = Hand(), journal or Journal(":memory:")
        self.agent = Agent("h1", self.journal, self.clock, "boot", builds, copies, migrations)
        self.exchange(SyncAnswer(5, guests={}), registration=True)

    def exchange(self, answer: SyncAnswer | None = None, registration: bool = False) -> Sync:
        """What the agent says; then it hears the answer, or by default that all of it was written
        down."""
        said = self.agent.request(
            True, [] if registration else None, INVENTORY if registration else None
        )
        self.agent.record_answer(
            said, answer or SyncAnswer(5, [result.key for result in said.results])
        )
        return said

    def finish(self, work: Work, status: str = "done") -> Result:
        command = work.command
        result = Result(work.key, command.server, command.fence, status)
        self.journal.end(result)
        self.agent.record_result(work, result)
        return result


@pytest.fixture
def rig() -> Rig:
    return Rig()


def command(
    action: str = "a",
    server: str = "s",
    fence: int = 1,
    session: int = 5,
    verb: str = "ensure_running",
) -> Command:
    return new_command(verb, action, server=server, fence=fence, session=session)


def taken(agent: Agent) -> list[str]:
    found = []
    while (work := agent.take()) is not None:
        found.append(work.command.key.owner)
    return found


def test_before_its_first_registration_it_accepts_nothing() -> None:
    agent = Agent("h1", Journal(":memory:"), Hand(), "boot")
    assert agent.needs_registration()
    assert not agent.has_lease()
    agent.accept([command(session=5)])
    assert agent.take() is None
    registration = agent.request(True, [], INVENTORY)
    assert (
        registration.host,
        registration.session,
        registration.boot_id,
        registration.inventory,
    ) == ("h1", 0, "boot", INVENTORY)


def test_a_later_registration_opens_a_session(rig: Rig) -> None:
    assert rig.exchange().session == 5
    assert rig.exchange(SyncAnswer(6), registration=True).session == 0
    assert rig.exchange(SyncAnswer(6)).session == 6


def test_commands_of_another_session_are_dropped_and_not_answered(rig: Rig) -> None:
    rig.agent.accept([command(session=4), command("b", session=6), command("c", session=0)])
    assert rig.agent.take() is None
    said = rig.exchange()
    assert (said.working, said.results) == ([], [])


def test_a_command_of_another_session_that_starts_nothing_is_dropped_too(rig: Rig) -> None:
    rig.agent.accept([command(session=4, verb="ensure_stopped")])
    assert rig.agent.in_hand() == {}
    assert rig.agent.take() is None


def test_nothing_starts_before_what_must_be_off_is_looked_at(rig: Rig) -> None:
    """Nobody has begun to stop it yet."""
    rig.exchange(SyncAnswer(6, guests={}, stop=["moved away"]), registration=True)
    rig.agent.accept([command(session=6)])
    assert rig.agent.take() is None
    assert rig.agent.take_stop() == "moved away"
    rig.agent.record_stop("moved away", True)
    assert taken(rig.agent) == ["a"]


def test_an_older_fence_is_refused_and_says_why(rig: Rig) -> None:
    rig.agent.accept([command(fence=3)])
    rig.agent.accept([command("b", fence=2)])
    assert taken(rig.agent) == ["a"]
    refused = rig.exchange().results[0]
    assert (refused.key, refused.status, refused.error) == (
        "do/b/step/1",
        "refused",
        "fence 2 is older than 3",
    )


def test_registration_teaches_fences_and_never_lowers_one(rig: Rig) -> None:
    rig.agent.accept([command(fence=9)])
    rig.exchange(SyncAnswer(5, guests={"s": 4, "other": 7}), registration=True)
    rig.agent.accept([command("b", fence=8), command("c", server="other", fence=6)])
    assert {result.key: result.status for result in rig.exchange().results} == {
        "do/b/step/1": "refused",
        "do/c/step/1": "refused",
    }


def test_fences_survive_a_restart(rig: Rig) -> None:
    rig.agent.accept([command(fence=4)])
    work = rig.agent.take()
    assert work is not None
    rig.finish(work)
    restarted = Rig(rig.journal)
    restarted.agent.accept([command("late", fence=3)])
    assert restarted.exchange().results[0].status == "refused"


def test_a_higher_fence_cancels_what_runs_and_drops_what_waits(rig: Rig) -> None:
    rig.agent.accept(
        [command(fence=1), command("waiting", fence=1), command("else", server="other")]
    )
    running = rig.agent.take()
    assert running is not None
    rig.agent.accept([command("b", fence=2)])
    assert running.cancelled
    rig.agent.record_result(running, None)
    assert taken(rig.agent) == ["else", "b"]
    assert rig.exchange().results == []


def test_a_higher_fence_that_an_answer_teaches_cancels_too(rig: Rig) -> None:
    """Whoever took the server meanwhile may have no command for this host."""
    rig.agent.accept(
        [
            command("a"),
            command("b", server="t", verb="ensure_stopped"),
            command("c", server="t", verb="ensure_stopped"),
        ]
    )
    running = rig.agent.take()
    rig.exchange(SyncAnswer(6, guests={"s": 2, "t": 1}), registration=True)
    assert running is not None
    assert running.cancelled
    rig.agent.record_result(running, None)
    assert taken(rig.agent) == ["b"], "what is still of today goes on"
    rig.exchange(SyncAnswer(6, guests={"t": 2}))
    assert taken(rig.agent) == []


def test_one_command_a_server_at_a_time(rig: Rig) -> None:
    rig.agent.accept([command("a"), command("b"), command("c", server="other")])
    first, other = rig.agent.take(), rig.agent.take()
    assert first is not None
    assert other is not None
    assert (first.command.key.owner, other.command.key.owner) == ("a", "c")
    assert rig.agent.take() is None
    rig.finish(first)
    assert taken(rig.agent) == ["b"]


def test_snapshots_and_builds_leave_a_worker_for_what_is_quick() -> None:
    rig = Rig(copies=2)
    rig.agent.accept(
        [
            command("a", "s1", verb="snapshot"),
            command("b", "s2", verb="ensure_guest"),
            command("c", "s3", verb="snapshot"),
            command("d", "s4", verb="ensure_guest"),
            command("e", "s5", verb="ensure_stopped"),
        ]
    )
    works = [rig.agent.take() for _ in range(3)]
    assert [work.command.key.owner for work in works if work] == ["a", "b", "e"]
    assert rig.agent.take() is None
    assert works[0] is not None
    rig.finish(works[0])
    assert taken(rig.agent) == ["c"]


def test_it_says_on_which_server_it_works(rig: Rig) -> None:
    rig.agent.accept([command()])
    assert not rig.agent.is_working_on("s")
    work = rig.agent.take()
    assert work is not None
    assert rig.agent.is_working_on("s")
    assert not rig.agent.is_working_on("other")
    rig.finish(work)
    assert not rig.agent.is_working_on("s")


def test_a_command_that_comes_twice_is_one(rig: Rig) -> None:
    rig.agent.accept([command(), command()])
    work = rig.agent.take()
    assert work is not None
    rig.agent.accept([command()])
    assert rig.agent.take() is None
    assert rig.exchange().working == ["do/a/step/1"]
    rig.finish(work)
    rig.agent.accept([command()])
    assert rig.agent.take() is None


def test_what_was_carried_out_before_is_answered_again_from_the_journal(rig: Rig) -> None:
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None
    done = rig.finish(work)
    assert rig.exchange().results == [done]
    assert rig.exchange().results == []
    rig.agent.accept([command()])
    assert rig.agent.take() is None
    assert rig.agent.has_news()
    assert rig.exchange().results == [done]


def test_results_are_repeated_until_they_are_acknowledged(rig: Rig) -> None:
    rig.agent.accept([command("a"), command("b", server="other")])
    for work in (rig.agent.take(), rig.agent.take()):
        assert work is not None
        rig.finish(work)
    assert len(rig.exchange(SyncAnswer(5, ["do/a/step/1"])).results) == 2
    assert [result.key for result in rig.exchange().results] == ["do/b/step/1"]
    assert not rig.agent.has_news()


def test_without_a_lease_nothing_is_started_and_registration_is_said(rig: Rig) -> None:
    rig.agent.accept(
        [
            command("start"),
            command("stop", server="b", verb="ensure_stopped"),
            command("remove", server="c", verb="ensure_absent"),
            command("make", server="d", verb="ensure_guest"),
            command("reboot", server="e", verb="reboot"),
            command("grow", server="f", verb="receive"),
        ]
    )
    rig.clock.seconds += LEASE_SECONDS - 0.1
    assert not rig.agent.needs_registration()
    rig.clock.seconds += 0.1
    assert rig.agent.needs_registration()
    assert taken(rig.agent) == ["stop", "remove"]
    assert rig.exchange(SyncAnswer(6), registration=True).working == [
        "do/stop/step/1",
        "do/remove/step/1",
    ]
    assert rig.agent.has_lease()
    rig.agent.accept([command("start", session=6)])
    assert taken(rig.agent) == ["start"]


@pytest.mark.parametrize("verb", ["ensure_guest", "live_migrate"])
def test_what_was_sent_before_a_registration_starts_nothing_after_it(rig: Rig, verb: str) -> None:
    rig.agent.accept([command(verb=verb), command("b", server="t", verb=verb)])
    work = rig.agent.take()
    assert work is not None and rig.agent.may_start(work)
    rig.clock.seconds += LEASE_SECONDS
    assert rig.exchange(SyncAnswer(6), registration=True).working[0] == work.key
    assert rig.agent.has_lease() and not work.cancelled and not rig.agent.may_start(work)
    assert taken(rig.agent) == []


def test_what_is_not_wanted_any_more_starts_nothing(rig: Rig) -> None:
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None and rig.agent.may_start(work)
    rig.agent.accept([command("b", fence=2, verb="ensure_absent")])
    assert not rig.agent.may_start(work)


def test_an_answer_of_another_session_ends_ours_and_keeps_what_was_to_be_told(rig: Rig) -> None:
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None
    done = rig.finish(work)
    rig.agent.record_changes([DomainState("s", 4, 1)])
    rig.exchange(SyncAnswer(0))
    assert rig.agent.needs_registration()
    said = rig.exchange(SyncAnswer(6, [done.key]), registration=True)
    assert (said.results, said.changed) == ([done], []), (
        "news of a server are told after its result was taken in"
    )
    assert rig.exchange().changed == [DomainState("s", 4, 1)]
    assert not rig.agent.has_news()


def test_a_changed_state_is_kept_until_that_very_state_was_answered(rig: Rig) -> None:
    rig.agent.record_changes([DomainState("s", 4, 1)])
    said = rig.agent.request(False, None, None)
    assert (said.ask, said.changed) == (False, [DomainState("s", 4, 1)])
    rig.agent.record_changes([DomainState("s", 1, 1)])
    rig.agent.record_answer(said, SyncAnswer(5))
    assert rig.agent.has_news()
    assert rig.exchange().changed == [DomainState("s", 1, 1)]
    assert not rig.agent.has_news()


def test_commands_in_an_answer_are_taken_in_hand(rig: Rig) -> None:
    rig.exchange(SyncAnswer(5, commands=[command("a"), command("old", session=4)]))
    assert taken(rig.agent) == ["a"]


def test_commands_in_the_answer_to_registration_are_of_the_new_session(rig: Rig) -> None:
    rig.exchange(
        SyncAnswer(6, commands=[command("a", session=6)], guests={"s": 1}), registration=True
    )
    assert taken(rig.agent) == ["a"]


def test_the_full_report_comes_once_a_minute(rig: Rig) -> None:
    assert not rig.agent.wants_full_report()
    rig.clock.seconds += FULL_REPORT_SECONDS
    assert rig.agent.wants_full_report()
    rig.agent.request(True, [DomainState("s", 1, 1)], None)
    assert not rig.agent.wants_full_report()


def test_a_result_acknowledged_by_nobody_survives_a_kill(tmp_path: Path) -> None:
    """After the restart the conductor sends the command again, and gets the answer instead of a
    second run."""
    rig = Rig(Journal(tmp_path / "agent.db"))
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None
    done = rig.finish(work)
    rig.journal.close()
    restarted = Rig(Journal(tmp_path / "agent.db"))
    restarted.agent.accept([command()])
    assert restarted.agent.take() is None
    assert restarted.exchange().results == [done]
    restarted.journal.close()


def test_a_state_that_a_result_tells_already_is_no_news(rig: Rig) -> None:
    rig.agent.accept([command(fence=2)])
    work = rig.agent.take()
    assert work is not None
    rig.agent.record_result(work, Result(work.key, "s", 2, "done", {"power_state": 1}))
    rig.agent.record_changes([DomainState("s", 1, 2), DomainState("other", 4, 1)])
    assert rig.exchange().changed == [DomainState("other", 4, 1)]
    rig.agent.record_changes([DomainState("s", 4, 2)])
    assert rig.exchange().changed == [DomainState("s", 4, 2)]


def test_what_was_seen_in_the_middle_of_a_command_is_no_news_after_it(rig: Rig) -> None:
    rig.agent.accept([command("a", fence=2)])
    work = rig.agent.take()
    assert work is not None
    rig.agent.record_changes(
        [DomainState("s", 3, 2)]
    )  # a domain that starts is paused for a moment
    assert rig.exchange().changed == []
    done = Result(work.key, "s", 2, "done", {"power_state": 1})
    rig.agent.record_result(work, done)
    rig.agent.record_changes([DomainState("s", 1, 2)])
    said = rig.exchange(SyncAnswer(5, [done.key]))
    assert (said.results, said.changed) == ([done], [])
    assert rig.exchange().changed == []
    assert not rig.agent.has_news()


def builds(*actions: str) -> list[Command]:
    return [command(action, server=action, verb="ensure_guest") for action in actions]


def test_builds_beyond_the_limit_wait_in_the_queue_and_what_is_quick_overtakes_them() -> None:
    rig = Rig(builds=2)
    rig.agent.accept(
        [
            *builds("a", "b", "c"),
            command("rebuild", server="r", verb="rebuild"),
            command("stop", server="s", verb="ensure_stopped"),
        ]
    )
    first, second = rig.agent.take(), rig.agent.take()
    assert first is not None
    assert second is not None
    assert (first.command.key.owner, second.command.key.owner) == ("a", "b")
    assert taken(rig.agent) == ["stop"]
    assert rig.exchange().working == [
        "do/a/step/1",
        "do/b/step/1",
        "do/c/step/1",
        "do/rebuild/step/1",
        "do/stop/step/1",
    ]
    rig.finish(first)
    assert taken(rig.agent) == ["c"]
    rig.finish(second)
    assert taken(rig.agent) == ["rebuild"]


def test_a_build_that_was_cancelled_gives_its_place_up(rig: Rig) -> None:
    rig = Rig(builds=1)
    rig.agent.accept(builds("a", "b"))
    work = rig.agent.take()
    assert work is not None
    rig.agent.record_result(work, None)
    assert taken(rig.agent) == ["b"]


def test_what_the_host_has_is_told_again_only_when_it_changed(rig: Rig) -> None:
    assert rig.exchange().inventory is None
    rig.agent.record_host(replace(INVENTORY), None)
    assert rig.exchange().inventory is None
    more = replace(INVENTORY, memory_mb=2)
    rig.agent.record_host(more, None)
    said = rig.agent.request(True, None, None)
    assert (said.session, said.inventory) == (5, more)
    assert rig.exchange().inventory == more, "told until it was acknowledged"
    assert rig.exchange().inventory is None
    rig.agent.record_host(more, None)
    assert rig.exchange().inventory is None


def test_a_change_between_two_exchanges_is_not_lost(rig: Rig) -> None:
    rig.agent.record_host(replace(INVENTORY, memory_mb=2), None)
    said = rig.agent.request(True, None, None)
    rig.agent.record_host(replace(INVENTORY, memory_mb=3), None)
    rig.agent.record_answer(said, SyncAnswer(5))
    assert rig.exchange().inventory == replace(INVENTORY, memory_mb=3)
    rig.exchange(SyncAnswer(0))
    assert rig.exchange(SyncAnswer(6), registration=True).inventory == INVENTORY
    assert rig.exchange(SyncAnswer(6)).inventory is None


def test_metrics_are_told_once(rig: Rig) -> None:
    rig.agent.record_host(INVENTORY, {"cpu.percent": 7.0})
    assert rig.exchange().metrics == {"cpu.percent": 7.0}
    assert rig.exchange().metrics is None


def test_images_that_were_fetched_ahead_are_told_until_an_answer_comes(rig: Rig) -> None:
    rig.agent.record_prefetch("one", "")
    rig.agent.record_prefetch("two", "no space")
    assert rig.agent.has_news()
    said = rig.agent.request(True, None, None)
    assert said.cached == {"one": "", "two": "no space"}
    rig.agent.record_prefetch("two", "")  # it was tried again meanwhile
    rig.agent.record_answer(said, SyncAnswer(5))
    assert rig.exchange(SyncAnswer(0)).cached == {"two": ""}
    assert rig.exchange(SyncAnswer(6), registration=True).cached == {"two": ""}
    assert not rig.agent.has_news()


@pytest.mark.parametrize(
    "odd",
    [
        {"fence": "2"},
        {"server": ["s"]},
        {"verb": ["ensure_running"]},
        {"verb": "ensure_stopped", "args": {}},
        {"verb": "control_migration", "args": None},
    ],
)
def test_a_command_of_another_shape_holds_up_no_other(rig: Rig, odd: dict[str, Any]) -> None:
    """Its action hears why, as often as it asks, until it is stuck."""
    bad = replace(command("bad", server="other"), **odd)
    for _ in range(3):
        rig.agent.accept([bad, command("good")])
    assert taken(rig.agent) == ["good"]
    [refused] = rig.exchange().results
    assert (refused.key, refused.status) == (str(bad.key), "refused")
    assert "cannot understand the command" in refused.error
    assert refused.details
    rig.agent.accept([bad])
    assert [result.key for result in rig.exchange().results] == [str(bad.key)]


def test_verb_of_a_newer_conductor_is_refused_until_the_agent_knows_it(rig: Rig) -> None:
    rig.agent.accept([replace(command(), verb="levitate")])
    [refused] = rig.exchange().results
    assert (refused.status, refused.reason) == ("refused", FailureReason.UNKNOWN_VERB)
    assert refused.error == "its agent does not know levitate and must be upgraded."
    assert rig.journal.find(refused.key) is None


@pytest.mark.parametrize("field", [field.name for field in fields(EnsureStopped)])
def test_command_with_mis_spelt_argument_is_refused_with_its_name(rig: Rig, field: str) -> None:
    good = command(verb="ensure_stopped")
    args = {f"{name}e" if name == field else name: value for name, value in good.args.items()}
    rig.agent.accept([replace(good, args=args)])
    [refused] = rig.exchange().results
    assert refused.status == "refused"
    assert f"'{field}'" in refused.details
