# SPDX-License-Identifier: Apache-2.0
"""The agent's half of the exchange: accepted commands, reports, leases and registration."""

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


class ManualClock:
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
        self.clock, self.journal = ManualClock(), journal or Journal(":memory:")
        self.agent = Agent("h1", self.journal, self.clock, "boot", builds, copies, migrations)
        self.exchange(SyncAnswer(5, guests={}), registration=True)

    def exchange(self, answer: SyncAnswer | None = None, registration: bool = False) -> Sync:
        """Return the agent's request, after the agent recorded the answer.

        The default answer acknowledges all results.
        """
        request = self.agent.request(
            True, [] if registration else None, INVENTORY if registration else None
        )
        self.agent.record_answer(
            request, answer or SyncAnswer(5, [result.key for result in request.results])
        )
        return request

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


def take_all(agent: Agent) -> list[str]:
    owners = []
    while (work := agent.take()) is not None:
        owners.append(work.command.key.owner)
    return owners


def test_agent_accepts_no_command_before_registration() -> None:
    agent = Agent("h1", Journal(":memory:"), ManualClock(), "boot")
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


def test_later_registration_opens_new_session(rig: Rig) -> None:
    assert rig.exchange().session == 5
    assert rig.exchange(SyncAnswer(6), registration=True).session == 0
    assert rig.exchange(SyncAnswer(6)).session == 6


def test_command_of_other_session_is_dropped_without_result(rig: Rig) -> None:
    rig.agent.accept([command(session=4), command("b", session=6), command("c", session=0)])
    assert rig.agent.take() is None
    request = rig.exchange()
    assert (request.working, request.results) == ([], [])


def test_stop_command_of_other_session_is_dropped(rig: Rig) -> None:
    rig.agent.accept([command(session=4, verb="ensure_stopped")])
    assert rig.agent.in_hand() == {}
    assert rig.agent.take() is None


def test_agent_runs_no_command_until_guest_in_stop_list_is_stopped(rig: Rig) -> None:
    rig.exchange(SyncAnswer(6, guests={}, stop=["moved away"]), registration=True)
    rig.agent.accept([command(session=6)])
    assert rig.agent.take() is None
    assert rig.agent.take_stop() == "moved away"
    rig.agent.record_stop("moved away", True)
    assert take_all(rig.agent) == ["a"]


def test_command_with_older_fence_is_refused_with_reason(rig: Rig) -> None:
    rig.agent.accept([command(fence=3)])
    rig.agent.accept([command("b", fence=2)])
    assert take_all(rig.agent) == ["a"]
    refused = rig.exchange().results[0]
    assert (refused.key, refused.status, refused.error) == (
        "do/b/step/1",
        "refused",
        "fence 2 is older than 3",
    )


def test_registration_raises_fences_but_never_lowers_them(rig: Rig) -> None:
    rig.agent.accept([command(fence=9)])
    rig.exchange(SyncAnswer(5, guests={"s": 4, "other": 7}), registration=True)
    rig.agent.accept([command("b", fence=8), command("c", server="other", fence=6)])
    assert {result.key: result.status for result in rig.exchange().results} == {
        "do/b/step/1": "refused",
        "do/c/step/1": "refused",
    }


def test_fences_survive_agent_restart(rig: Rig) -> None:
    rig.agent.accept([command(fence=4)])
    work = rig.agent.take()
    assert work is not None
    rig.finish(work)
    restarted = Rig(rig.journal)
    restarted.agent.accept([command("late", fence=3)])
    assert restarted.exchange().results[0].status == "refused"


def test_higher_fence_cancels_running_and_drops_queued_commands(rig: Rig) -> None:
    rig.agent.accept(
        [command(fence=1), command("waiting", fence=1), command("else", server="other")]
    )
    running = rig.agent.take()
    assert running is not None
    rig.agent.accept([command("b", fence=2)])
    assert running.cancelled
    rig.agent.record_result(running, None)
    assert take_all(rig.agent) == ["else", "b"]
    assert rig.exchange().results == []


def test_higher_fence_in_sync_answer_cancels_running_and_queued_commands(rig: Rig) -> None:
    """A server that moved to another host has a higher fence, and needs no command here."""
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
    assert take_all(rig.agent) == ["b"], "what is still of today goes on"
    rig.exchange(SyncAnswer(6, guests={"t": 2}))
    assert take_all(rig.agent) == []


def test_agent_runs_commands_of_one_server_one_at_a_time(rig: Rig) -> None:
    rig.agent.accept([command("a"), command("b"), command("c", server="other")])
    first, other = rig.agent.take(), rig.agent.take()
    assert first is not None
    assert other is not None
    assert (first.command.key.owner, other.command.key.owner) == ("a", "c")
    assert rig.agent.take() is None
    rig.finish(first)
    assert take_all(rig.agent) == ["b"]


def test_snapshots_and_builds_beyond_copy_limit_wait_but_stop_command_runs() -> None:
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
    assert take_all(rig.agent) == ["c"]


