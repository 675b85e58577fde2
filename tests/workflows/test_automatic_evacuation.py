# SPDX-License-Identifier: Apache-2.0
"""Automatic evacuation: hosts that went down are emptied without anybody's word, with proof and
within limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.domain import errors, ids, states
from common.domain.clock import SECOND
from common.domain.context import OURSELVES
from common.store.views import host_contents
from conductor.hosts import automatic_evacuation
from conductor.hosts.automatic_evacuation import EvacuationPolicy
from tests.schemas import memory_store
from tests.workflows.operators import kinds, silence
from tests.workflows.simulator import Cloud, Time


@pytest.fixture
def fenced() -> list[str]:
    """Hosts that the hook was called for."""
    return []


@pytest.fixture
def cloud(fenced: list[str]) -> Iterator[Cloud]:
    """Four hosts, a hook that switches them off, and evacuation for one host at a time."""
    time = Time()
    cloud = Cloud(memory_store(time), time, hosts=4)

    def fence(host: str) -> None:
        if host not in fenced:  # the real hook's word counts for all who ask at the same time
            fenced.append(host)
            cloud.hosts[host].power_cut()

    chore = automatic_evacuation.chore(EvacuationPolicy(after=90, max_hosts=1))
    cloud.options |= {"fence_host": fence, "chores": (chore,)}
    cloud.restart_conductor()
    cloud.round()
    yield cloud
    cloud.store.close()


def on(cloud: Cloud, host: str) -> list[str]:
    """A server that runs and one that is stopped."""
    servers = cloud.create(2, host=host, forced=True)
    cloud.settle()
    cloud.ask(servers[1], "os-stop")
    cloud.settle()
    return servers


def test_servers_of_a_host_that_went_down_live_elsewhere(cloud: Cloud, fenced: list[str]) -> None:
    servers = on(cloud, "h1")
    silence(cloud, "h1")
    assert (kinds(cloud), fenced) == ({}, []), "it has not been silent for long enough"
    cloud.idle(90)
    assert fenced == ["h1"]
    assert "h1" not in {cloud.show(server).host for server in servers}
    assert [cloud.show(server).vm_state for server in servers] == [states.ACTIVE, states.STOPPED]
    assert {cloud.migration(server).user_id for server in servers} == {OURSELVES}
    cloud.idle(60)
    assert len(kinds(cloud)) == 2
    cloud.cut.discard("h1")
    cloud.hosts["h1"].power_on()
    cloud.settle()
    assert all(cloud.domains(server) == [cloud.show(server).host] for server in servers)
    assert cloud.findings() == []


def test_where_the_hook_proves_nothing_servers_stay(cloud: Cloud) -> None:
    calls: list[str] = []

    def refuse(host: str) -> None:
        calls.append(host)
        raise errors.Conflict("It does not answer.")

    cloud.engine.fence_host = refuse
    servers = on(cloud, "h1")
    silence(cloud, "h1")
    cloud.idle(400)
    assert (len(calls), {cloud.show(server).host for server in servers}) == (2, {"h1"}), (
        "once for each server"
    )
    cloud.idle(int(automatic_evacuation.RETRY_MICROS / SECOND))
    assert len(calls) == 4


def test_more_hosts_down_than_allowed_are_left_to_an_operator(
    cloud: Cloud, fenced: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    servers = [*on(cloud, "h1"), *on(cloud, "h2")]
    cloud.cut.add("h1")
    silence(cloud, "h2")
    cloud.idle(200)
    assert (fenced, {cloud.show(server).host for server in servers}) == ([], {"h1", "h2"})
    assert (
        "2 hosts with servers are down (h1, h2), and [ha] max_hosts is 1: nothing is evacuated"
        in caplog.text
    )
    cloud.cut.discard("h2")
    cloud.idle(60)
    assert [cloud.show(server).host for server in servers][2:] == ["h2", "h2"]
    assert "h1" not in {cloud.show(server).host for server in servers[:2]}


def test_a_host_without_servers_counts_for_nothing(cloud: Cloud, fenced: list[str]) -> None:
    servers = on(cloud, "h1")
    silence(cloud, "h4")
    silence(cloud, "h1")
    cloud.idle(120)
    assert fenced == ["h1"]
    assert "h1" not in {cloud.show(server).host for server in servers}


def test_a_conductor_that_has_just_started_listens_first(cloud: Cloud, fenced: list[str]) -> None:
    """The host is well again; nobody was there to hear it."""
    servers = on(cloud, "h1")
    silence(cloud, "h1")
    cloud.time.pass_by(600)
    cloud.restart_conductor()
    cloud.round()
    cloud.round()
    cloud.cut.discard("h1")
    cloud.idle(200)
    assert (fenced, {cloud.show(server).host for server in servers}) == ([], {"h1"})


def test_what_an_admin_forced_down_is_the_admins(cloud: Cloud, fenced: list[str]) -> None:
    servers = on(cloud, "h1")
    silence(cloud, "h1")
    cloud.force_down("h1")
    cloud.idle(200)
    assert (fenced, {cloud.show(server).host for server in servers}) == ([], {"h1"})


def test_it_is_off_by_default_and_needs_a_hook(cloud: Cloud, fenced: list[str]) -> None:
    cloud.options.pop("chores")
    cloud.restart_conductor()
    on(cloud, "h1")
    silence(cloud, "h1")
    cloud.idle(200)
    assert (fenced, kinds(cloud)) == ([], {})
    assert "needs [conductor] fencing_hook" in automatic_evacuation.refusal(True, "")
    assert (
        automatic_evacuation.refusal(True, "/bin/true")
        == automatic_evacuation.refusal(False, "")
        == ""
    )


def test_who_has_shares_stays_and_holds_up_nobody(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time may go, and the one with shares is the first in line."""
    monkeypatch.setattr(automatic_evacuation, "PARALLEL", 1)
    servers = on(cloud, "h1")
    first, last = cloud.store.read(lambda tx: host_contents.look(tx, "h1")).servers
    if cloud.show(first.id).vm_state == states.ACTIVE:
        cloud.ask(first.id, "os-stop")
        cloud.settle()
    cloud.attach_share(first.id, ids.new())
    cloud.settle()
    silence(cloud, "h1")
    cloud.idle(120)
    assert {first.id, last.id} == set(servers)
    assert cloud.show(first.id).host == "h1" != cloud.show(last.id).host
