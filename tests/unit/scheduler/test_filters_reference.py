# SPDX-License-Identifier: Apache-2.0
"""The filters over columns give the same result as a plain reference for one host at a time."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.domain import hardware, numa
from common.domain.models import RequestSpec
from scheduler import filters
from scheduler.filters import Check, hosts, resources
from scheduler.filters.resources import parts
from scheduler.snapshot import Mask, Snapshot
from tests.unit.scheduler import filter_reference as reference
from tests.unit.scheduler.filter_world import REQUESTS, Host, World, columns, worlds

PLENTY = 9
slow = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None
)


def checks_of_filter(name: str, snapshot: Snapshot, spec: RequestSpec, world: World) -> list[Check]:
    """Return the checks of this filter.

    For checks that are always enabled, return the part with the filter's name in Nova.
    """
    make = filters.BUILT_IN[name].make
    if make is not None:
        return list(make(world.conf)(snapshot, spec))
    if name == "AvailabilityZoneFilter":
        return list(hosts.availability_zone(snapshot, spec))
    if name.startswith("ServerGroup"):
        return list(resources.group(snapshot, spec))
    return list(parts(snapshot, spec, np.ones(len(snapshot.names), np.bool_), PLENTY))


def combine_checks(filter_checks: list[Check], size: int) -> list[bool]:
    mask: Mask = np.ones(size, np.bool_)
    for check in filter_checks:
        assert check.passes.shape == (size,) and check.passes.dtype == np.bool_
        mask &= check.passes
    return mask.tolist()


def expected_by_reference(name: str, spec: RequestSpec, world: World) -> list[bool]:
    # Two filters of Nova may be one check here.
    names = [name]
    if name.startswith("ServerGroup"):
        names = ["ServerGroupAffinityFilter", "ServerGroupAntiAffinityFilter"]
    elif name in ("NUMATopologyFilter", "PciPassthroughFilter"):
        names = ["NUMATopologyFilter", "PciPassthroughFilter"]
    return [
        all(reference.REFERENCE[filter_name](host, spec, world) for filter_name in names)
        for host in world.hosts
    ]


@slow
@given(worlds(), REQUESTS)
def test_filters_agree_with_reference_for_random_worlds(world: World, spec: RequestSpec) -> None:
    snapshot = columns(world)
    results = {
        name: combine_checks(checks_of_filter(name, snapshot, spec, world), len(world.hosts))
        for name in filters.BUILT_IN
    }
    assert results == {
        name: expected_by_reference(name, spec, world) for name in reference.REFERENCE
    }


# This test checks the generator of worlds, which rarely changes.
@pytest.mark.slice("operations")
def test_random_worlds_make_each_filter_but_all_hosts_accept_and_reject() -> None:
    answers_by_name: dict[str, set[bool]] = defaultdict(set)

    @settings(slow, derandomize=True, max_examples=400, database=None, phases=[Phase.generate])
    @given(worlds(), REQUESTS)
    def record_answers(world: World, spec: RequestSpec) -> None:
        for name, passes in reference.REFERENCE.items():
            answers_by_name[name] |= {passes(host, spec, world) for host in world.hosts}

    record_answers()
    assert {name for name, answers in answers_by_name.items() if answers != {True, False}} == {
        "AllHostsFilter"
    }


@slow
@given(worlds(), REQUESTS, st.lists(st.sampled_from(sorted(filters.BUILT_IN)), max_size=5))
def test_enabled_filters_together_agree_with_reference(
    world: World, spec: RequestSpec, enabled: list[str]
) -> None:
    world.options["enabled_filters"] = enabled
    snapshot, mask = columns(world), np.ones(len(world.hosts), np.bool_)
    for check in filters.load(world.conf).checks(snapshot, spec, mask):
        mask &= check.passes
    assert mask.tolist() == [reference.may_take(host, spec, world, enabled) for host in world.hosts]


@slow
@given(worlds(), REQUESTS, st.sampled_from(sorted(filters.BUILT_IN)))
def test_room_equals_number_of_servers_accepted_by_reference(
    world: World, spec: RequestSpec, name: str
) -> None:
    """The reference places the servers one after the other on one host, up to PLENTY."""
    world.options["enabled_filters"], world.options["build_failure_limit"] = [name], 0
    spec = replace(spec, is_rebuild=False)
    snapshot, mask = columns(world), np.ones(len(world.hosts), np.bool_)
    room = np.full(len(world.hosts), PLENTY)
    for check in filters.load(world.conf).checks(snapshot, spec, mask, PLENTY):
        mask &= check.passes
        if check.room is not None:
            room = np.minimum(room, check.room)
    for row in np.flatnonzero(mask):
        assert room[row] == count_placeable(world, world.hosts[row], spec, name)


def count_placeable(world: World, host: Host, spec: RequestSpec, name: str) -> int:
    """Return the number of servers that the host takes before the reference rejects one."""
    world = replace(world, hosts=[copy.deepcopy(original) for original in world.hosts])
    host, count = next(original for original in world.hosts if original.name == host.name), 0
    while count < PLENTY and reference.may_take(host, spec, world, [name]):
        count += 1
        host.servers, host.working, host.in_group = (
            host.servers + 1,
            host.working + 1,
            host.in_group + 1,
        )
        for resource_class, amount in spec.resources.items():
            if resource_class in host.free:
                host.free[resource_class] -= amount
        if spec.flavor is not None:
            requested = hardware.hardware(spec.flavor, spec.image_properties)
            assignment = numa.fit(host.numa_nodes, host.devices, host.held, requested)
            assert assignment is not None
            host.held.append(assignment)
    return count