def test_is_working_on_is_true_while_command_of_server_runs(rig: Rig) -> None:
    rig.agent.accept([command()])
    assert not rig.agent.is_working_on("s")
    work = rig.agent.take()
    assert work is not None
    assert rig.agent.is_working_on("s")
    assert not rig.agent.is_working_on("other")
    rig.finish(work)
    assert not rig.agent.is_working_on("s")


def test_command_received_twice_runs_once(rig: Rig) -> None:
    rig.agent.accept([command(), command()])
    work = rig.agent.take()
    assert work is not None
    rig.agent.accept([command()])
    assert rig.agent.take() is None
    assert rig.exchange().working == ["do/a/step/1"]
    rig.finish(work)
    rig.agent.accept([command()])
    assert rig.agent.take() is None


def test_completed_command_is_answered_again_from_journal(rig: Rig) -> None:
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


def test_results_are_repeated_until_acknowledged(rig: Rig) -> None:
    rig.agent.accept([command("a"), command("b", server="other")])
    for work in (rig.agent.take(), rig.agent.take()):
        assert work is not None
        rig.finish(work)
    assert len(rig.exchange(SyncAnswer(5, ["do/a/step/1"])).results) == 2
    assert [result.key for result in rig.exchange().results] == ["do/b/step/1"]
    assert not rig.agent.has_news()


def test_agent_without_lease_starts_no_guest_and_needs_registration(rig: Rig) -> None:
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
    assert take_all(rig.agent) == ["stop", "remove"]
    assert rig.exchange(SyncAnswer(6), registration=True).working == [
        "do/stop/step/1",
        "do/remove/step/1",
    ]
    assert rig.agent.has_lease()
    rig.agent.accept([command("start", session=6)])
    assert take_all(rig.agent) == ["start"]


@pytest.mark.parametrize("verb", ["ensure_guest", "live_migrate"])
def test_command_sent_before_registration_starts_no_guest_after_it(rig: Rig, verb: str) -> None:
    rig.agent.accept([command(verb=verb), command("b", server="t", verb=verb)])
    work = rig.agent.take()
    assert work is not None and rig.agent.may_start(work)
    rig.clock.seconds += LEASE_SECONDS
    assert rig.exchange(SyncAnswer(6), registration=True).working[0] == work.key
    assert rig.agent.has_lease() and not work.cancelled and not rig.agent.may_start(work)
    assert take_all(rig.agent) == []


def test_command_may_not_start_guest_after_higher_fence(rig: Rig) -> None:
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None and rig.agent.may_start(work)
    rig.agent.accept([command("b", fence=2, verb="ensure_absent")])
    assert not rig.agent.may_start(work)


def test_answer_of_other_session_ends_session_but_keeps_pending_reports(rig: Rig) -> None:
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None
    done = rig.finish(work)
    rig.agent.record_changes([DomainState("s", 4, 1)])
    rig.exchange(SyncAnswer(0))
    assert rig.agent.needs_registration()
    request = rig.exchange(SyncAnswer(6, [done.key]), registration=True)
    assert (request.results, request.changed) == ([done], []), (
        "news of a server are told after its result was taken in"
    )
    assert rig.exchange().changed == [DomainState("s", 4, 1)]
    assert not rig.agent.has_news()


def test_domain_state_changed_again_during_exchange_is_reported_next(rig: Rig) -> None:
    rig.agent.record_changes([DomainState("s", 4, 1)])
    request = rig.agent.request(False, None, None)
    assert (request.ask, request.changed) == (False, [DomainState("s", 4, 1)])
    rig.agent.record_changes([DomainState("s", 1, 1)])
    rig.agent.record_answer(request, SyncAnswer(5))
    assert rig.agent.has_news()
    assert rig.exchange().changed == [DomainState("s", 1, 1)]
    assert not rig.agent.has_news()


def test_sync_answer_commands_are_accepted_only_for_current_session(rig: Rig) -> None:
    rig.exchange(SyncAnswer(5, commands=[command("a"), command("old", session=4)]))
    assert take_all(rig.agent) == ["a"]


def test_commands_in_registration_answer_belong_to_new_session(rig: Rig) -> None:
    rig.exchange(
        SyncAnswer(6, commands=[command("a", session=6)], guests={"s": 1}), registration=True
    )
    assert take_all(rig.agent) == ["a"]


def test_full_report_is_due_once_per_period(rig: Rig) -> None:
    assert not rig.agent.wants_full_report()
    rig.clock.seconds += FULL_REPORT_SECONDS
    assert rig.agent.wants_full_report()
    rig.agent.request(True, [DomainState("s", 1, 1)], None)
    assert not rig.agent.wants_full_report()


def test_unacknowledged_result_is_reported_after_agent_restart(tmp_path: Path) -> None:
    """After the restart, a repeated command returns the recorded result and does not run again."""
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


def test_domain_state_already_reported_by_result_is_not_reported_again(rig: Rig) -> None:
    rig.agent.accept([command(fence=2)])
    work = rig.agent.take()
    assert work is not None
    rig.agent.record_result(work, Result(work.key, "s", 2, "done", {"power_state": 1}))
    rig.agent.record_changes([DomainState("s", 1, 2), DomainState("other", 4, 1)])
    assert rig.exchange().changed == [DomainState("other", 4, 1)]
    rig.agent.record_changes([DomainState("s", 4, 2)])
    assert rig.exchange().changed == [DomainState("s", 4, 2)]


