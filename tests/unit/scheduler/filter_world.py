# SPDX-License-Identifier: Apache-2.0
"""A cloud as plain objects and the same cloud as columns, which the tests of filters compare.

The reference reads a ``World``, one host after the other. ``columns`` builds the snapshot of this
world for the filters. ``worlds`` and ``REQUESTS`` draw random examples from few words, so that
hosts and requests often have something in common.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from common.domain.models import (
    AssignedNumaNode,
    Device,
    Flavor,
    HardwareAssignment,
    NumaNode,
    RequestSpec,
)
from scheduler.hosts import seed
from scheduler.snapshot import Aggregate, Group, Parts, Snapshot, Stock


@dataclass
class Host:
    name: str
    served: bool = True
    disabled: bool = False
    forced_down: bool = False
    up: bool = True
    zone: str = "nova"
    servers: int = 0
    working: int = 0
    failures: int = 0
    waits: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    #: Resource class -> free units.
    free: dict[str, int] = field(default_factory=dict)
    #: Resource class -> least, most and step of one consumer.
    units: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    traits: set[str] = field(default_factory=set)
    in_group: int = 0
    numa_nodes: list[NumaNode] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    held: list[HardwareAssignment] = field(default_factory=list)
    aggregates: list[dict[str, str]] = field(default_factory=list)


@dataclass
class World:
    """A cloud.

    ``policy`` and ``most`` belong to the server group "group". ``places`` maps servers to hosts.
    ``options`` are options of [scheduler].
    """

    hosts: list[Host]
    policy: str = ""
    most: int = 1
    places: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def conf(self) -> Any:
        return SimpleNamespace(scheduler=SimpleNamespace(**OPTIONS | self.options))


OPTIONS: dict[str, Any] = {
    "max_instances_per_host": 2,
    "max_io_ops_per_host": 2,
    "build_failure_limit": 3,
    "isolated_hosts": [],
    "isolated_images": [],
    "restrict_isolated_hosts_to_isolated_images": True,
    "image_properties_default_architecture": None,
    "aggregate_image_properties_isolation_namespace": None,
    "aggregate_image_properties_isolation_separator": ".",
}


def columns(world: World) -> Snapshot:
    """Return the world as the scheduler's snapshot."""
    hosts = world.hosts
    names = [host.name for host in hosts]
    zones = sorted({host.zone for host in hosts} | {"nova"})
    facts = [
        facts
        for number, facts in enumerate(host.facts for host in hosts)
        if facts not in [other.facts for other in hosts[:number]]
    ]
    metas: list[dict[str, str]] = []
    for host in hosts:
        metas += [meta for meta in host.aggregates if meta not in metas]
    return Snapshot(
        names=names,
        rows={name: row for row, name in enumerate(names)},
        seeds=np.array([seed(name) for name in names], np.uint64),
        **{
            name: flags([getattr(host, name) for host in hosts])
            for name in ("served", "disabled", "forced_down", "up")
        },
        zones=numbers([zones.index(host.zone) for host in hosts]),
        zone_numbers={zone: number for number, zone in enumerate(zones)},
        stock={
            name: _stock(hosts, name)
            for name in sorted({name for host in hosts for name in host.free})
        },
        traits={
            name: flags([name in host.traits for host in hosts])
            for name in sorted({name for host in hosts for name in host.traits})
        },
        **{
            name: numbers([getattr(host, name) for host in hosts])
            for name in ("servers", "working", "failures", "waits")
        },
        versions=numbers([host.facts.get("hypervisor_version", 0) for host in hosts]),
        kinds=numbers([facts.index(host.facts) for host in hosts]),
        facts=list(facts),
        aggregates=[
            Aggregate(
                number, f"secret{number}", meta, flags([meta in host.aggregates for host in hosts])
            )
            for number, meta in enumerate(metas)
        ],
        parts={
            row: Parts(host.numa_nodes, host.devices, host.held)
            for row, host in enumerate(hosts)
            if host.numa_nodes or host.devices
        },
        groups={
            "group": Group(
                world.policy,
                world.most,
                {row: host.in_group for row, host in enumerate(hosts) if host.in_group},
            )
        }
        if world.policy
        else {},
        places=world.places,
    )


def flags(values: list[bool]) -> np.ndarray:
    return np.array(values, np.bool_)


