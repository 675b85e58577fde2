# SPDX-License-Identifier: Apache-2.0
"""The columns follow the store: inventories, usage, flags, zones, and what was just proposed."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from common.domain.clock import SECOND
from common.domain.models import RequestSpec
from common.store import schema
from scheduler.hosts import Hosts
from scheduler.proposals import Proposals
from tests.unit.scheduler.conftest import Cloud, options

ONE = {"VCPU": 1, "MEMORY_MB": 1024, "DISK_GB": 10}


def request(server: str = "s", **more: object) -> RequestSpec:
    return RequestSpec(server, "p", **{"resources": ONE, **more})  # type: ignore[arg-type]


def hosts_of(cloud: Cloud) -> Hosts:
    return Hosts(cloud.store, cloud.clock)


def free(hosts: Hosts, name: str, resource_class: str = "VCPU") -> int:
    snapshot = hosts.snapshot()
    return int(snapshot.stock[resource_class].free[snapshot.rows[name]])


def test_capacity_is_total_less_reserved_times_ratio_less_used(cloud: Cloud) -> None:
    cloud.host("a", vcpus=4, memory_mb=4096, reserved=96, ratio=1.5)
    cloud.claim("a", "s1", VCPU=2, MEMORY_MB=1000)
    cloud.claim("a", "s2", VCPU=1)
    hosts = hosts_of(cloud)
    hosts.refresh()
    assert (free(hosts, "a"), free(hosts, "a", "MEMORY_MB"), free(hosts, "a", "DISK_GB")) == (
        3,
        3000,
        40,
    )


def test_reads_at_most_every_50_ms_and_then_only_what_changed(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    hosts = hosts_of(cloud)
    assert hosts.refresh()
    cloud.clock.seconds += 20
    cloud.claim("a", "s", VCPU=3)
    assert hosts.refresh() and (free(hosts, "a"), free(hosts, "b")) == (1, 4)
    cloud.claim("b", "t", VCPU=1)
    cloud.clock.seconds += 0.04
    assert not hosts.refresh() and free(hosts, "b") == 4
    assert hosts.refresh(at_once=True) and free(hosts, "b") == 3


def test_a_host_is_not_read_again_for_a_change_that_was_seen(cloud: Cloud) -> None:
    cloud.host("a")
    hosts = hosts_of(cloud)
    cloud.clock.seconds += 0.1
    hosts.refresh()
    read: list[str] = []
    sa.event.listen(cloud.store.engine, "before_cursor_execute", lambda *told: read.append(told[2]))
    for changed in (False, True, False):
        cloud.clock.seconds += 0.1
        if changed:
            cloud.claim("a", "s", VCPU=3)
        cloud.clock.seconds += 0.1
        read.clear()
        hosts.refresh()
        assert len(read) == (4 if changed else 2), read
    assert free(hosts, "a") == 1


def test_change_that_commits_late_is_still_seen(cloud: Cloud) -> None:
    cloud.host("a")
    hosts = hosts_of(cloud)
    cloud.clock.seconds += 100
    hosts.refresh()
    late = cloud.clock.micros() - 4 * SECOND
    cloud.claim("a", "s", VCPU=3)
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.providers).values(changed_at=late))
    cloud.clock.seconds += 1
    hosts.refresh()
    assert free(hosts, "a") == 1


def test_new_and_gone_hosts_and_classes(cloud: Cloud) -> None:
    cloud.host("a")
    hosts = hosts_of(cloud)
    hosts.refresh()
    cloud.clock.seconds += 10
    cloud.host("b")
    hosts.refresh()
    assert hosts.snapshot().names == ["a", "b"]
    with cloud.store.begin() as tx:
        tx.execute(
            sa.delete(schema.inventories).where(
                schema.inventories.c.resource_class == "DISK_GB",
                schema.inventories.c.provider_id == cloud.ids["b"],
            )
        )
        tx.execute(
            sa.update(schema.providers)
            .where(schema.providers.c.host == "b")
            .values(changed_at=cloud.clock.micros())
        )
        tx.execute(sa.delete(schema.providers).where(schema.providers.c.host == "a"))
    cloud.clock.seconds += 1
    hosts.refresh()
    assert hosts.snapshot().names == ["b"]
    assert hosts.snapshot().stock["DISK_GB"].most.tolist() == [0]


def test_flags_and_zones_are_read_each_time(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b", up=False, forced_down=True)
    scheduler = Proposals(hosts_of(cloud), options())
    assert scheduler.select([request()])[0].hosts == ["a"]
    cloud.clock.seconds += 30
    cloud.zone("az1", "b")
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.heartbeats).values(up=True))
        tx.execute(sa.update(schema.services).values(forced_down=False))
    both = scheduler.select(
        [
            request("t"),
            request("u", availability_zone="az1"),
            request("v", availability_zone="nova"),
        ]
    )
    assert [sorted(answer.hosts) for answer in both] == [["a", "b"], ["b"], ["a"]]


def test_a_ratio_beyond_all_numbers_is_much_room_and_not_none(cloud: Cloud) -> None:
    cloud.host("a", vcpus=4, memory_mb=4096, ratio=3.4e38)
    hosts = hosts_of(cloud)
    hosts.refresh()
    assert free(hosts, "a") == 2**53


def test_proposal_counts_until_the_generation_moves(cloud: Cloud) -> None:
    cloud.host("a")
    hosts = hosts_of(cloud)
    scheduler = Proposals(hosts, options())
    scheduler.select([request("s")])
    assert free(hosts, "a") == 3
    cloud.clock.seconds += 1
    hosts.refresh()
    assert free(hosts, "a") == 3
    cloud.claim("a", "s", **ONE)
    hosts.refresh(at_once=True)
    assert free(hosts, "a") == 3  # now as usage, no longer as a proposal


def test_proposal_that_nobody_claimed_is_forgotten_after_five_seconds(cloud: Cloud) -> None:
    cloud.host("a")
    hosts = hosts_of(cloud)
    Proposals(hosts, options()).select([request("s")])
    cloud.clock.seconds += 5.1
    hosts.refresh()
    assert free(hosts, "a") == 4


def test_asking_again_withdraws_the_earlier_proposal(cloud: Cloud) -> None:
    cloud.host("a", vcpus=1)
    cloud.host("b", vcpus=1)
    scheduler = Proposals(hosts_of(cloud), options())
    first = scheduler.select([request("s")])[0].hosts[0]
    second = scheduler.select([request("s", excluded=[first])])[0].hosts
    assert second == [{"a": "b", "b": "a"}[first]]
    assert scheduler.select([request("t")])[0].hosts[0] == first


def test_proposals_spread_but_never_refuse(cloud: Cloud) -> None:
    cloud.host("a", vcpus=1)
    scheduler = Proposals(hosts_of(cloud), options())
    assert scheduler.select([request("s")])[0].hosts == ["a"]
    # the claim decides which of the two gets it
    assert scheduler.select([request("t")])[0].hosts == ["a"]


def test_one_request_never_promises_the_same_room_twice(cloud: Cloud) -> None:
    cloud.host("a", vcpus=2)
    answers = Proposals(hosts_of(cloud), options()).select(
        [request(f"s{number}") for number in range(3)]
    )
    assert [answer.hosts for answer in answers] == [["a"], ["a"], []]
    assert answers[2].reason == "1 host: 1 short of VCPU (need 1, most free 0)"


@pytest.mark.parametrize("fresh", [False, True])
def test_no_host_is_only_said_after_reading_again(cloud: Cloud, fresh: bool) -> None:
    cloud.host("a", vcpus=1)
    cloud.claim("a", "old", VCPU=1)
    hosts = hosts_of(cloud)
    hosts.refresh()
    with cloud.store.begin() as tx:
        tx.execute(sa.delete(schema.allocations))
        tx.execute(sa.update(schema.providers).values(changed_at=cloud.clock.micros()))
    assert Proposals(hosts, options()).select([request()], fresh)[0].hosts == ["a"]


def test_a_host_that_comes_where_one_went_is_another(cloud: Cloud) -> None:
    """Rows are told apart by the numbers of providers: none is given twice, not even the highest on
    SQLite."""
    cloud.host("a")
    cloud.host("old", vcpus=8)
    hosts = hosts_of(cloud)
    hosts.refresh()
    with cloud.store.begin() as tx:
        for table in (schema.providers, schema.services, schema.heartbeats):
            tx.execute(sa.delete(table).where(table.c.host == "old"))
        tx.execute(
            sa.delete(schema.inventories).where(
                schema.inventories.c.provider_id == cloud.ids["old"]
            )
        )
    cloud.clock.seconds += 1
    cloud.host("new", vcpus=6)
    assert cloud.ids["new"] > cloud.ids["old"]
    assert hosts.refresh(at_once=True)
    assert hosts.snapshot().names == ["a", "new"] and free(hosts, "new") == 6


def test_a_ratio_beyond_all_measure_is_much_room(cloud: Cloud) -> None:
    """The placement API takes ratios up to 3.4e38."""
    cloud.host("a", vcpus=4, ratio=3e38)
    hosts = hosts_of(cloud)
    hosts.refresh()
    assert free(hosts, "a") > 2**31
