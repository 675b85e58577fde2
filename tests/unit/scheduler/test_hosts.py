# SPDX-License-Identifier: Apache-2.0
"""Updates of the columns from the store.

The tests cover inventories, usage, flags and zones, and the proposals since then.
"""

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


def load_hosts(cloud: Cloud) -> Hosts:
    return Hosts(cloud.store, cloud.clock)


def read_free(hosts: Hosts, name: str, resource_class: str = "VCPU") -> int:
    snapshot = hosts.snapshot()
    return int(snapshot.stock[resource_class].free[snapshot.rows[name]])


def test_free_is_total_less_reserved_times_ratio_less_used(cloud: Cloud) -> None:
    cloud.host("a", vcpus=4, memory_mb=4096, reserved=96, ratio=1.5)
    cloud.claim("a", "s1", VCPU=2, MEMORY_MB=1000)
    cloud.claim("a", "s2", VCPU=1)
    hosts = load_hosts(cloud)
    hosts.refresh()
    assert (
        read_free(hosts, "a"),
        read_free(hosts, "a", "MEMORY_MB"),
        read_free(hosts, "a", "DISK_GB"),
    ) == (
        3,
        3000,
        40,
    )


def test_refresh_reads_changed_hosts_at_most_every_50_ms(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    hosts = load_hosts(cloud)
    assert hosts.refresh()
    cloud.clock.seconds += 20
    cloud.claim("a", "s", VCPU=3)
    assert hosts.refresh() and (read_free(hosts, "a"), read_free(hosts, "b")) == (1, 4)
    cloud.claim("b", "t", VCPU=1)
    cloud.clock.seconds += 0.04
    assert not hosts.refresh() and read_free(hosts, "b") == 4
    assert hosts.refresh(at_once=True) and read_free(hosts, "b") == 3


def test_refresh_reads_host_only_once_per_change(cloud: Cloud) -> None:
    cloud.host("a")
    hosts = load_hosts(cloud)
    cloud.clock.seconds += 0.1
    hosts.refresh()
    statements: list[str] = []
    sa.event.listen(
        cloud.store.engine,
        "before_cursor_execute",
        lambda *event_args: statements.append(event_args[2]),
    )
    for changed in (False, True, False):
        cloud.clock.seconds += 0.1
        if changed:
            cloud.claim("a", "s", VCPU=3)
        cloud.clock.seconds += 0.1
        statements.clear()
        hosts.refresh()
        assert len(statements) == (4 if changed else 2), statements
    assert read_free(hosts, "a") == 1


def test_refresh_reads_change_with_late_commit(cloud: Cloud) -> None:
    cloud.host("a")
    hosts = load_hosts(cloud)
    cloud.clock.seconds += 100
    hosts.refresh()
    earlier_time = cloud.clock.micros() - 4 * SECOND
    cloud.claim("a", "s", VCPU=3)
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.providers).values(changed_at=earlier_time))
    cloud.clock.seconds += 1
    hosts.refresh()
    assert read_free(hosts, "a") == 1


def test_refresh_adds_and_removes_hosts_and_inventories(cloud: Cloud) -> None:
    cloud.host("a")
    hosts = load_hosts(cloud)
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


def test_select_reads_flags_and_zones_each_time(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b", up=False, forced_down=True)
    scheduler = Proposals(load_hosts(cloud), options())
    assert scheduler.select([request()])[0].hosts == ["a"]
    cloud.clock.seconds += 30
    cloud.zone("az1", "b")
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.heartbeats).values(up=True))
        tx.execute(sa.update(schema.services).values(forced_down=False))
    selections = scheduler.select(
        [
            request("t"),
            request("u", availability_zone="az1"),
            request("v", availability_zone="nova"),
        ]
    )
    assert [sorted(answer.hosts) for answer in selections] == [["a", "b"], ["b"], ["a"]]