def numbers(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


def _stock(hosts: list[Host], name: str) -> Stock:
    units = [host.units.get(name, (0, 0, 1)) for host in hosts]
    return Stock(
        numbers([host.free.get(name, 0) for host in hosts]),
        *(numbers(list(column)) for column in zip(*units, strict=True)),
    )


# --- random worlds and requests ---
SERVERS = ["server1", "server2", "server3"]
IMAGES = ["image1", "image2"]
TRAITS = ["HW_CPU_X86_AVX2", "CUSTOM_FAST"]
META = {
    "availability_zone": ["az1", "nova"],
    "ssd": ["true", "false, true", "3", "", "fast,10"],
    "filter_tenant_id": ["project1", "project2, project3", ""],
    "filter_tenant_id_more": ["project1", "project2"],
    "instance_type": ["small", "large, small", "large", ""],
    "max_instances_per_host": ["1", " 3 ", "many", "1,2", "-4"],
    "max_io_ops_per_host": ["1", "3", "0", "few"],
    "os_distro": ["debian", "debian, windows", "windows"],
    "ns.colour": ["red", "red, blue"],
    "hw_architecture": ["x86_64", "aarch64"],
}
EXTRA = [
    "aggregate_instance_extra_specs:ssd",
    "ssd",
    "aggregate_instance_extra_specs:a:b",
    "capabilities:hypervisor_type",
    "capabilities:cpu_info:arch",
    "capabilities:cpu_info:features",
    "capabilities:cpu_info",
    "hypervisor_type",
    "num_io_ops",
    "capabilities:num_instances",
    "free_ram_mb",
    "capabilities:free_disk_mb:deep",
    "capabilities:vcpus_total",
    "capabilities:failed_builds",
    "capabilities:stats:one",
    "capabilities:absent",
    "capabilities:hypervisor_version",
    "hw:maxphysaddr_bits",
    "quota:cpu_shares",
    "absent",
]
REQUIREMENTS = [
    "true",
    "3",
    "",
    "= 2",
    "== 3",
    "!= 3",
    ">= 1000",
    "<= 2",
    "s== kvm",
    "s!= QEMU",
    "s> a",
    "s>= true",
    "s< z",
    "s<= kvm",
    "<in> avx",
    "<all-in> sse avx",
    "<all-in>",
    "<or> true <or> 3",
    "<or>",
    "<or> kvm <or>",
    "<in>",
    ">= many",
    "46",
    "kvm",
    ">=",
    "<or> x86_64 <or> 10",
]
PROPERTIES = {
    "os_distro": ["debian", "windows", ""],
    "ns.colour": ["red", "blue", "green"],
    "hw_architecture": ["AMD64", "aarch64"],
    "architecture": ["x86_64", "i486"],
    "img_hv_type": ["KVM", "qemu", "xapi"],
    "hypervisor_type": ["qemu"],
    "hw_vm_mode": ["hv", "xen", "exe"],
    "img_hv_requested_version": [">=6.0", ">=2.0, <9", "= 3", "!=7.2.0", ">=x"],
    "hypervisor_version_requires": ["<5"],
    "hw_maxphysaddr_bits": ["42", "46", "wide"],
    "trait:CUSTOM_FAST": ["required"],
}
FACTS = [
    {
        "hypervisor_type": "QEMU",
        "hypervisor_version": 7002000,
        "supported_instances": [["x86_64", "kvm", "hvm"], ["i686", "qemu", "hvm"]],
        "cpu_info": {"arch": "x86_64", "features": ["sse", "avx"], "maxphysaddr": {"bits": 46}},
        "stats": '{"one": 3}',
    },
    {
        "hypervisor_type": "kvm",
        "hypervisor_version": 3001000,
        "supported_instances": [["aarch64", "kvm", "hvm"]],
        "cpu_info": {"arch": "aarch64", "features": ["sse"], "maxphysaddr": {"bits": 40}},
        "stats": "no json",
    },
    {
        "hypervisor_type": "kvm",
        "hypervisor_version": 0,
        "supported_instances": [["x86_64", "xen", "xen"], ["x86_64", "qemu", "exe"]],
        "cpu_info": {},
    },
    {"supported_instances": [], "absent": "3"},
    {},
]
PARTS: list[dict[str, str]] = [
    {},
    {},
    {"hw:cpu_policy": "dedicated"},
    {"kilonova:devices": "gpu=10de:1db4:1"},
    {"hw:cpu_policy": "dedicated", "kilonova:devices": "any=10de:1db4|10de:1db5:2"},
]
CLASSES = ["VCPU", "MEMORY_MB", "CUSTOM_GOLD"]


def draw_some(table: dict[str, list[str]], most: int) -> st.SearchStrategy[dict[str, str]]:
    """Draw some keys of a table, with one value for each key."""
    return st.lists(
        st.sampled_from([(key, value) for key, values in table.items() for value in values]),
        max_size=most,
    ).map(dict)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    metas = draw(st.lists(draw_some(META, 4), max_size=3))
    hosts = []
    for number in range(draw(st.integers(0, 6))):
        classes = draw(st.sampled_from([CLASSES, CLASSES, CLASSES[1:], []]))
        hosts.append(
            Host(
                f"host{number}",
                *(
                    draw(st.sampled_from([usual] * 4 + [not usual]))
                    for usual in (True, False, False, True)
                ),
                draw(st.sampled_from(["nova", "az1"])),
                draw(st.integers(0, 4)),
                draw(st.integers(0, 3)),
                draw(st.sampled_from([0, 0, 0, 2, 3, 9])),
                draw(st.sampled_from([0, 0, 120])),
                draw(st.sampled_from(FACTS)),
                {name: draw(st.sampled_from([4, 7, 0, -1, 2000])) for name in classes},
                {
                    name: draw(st.sampled_from([(1, 9000, 1), (2, 9000, 2), (1, 3, 1), (0, 0, 1)]))
                    for name in classes
                },
                draw(st.sets(st.sampled_from(TRAITS))),
                draw(st.sampled_from([0, 0, 1, 2])),
                aggregates=[meta for meta in metas if draw(st.booleans())],
            )
        )
        _add_parts(draw, hosts[-1])
    names = st.sampled_from(["host0", "host1", "host2", "gone"])
    return World(
        hosts,
        draw(st.sampled_from(["anti-affinity", "affinity", "soft-affinity", ""])),
        draw(st.integers(1, 3)),
        draw(st.dictionaries(st.sampled_from(SERVERS), names)),
        {
            "max_instances_per_host": draw(st.integers(1, 4)),
            "max_io_ops_per_host": draw(st.integers(0, 3)),
            "build_failure_limit": draw(st.sampled_from([0, 3])),
            "isolated_hosts": draw(st.lists(names, max_size=2)),
            "isolated_images": draw(st.lists(st.sampled_from(IMAGES), max_size=1)),
            "restrict_isolated_hosts_to_isolated_images": draw(st.booleans()),
            "image_properties_default_architecture": draw(st.sampled_from([None, None, "x86_64"])),
            "aggregate_image_properties_isolation_namespace": draw(
                st.sampled_from([None, "", "ns"])
            ),
        },
    )


def _add_parts(draw: st.DrawFn, host: Host) -> None:
    """Add NUMA nodes with two dedicated CPUs, and devices. A part of them is already assigned."""
    cpus = iter(range(100))
    for number in range(draw(st.integers(0, 2))):
        pcpus = [next(cpus), next(cpus)]
        host.numa_nodes.append(
            NumaNode(number, [], pcpus, 4096, [[cpu] for cpu in pcpus], {"4": 4096 * 256})
        )
    for number in range(draw(st.integers(0, 3))):
        host.devices.append(
            Device(f"0000:81:00.{number}", "10de", draw(st.sampled_from(["1db4", "1db5"])))
        )
    if host.devices and draw(st.booleans()):
        host.held.append(HardwareAssignment(devices=[host.devices[0].address]))
    if host.numa_nodes and draw(st.booleans()):
        host.held.append(
            HardwareAssignment([AssignedNumaNode(0, [0], {"0": host.numa_nodes[0].pcpus[0]}, 64)])
        )


EXTRA_SPECS = st.builds(
    dict.__or__,
    st.dictionaries(st.sampled_from(EXTRA), st.sampled_from(REQUIREMENTS), max_size=2),
    st.sampled_from(PARTS),
)
REQUESTS = st.builds(
    RequestSpec,
    st.just("new"),
    st.sampled_from(["project1", "project2", "project9"]),
    st.dictionaries(
        st.sampled_from([*CLASSES, "VGPU"]), st.sampled_from([2, 1, 3, 0, 1000]), max_size=2
    ),
    flavor=st.builds(
        Flavor,
        st.just("1"),
        st.sampled_from(["small", "large"]),
        st.integers(1, 2),
        st.just(64),
        st.just(0),
        extra_specs=EXTRA_SPECS,
    ),
    image_id=st.sampled_from([None, *IMAGES]),
    image_properties=draw_some(PROPERTIES, 3),
    required_traits=st.lists(st.sampled_from([*TRAITS, "CUSTOM_UNKNOWN"]), max_size=1),
    forbidden_traits=st.lists(st.sampled_from([*TRAITS, "CUSTOM_UNKNOWN"]), max_size=1),
    availability_zone=st.sampled_from([None, "nova", "az1", "az9"]),
    force_host=st.sampled_from([None, None, None, "host1", "gone"]),
    requested_host=st.sampled_from([None, None, None, "host0", "gone"]),
    excluded=st.lists(st.sampled_from(["host0", "host1", "gone"]), max_size=1),
    hints=st.dictionaries(
        st.sampled_from(["same_host", "different_host"]),
        st.one_of(
            st.sampled_from(SERVERS), st.lists(st.sampled_from([*SERVERS, "stranger"]), max_size=2)
        ),
        max_size=1,
    ),
    group=st.sampled_from([None, "group", "group", "gone"]),
    is_rebuild=st.booleans(),
)
