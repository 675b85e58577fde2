# SPDX-License-Identifier: Apache-2.0
"""Shares of servers: rules that servers of one host need together, rules that come late, and what
is refused."""

from __future__ import annotations

import pytest

from common.domain import errors, ids, states
from common.store import cleanups
from common.store.servers import actions
from conductor.engine import runner
from conductor.engine.engine import Lane
from conductor.steps import shares
from tests.answers import Answer
from tests.workflows.scenarios import SHARE
from tests.workflows.simulator import Cloud

ADDRESS = "127.0.0.1"


@pytest.fixture
def server(cloud: Cloud) -> str:
    """One that is off."""
    return stopped(cloud)


def stopped(cloud: Cloud, host: str = "h1") -> str:
    cloud.round()
    [server] = cloud.create(host=host)
    cloud.settle()
    cloud.ask(server, "os-stop")
    cloud.settle()
    return server


def attached(cloud: Cloud, server: str, share: str = SHARE) -> str:
    cloud.attach_share(server, share, tag=share[:8])
    cloud.settle()
    return server


def mounted(cloud: Cloud, server: str) -> list[str]:
    return cloud.hosts[cloud.show(server).host].driver.host.guests[server].mounted


def last(cloud: Cloud, server: str) -> tuple[str, str, str | None]:
    row = cloud.store.read(lambda tx: actions.list_for(tx, server))[0]
    return row.name, row.state, row.message


def test_the_host_mounts_it_as_long_as_the_guest_runs(cloud: Cloud, server: str) -> None:
    attached(cloud, server)
    assert cloud.shares_of(server) == {SHARE: "inactive"} and mounted(cloud, server) == []
    cloud.ask(server, "os-start")
    cloud.settle()
    assert mounted(cloud, server) == [SHARE]
    cloud.ask(server, "os-stop")
    cloud.settle()
    assert mounted(cloud, server) == []


def test_a_rescued_guest_keeps_its_shares(cloud: Cloud, server: str) -> None:
    attached(cloud, server)
    cloud.ask(server, "rescue", args={"image": {"id": ids.new()}})
    cloud.settle()
    assert mounted(cloud, server) == [SHARE]


def test_a_share_waits_until_the_host_may_mount_it(cloud: Cloud, server: str) -> None:
    cloud.shares.applies_after = 3
    attached(cloud, server)
    assert cloud.shares_of(server) == {SHARE: "inactive"}
    assert cloud.shares.asked.count(("allow", SHARE)) >= 4


@pytest.mark.parametrize(
    ("happens", "says"), [("fails", "cannot let"), ("late", "within 5 seconds")]
)
def test_a_rule_that_never_counts_is_an_error_to_be_seen(
    cloud: Cloud, server: str, happens: str, says: str
) -> None:
    cloud.shares.fails = happens == "fails"
    cloud.shares.applies_after = 1000 if happens == "late" else 0
    cloud.engine.share_timeout = 5
    cloud.attach_share(server, SHARE)
    cloud.settle()
    assert cloud.shares_of(server) == {SHARE: "error"} and cloud.shares.rules == {}
    assert last(cloud, server)[:2] == ("attach_share", "failed") and says in (
        last(cloud, server)[2] or ""
    )
    assert cloud.show(server).vm_state == states.STOPPED
    cloud.shares.fails, cloud.shares.applies_after = False, 0
    cloud.detach_share(server, SHARE)
    cloud.settle()
    assert cloud.shares_of(server) == {} and cloud.show(server).shares == 0


def test_a_share_that_is_gone_is_told_in_its_words(cloud: Cloud, server: str) -> None:
    cloud.shares.gone.add(SHARE)
    attached(cloud, server)
    assert last(cloud, server) == ("attach_share", "failed", f"Share {SHARE} could not be found.")
    assert cloud.shares_of(server) == {SHARE: "error"}


def test_a_rule_is_there_while_any_server_of_the_host_needs_it(cloud: Cloud, server: str) -> None:
    other = attached(cloud, stopped(cloud))
    attached(cloud, server)
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)]
    cloud.detach_share(other, SHARE)
    cloud.settle()
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)], "the other server has it"
    cloud.detach_share(server, SHARE)
    cloud.settle()
    assert cloud.shares.rules == {}


def test_a_deleted_server_leaves_no_rule(cloud: Cloud, server: str) -> None:
    attached(cloud, server)
    attached(cloud, server, ids.new())
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.shares.rules == {} and cloud.shares_of(server) == {}
    assert (cloud.show(server).deleted, cloud.show(server).shares) == (1, 0)


@pytest.mark.parametrize("key", ["delete", "detach"])
def test_a_rule_that_may_not_go_is_a_pending_cleanup(cloud: Cloud, server: str, key: str) -> None:
    attached(cloud, server)
    cloud.shares.refusing["deny", SHARE] = errors.Conflict("The share is busy.")
    if key == "delete":
        cloud.ask(server, "delete")
    else:
        cloud.detach_share(server, SHARE)
    cloud.settle()
    assert cloud.shares_of(server) == {} and cloud.pending() == [(cleanups.SHARE, SHARE)]
    cloud.shares.well()
    cloud.clean_up()
    assert cloud.shares.rules == {}


