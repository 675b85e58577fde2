# SPDX-License-Identifier: Apache-2.0
"""The filters of a configuration.

The tests cover their names, filters of third parties, the checks of each kind of request, and the
reasons.
"""

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
from tests.log_lines import logged_fields, rendered_lines
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
    configuration = cfg.ConfigOpts()
    config.register(configuration)
    configuration([], default_config_files=[], default_config_dirs=[])
    for name, value in values.items():
        configuration.set_override(name, value, "scheduler")
    return configuration


def request(**more: Any) -> RequestSpec:
    return RequestSpec("new", "project1", **{"resources": {}, "flavor": SMALL, **more})


def collect_reasons(
    hosts: list[Host],
    spec: RequestSpec,
    *enabled: str,
    world: World | None = None,
    **options: object,
) -> dict[str, str]:
    """Return the reason of each rejected host for admins.

    The key "" has the reasons of all hosts for tenants.
    """
    snapshot = columns(replace(world, hosts=hosts) if world else World(hosts))
    mask, reasons, texts = np.ones(len(hosts), np.bool_), {}, []
    for check in filters.load(conf(enabled_filters=list(enabled), **options)).checks(
        snapshot, spec, mask, 10
    ):
        rejected = mask & ~check.passes
        if rejected.any():
            texts.append(check.for_many(rejected))
            reasons |= {
                hosts[row].name: check.for_one(int(row)) for row in np.flatnonzero(rejected)
            }
        mask &= check.passes
    return reasons | {"": ", ".join(texts)}


# --- names ---
def test_built_in_filters_have_exactly_the_names_of_nova() -> None:
    assert sorted(filters.BUILT_IN) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_filter_can_be_enabled_alone(name: str) -> None:
    assert collect_reasons([Host("host0")], request(), name) == {"": ""}


def test_default_enabled_filters_exist() -> None:
    assert set(conf().scheduler.enabled_filters) <= set(NAMES)
    filters.load(conf())


def test_unknown_filter_raises_error_with_allowed_names() -> None:
    with pytest.raises(
        filters.UnknownFilter,
        match=r"\[scheduler\] enabled_filters: unknown RamFilter, CoreFilter; "
        r"allowed are AggregateImagePropertiesIsolation, .*SameHost",
    ):
        filters.load(conf(enabled_filters=["ComputeFilter", "RamFilter", "CoreFilter"]))


def test_filter_named_twice_is_loaded_once() -> None:
    assert len(filters.load(conf(enabled_filters=["ComputeFilter"] * 3)).enabled) == 1


