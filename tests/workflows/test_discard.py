# SPDX-License-Identifier: Apache-2.0
"""Tests of ``kilonova host discard``, which deletes a guest without a record from a host.

The command records a pending cleanup, and a simulated host removes the guest.
"""

from __future__ import annotations

from copy import deepcopy

import pytest

from common.domain import errors
from common.store.servers import guests
from deploy.operator.hosts import discard as host_discard
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud
from tests.workflows.test_adopt import (
    Adopter,
    HostAnswers,
    boot_lost_server,
    boot_moved_server,
    check_usable,
    wait_for_full_reports,
)
from tests.workflows.test_lost_commits import read_running_hosts, snapshot_database


def test_discard_removes_guest_with_higher_fence_than_database(cloud: Cloud) -> None:
    register(cloud)
    set_back = snapshot_database(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    for key in ("os-stop", "os-start"):
        cloud.ask(server, key)
        cloud.settle()
    set_back()
    cloud.hosts["h1"].restart()
    cloud.idle(65)
    assert read_running_hosts(cloud, server) == ["h1"]
    cloud.store.write(lambda tx: guests.discard(tx, server, "h1"))
    cloud.idle(65)
    assert (cloud.domains(server), cloud.findings()) == ([], [])


def test_guests_discard_raises_conflict_on_any_host_for_recorded_server(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    for host in ("h1", "h2"):
        with pytest.raises(errors.Conflict):
            cloud.store.write(lambda tx, host=host: guests.discard(tx, server, host))  # type: ignore[misc]
    cloud.settle()
    assert read_running_hosts(cloud, server) == ["h1"]


@pytest.mark.parametrize("move", ["resize", "os-migrateLive"])
def test_discard_removes_unrecorded_guest_copy_but_refuses_only_copy(
    either: Cloud, move: str
) -> None:
    """If the recorded host has no guest, the command refuses to remove the only copy."""
    either.watcher = lambda: None  # The watcher would report the guest without a record.
    server, hosts = boot_moved_server(either, move), HostAnswers(either)
    disks = either.hosts["h2"].driver.host

    def discard() -> int:
        return host_discard.carry_out(
            either.store, hosts, Adopter(either).sources.ports, server, "h2", True
        )

    if move == "os-migrateLive":  # h1 has no guest any more.
        with pytest.raises(errors.Conflict, match="may be the only one"):
            discard()
        assert either.domains(server) == ["h2"] and disks.guests[server].disk
        return
    assert discard() == 0
    wait_for_full_reports(either)
    assert (either.domains(server), either.findings()) == (["h1"], [])
    check_usable(either, server, "h1")


def test_discard_refuses_guest_on_recorded_host_and_host_without_guest(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    for host, why in (("h1", "exists. Delete or move|has a guest record"), ("h2", "has no guest")):
        for is_confirmed in (False, True):
            with pytest.raises(errors.Problem, match=why):
                host_discard.carry_out(
                    cloud.store,
                    HostAnswers(cloud),
                    Adopter(cloud).sources.ports,
                    server,
                    host,
                    is_confirmed,
                )
    assert read_running_hosts(cloud, server) == ["h1"]


def test_discard_of_last_guest_of_server_lost_from_database_deletes_ports(cloud: Cloud) -> None:
    server, ports = boot_lost_server(cloud), Adopter(cloud).sources.ports
    twin = deepcopy(cloud.hosts["h1"].driver.host.guests[server])
    cloud.hosts["h2"].driver.host.keep_guest(server, twin)
    for host, ports_left in (("h2", 1), ("h1", 0)):
        assert (
            host_discard.carry_out(cloud.store, HostAnswers(cloud), ports, server, host, True) == 0
        )
        wait_for_full_reports(cloud)
        cloud.clean_up()
        assert len(cloud.networks.ports(server)) == ports_left
    assert (cloud.findings(), cloud.domains(server), cloud.pending()) == ([], [], [])