def test_a_pending_cleanup_leaves_the_rule_that_is_needed_again(cloud: Cloud, server: str) -> None:
    attached(cloud, server)
    cloud.shares.refusing["deny", SHARE] = errors.Conflict("The share is busy.")
    cloud.detach_share(server, SHARE)
    cloud.settle()
    attached(cloud, server)
    cloud.shares.well()
    cloud.clean_up()
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)]


def test_a_rule_that_is_needed_meanwhile_comes_back(cloud: Cloud, server: str) -> None:
    """Between the look at the records and the call, another server of the host gets the share, and
    finds the rule."""
    attached(cloud, server)
    other, deny, late = stopped(cloud), cloud.shares.deny, cloud.conductor("c2/1")

    def slow(share_id: str, access_to: str) -> None:
        cloud.shares.deny = deny  # type: ignore[method-assign]  # the neighbour is the test's to bend
        cloud.attach_share(other, share_id)
        for lane in (Lane.INSIDE, Lane.SHARE):
            runner.advance(late, lane)
        assert cloud.shares.asked[-1] == ("allow", share_id), "it has found the rule"
        deny(share_id, access_to)

    cloud.shares.deny = slow  # type: ignore[method-assign]
    cloud.detach_share(server, SHARE)
    cloud.settle()
    assert (cloud.shares_of(server), cloud.shares_of(other)) == ({}, {SHARE: "inactive"})
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)]


def test_a_rule_on_its_way_out_is_asked_for_again(cloud: Cloud, server: str) -> None:
    attached(cloud, server)
    cloud.shares.going = True
    with pytest.raises(errors.Unavailable):
        shares.reconcile_rule(cloud.engine, SHARE, ADDRESS)
    cloud.shares.going = False
    shares.reconcile_rule(cloud.engine, SHARE, ADDRESS)
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)]


@pytest.mark.parametrize("answer", [Answer.SILENT, Answer.LOST])
def test_a_silent_service_makes_it_late(cloud: Cloud, server: str, answer: Answer) -> None:
    cloud.shares.script = dict.fromkeys(range(1, 4), answer)
    attached(cloud, server)
    assert cloud.shares_of(server) == {SHARE: "inactive"}


def test_a_rule_that_was_made_late_goes_with_its_server(cloud: Cloud, server: str) -> None:
    cloud.shares.silent = 1
    cloud.attach_share(server, SHARE)
    cloud.advance()
    cloud.ask(server, "delete")
    cloud.watcher = lambda: (
        cloud.shares.rules.setdefault((SHARE, ADDRESS), 0) if cloud.show(server).deleted else None
    )
    for _ in range(3):
        cloud.round()
    cloud.watcher = lambda: None
    cloud.settle()
    assert cloud.shares.rules == {}


@pytest.mark.parametrize("key", ["rebuild", "shelve"])
def test_what_cannot_be_done_with_shares_says_so(cloud: Cloud, server: str, key: str) -> None:
    attached(cloud, server)
    with pytest.raises(
        errors.Conflict, match=f"Cannot '{key}' instance {server} while it has shares"
    ):
        cloud.ask(server, key)


@pytest.mark.parametrize("key", ["resize", "migrate", "evacuate"])
def test_a_server_with_shares_does_not_move(cloud: Cloud, server: str, key: str) -> None:
    attached(cloud, server)
    with pytest.raises(errors.Conflict, match="while it has shares; detach them first"):
        cloud.move(server, key)


def test_a_server_has_a_share_and_a_tag_once(cloud: Cloud, server: str) -> None:
    cloud.attach_share(server, SHARE, "data")
    cloud.settle()
    for share, tag in ((SHARE, "other"), (ids.new(), "data")):
        with pytest.raises(errors.Conflict, match="already associated"):
            cloud.attach_share(server, share, tag)


def test_a_guest_that_runs_keeps_its_shares(cloud: Cloud, server: str) -> None:
    """A server in error whose guest runs all the same."""
    attached(cloud, server)
    guest = cloud.hosts["h1"].driver.host.guests[server]
    cloud.detach_share(server, SHARE)
    guest.power_state = states.RUNNING
    cloud.settle()
    assert last(cloud, server) == (
        "detach_share",
        "failed",
        "The server runs; stop it before its shares are changed.",
    )
    assert cloud.shares_of(server) == {SHARE: "inactive"} and [
        one.share_id for one in guest.shares
    ] == [SHARE]
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)]


def test_a_dead_host_has_let_go_of_its_shares(cloud: Cloud, server: str) -> None:
    attached(cloud, server)
    cloud.kill("h1")
    cloud.detach_share(server, SHARE)
    cloud.settle()
    assert (cloud.shares_of(server), cloud.shares.rules) == ({}, {})
    cloud.move(server, "evacuate")
    cloud.settle()
    assert cloud.show(server).host == "h2"


def test_a_host_that_is_back_mounts_no_share_that_was_detached(cloud: Cloud, server: str) -> None:
    attached(cloud, server)
    cloud.attach_share(server, other := ids.new(), "more")
    cloud.settle()
    cloud.kill("h1")
    cloud.detach_share(server, SHARE)
    cloud.settle()
    cloud.hosts["h1"].power_on()
    cloud.force_down("h1", False)
    cloud.settle()
    cloud.ask(server, "os-start")
    cloud.settle()
    guest = cloud.hosts["h1"].driver.host.guests[server]
    assert guest.is_active and guest.mounted == [one.share_id for one in guest.shares] == [other]
