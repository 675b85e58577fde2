# SPDX-License-Identifier: Apache-2.0
"""Tests of automatic evacuation: fencing, the delay, and the maximum number of hosts.

The simulated cloud has four hosts. The fencing hook of the tests cuts the power of a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.domain import errors, ids, states
from common.domain.clock import SECOND
from common.domain.context import OURSELVES
from common.store.engine import Connection
from common.store.hosts import host_actions
from common.store.hosts.host_actions import HostAction
from common.store.views import host_contents
from conductor.hosts import automatic_evacuation
from conductor.hosts.automatic_evacuation import EvacuationPolicy
from tests.log_lines import logged_fields
from tests.schemas import memory_store
from tests.workflows.operators import kinds, silence
from tests.workflows.simulator import Cloud, Time


@pytest.fixture
def fenced_hosts() -> list[str]:
    """Names of the hosts for which the fencing hook was called."""
    return []


@pytest.fixture
def cloud(fenced_hosts: list[str]) -> Iterator[Cloud]:
    """Yield a cloud of four hosts with a fencing hook, and ``max_hosts`` 1."""
    time = Time()
    cloud = Cloud(memory_store(time), time, hosts=4)

    def fence(host: str) -> None:
        # Concurrent requests share one call of the real hook.
        if host not in fenced_hosts:
            fenced_hosts.append(host)
            cloud.hosts[host].power_cut()

    chore = automatic_evacuation.chore(EvacuationPolicy(after=90, max_hosts=1))
    cloud.options |= {"fence_host": fence, "chores": (chore,)}
    cloud.restart_conductor()
    cloud.round()
    yield cloud
    cloud.store.close()


def boot_two_servers(cloud: Cloud, host: str) -> list[str]:
    """Return the ids of a running and a stopped server on the host."""
    servers = cloud.create(2, host=host, forced=True)
    cloud.settle()
    cloud.ask(servers[1], "os-stop")
    cloud.settle()
    return servers


def test_automatic_evacuation_moves_servers_of_silent_host(
    cloud: Cloud, fenced_hosts: list[str]
) -> None:
    servers = boot_two_servers(cloud, "h1")
    silence(cloud, "h1")
    assert (kinds(cloud), fenced_hosts) == ({}, []), "it has not been silent for long enough"
    cloud.idle(90)
    assert fenced_hosts == ["h1"]
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


def test_automatic_evacuation_keeps_servers_and_retries_when_fencing_fails(cloud: Cloud) -> None:
    calls: list[str] = []

    def refuse(host: str) -> None:
        calls.append(host)
        raise errors.Conflict("It does not answer.")

    cloud.engine.fence_host = refuse
    servers = boot_two_servers(cloud, "h1")
    silence(cloud, "h1")
    cloud.idle(400)
    assert (len(calls), {cloud.show(server).host for server in servers}) == (2, {"h1"}), (
        "once for each server"
    )
    cloud.idle(int(automatic_evacuation.RETRY_MICROS / SECOND))
    assert len(calls) == 4


def test_automatic_evacuation_waits_while_more_than_max_hosts_are_down(
    cloud: Cloud, fenced_hosts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    servers = [*boot_two_servers(cloud, "h1"), *boot_two_servers(cloud, "h2")]
    cloud.cut.add("h1")
    silence(cloud, "h2")
    cloud.idle(200)
    assert (fenced_hosts, {cloud.show(server).host for server in servers}) == ([], {"h1", "h2"})
    assert {"count": 2, "hosts": "h1, h2", "max_hosts": 1} in logged_fields(
        caplog,
        "more hosts with servers are down than [ha] max_hosts permits, so no host is evacuated; check "
        "whether they are dead, then run for each dead host: kilonova host evacuate HOST",
    )
    cloud.cut.discard("h2")
    cloud.idle(60)
    assert [cloud.show(server).host for server in servers][2:] == ["h2", "h2"]
    assert "h1" not in {cloud.show(server).host for server in servers[:2]}


def test_automatic_evacuation_does_not_count_empty_hosts_as_down(
    cloud: Cloud, fenced_hosts: list[str]
) -> None:
    servers = boot_two_servers(cloud, "h1")
    silence(cloud, "h4")
    silence(cloud, "h1")
    cloud.idle(120)
    assert fenced_hosts == ["h1"]
    assert "h1" not in {cloud.show(server).host for server in servers}


def test_automatic_evacuation_waits_again_after_conductor_start(
    cloud: Cloud, fenced_hosts: list[str]
) -> None:
    """While no conductor ran, the host was silent for longer than the delay. Then it is back."""
    servers = boot_two_servers(cloud, "h1")
    silence(cloud, "h1")
    cloud.time.pass_by(600)
    cloud.restart_conductor()
    cloud.round()
    cloud.round()
    cloud.cut.discard("h1")
    cloud.idle(200)
    assert (fenced_hosts, {cloud.show(server).host for server in servers}) == ([], {"h1"})


def test_automatic_evacuation_ignores_host_forced_down(
    cloud: Cloud, fenced_hosts: list[str]
) -> None:
    servers = boot_two_servers(cloud, "h1")
    silence(cloud, "h1")
    cloud.force_down("h1")
    cloud.idle(200)
    assert (fenced_hosts, {cloud.show(server).host for server in servers}) == ([], {"h1"})


def test_automatic_evacuation_is_off_by_default_and_requires_fencing_hook(
    cloud: Cloud, fenced_hosts: list[str]
) -> None:
    cloud.options.pop("chores")
    cloud.restart_conductor()
    boot_two_servers(cloud, "h1")
    silence(cloud, "h1")
    cloud.idle(200)
    assert (fenced_hosts, kinds(cloud)) == ([], {})
    assert "but [conductor] fencing_hook is not" in automatic_evacuation.refusal(True, "")
    assert (
        automatic_evacuation.refusal(True, "/bin/true")
        == automatic_evacuation.refusal(False, "")
        == ""
    )


def test_automatic_evacuation_skips_server_with_shares(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server with shares is first in the queue, and only one server moves at a time."""
    monkeypatch.setattr(automatic_evacuation, "PARALLEL", 1)
    servers = boot_two_servers(cloud, "h1")
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


def test_automatic_evacuation_begins_for_other_host_when_one_is_removed(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host is removed after the conductor has read the hosts that are down."""
    for host in ("h1", "h2"):
        boot_two_servers(cloud, host)
        cloud.cut.add(host)
    silence(cloud, "h2")
    cloud.time.pass_by(200)
    begin = host_actions.begin

    def begin_unless_removed(tx: Connection, host: str, *args: Any) -> HostAction:
        if host == "h1":
            raise errors.NotFound(f"Compute host {host} could not be found.")
        return begin(tx, host, *args)

    monkeypatch.setattr(host_actions, "begin", begin_unless_removed)
    policy = EvacuationPolicy(after=90, max_hosts=2)
    assert automatic_evacuation.evacuate(cloud.store, policy) == ["h2"]