def test_free_with_ratio_beyond_integers_is_limited_and_not_zero(cloud: Cloud) -> None:
    cloud.host("a", vcpus=4, memory_mb=4096, ratio=3.4e38)
    hosts = load_hosts(cloud)
    hosts.refresh()
    assert read_free(hosts, "a") == 2**53


def test_proposal_counts_as_used_until_claim_replaces_it(cloud: Cloud) -> None:
    cloud.host("a")
    hosts = load_hosts(cloud)
    scheduler = Proposals(hosts, options())
    scheduler.select([request("s")])
    assert read_free(hosts, "a") == 3
    cloud.clock.seconds += 1
    hosts.refresh()
    assert read_free(hosts, "a") == 3
    cloud.claim("a", "s", **ONE)
    hosts.refresh(at_once=True)
    # The claim counts as usage and replaces the proposal.
    assert read_free(hosts, "a") == 3


def test_proposal_without_claim_is_forgotten_after_five_seconds(cloud: Cloud) -> None:
    cloud.host("a")
    hosts = load_hosts(cloud)
    Proposals(hosts, options()).select([request("s")])
    cloud.clock.seconds += 5.1
    hosts.refresh()
    assert read_free(hosts, "a") == 4


def test_repeated_request_withdraws_earlier_proposal_of_server(cloud: Cloud) -> None:
    cloud.host("a", vcpus=1)
    cloud.host("b", vcpus=1)
    scheduler = Proposals(load_hosts(cloud), options())
    first = scheduler.select([request("s")])[0].hosts[0]
    second = scheduler.select([request("s", excluded=[first])])[0].hosts
    assert second == [{"a": "b", "b": "a"}[first]]
    assert scheduler.select([request("t")])[0].hosts[0] == first


def test_proposal_filling_last_host_does_not_make_select_reject_it(cloud: Cloud) -> None:
    cloud.host("a", vcpus=1)
    scheduler = Proposals(load_hosts(cloud), options())
    assert scheduler.select([request("s")])[0].hosts == ["a"]
    # The claim decides between the two servers.
    assert scheduler.select([request("t")])[0].hosts == ["a"]


def test_select_of_several_servers_uses_free_resources_once(cloud: Cloud) -> None:
    cloud.host("a", vcpus=2)
    answers = Proposals(load_hosts(cloud), options()).select(
        [request(f"s{number}") for number in range(3)]
    )
    assert [answer.hosts for answer in answers] == [["a"], ["a"], []]
    assert answers[2].reason == "1 host: 1 short of VCPU (need 1, most free 0)"


@pytest.mark.parametrize("fresh", [False, True])
def test_select_reads_store_again_before_rejecting_all_hosts(cloud: Cloud, fresh: bool) -> None:
    cloud.host("a", vcpus=1)
    cloud.claim("a", "old", VCPU=1)
    hosts = load_hosts(cloud)
    hosts.refresh()
    with cloud.store.begin() as tx:
        tx.execute(sa.delete(schema.allocations))
        tx.execute(sa.update(schema.providers).values(changed_at=cloud.clock.micros()))
    assert Proposals(hosts, options()).select([request()], fresh)[0].hosts == ["a"]


def test_refresh_treats_new_host_after_deleted_one_as_another(cloud: Cloud) -> None:
    """The columns identify hosts by the number of their provider.

    No number is used twice, not even the highest one on SQLite.
    """
    cloud.host("a")
    cloud.host("old", vcpus=8)
    hosts = load_hosts(cloud)
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
    assert hosts.snapshot().names == ["a", "new"] and read_free(hosts, "new") == 6


def test_free_vcpus_with_allocation_ratio_3e38_exceed_2_to_the_31(cloud: Cloud) -> None:
    """The placement API accepts ratios up to 3.4e38."""
    cloud.host("a", vcpus=4, ratio=3e38)
    hosts = load_hosts(cloud)
    hosts.refresh()
    assert read_free(hosts, "a") > 2**31
