# SPDX-License-Identifier: Apache-2.0
"""Explanations of a request: the number of servers with room, and the reasons of rejected hosts.

An explanation adds no proposal.
"""

from __future__ import annotations

from collections.abc import Callable

from common.domain.models import RequestSpec
from scheduler.hosts import Hosts
from scheduler.proposals import Proposals
from scheduler.selection import explain
from scheduler.snapshot import Group, Snapshot
from tests.unit.scheduler.conftest import Cloud, options

ONE = {"VCPU": 1, "MEMORY_MB": 1024, "DISK_GB": 10}
MakeColumns = Callable[..., Snapshot]


def request(**more: object) -> RequestSpec:
    return RequestSpec("s", "p", **{"resources": dict(ONE), **more})  # type: ignore[arg-type]


def test_explain_counts_room_by_zone_and_reasons_of_rejected_hosts(
    make_columns: MakeColumns,
) -> None:
    hosts = make_columns(4, vcpus=4)
    hosts.zone_numbers |= {"az1": 1, "empty": 2}
    hosts.zones[2:] = 1
    hosts.disabled[3] = True
    hosts.stock["VCPU"].free[:] = [4, 0, 3, 4]
    explanation = explain(hosts, request(), options())
    assert (explanation.total, explanation.passing, sorted(explanation.hosts)) == (
        4,
        2,
        ["host0", "host2"],
    )
    assert explanation.room == {"az1": 3, "empty": 0, "nova": 4}
    assert explanation.removed == [
        {"hosts": 1, "text": "disabled"},
        {"hosts": 1, "text": "short of VCPU (need 1, most free 0)"},
    ]
    assert explanation.reason == "4 hosts: 1 disabled, 1 short of VCPU (need 1, most free 0)"
    assert explanation.by_host == {"host1": "short of VCPU (need 1, free 0)", "host3": "disabled"}


def test_explain_counts_room_by_policy_of_group(make_columns: MakeColumns) -> None:
    for policy, room in (("affinity", 8), ("anti-affinity", 3), ("soft-affinity", 24)):
        hosts = make_columns(3)
        hosts.groups["g"] = Group(policy)
        assert explain(hosts, request(group="g"), options()).room == {"nova": room}, policy


def test_explain_names_at_most_ten_hosts_best_first(make_columns: MakeColumns) -> None:
    hosts = make_columns(30)
    hosts.stock["MEMORY_MB"].free[:] = range(2000, 8000, 200)
    explanation = explain(hosts, request(), options())
    assert explanation.hosts == [f"host{number}" for number in range(29, 19, -1)]
    assert (explanation.reason, explanation.by_host, explanation.removed) == ("", {}, [])


def test_explain_without_hosts_gives_reason() -> None:
    assert explain(Snapshot(), request(), options()).reason == "There is no host yet."


def test_explain_reads_store_each_time_and_adds_no_proposal(cloud: Cloud) -> None:
    cloud.host("a", vcpus=2)
    scheduler = Proposals(Hosts(cloud.store, cloud.clock), options())
    assert scheduler.explain(request()).room == {"nova": 2}
    cloud.claim("a", "other", VCPU=1)
    assert scheduler.explain(request()).room == {"nova": 1}
    scheduler.select([RequestSpec("t", "p", dict(ONE))])
    assert scheduler.explain(request()).room == {"nova": 0}
    assert "short of VCPU" in scheduler.explain(request()).reason
