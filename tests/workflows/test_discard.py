# SPDX-License-Identifier: Apache-2.0
"""A guest without a record is removed by a debt that an operator makes of it."""

from __future__ import annotations

from copy import deepcopy

import pytest

from common.domain import errors
from common.store.servers import guests
from deploy.operator.hosts import discard as host_discard
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud
from tests.workflows.test_adopt import Adopter, Answers, away, lives, lost, minutes
from tests.workflows.test_lost_commits import everything, running


def test_a_guest_without_a_record_is_removed(cloud: Cloud) -> None:
    """Its host knows a higher fence than the database, which takes it in."""
    register(cloud)
    set_back = everything(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    for key in ("os-stop", "os-start"):
        cloud.ask(server, key)
        cloud.settle()
    set_back()
    cloud.hosts["h1"].restart()
    cloud.idle(65)
    assert running(cloud, server) == ["h1"]
    cloud.store.write(lambda tx: guests.discard(tx, server, "h1"))
    cloud.idle(65)
    assert (cloud.domains(server), cloud.findings()) == ([], [])


def test_a_guest_with_a_record_is_not(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    for host in ("h1", "h2"):
        with pytest.raises(errors.Conflict):
            cloud.store.write(lambda tx, host=host: guests.discard(tx, server, host))  # type: ignore[misc]
    cloud.settle()
    assert running(cloud, server) == ["h1"]


@pytest.mark.parametrize("move", ["resize", "os-migrateLive"])
def test_of_two_copies_the_one_where_the_record_is_stays(either: Cloud, move: str) -> None:
    """What is on shared storage is that one's too."""
    either.watcher = lambda: None  # a guest that nobody knows is a finding
    server, hosts = away(either, move), Answers(either)
    disks = either.hosts["h2"].driver.host

    def discard() -> int:
        return host_discard.carry_out(
            either.store, hosts, Adopter(either).sources.ports, server, "h2", True
        )

    if move == "os-migrateLive":  # h1 has nothing any more
        with pytest.raises(errors.Conflict, match="this may be the only one"):
            discard()
        assert either.domains(server) == ["h2"] and disks.guests[server].disk
        return
    assert discard() == 0
    minutes(either)
    assert (either.domains(server), either.findings()) == (["h1"], [])
    lives(either, server, "h1")


def test_a_guest_where_the_record_is_stays(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    for host, why in (("h1", "is there: delete it|has a record"), ("h2", "has no guest")):
        with pytest.raises(errors.Problem, match=why):
            host_discard.carry_out(
                cloud.store, Answers(cloud), Adopter(cloud).sources.ports, server, host, True
            )
    assert running(cloud, server) == ["h1"]


def test_a_lost_servers_ports_go_with_its_last_guest(cloud: Cloud) -> None:
    server, ports = lost(cloud), Adopter(cloud).sources.ports
    twin = deepcopy(cloud.hosts["h1"].driver.host.guests[server])
    cloud.hosts["h2"].driver.host.keep_guest(server, twin)
    for host, left in (("h2", 1), ("h1", 0)):
        assert host_discard.carry_out(cloud.store, Answers(cloud), ports, server, host, True) == 0
        minutes(cloud)
        cloud.clean_up()
        assert len(cloud.networks.ports(server)) == left
    assert (cloud.findings(), cloud.domains(server), cloud.pending()) == ([], [], [])
