# SPDX-License-Identifier: Apache-2.0
"""Tests of shares of servers: access rules, late rules, mounts and refusals."""

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
    """Return a stopped server on host h1, without shares."""
    return boot_stopped_server(cloud)


def boot_stopped_server(cloud: Cloud, host: str = "h1") -> str:
    cloud.round()
    [server] = cloud.create(host=host)
    cloud.settle()
    cloud.ask(server, "os-stop")
    cloud.settle()
    return server


def attach_and_settle(cloud: Cloud, server: str, share: str = SHARE) -> str:
    cloud.attach_share(server, share, tag=share[:8])
    cloud.settle()
    return server


def read_mounts(cloud: Cloud, server: str) -> list[str]:
    return cloud.hosts[cloud.show(server).host].driver.host.guests[server].mounted


def read_last_action(cloud: Cloud, server: str) -> tuple[str, str, str | None]:
    row = cloud.store.read(lambda tx: actions.list_for(tx, server))[0]
    return row.name, row.state, row.message


def test_host_mounts_attached_share_only_while_guest_runs(cloud: Cloud, server: str) -> None:
    attach_and_settle(cloud, server)
    assert cloud.shares_of(server) == {SHARE: "inactive"} and read_mounts(cloud, server) == []
    cloud.ask(server, "os-start")
    cloud.settle()
    assert read_mounts(cloud, server) == [SHARE]
    cloud.ask(server, "os-stop")
    cloud.settle()
    assert read_mounts(cloud, server) == []


def test_rescue_of_stopped_server_mounts_attached_share(cloud: Cloud, server: str) -> None:
    attach_and_settle(cloud, server)
    cloud.ask(server, "rescue", args={"image": {"id": ids.new()}})
    cloud.settle()
    assert read_mounts(cloud, server) == [SHARE]


def test_attach_share_waits_until_rule_is_active(cloud: Cloud, server: str) -> None:
    cloud.shares.applies_after = 3
    attach_and_settle(cloud, server)
    assert cloud.shares_of(server) == {SHARE: "inactive"}
    assert cloud.shares.asked.count(("allow", SHARE)) >= 4


@pytest.mark.parametrize(
    ("fault", "message"), [("fails", "could not create"), ("late", "within 5 seconds")]
)
def test_attach_share_fails_when_rule_never_becomes_active(
    cloud: Cloud, server: str, fault: str, message: str
) -> None:
    cloud.shares.fails = fault == "fails"
    cloud.shares.applies_after = 1000 if fault == "late" else 0
    cloud.engine.share_timeout = 5
    cloud.attach_share(server, SHARE)
    cloud.settle()
    assert cloud.shares_of(server) == {SHARE: "error"} and cloud.shares.rules == {}
    assert read_last_action(cloud, server)[:2] == ("attach_share", "failed") and message in (
        read_last_action(cloud, server)[2] or ""
    )
    assert cloud.show(server).vm_state == states.STOPPED
    cloud.shares.fails, cloud.shares.applies_after = False, 0
    cloud.detach_share(server, SHARE)
    cloud.settle()
    assert cloud.shares_of(server) == {} and cloud.show(server).shares == 0


def test_attach_share_of_missing_share_fails_with_message_of_service(
    cloud: Cloud, server: str
) -> None:
    cloud.shares.gone.add(SHARE)
    attach_and_settle(cloud, server)
    assert read_last_action(cloud, server) == (
        "attach_share",
        "failed",
        f"Share {SHARE} could not be found.",
    )
    assert cloud.shares_of(server) == {SHARE: "error"}


def test_detach_share_keeps_rule_for_other_server_of_host(cloud: Cloud, server: str) -> None:
    other = attach_and_settle(cloud, boot_stopped_server(cloud))
    attach_and_settle(cloud, server)
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)]
    cloud.detach_share(other, SHARE)
    cloud.settle()
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)], "the other server still needs the rule"
    cloud.detach_share(server, SHARE)
    cloud.settle()
    assert cloud.shares.rules == {}


def test_delete_removes_access_rules_of_shares(cloud: Cloud, server: str) -> None:
    attach_and_settle(cloud, server)
    attach_and_settle(cloud, server, ids.new())
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.shares.rules == {} and cloud.shares_of(server) == {}
    assert (cloud.show(server).deleted, cloud.show(server).shares) == (1, 0)


@pytest.mark.parametrize("key", ["delete", "detach"])
def test_refused_removal_of_share_rule_becomes_pending_cleanup(
    cloud: Cloud, server: str, key: str
) -> None:
    attach_and_settle(cloud, server)
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


