# SPDX-License-Identifier: Apache-2.0
"""Tests that reports of a stolen host change no servers of other hosts and bring no unsafe text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import ids, states
from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import DomainState, ImageRef, Result, Sync
from common.domain.wire import to_wire
from common.store import schema
from common.store.hosts import hosts
from common.store.servers import actions, guests, migrations
from conductor.engine import reports
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud(cloud: Cloud) -> Cloud:
    """Return a cloud with registered hosts and without servers."""
    register(cloud)
    return cloud


def boot_server_elsewhere(cloud: Cloud) -> tuple[str, str, str]:
    """Return a running server, its host, and the other host, which the tests treat as stolen."""
    [server] = cloud.create(networks=[])
    cloud.settle()
    home = cloud.show(server).host
    return server, home, next(name for name in cloud.hosts if name != home)


def handle_report(cloud: Cloud, host: str, **fields: Any) -> Any:
    """Handle a report of this host, in its session, with the given fields. Return the answer."""
    session = cloud.store.read(lambda tx: hosts.sessions(tx, [host]))[host]
    [answer] = reports.handle(
        cloud.engine, [Sync(host, session, cloud.hosts[host].agent.boot_id, **fields)]
    )
    assert not isinstance(answer, Exception)
    return answer


def begin_lost_stop(cloud: Cloud, server: str) -> Any:
    """Begin a stop whose command is lost, and return the action."""
    cloud.lose = lambda kind: kind == "do"
    cloud.ask(server, "os-stop")
    cloud.advance()
    [row] = [
        row
        for row in cloud.store.read(lambda tx: actions.list_for(tx, server))
        if row.state == "waiting"
    ]
    return row


@pytest.mark.parametrize("status", ["done", "failed", "refused", "unknown"])
def test_result_from_other_host_does_not_end_action(cloud: Cloud, status: str) -> None:
    server, home, stolen = boot_server_elsewhere(cloud)
    row = begin_lost_stop(cloud, server)
    key = f"do/{row.id}/{row.step}/{row.attempt}"
    data = {"power_state": states.SHUTDOWN}
    handle_report(
        cloud,
        stolen,
        results=[Result(key, server, row.fence, status, data, known_fence=2**40)],
        phases={key: CommandProgress(CommandPhase.STARTING, stalled_verb="trap")},
    )
    [after] = [
        action
        for action in cloud.store.read(lambda tx: actions.list_for(tx, server))
        if action.id == row.id
    ]
    assert (after.state, after.failures, after.cause, cloud.show(server).fence) == (
        "waiting",
        0,
        row.cause,
        row.fence,
    )
    cloud.lose = lambda kind: False
    handle_report(
        cloud,
        home,
        results=[Result(key, server, row.fence, "done", {"power_state": states.SHUTDOWN})],
    )
    assert cloud.show(server).vm_state == states.STOPPED


def test_domain_state_from_other_host_does_not_change_server(cloud: Cloud) -> None:
    server, _, stolen = boot_server_elsewhere(cloud)
    before = cloud.show(server)
    for fence in (before.fence, 2**40):
        handle_report(cloud, stolen, changed=[DomainState(server, states.SHUTDOWN, fence)])
        handle_report(cloud, stolen, domains=[DomainState(server, states.RUNNING, fence)])
    after = cloud.show(server)
    assert (after.vm_state, after.fence, after.power_state) == (
        before.vm_state,
        before.fence,
        before.power_state,
    )


def test_result_from_other_host_does_not_end_pending_removal(cloud: Cloud) -> None:
    server, home, stolen = boot_server_elsewhere(cloud)
    cloud.hosts[home].power_cut()
    cloud.ask(server, "delete")
    cloud.round()
    [removal] = cloud.store.read(lambda tx: guests.removals_of(tx, [server]))
    key = f"cleanup/{server}/ensure_absent/{removal.fence}"
    for status, known_fence in (("done", None), ("refused", 2**40)):
        result = Result(key, server, removal.fence, status, known_fence=known_fence)
        handle_report(cloud, stolen, results=[result])
    [remaining] = cloud.store.read(lambda tx: guests.removals_of(tx, [server]))
    assert (remaining.host, remaining.fence) == (home, removal.fence)


def test_host_report_raises_fence_of_server_only_up_to_limit(cloud: Cloud) -> None:
    """The host of a server may report a fence, too, but must not use up the numbers."""
    server, home, _ = boot_server_elsewhere(cloud)
    handle_report(cloud, home, changed=[DomainState(server, states.RUNNING, 2**62)])
    assert cloud.show(server).fence < 2**49


def test_migration_progress_from_host_other_than_source_is_ignored(cloud: Cloud) -> None:
    server, home, stolen = boot_server_elsewhere(cloud)
    cloud.lose = lambda kind: kind == "do"
    cloud.move(server, "os-migrateLive")
    cloud.advance()
    [row] = cloud.store.read(lambda tx: migrations.page(tx, source=home))
    handle_report(cloud, stolen, moved={f"do/{row.action_id}/migrate/1": {"memory_total": 7}})
    assert cloud.store.read(lambda tx: migrations.page(tx, source=home))[0].progress is None
    handle_report(cloud, home, moved={f"do/{row.action_id}/migrate/1": {"memory_total": 7}})
    assert cloud.store.read(lambda tx: migrations.page(tx, source=home))[0].progress == {
        "memory_total": 7
    }


UNSAFE_TEXT = "E:\x1b]0;PWNED\x07\x1b[31mRED\x1b[2J\r\nFAKE LINE \x9b31m \u202e" + "x" * 5000


def test_error_text_of_a_host_is_stored_printable_and_short(cloud: Cloud) -> None:
    server, home, _ = boot_server_elsewhere(cloud)
    row = begin_lost_stop(cloud, server)
    key = f"do/{row.id}/{row.step}/{row.attempt}"
    failed = Result(key, server, row.fence, "failed", error=UNSAFE_TEXT, details=UNSAFE_TEXT)
    handle_report(cloud, home, results=[failed])
    cloud.lose = lambda kind: False
    cloud.settle()
    [after] = [
        action
        for action in cloud.store.read(lambda tx: actions.list_for(tx, server))
        if action.id == row.id
    ]
    events = cloud.store.read(lambda tx: actions.events_of(tx, row.id))
    texts = [after.message, *(event.message for event in events)]
    assert any(text and text.startswith("E:?]0;PWNED?") for text in texts)
    for text in [*texts, *(event.details for event in events)]:
        assert not text or (text.isprintable() and len(text) <= 2000)
    assert max(len(text or "") for text in texts) <= 600


def test_inventory_of_a_host_is_stored_printable_and_short(cloud: Cloud) -> None:
    stolen = next(iter(cloud.hosts.values()))
    inventory = replace(
        stolen.driver.inventory(),
        hypervisor_hostname=UNSAFE_TEXT,
        facts={"arch": UNSAFE_TEXT, UNSAFE_TEXT: [UNSAFE_TEXT]},
        traits=["COMPUTE_NODE", UNSAFE_TEXT],
    )
    handle_report(cloud, stolen.name, inventory=inventory)
    [host] = [host for host in cloud.store.read(hosts.list_all) if host["name"] == stolen.name]
    texts = [host["hypervisor_hostname"], host["facts"]["arch"], *host["facts"], *host["traits"]]
    assert [text for text in texts if not text.isprintable() or len(text) > 500] == []
    assert any("FAKE" in text for text in texts)


def test_error_text_of_failed_image_fetch_is_stored_printable(cloud: Cloud) -> None:
    stolen = next(iter(cloud.hosts))
    image = to_wire(ImageRef(ids.new(), "qcow2", 1))
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.host_images),
            {"host": stolen, "image_id": image["id"], "image": image, "asked_at": 0},
        )
    handle_report(cloud, stolen, cached={image["id"]: UNSAFE_TEXT})
    with cloud.store.begin() as tx:
        rows = repr(list(tx.execute(sa.select(schema.host_images))))
    assert "\\x1b" not in rows
    assert "FAKE" in rows
