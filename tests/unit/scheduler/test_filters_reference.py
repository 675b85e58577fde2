# SPDX-License-Identifier: Apache-2.0
"""The filters over columns say the same of every host as a plain reference does, one host at a
time."""

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


def checks(name: str, snapshot: Snapshot, spec: RequestSpec, world: World) -> list[Check]:
    """What this filter asks; of those that are promised whatever is enabled, the part that has its
    name in Nova."""
    make = filters.BUILT_IN[name].make
    if make is not None:
        return list(make(world.conf)(snapshot, spec))
    if name == "AvailabilityZoneFilter":
        return list(hosts.availability_zone(snapshot, spec))
    if name.startswith("ServerGroup"):
        return list(resources.group(snapshot, spec))
    return list(parts(snapshot, spec, np.ones(len(snapshot.names), np.bool_), PLENTY))


def passing(asked: list[Check], size: int) -> list[bool]:
    mask: Mask = np.ones(size, np.bool_)
    for check in asked:
        assert check.passes.shape == (size,) and check.passes.dtype == np.bool_
        mask &= check.passes
    return mask.tolist()


def expected(name: str, spec: RequestSpec, world: World) -> list[bool]:
    meant = [name]  # two names of Nova's may be one question here
    if name.startswith("ServerGroup"):
        meant = ["ServerGroupAffinityFilter", "ServerGroupAntiAffinityFilter"]
    elif name in ("NUMATopologyFilter", "PciPassthroughFilter"):
        meant = ["NUMATopologyFilter", "PciPassthroughFilter"]
    return [
        all(reference.REFERENCE[one](host, spec, world) for one in meant) for host in world.hosts
    ]


@slow
@given(worlds(), REQUESTS)
def test_each_filter_says_of_each_host_what_its_reference_says(
    world: World, spec: RequestSpec
) -> None:
    snapshot = columns(world)
    found = {
        name: passing(checks(name, snapshot, spec, world), len(world.hosts))
        for name in filters.BUILT_IN
    }
    assert found == {name: expected(name, spec, world) for name in reference.REFERENCE}


@pytest.mark.slice("operations")  # checks the generator of worlds, which rarely changes
def test_the_comparison_sees_each_filter_let_in_and_keep_out() -> None:
    seen: dict[str, set[bool]] = defaultdict(set)

    @settings(slow, derandomize=True, max_examples=400, database=None, phases=[Phase.generate])
    @given(worlds(), REQUESTS)
    def look(world: World, spec: RequestSpec) -> None:
        for name, passes in reference.REFERENCE.items():
            seen[name] |= {passes(host, spec, world) for host in world.hosts}

    look()
    assert {name for name, answers in seen.items() if answers != {True, False}} == {
        "AllHostsFilter"
    }


@slow
@given(worlds(), REQUESTS, st.lists(st.sampled_from(sorted(filters.BUILT_IN)), max_size=5))
def test_all_checks_together_say_what_the_reference_says(
    world: World, spec: RequestSpec, enabled: list[str]
) -> None:
    world.options["enabled_filters"] = enabled
    snapshot, mask = columns(world), np.ones(len(world.hosts), np.bool_)
    for check in filters.load(world.conf).checks(snapshot, spec, mask):
        mask &= check.passes
    assert mask.tolist() == [reference.may_take(host, spec, world, enabled) for host in world.hosts]


@slow
@given(worlds(), REQUESTS, st.sampled_from(sorted(filters.BUILT_IN)))
def test_room_is_the_number_of_servers_that_the_reference_lets_in(
    world: World, spec: RequestSpec, name: str
) -> None:
    """... one after the other on one host, counted as far as PLENTY."""
    world.options["enabled_filters"], world.options["build_failure_limit"] = [name], 0
    spec = replace(spec, is_rebuild=False)
    snapshot, mask = columns(world), np.ones(len(world.hosts), np.bool_)
    room = np.full(len(world.hosts), PLENTY)
    for check in filters.load(world.conf).checks(snapshot, spec, mask, PLENTY):
        mask &= check.passes
        if check.room is not None:
            room = np.minimum(room, check.room)
    for row in np.flatnonzero(mask):
        assert room[row] == placed(world, world.hosts[row], spec, name)


def placed(world: World, host: Host, spec: RequestSpec, name: str) -> int:
    """How many such servers the host takes, until the reference says no."""
    world = replace(world, hosts=[copy.deepcopy(one) for one in world.hosts])
    host, count = next(one for one in world.hosts if one.name == host.name), 0
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
            wanted = hardware.hardware(spec.flavor, spec.image_properties)
            assignment = numa.fit(host.numa_nodes, host.devices, host.held, wanted)
            assert assignment is not None
            host.held.append(assignment)
    return count
