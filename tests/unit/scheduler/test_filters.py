# SPDX-License-Identifier: Apache-2.0
"""The filters of a configuration: their names, those of third parties, what is asked when, what
tenants are told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oslo_config import cfg

from common.domain.models import (
    AssignedNumaNode,
    Device,
    Flavor,
    HardwareAssignment,
    NumaNode,
    RequestSpec,
)
from common.service import config
from scheduler import filters
from scheduler.filters import Check
from scheduler.snapshot import Snapshot
from tests.unit.scheduler.filter_world import FACTS, Host, World, columns

NAMES = [
    "AggregateImagePropertiesIsolation",
    "AggregateInstanceExtraSpecsFilter",
    "AggregateIoOpsFilter",
    "AggregateMultiTenancyIsolation",
    "AggregateNumInstancesFilter",
    "AggregateTypeAffinityFilter",
    "AllHostsFilter",
    "AvailabilityZoneFilter",
    "ComputeCapabilitiesFilter",
    "ComputeFilter",
    "DifferentHostFilter",
    "ImagePropertiesFilter",
    "IoOpsFilter",
    "IsolatedHostsFilter",
    "NUMATopologyFilter",
    "NumInstancesFilter",
    "PciPassthroughFilter",
    "SameHostFilter",
    "ServerGroupAffinityFilter",
    "ServerGroupAntiAffinityFilter",
]
SMALL = Flavor("1", "small", 1, 64, 0)


def conf(**values: object) -> cfg.ConfigOpts:
    made = cfg.ConfigOpts()
    config.register(made)
    made([], default_config_files=[], default_config_dirs=[])
    for name, value in values.items():
        made.set_override(name, value, "scheduler")
    return made


def request(**more: Any) -> RequestSpec:
    return RequestSpec("new", "project1", **{"resources": {}, "flavor": SMALL, **more})


def told(
    hosts: list[Host],
    spec: RequestSpec,
    *enabled: str,
    world: World | None = None,
    **options: object,
) -> dict[str, str]:
    """Host -> why it is left out, as admins are told it; and "" -> what tenants are told of all of
    them."""
    snapshot = columns(replace(world, hosts=hosts) if world else World(hosts))
    mask, found, texts = np.ones(len(hosts), np.bool_), {}, []
    for check in filters.load(conf(enabled_filters=list(enabled), **options)).checks(
        snapshot, spec, mask, 10
    ):
        rejected = mask & ~check.passes
        if rejected.any():
            texts.append(check.for_many(rejected))
            found |= {hosts[row].name: check.for_one(int(row)) for row in np.flatnonzero(rejected)}
        mask &= check.passes
    return found | {"": ", ".join(texts)}


# --- names ---
def test_there_is_each_of_novas_filters_and_no_other() -> None:
    assert sorted(filters.BUILT_IN) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_can_be_enabled_alone(name: str) -> None:
    assert told([Host("host0")], request(), name) == {"": ""}


def test_what_is_enabled_without_being_asked_exists() -> None:
    assert set(conf().scheduler.enabled_filters) <= set(NAMES)
    filters.load(conf())


def test_unknown_names_end_in_a_message_that_says_what_there_is() -> None:
    with pytest.raises(
        filters.UnknownFilter,
        match=r"\[scheduler\] enabled_filters: unknown RamFilter, CoreFilter; "
        r"allowed are AggregateImagePropertiesIsolation, .*SameHost",
    ):
        filters.load(conf(enabled_filters=["ComputeFilter", "RamFilter", "CoreFilter"]))


def test_a_name_that_stands_twice_is_asked_once() -> None:
    assert len(filters.load(conf(enabled_filters=["ComputeFilter"] * 3)).enabled) == 1


# --- third parties ---
THEIRS = """
import numpy as np
from oslo_config import cfg
from scheduler.filters import Check

def odd_hosts(conf):
    conf.register_opts([cfg.StrOpt("odd_text", default="with an even number")], group="example")
    text = conf.example.odd_text
    def ask(snapshot, spec):
        yield Check(np.array([name[-1] in "13579" for name in snapshot.names], np.bool_), text)
    return ask