def test_pending_cleanup_keeps_rule_of_share_attached_again(cloud: Cloud, server: str) -> None:
    attach_and_settle(cloud, server)
    cloud.shares.refusing["deny", SHARE] = errors.Conflict("The share is busy.")
    cloud.detach_share(server, SHARE)
    cloud.settle()
    attach_and_settle(cloud, server)
    cloud.shares.well()
    cloud.clean_up()
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)]


def test_detach_share_restores_rule_for_concurrent_attach(cloud: Cloud, server: str) -> None:
    """Another server on the host attaches the share just before the service removes the rule."""
    attach_and_settle(cloud, server)
    other, deny, engine = boot_stopped_server(cloud), cloud.shares.deny, cloud.conductor("c2/1")

    def attach_then_deny(share_id: str, access_to: str) -> None:
        cloud.shares.deny = deny  # type: ignore[method-assign]
        cloud.attach_share(other, share_id)
        for lane in (Lane.INSIDE, Lane.SHARE):
            runner.advance(engine, lane)
        assert cloud.shares.asked[-1] == ("allow", share_id), "the rule exists already"
        deny(share_id, access_to)

    cloud.shares.deny = attach_then_deny  # type: ignore[method-assign]
    cloud.detach_share(server, SHARE)
    cloud.settle()
    assert (cloud.shares_of(server), cloud.shares_of(other)) == ({}, {SHARE: "inactive"})
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)]


def test_reconcile_share_rule_raises_unavailable_while_rule_is_denying(
    cloud: Cloud, server: str
) -> None:
    attach_and_settle(cloud, server)
    cloud.shares.going = True
    with pytest.raises(errors.Unavailable):
        shares.reconcile_rule(cloud.engine, SHARE, ADDRESS)
    cloud.shares.going = False
    shares.reconcile_rule(cloud.engine, SHARE, ADDRESS)
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)]


@pytest.mark.parametrize("answer", [Answer.SILENT, Answer.LOST])
def test_attach_share_succeeds_after_missing_answers_of_service(
    cloud: Cloud, server: str, answer: Answer
) -> None:
    cloud.shares.script = dict.fromkeys(range(1, 4), answer)
    attach_and_settle(cloud, server)
    assert cloud.shares_of(server) == {SHARE: "inactive"}


def test_delete_removes_share_rule_applied_after_delete(cloud: Cloud, server: str) -> None:
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
def test_rebuild_and_shelve_conflict_while_server_has_shares(
    cloud: Cloud, server: str, key: str
) -> None:
    attach_and_settle(cloud, server)
    with pytest.raises(
        errors.Conflict, match=f"Cannot '{key}' instance {server} while it has shares"
    ):
        cloud.ask(server, key)


@pytest.mark.parametrize("key", ["resize", "migrate", "evacuate"])
def test_move_conflicts_while_server_has_shares(cloud: Cloud, server: str, key: str) -> None:
    attach_and_settle(cloud, server)
    with pytest.raises(errors.Conflict, match="while it has shares; detach them first"):
        cloud.move(server, key)


def test_attach_share_with_used_share_or_tag_conflicts(cloud: Cloud, server: str) -> None:
    cloud.attach_share(server, SHARE, "data")
    cloud.settle()
    for share, tag in ((SHARE, "other"), (ids.new(), "data")):
        with pytest.raises(errors.Conflict, match="already associated"):
            cloud.attach_share(server, share, tag)


def test_detach_share_from_running_guest_fails(cloud: Cloud, server: str) -> None:
    """The records show the server as stopped, but its guest runs."""
    attach_and_settle(cloud, server)
    guest = cloud.hosts["h1"].driver.host.guests[server]
    cloud.detach_share(server, SHARE)
    guest.power_state = states.RUNNING
    cloud.settle()
    assert read_last_action(cloud, server) == (
        "detach_share",
        "failed",
        "The server runs; stop the server before its shares are changed.",
    )
    assert cloud.shares_of(server) == {SHARE: "inactive"} and [
        share.share_id for share in guest.shares
    ] == [SHARE]
    assert list(cloud.shares.rules) == [(SHARE, ADDRESS)]


def test_detach_share_on_forced_down_host_removes_rule(cloud: Cloud, server: str) -> None:
    attach_and_settle(cloud, server)
    cloud.kill("h1")
    cloud.detach_share(server, SHARE)
    cloud.settle()
    assert (cloud.shares_of(server), cloud.shares.rules) == ({}, {})
    cloud.move(server, "evacuate")
    cloud.settle()
    assert cloud.show(server).host == "h2"


def test_returned_host_does_not_mount_detached_share(cloud: Cloud, server: str) -> None:
    attach_and_settle(cloud, server)
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
    assert guest.is_active and guest.mounted == [share.share_id for share in guest.shares] == [
        other
    ]