# --- third parties ---
THIRD_PARTY_MODULE = """
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
    """Write a distribution with one module, as an installer does."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (folder / f"{name}.py").write_text(module)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def third_party_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Yield a distribution with one working filter and several broken filters."""
    install(
        tmp_path,
        "example_filters",
        THIRD_PARTY_MODULE,
        "[kilonova.scheduler.filters]\nOddHostsFilter = example_filters:odd_hosts\n"
        "BrokenFilter = example_filters:Broken\nMissingFilter = example_filters:gone\n"
        "LateFilter = example_filters:late\nShortFilter = example_filters:short\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("example_filters", None)


@pytest.mark.usefixtures("third_party_filters")
def test_third_party_filter_of_distribution_rejects_hosts() -> None:
    hosts = [Host("host0"), Host("host1")]
    assert collect_reasons(hosts, request(), "ComputeFilter", "OddHostsFilter") == {
        "host0": "with an even number",
        "": "with an even number",
    }
    rebuild = request(is_rebuild=True, requested_host="host0")
    assert collect_reasons(hosts, rebuild, "OddHostsFilter")["host0"] == "with an even number"


@pytest.mark.usefixtures("third_party_filters")
def test_third_party_filter_with_error_at_load_raises_unknown_filter() -> None:
    with pytest.raises(
        filters.UnknownFilter,
        match=r"BrokenFilter \(example_filters:Broken\) cannot be created: "
        "RuntimeError: no licence",
    ):
        filters.load(conf(enabled_filters=["BrokenFilter"]))
    with pytest.raises(
        filters.UnknownFilter, match="MissingFilter .* cannot be created: AttributeError"
    ):
        filters.load(conf(enabled_filters=["MissingFilter"]))
    with pytest.raises(
        filters.UnknownFilter, match="unknown RamFilter; allowed are .*BrokenFilter.*OddHostsFilter"
    ):
        filters.load(conf(enabled_filters=["RamFilter"]))


@pytest.mark.usefixtures("third_party_filters")
@pytest.mark.parametrize(
    ("name", "logged"),
    [
        ("LateFilter", "KeyError: 'rack'"),
        ("ShortFilter", "must be 2 booleans, one for each host, in the check: too short"),
    ],
)
def test_failing_third_party_filter_rejects_all_hosts_and_is_logged(
    name: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert collect_reasons([Host("host0"), Host("host1")], request(), name)[""] == (
        f"rejected because the filter {name} failed (see the scheduler's log)"
    )
    [fields] = logged_fields(
        caplog, "a filter failed; repair it or take it out of [scheduler] enabled_filters"
    )
    assert fields == {"filter": name}
    assert any(logged in line for line in rendered_lines(caplog))


def test_rack_filter_example_in_docs_accepts_only_hosts_of_hinted_rack(
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
    reasons = collect_reasons(hosts, request(hints={"rack": "A1"}), "RackFilter")
    assert set(reasons) == {"host1", "host2", ""}
    assert collect_reasons(hosts, request(), "RackFilter") == {"": ""}


# --- checks of each kind of request ---
def test_forced_host_skips_enabled_filters_but_not_mandatory_checks() -> None:
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
    assert collect_reasons(hosts, forced, "ComputeFilter", "NumInstancesFilter") == {
        "host1": "not the requested host",
        "": "not the requested host",
    }
    assert collect_reasons(hosts, replace(forced, resources={"VCPU": 1}), "ComputeFilter")[
        "host0"
    ] == ("short of VCPU (need 1, free 0)")
    assert (
        collect_reasons(hosts, replace(forced, required_traits=["CUSTOM_FAST"]))["host0"]
        == "without the trait CUSTOM_FAST"
    )
    grouped = World([], "anti-affinity")
    hosts[0].in_group = 1
    assert (
        collect_reasons(hosts, replace(forced, group="group"), world=grouped)["host0"]
        == "with a server of the group"
    )
    for state, text in (
        ({"served": False}, "without a compute service"),
        ({"forced_down": True}, "forced down"),
        ({"up": False}, "without a recent report"),
    ):
        assert collect_reasons([replace(hosts[0], **state)], forced)["host0"] == text


def test_requested_host_must_pass_all_filters() -> None:
    hosts = [Host("host0", disabled=True), Host("host1")]
    assert collect_reasons(hosts, request(requested_host="host0"), "ComputeFilter") == {
        "host0": "disabled",
        "host1": "not the requested host",
        "": "not the requested host, disabled",
    }
    assert collect_reasons(hosts, request(requested_host="gone"))[""] == "not the requested host"


def test_rebuild_must_pass_only_filters_about_its_image() -> None:
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
    assert collect_reasons([host], rebuild, *NAMES) == {"": ""}
    for image, name, text in (
        (
            {"hw_architecture": "aarch64"},
            "ImagePropertiesFilter",
            "without support for guests with aarch64",
        ),
        (
            {"os_distro": "windows"},
            "AggregateImagePropertiesIsolation",
            "reserved for images with another os_distro",
        ),
    ):
        assert (
            collect_reasons([host], replace(rebuild, image_properties=image), name)["host0"] == text
        )
    assert collect_reasons([host], rebuild, "IsolatedHostsFilter", isolated_images=["image1"])[
        "host0"
    ] == ("not reserved for this image")


def test_host_with_failed_builds_is_rejected_then_has_room_for_one() -> None:
    hosts = [
        Host("host0", failures=5, waits=240),
        Host("host1", failures=7, waits=100),
        Host("host2", failures=6),
        Host("host3", failures=4),
    ]
    assert collect_reasons(hosts, request()) == {
        "host0": "left out after 5 failed builds in a row, tried again in 240 s",
        "host1": "left out after 7 failed builds in a row, tried again in 100 s",
        "": "left out after 5 failed builds in a row, tried again in 100 s",
    }
    checks = filters.load(conf(enabled_filters=[])).checks(
        columns(World(hosts)), request(), np.ones(4, np.bool_)
    )
    room = next(check.room for check in checks)
    assert room is not None and room[2] == 1 and room[3] > 1000
    assert collect_reasons(hosts, request(), build_failure_limit=0) == {"": ""}


def test_affinity_check_lets_first_server_choose_host_of_empty_group() -> None:
    world = World([Host("host0"), Host("host1")], "affinity")
    loaded_filters = filters.load(conf(enabled_filters=[]))
    checks = list(
        loaded_filters.checks(columns(world), request(group="group"), np.ones(2, np.bool_))
    )
    assert [check.settles for check in checks] == [False, True]
    world.hosts[1].in_group = 1
    checks = list(
        loaded_filters.checks(columns(world), request(group="group"), np.ones(2, np.bool_))
    )
    assert [(check.settles, check.passes.tolist()) for check in checks[1:]] == [
        (False, [False, True])
    ]


# --- reasons ---
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
        (Host("host0", working=9), {}, "IoOpsFilter", "with 9 disk copies (at most 8)"),
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
            "reserved for other projects",
        ),
        (
            Host("host0", aggregates=[{"instance_type": "large"}]),
            {},
            "AggregateTypeAffinityFilter",
            "reserved for other flavors",
        ),
        (
            Host("host0"),
            {"flavor": replace(SMALL, extra_specs={"aggregate_instance_extra_specs:ssd": "true"})},
            "AggregateInstanceExtraSpecsFilter",
            "in no aggregate with the ssd that the flavor requires",
        ),
        (
            Host("host0", facts=FACTS[0]),
            {"flavor": replace(SMALL, extra_specs={"capabilities:cpu_info:arch": "s== arm"})},
            "ComputeCapabilitiesFilter",
            "without the cpu_info:arch that the flavor requires",
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
def test_filter_gives_reason_for_rejected_host(
    host: Host, more: dict[str, Any], name: str, text: str
) -> None:
    assert collect_reasons([host], request(**more), name)["host0"] == text


def test_reason_for_several_hosts_contains_lowest_limit() -> None:
    hosts = [
        Host(f"host{number}", servers=9, aggregates=[{"max_instances_per_host": f"{number + 3}"}])
        for number in range(3)
    ]
    assert (
        collect_reasons(hosts, request(), "AggregateNumInstancesFilter")[""]
        == "with 3 or more servers"
    )


def count_room(hosts: list[Host], spec: RequestSpec, *enabled: str, count: int = 10) -> list[int]:
    """Return the number of such servers that each host takes, up to a limit."""
    room = np.full(len(hosts), 99)
    for check in filters.load(conf(enabled_filters=list(enabled))).checks(
        columns(World(hosts)), spec, np.ones(len(hosts), np.bool_), count
    ):
        room = np.where(
            check.passes, room if check.room is None else np.minimum(room, check.room), 0
        )
    return room.tolist()


def test_room_is_limited_by_scarcest_resource_and_step() -> None:
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
    assert count_room(hosts, request(resources={"VCPU": 2, "MEMORY_MB": 100})) == [3, 2]
    # The step of MEMORY_MB is 100.
    assert count_room(hosts, request(resources={"VCPU": 2, "MEMORY_MB": 150})) == [
        0,
        0,
    ]


def test_invalid_aggregate_limit_replaces_all_limits_by_default() -> None:
    hosts = [
        Host("host0", servers=3, aggregates=[{"max_instances_per_host": "2"}]),
        Host(
            "host1",
            servers=3,
            aggregates=[{"max_instances_per_host": "2"}, {"max_instances_per_host": "two"}],
        ),
    ]
    assert count_room(hosts, request(), "AggregateNumInstancesFilter") == [0, 47]


def test_room_for_dedicated_cpus_and_devices_is_counted_up_to_limit() -> None:
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
    assert count_room(hosts, dedicated) == [2, 2, 0, 2]
    assert count_room(hosts, dedicated, count=1) == [1, 1, 0, 1]
    assert collect_reasons(hosts, dedicated, "ComputeFilter")[""] == (
        "without a recent report, without a place for a guest with 1 NUMA node with 64 MiB, 2 CPUs of its own"
    )
    cards = [Device(f"0000:81:00.{number}", "10de", "1db4") for number in range(5)]
    cards_held = [HardwareAssignment(devices=[cards[0].address, cards[1].address])]
    hosts = [
        Host("host0", devices=cards),
        Host("host1", devices=cards, held=cards_held),
        Host("host2"),
    ]
    with_devices = request(
        flavor=replace(SMALL, extra_specs={"kilonova:devices": "gpu=10de:1db4:2"})
    )
    assert count_room(hosts, with_devices) == [2, 1, 0]
    assert collect_reasons(hosts, with_devices)[""] == "without free PCI devices (2 of gpu)"


def test_unsupported_hardware_gives_reason_and_no_error() -> None:
    spec = request(flavor=replace(SMALL, extra_specs={"hw:mem_encryption": "true"}))
    assert collect_reasons([Host("host0")], spec)[""].startswith(
        "not able to give the server its hardware: "
    )


def test_reason_is_short_for_long_image_properties() -> None:
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
                collect_reasons(
                    [Host("host0", facts=FACTS[0])],
                    request(image_properties=image),
                    "ImagePropertiesFilter",
                )[""]
            )
            < 300
        )


def test_different_host_hint_ignores_unknown_servers() -> None:
    world = World([Host("host0"), Host("host1")], places={"mine": "host0"})
    spec = request(hints={"different_host": ["mine", "stranger"]})
    assert set(collect_reasons(world.hosts, spec, "DifferentHostFilter", world=world)) == {
        "host0",
        "",
    }
    assert collect_reasons(
        world.hosts,
        request(hints={"different_host": ["stranger"]}),
        "DifferentHostFilter",
        world=world,
    ) == {"": ""}


def test_filters_return_empty_checks_and_no_reason_without_hosts() -> None:
    assert collect_reasons(
        [], request(resources={"VCPU": 1}, required_traits=["CUSTOM_FAST"]), *NAMES
    ) == {"": ""}
    for name in NAMES:
        checks: list[Check] = list(
            filters.load(conf(enabled_filters=[name])).checks(
                Snapshot(), request(), np.zeros(0, np.bool_)
            )
        )
        assert all(check.passes.size == 0 for check in checks)