odd_hosts.on_rebuild = True

def late(conf):
    def ask(snapshot, spec):
        raise KeyError("rack")
    return ask

def short(conf):
    return lambda snapshot, spec: [Check(np.ones(1, np.bool_), "too short")]

class Broken:
    def __init__(self, conf):
        raise RuntimeError("no licence")
"""


def install(folder: Path, name: str, module: str, entry_points: str) -> None:
    """What an installer makes of a distribution of one module."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (folder / f"{name}.py").write_text(module)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with filters: one that works, others that do not."""
    install(
        tmp_path,
        "example_filters",
        THEIRS,
        "[kilonova.scheduler.filters]\nOddHostsFilter = example_filters:odd_hosts\n"
        "BrokenFilter = example_filters:Broken\nMissingFilter = example_filters:gone\n"
        "LateFilter = example_filters:late\nShortFilter = example_filters:short\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("example_filters", None)


@pytest.mark.usefixtures("installed")
def test_an_installed_distribution_brings_its_own_filter() -> None:
    hosts = [Host("host0"), Host("host1")]
    assert told(hosts, request(), "ComputeFilter", "OddHostsFilter") == {
        "host0": "with an even number",
        "": "with an even number",
    }
    rebuild = request(is_rebuild=True, requested_host="host0")
    assert told(hosts, rebuild, "OddHostsFilter")["host0"] == "with an even number"


@pytest.mark.usefixtures("installed")
def test_a_filter_of_others_that_cannot_be_made_ends_in_a_message() -> None:
    with pytest.raises(
        filters.UnknownFilter,
        match=r"BrokenFilter \(example_filters:Broken\) cannot be made: "
        "RuntimeError: no licence",
    ):
        filters.load(conf(enabled_filters=["BrokenFilter"]))
    with pytest.raises(
        filters.UnknownFilter, match="MissingFilter .* cannot be made: AttributeError"
    ):
        filters.load(conf(enabled_filters=["MissingFilter"]))
    with pytest.raises(
        filters.UnknownFilter, match="unknown RamFilter; allowed are .*BrokenFilter.*OddHostsFilter"
    ):
        filters.load(conf(enabled_filters=["RamFilter"]))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "logged"),
    [
        ("LateFilter", "KeyError: 'rack'"),
        ("ShortFilter", "must be 2 booleans, one a host, where it says: too short"),
    ],
)
def test_a_filter_of_others_that_fails_lets_nobody_in_and_is_logged(
    name: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert told([Host("host0"), Host("host1")], request(), name)[""] == (
        f"not let in because {name} failed (see the scheduler's log)"
    )
    assert logged in caplog.text and "take it out of [scheduler] enabled_filters" in caplog.text


def test_the_example_for_third_parties_in_the_documentation_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/filters.md").read_text()
    module = text.split("```python\n", 1)[1].split("```", 1)[0]
    entry = text.split("```ini\n", 1)[1].split("```", 1)[0].split("\n", 1)[1]
    group, line = (part.strip() for part in entry.strip().split("\n"))
    install(tmp_path, "rack_filter", module, f"[{group.rstrip(' =')}]\n{line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    hosts = [
        Host("host0", facts={"rack": "A1"}),
        Host("host1", facts={"rack": "B2"}),
        Host("host2"),
    ]
    found = told(hosts, request(hints={"rack": "A1"}), "RackFilter")
    assert set(found) == {"host1", "host2", ""}
    assert told(hosts, request(), "RackFilter") == {"": ""}


# --- what is asked when ---
def test_a_forced_host_is_not_asked_what_the_operator_enabled() -> None:
    hosts = [
        Host(
            "host0",
            disabled=True,
            servers=99,
            failures=9,
            waits=60,
            free={"VCPU": 0},
            units={"VCPU": (1, 8, 1)},
        ),
        Host("host1"),
    ]
    forced = request(force_host="host0")
    assert told(hosts, forced, "ComputeFilter", "NumInstancesFilter") == {
        "host1": "not the requested host",
        "": "not the requested host",
    }
    assert told(hosts, replace(forced, resources={"VCPU": 1}), "ComputeFilter")["host0"] == (
        "short of VCPU (need 1, free 0)"
    )
    assert (
        told(hosts, replace(forced, required_traits=["CUSTOM_FAST"]))["host0"]
        == "without the trait CUSTOM_FAST"
    )
    grouped = World([], "anti-affinity")
    hosts[0].in_group = 1
    assert (
        told(hosts, replace(forced, group="group"), world=grouped)["host0"]
        == "with a server of the group"
    )
    for state, text in (
        ({"served": False}, "without a compute service"),
        ({"forced_down": True}, "forced down"),
        ({"up": False}, "not heard from"),
    ):
        assert told([replace(hosts[0], **state)], forced)["host0"] == text


def test_a_requested_host_is_asked_everything() -> None:
    hosts = [Host("host0", disabled=True), Host("host1")]
    assert told(hosts, request(requested_host="host0"), "ComputeFilter") == {
        "host0": "disabled",
        "host1": "not the requested host",
        "": "not the requested host, disabled",
    }
    assert told(hosts, request(requested_host="gone"))[""] == "not the requested host"


def test_a_rebuild_is_asked_only_what_depends_on_its_image() -> None:
    host = Host(
        "host0",
        disabled=True,
        up=False,
        servers=99,
        working=99,
        failures=9,
        waits=60,
        facts=FACTS[0],
        aggregates=[{"os_distro": "debian"}],
    )
    rebuild = request(
        is_rebuild=True,
        requested_host="host0",
        resources={"VCPU": 1},
        availability_zone="az9",
        image_id="image1",
    )
    assert told([host], rebuild, *NAMES) == {"": ""}
    for image, name, text in (
        (
            {"hw_architecture": "aarch64"},
            "ImagePropertiesFilter",
            "not made for guests with aarch64",
        ),
        (
            {"os_distro": "windows"},
            "AggregateImagePropertiesIsolation",
            "kept for images with another os_distro",
        ),
    ):
        assert told([host], replace(rebuild, image_properties=image), name)["host0"] == text
    assert told([host], rebuild, "IsolatedHostsFilter", isolated_images=["image1"])["host0"] == (
        "not kept for this image"
    )


def test_a_host_on_which_builds_fail_is_left_out_and_then_tried_with_one_server() -> None:
    hosts = [
        Host("host0", failures=5, waits=240),
        Host("host1", failures=7, waits=100),
        Host("host2", failures=6),
        Host("host3", failures=4),
    ]
    assert told(hosts, request()) == {
        "host0": "left out after 5 failed builds in a row, tried again in 240 s",
        "host1": "left out after 7 failed builds in a row, tried again in 100 s",
        "": "left out after 5 failed builds in a row, tried again in 100 s",
    }
    asked = filters.load(conf(enabled_filters=[])).checks(
        columns(World(hosts)), request(), np.ones(4, np.bool_)
    )
    room = next(check.room for check in asked)
    assert room is not None and room[2] == 1 and room[3] > 1000
    assert told(hosts, request(), build_failure_limit=0) == {"": ""}


def test_an_affinity_group_without_servers_is_settled_by_the_first() -> None:
    world = World([Host("host0"), Host("host1")], "affinity")
    loaded = filters.load(conf(enabled_filters=[]))
    asked = list(loaded.checks(columns(world), request(group="group"), np.ones(2, np.bool_)))
    assert [check.settles for check in asked] == [False, True]
    world.hosts[1].in_group = 1
    asked = list(loaded.checks(columns(world), request(group="group"), np.ones(2, np.bool_)))
    assert [(check.settles, check.passes.tolist()) for check in asked[1:]] == [
        (False, [False, True])
    ]


# --- what is told ---
@pytest.mark.parametrize(
    ("host", "more", "name", "text"),
    [
        (
            Host("host0", zone="az1"),
            {"availability_zone": "az2"},
            "AvailabilityZoneFilter",
            "not in zone az2",
        ),
        (Host("host0", servers=51), {}, "NumInstancesFilter", "with 51 servers (at most 50)"),
        (Host("host0", working=9), {}, "IoOpsFilter", "with 9 servers in work (at most 8)"),
        (
            Host(
                "host0",
                servers=3,
                aggregates=[{"max_instances_per_host": "3"}, {"max_instances_per_host": "9"}],
            ),
            {},
            "AggregateNumInstancesFilter",
            "with 3 servers (at most 3)",
        ),
        (
            Host("host0", aggregates=[{"filter_tenant_id": "project2"}]),
            {},
            "AggregateMultiTenancyIsolation",
            "kept for other projects",
        ),
        (
            Host("host0", aggregates=[{"instance_type": "large"}]),
            {},
            "AggregateTypeAffinityFilter",
            "kept for other flavors",
        ),
        (
            Host("host0"),
            {"flavor": replace(SMALL, extra_specs={"aggregate_instance_extra_specs:ssd": "true"})},
            "AggregateInstanceExtraSpecsFilter",
            "in no aggregate whose ssd is as the flavor wants it",
        ),
        (
            Host("host0", facts=FACTS[0]),
            {"flavor": replace(SMALL, extra_specs={"capabilities:cpu_info:arch": "s== arm"})},
            "ComputeCapabilitiesFilter",
            "whose cpu_info:arch is not as the flavor wants it",
        ),
        (
            Host("host0", facts=FACTS[0]),
            {"image_properties": {"architecture": "amd64", "img_hv_requested_version": ">=9.1"}},
            "ImagePropertiesFilter",
            "with a hypervisor whose version is not >=9.1",
        ),
        (
            Host("host0", facts=FACTS[0]),
            {"image_properties": {"hw_architecture": "x86_64", "hw_maxphysaddr_bits": "52"}},
            "ImagePropertiesFilter",
            "with physical addresses of fewer than 52 bits",
        ),
        (
            Host("host0"),
            {"hints": {"same_host": "stranger"}},
            "SameHostFilter",
            "without a server that same_host names",
        ),
        (
            Host("host0"),
            {"required_traits": ["CUSTOM_FAST"]},
            "AllHostsFilter",
            "without the trait CUSTOM_FAST",
        ),
        (
            Host("host0", traits={"CUSTOM_SLOW"}),
            {"forbidden_traits": ["CUSTOM_SLOW"]},
            "AllHostsFilter",
            "with the forbidden trait CUSTOM_SLOW",
        ),
    ],
    ids=lambda value: (
        value if isinstance(value, str) and value.endswith(("Filter", "Isolation")) else ""
    ),
)
def test_a_host_that_is_left_out_is_told_why(
    host: Host, more: dict[str, Any], name: str, text: str
) -> None:
    assert told([host], request(**more), name)["host0"] == text


def test_limits_of_several_hosts_are_told_as_the_lowest() -> None:
    hosts = [
        Host(f"host{number}", servers=9, aggregates=[{"max_instances_per_host": f"{number + 3}"}])
        for number in range(3)
    ]
    assert told(hosts, request(), "AggregateNumInstancesFilter")[""] == "with 3 or more servers"


def rooms(hosts: list[Host], spec: RequestSpec, *enabled: str, count: int = 10) -> list[int]:
    """How many such servers each host takes, as far as it is known."""
    room = np.full(len(hosts), 99)
    for check in filters.load(conf(enabled_filters=list(enabled))).checks(
        columns(World(hosts)), spec, np.ones(len(hosts), np.bool_), count
    ):
        room = np.where(
            check.passes, room if check.room is None else np.minimum(room, check.room), 0
        )
    return room.tolist()


def test_room_is_what_the_scarcest_resource_leaves() -> None:
    hosts = [
        Host(
            "host0",
            free={"VCPU": 7, "MEMORY_MB": 900},
            units={"VCPU": (1, 8, 1), "MEMORY_MB": (1, 9000, 100)},
        ),
        Host(
            "host1",
            free={"VCPU": 8, "MEMORY_MB": 299},
            units={"VCPU": (1, 8, 1), "MEMORY_MB": (1, 9000, 100)},
        ),
    ]
    assert rooms(hosts, request(resources={"VCPU": 2, "MEMORY_MB": 100})) == [3, 2]
    # its step is 100
    assert rooms(hosts, request(resources={"VCPU": 2, "MEMORY_MB": 150})) == [
        0,
        0,
    ]


def test_a_limit_that_is_no_number_takes_the_others_of_that_host_with_it() -> None:
    hosts = [
        Host("host0", servers=3, aggregates=[{"max_instances_per_host": "2"}]),
        Host(
            "host1",
            servers=3,
            aggregates=[{"max_instances_per_host": "2"}, {"max_instances_per_host": "two"}],
        ),
    ]
    assert rooms(hosts, request(), "AggregateNumInstancesFilter") == [0, 47]


def test_room_for_guests_with_parts_of_the_host_is_counted_as_far_as_it_matters() -> None:
    numa_node = NumaNode(0, [], [0, 1, 2, 3, 4], 4096, [[cpu] for cpu in range(5)])
    hosts = [
        Host("host0", numa_nodes=[numa_node]),
        Host("host1", numa_nodes=[numa_node]),
        Host("host2"),
        Host(
            "host3",
            numa_nodes=[numa_node],
            held=[HardwareAssignment([AssignedNumaNode(0, [0], {"0": 3}, 64)])],
            up=False,
        ),
    ]
    dedicated = request(
        flavor=Flavor("2", "own", 2, 64, 0, extra_specs={"hw:cpu_policy": "dedicated"})
    )
    assert rooms(hosts, dedicated) == [2, 2, 0, 2]
    assert rooms(hosts, dedicated, count=1) == [1, 1, 0, 1]
    assert told(hosts, dedicated, "ComputeFilter")[""] == (
        "not heard from, without a place for a guest with 1 NUMA node with 64 MiB, 2 CPUs of its own"
    )
    cards = [Device(f"0000:81:00.{number}", "10de", "1db4") for number in range(5)]
    cards_held = [HardwareAssignment(devices=[cards[0].address, cards[1].address])]
    hosts = [
        Host("host0", devices=cards),
        Host("host1", devices=cards, held=cards_held),
        Host("host2"),
    ]
    wanted = request(flavor=replace(SMALL, extra_specs={"kilonova:devices": "gpu=10de:1db4:2"}))
    assert rooms(hosts, wanted) == [2, 1, 0]
    assert told(hosts, wanted)[""] == "without free PCI devices (2 of gpu)"


def test_hardware_that_no_host_makes_is_a_reason_and_no_error() -> None:
    odd = request(flavor=replace(SMALL, extra_specs={"hw:mem_encryption": "true"}))
    assert told([Host("host0")], odd)[""].startswith("not able to make its hardware: ")


def test_a_text_does_not_grow_with_what_an_image_says() -> None:
    wild = {
        "hw_architecture": "x" * 9999,
        "img_hv_requested_version": "y" * 9999,
        "hw_maxphysaddr_bits": "9" * 9999,
    }
    for image in (
        wild,
        wild | {"hw_architecture": "x86_64"},
        wild | {"hw_architecture": "i686", "img_hv_requested_version": ">=1"},
    ):
        assert (
            20
            < len(
                told(
                    [Host("host0", facts=FACTS[0])],
                    request(image_properties=image),
                    "ImagePropertiesFilter",
                )[""]
            )
            < 300
        )


def test_hints_say_nothing_of_servers_that_are_not_known_here() -> None:
    world = World([Host("host0"), Host("host1")], places={"mine": "host0"})
    asked = request(hints={"different_host": ["mine", "stranger"]})
    assert set(told(world.hosts, asked, "DifferentHostFilter", world=world)) == {"host0", ""}
    assert told(
        world.hosts,
        request(hints={"different_host": ["stranger"]}),
        "DifferentHostFilter",
        world=world,
    ) == {"": ""}


def test_no_hosts_are_no_trouble() -> None:
    assert told([], request(resources={"VCPU": 1}, required_traits=["CUSTOM_FAST"]), *NAMES) == {
        "": ""
    }
    for name in NAMES:
        checks: list[Check] = list(
            filters.load(conf(enabled_filters=[name])).checks(
                Snapshot(), request(), np.zeros(0, np.bool_)
            )
        )
        assert all(check.passes.size == 0 for check in checks)
