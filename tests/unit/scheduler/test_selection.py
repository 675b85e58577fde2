# SPDX-License-Identifier: Apache-2.0
"""Selection of hosts: passing hosts, their order, and one reason for each rejected host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.domain.models import Device, Flavor, HardwareAssignment, RequestSpec, Selection
from scheduler.columns import seed
from scheduler.filters import Check, Filters
from scheduler.selection import SelectionOptions, _group_equal_requests, examine
from scheduler.selection import select as choose
from scheduler.snapshot import Group, Parts, Snapshot, Stock
from tests.unit.scheduler.conftest import options

NANO = {"VCPU": 1, "MEMORY_MB": 128, "DISK_GB": 1}
DEFAULT, TWENTY = options(), options(hosts=20)
MakeColumns = Callable[..., Snapshot]


def request(server: str = "s", **more: object) -> RequestSpec:
    return RequestSpec(server, "p", **{"resources": dict(NANO), **more})  # type: ignore[arg-type]


def select(
    hosts: Snapshot, specs: list[RequestSpec], selection_options: SelectionOptions
) -> list[Selection]:
    return [choice.selection for choice in choose(hosts, specs, selection_options)]


def test_select_reason_counts_each_rejected_host_with_numbers(make_columns: MakeColumns) -> None:
    hosts = make_columns(12)
    hosts.zone_numbers["az1"] = 1
    hosts.zones[7:] = 1
    hosts.disabled[11] = True
    hosts.stock["MEMORY_MB"].free[7:11] = [1024, 2048, 512, 0]
    (answer,) = select(
        hosts, [request(resources=NANO | {"MEMORY_MB": 4096}, availability_zone="az1")], options()
    )
    assert answer.hosts == []
    assert answer.reason == (
        "12 hosts: 7 not in zone az1, 4 short of MEMORY_MB (need 4096, most free 2048), 1 disabled"
    )
    assert answer.by_host["host8"] == "short of MEMORY_MB (need 4096, free 2048)"
    assert answer.by_host["host11"] == "disabled"
    assert len(answer.by_host) == 12


def test_select_returns_zone_of_each_host(make_columns: MakeColumns) -> None:
    hosts = make_columns(3)
    hosts.zone_numbers["az1"] = 1
    hosts.zones[2] = 1
    (answer,) = select(hosts, [request()], options())
    assert answer.zones == {"host0": "nova", "host1": "nova", "host2": "az1"}


def test_select_without_hosts_gives_reason() -> None:
    (answer,) = select(Snapshot(), [request()], options())
    assert (answer.hosts, answer.reason) == ([], "There is no host yet.")


def test_select_gives_reason_for_each_status_of_host(make_columns: MakeColumns) -> None:
    hosts = make_columns(4)
    hosts.served[0] = hosts.up[3] = False
    hosts.disabled[1] = hosts.forced_down[2] = True
    (answer,) = select(hosts, [request()], options())
    assert answer.by_host == {
        "host0": "without a compute service",
        "host1": "disabled",
        "host2": "forced down",
        "host3": "without a recent report",
    }


def test_down_host_is_accepted_without_enabled_filters(make_columns: MakeColumns) -> None:
    hosts = make_columns(1)
    hosts.up[:] = False
    (answer,) = select(hosts, [request()], options(enabled_filters=[]))
    assert answer.hosts == ["host0"]


def test_disabled_host_is_rejected_without_enabled_filters(make_columns: MakeColumns) -> None:
    """A claim refuses disabled hosts, so the server would request a host again without end."""
    hosts = make_columns(1)
    hosts.disabled[:] = True
    (answer,) = select(hosts, [request()], options(enabled_filters=[]))
    assert answer.reason == "1 host: 1 disabled"


def test_select_respects_forced_and_excluded_hosts(make_columns: MakeColumns) -> None:
    forced, unknown, other = select(
        make_columns(2),
        [
            request(force_host="host1"),
            request(force_host="nowhere"),
            request(excluded=["host0", "gone"]),
        ],
        options(),
    )
    assert forced.hosts == ["host1"]
    assert unknown.reason == "2 hosts: 2 not the requested host"
    assert other.hosts == ["host1"]


def test_select_reason_names_host_with_pending_guest_removal(make_columns: MakeColumns) -> None:
    (answer,) = select(
        make_columns(3),
        [
            request(
                excluded=["host0", "host1", "host2"],
                hosts_with_removals=["host1", "gone"],
            )
        ],
        options(),
    )
    assert answer.hosts == []
    assert answer.reason == (
        "3 hosts: 2 where the server is or was tried, 1 where an old guest of the server is not deleted yet"
    )
    assert answer.by_host["host1"] == "where an old guest of the server is not deleted yet"


def test_select_rejects_amount_off_the_step_and_unknown_resource_class(
    make_columns: MakeColumns,
) -> None:
    hosts = make_columns(1)
    hosts.stock["VCPU"].step[:] = 2
    odd, even, unknown = select(
        hosts,
        [
            request(resources={"VCPU": 3}),
            request(resources={"VCPU": 4}),
            request(resources={"VGPU": 1}),
        ],
        options(),
    )
    assert odd.by_host == {"host0": "not able to give one server 3 of VCPU"}
    assert even.hosts == ["host0"]
    assert unknown.by_host == {"host0": "without VGPU"}


def test_select_ignores_resource_with_amount_of_zero(make_columns: MakeColumns) -> None:
    hosts = make_columns(1)
    del hosts.stock["DISK_GB"]
    (answer,) = select(hosts, [request(resources={"VCPU": 1, "DISK_GB": 0})], options())
    assert answer.hosts == ["host0"]


def test_ram_weight_multiplier_spreads_or_stacks_servers(make_columns: MakeColumns) -> None:
    for sign, expected in ((1.0, ["host2", "host1", "host0"]), (-1.0, ["host0", "host1", "host2"])):
        hosts = make_columns(3)
        hosts.stock["MEMORY_MB"].free[:] = [1000, 4000, 8000]
        (answer,) = select(hosts, [request()], options(ram_weight_multiplier=sign))
        assert answer.hosts == expected


def test_select_of_many_servers_counts_resources_of_earlier_servers(
    make_columns: MakeColumns,
) -> None:
    answers = select(
        make_columns(3, vcpus=2), [request(f"s{number}") for number in range(7)], options()
    )
    assert Counter(answer.hosts[0] for answer in answers if answer.hosts) == dict.fromkeys(
        ("host0", "host1", "host2"), 2
    )
    assert [bool(answer.hosts) for answer in answers] == [True] * 6 + [False]
    assert "3 short of VCPU (need 1, most free 0)" in answers[6].reason


def test_select_among_equal_hosts_depends_on_server_and_is_repeatable(
    make_columns: MakeColumns,
) -> None:
    first = {
        number: select(make_columns(10), [request(f"s{number}")], options())[0].hosts
        for number in range(50)
    }
    second = {
        number: select(make_columns(10), [request(f"s{number}")], options())[0].hosts
        for number in range(50)
    }
    assert first == second
    assert len({hosts[0] for hosts in first.values()}) >= 8


@st.composite
def clouds(draw: st.DrawFn) -> Snapshot:
    size = draw(st.integers(0, 12))

    def flags() -> np.ndarray:
        return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), np.bool_)

    def numbers(low: int, high: int) -> np.ndarray:
        return np.array(
            draw(st.lists(st.integers(low, high), min_size=size, max_size=size)), np.int64
        )

    names = [f"host{number}" for number in range(size)]
    classes = draw(st.sets(st.sampled_from(sorted(NANO))))
    return Snapshot(
        names,
        {name: row for row, name in enumerate(names)},
        np.array([seed(name) for name in names], np.uint64),
        flags(),
        flags(),
        flags(),
        flags(),
        numbers(0, 1),
        {"nova": 0, "az1": 1},
        {
            name: Stock(numbers(-2, 200), numbers(1, 2), numbers(0, 200), numbers(1, 3))
            for name in classes
        },
        servers=numbers(0, 9),
        working=numbers(0, 9),
        failures=numbers(0, 9),
        waits=numbers(0, 9),
        versions=numbers(1, 2),
        kinds=numbers(0, 0),
        facts=[{}],
        devices=numbers(0, 3),
    )


requests = st.builds(
    request,
    availability_zone=st.sampled_from([None, "nova", "az1", "az2"]),
    force_host=st.sampled_from([None, None, None, "host0", "nowhere"]),
    excluded=st.lists(st.sampled_from(["host0", "host1", "gone"])),
)


@given(clouds(), requests)
def test_hosts_are_candidates_or_rejected_exactly_once(hosts: Snapshot, spec: RequestSpec) -> None:
    result = examine(hosts, spec, DEFAULT)
    passing = result.passing
    times = passing.astype(int) + sum(
        (rejected.astype(int) for _, rejected in result.removed), np.zeros(len(hosts.names), int)
    )
    assert (times == 1).all()
    (answer,) = select(hosts, [spec], TWENTY)
    assert (
        sorted(answer.hosts) == sorted(np.array(hosts.names)[passing])
        if hosts.names
        else not answer.hosts
    )
    if not answer.hosts:
        assert set(answer.by_host) == set(hosts.names)


@given(clouds(), st.lists(requests, max_size=5))
def test_select_never_uses_more_than_free_resources(
    hosts: Snapshot, specs: list[RequestSpec]
) -> None:
    before = {name: stock.free.copy() for name, stock in hosts.stock.items()}
    select(hosts, specs, DEFAULT)
    for name, stock in hosts.stock.items():
        assert (stock.free[stock.free < before[name]] >= 0).all()


@given(
    clouds(),
    requests,
    st.integers(1, 30),
    st.sampled_from([None, "affinity", "anti-affinity", "soft-affinity"]),
)
def test_select_of_equal_requests_fills_room_exactly(
    hosts: Snapshot, spec: RequestSpec, number: int, policy: str | None
) -> None:
    """As many servers as possible are placed, and no selection lists a host twice.

    The other servers get a reason.
    """
    if policy is not None:
        hosts.groups["g"] = Group(policy, most=2)
        spec = replace(spec, group="g")
    result = examine(hosts, spec, TWENTY, number)
    room = np.zeros(len(hosts.names), np.int64)
    if result.passing.any():
        room = np.where(
            result.passing, number if result.room is None else np.clip(result.room, 0, number), 0
        )
    answers = select(hosts, [replace(spec, server=f"s{index}") for index in range(number)], TWENTY)
    counts = Counter(answer.hosts[0] for answer in answers if answer.hosts)
    assert all(counts[name] <= room[hosts.rows[name]] for name in counts)
    if result.settles and room.any():
        assert len(counts) == 1 and counts.total() == room[hosts.rows[next(iter(counts))]]
    else:
        assert counts.total() == min(number, int(room.sum()))
    assert all(len(answer.hosts) == len(set(answer.hosts)) for answer in answers)
    for answer in answers:
        assert bool(answer.hosts) != bool(answer.reason)
        if not answer.hosts and hosts.names:
            assert set(answer.by_host) == set(hosts.names)


@given(clouds(), st.lists(requests, max_size=5))
def test_select_is_repeatable(hosts: Snapshot, specs: list[RequestSpec]) -> None:
    assert select(hosts.copy(), specs, DEFAULT) == select(hosts.copy(), specs, DEFAULT)


def test_interleaved_equal_requests_are_selected_as_one_batch(make_columns: MakeColumns) -> None:
    small, large = dict(NANO), NANO | {"VCPU": 2}
    specs = [request(f"s{number}", resources=large if number % 2 else small) for number in range(6)]
    answers = select(make_columns(1, vcpus=7), specs, DEFAULT)
    assert [answer.server for answer in answers] == [f"s{number}" for number in range(6)]
    assert [bool(answer.hosts) for answer in answers] == [True, True, True, True, True, False]


def test_select_returns_next_best_hosts_as_alternates(make_columns: MakeColumns) -> None:
    hosts = make_columns(4)
    hosts.stock["MEMORY_MB"].free[:] = [8000, 6000, 4000, 2000]
    answers = select(
        hosts,
        [request(f"s{number}") for number in range(2)],
        options(
            hosts=3,
            cpu_weight_multiplier=0.0,
            disk_weight_multiplier=0.0,
            io_ops_weight_multiplier=0.0,
        ),
    )
    assert [answer.hosts for answer in answers] == [["host0", "host1", "host2"]] * 2


def test_select_assigns_device_to_one_server_only(make_columns: MakeColumns) -> None:
    hosts = make_columns(3)
    gear = [Device(f"0000:81:00.{number}", "10de", "1db4") for number in range(2)]
    hosts.parts = {
        0: Parts([], gear, []),
        1: Parts([], gear, [HardwareAssignment(devices=[gear[0].address])]),
    }
    hosts.devices[:] = [2, 1, 0]
    flavor = Flavor("1", "gpu", 1, 128, 1, extra_specs={"kilonova:devices": "gpu=10de:1db4:1"})
    specs = [
        request(f"s{number}", flavor=flavor, hints={"n": str(number // 2)}) for number in range(4)
    ]
    choices = choose(hosts, specs, DEFAULT)
    assert Counter(choice.selection.hosts[0] for choice in choices[:3]) == {"host0": 2, "host1": 1}
    assert sorted(
        device
        for choice in choices[:3]
        if choice.assignment
        for device in choice.assignment.devices
    ) == [gear[0].address, gear[1].address, gear[1].address]
    assert choices[3].selection.reason == "3 hosts: 3 without free PCI devices (1 of gpu)"


def test_failing_filter_rejects_only_its_own_request(make_columns: MakeColumns) -> None:
    def fussy(snapshot: Snapshot, spec: RequestSpec) -> Iterator[Check]:
        yield Check(snapshot.up, f"{1 / spec.resources['VCPU']}")

    selection_options = replace(DEFAULT, filters=Filters(((fussy, False),)))
    first, second, third = select(
        make_columns(2),
        [request("a"), request("b", resources={"VCPU": 0}), request("c")],
        selection_options,
    )
    assert first.hosts and third.hosts
    assert (second.hosts, second.reason) == (
        [],
        "The scheduler failed on this request (ZeroDivisionError); see the scheduler's log.",
    )


def test_select_for_rebuild_keeps_host_and_takes_no_resources(make_columns: MakeColumns) -> None:
    hosts = make_columns(2)
    hosts.disabled[:] = True
    hosts.stock["VCPU"].free[:] = 0
    (selection,) = select(hosts, [request(requested_host="host1", is_rebuild=True)], DEFAULT)
    assert (selection.hosts, hosts.stock["VCPU"].free.tolist()) == (["host1"], [0, 0])


def test_forced_host_skips_filters_and_requested_host_does_not(make_columns: MakeColumns) -> None:
    hosts = make_columns(2)
    hosts.disabled[0] = True
    forced, requested = select(
        hosts, [request(force_host="host0"), request(requested_host="host0")], DEFAULT
    )
    assert forced.hosts == ["host0"]
    assert requested.reason == "2 hosts: 1 not the requested host, 1 disabled"


OTHER_VALUES = {
    "str": "other",
    "dict[str, int]": {"VCPU": 2},
    "dict[str, str]": {"a": "b"},
    "list[str]": ["T"],
    "bool": True,
    "JsonObject": {"hint": 1},
    "Flavor | None": Flavor("1", "f", 1, 1, 1),
    "str | None": "other",
}


@pytest.mark.parametrize("field", fields(RequestSpec), ids=lambda field: field.name)
def test_requests_with_any_difference_except_server_are_two_batches(field: Field[object]) -> None:
    spec = request()
    other = replace(spec, **{field.name: OTHER_VALUES[str(field.type)]})  # type: ignore[arg-type]
    assert len(_group_equal_requests([spec, spec, other])) == (1 if field.name == "server" else 2)