def test_domain_state_seen_during_command_is_not_reported_after_it(rig: Rig) -> None:
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
    request = rig.exchange(SyncAnswer(5, [done.key]))
    assert (request.results, request.changed) == ([done], [])
    assert rig.exchange().changed == []
    assert not rig.agent.has_news()


def new_builds(*actions: str) -> list[Command]:
    return [command(action, server=action, verb="ensure_guest") for action in actions]


def test_builds_beyond_limit_wait_and_quick_commands_overtake_them() -> None:
    rig = Rig(builds=2)
    rig.agent.accept(
        [
            *new_builds("a", "b", "c"),
            command("rebuild", server="r", verb="rebuild"),
            command("stop", server="s", verb="ensure_stopped"),
        ]
    )
    first, second = rig.agent.take(), rig.agent.take()
    assert first is not None
    assert second is not None
    assert (first.command.key.owner, second.command.key.owner) == ("a", "b")
    assert take_all(rig.agent) == ["stop"]
    assert rig.exchange().working == [
        "do/a/step/1",
        "do/b/step/1",
        "do/c/step/1",
        "do/rebuild/step/1",
        "do/stop/step/1",
    ]
    rig.finish(first)
    assert take_all(rig.agent) == ["c"]
    rig.finish(second)
    assert take_all(rig.agent) == ["rebuild"]


def test_cancelled_build_frees_its_slot(rig: Rig) -> None:
    rig = Rig(builds=1)
    rig.agent.accept(new_builds("a", "b"))
    work = rig.agent.take()
    assert work is not None
    rig.agent.record_result(work, None)
    assert take_all(rig.agent) == ["b"]


def test_inventory_is_reported_again_only_when_changed(rig: Rig) -> None:
    assert rig.exchange().inventory is None
    rig.agent.record_host(replace(INVENTORY), None)
    assert rig.exchange().inventory is None
    more = replace(INVENTORY, memory_mb=2)
    rig.agent.record_host(more, None)
    request = rig.agent.request(True, None, None)
    assert (request.session, request.inventory) == (5, more)
    assert rig.exchange().inventory == more, "told until it was acknowledged"
    assert rig.exchange().inventory is None
    rig.agent.record_host(more, None)
    assert rig.exchange().inventory is None


def test_inventory_change_during_exchange_is_reported_next(rig: Rig) -> None:
    rig.agent.record_host(replace(INVENTORY, memory_mb=2), None)
    request = rig.agent.request(True, None, None)
    rig.agent.record_host(replace(INVENTORY, memory_mb=3), None)
    rig.agent.record_answer(request, SyncAnswer(5))
    assert rig.exchange().inventory == replace(INVENTORY, memory_mb=3)
    rig.exchange(SyncAnswer(0))
    assert rig.exchange(SyncAnswer(6), registration=True).inventory == INVENTORY
    assert rig.exchange(SyncAnswer(6)).inventory is None


def test_metrics_are_reported_once(rig: Rig) -> None:
    rig.agent.record_host(INVENTORY, {"cpu.percent": 7.0})
    assert rig.exchange().metrics == {"cpu.percent": 7.0}
    assert rig.exchange().metrics is None


def test_prefetched_images_are_reported_until_acknowledged(rig: Rig) -> None:
    rig.agent.record_prefetch("one", "")
    rig.agent.record_prefetch("two", "no space")
    assert rig.agent.has_news()
    request = rig.agent.request(True, None, None)
    assert request.cached == {"one": "", "two": "no space"}
    rig.agent.record_prefetch("two", "")  # a second attempt succeeded meanwhile
    rig.agent.record_answer(request, SyncAnswer(5))
    assert rig.exchange(SyncAnswer(0)).cached == {"two": ""}
    assert rig.exchange(SyncAnswer(6), registration=True).cached == {"two": ""}
    assert not rig.agent.has_news()


@pytest.mark.parametrize(
    "fields_changed",
    [
        {"fence": "2"},
        {"server": ["s"]},
        {"verb": ["ensure_running"]},
        {"verb": "ensure_stopped", "args": {}},
        {"verb": "control_migration", "args": None},
    ],
)
def test_malformed_command_is_refused_and_blocks_no_other_command(
    rig: Rig, fields_changed: dict[str, Any]
) -> None:
    """The refusal is repeated each time that the conductor sends the command."""
    bad = replace(command("bad", server="other"), **fields_changed)
    for _ in range(3):
        rig.agent.accept([bad, command("good")])
    assert take_all(rig.agent) == ["good"]
    [refused] = rig.exchange().results
    assert (refused.key, refused.status) == (str(bad.key), "refused")
    assert "cannot understand the command" in refused.error
    assert refused.details
    rig.agent.accept([bad])
    assert [result.key for result in rig.exchange().results] == [str(bad.key)]


def test_command_with_unknown_verb_is_refused_without_journal_entry(rig: Rig) -> None:
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
