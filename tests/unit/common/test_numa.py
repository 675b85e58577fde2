# SPDX-License-Identifier: Apache-2.0
"""``fit``, the assignment of NUMA nodes, CPUs, pages and devices: examples and properties.

The properties compare ``fit`` with a search that tries all combinations.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.domain.hardware import DeviceRequest, Hardware, NumaNodeRequest
from common.domain.models import AssignedNumaNode, Device, HardwareAssignment, NumaNode
from common.domain.numa import fit

GPU, NIC = ("10de", "1db4"), ("8086", "154c")


def numa_node(
    number: int,
    *,
    pcpus: int = 4,
    shared: int = 4,
    threads: int = 2,
    memory_mb: int = 8192,
    pages: dict[str, int] | None = None,
) -> NumaNode:
    """Return a NUMA node with dedicated CPUs, then shared CPUs, and ``threads`` threads a core."""
    first = number * 100
    own, others = list(range(first, first + pcpus)), list(range(first + 50, first + 50 + shared))
    groups = [
        cpus[start : start + threads]
        for cpus in (own, others)
        for start in range(0, len(cpus), threads)
    ]
    return NumaNode(
        number, others, own, memory_mb, [group for group in groups if len(group) > 1], pages or {}
    )


def dedicated_cpus(
    count: int, numa_nodes: int = 1, threads: str = "", memory_mb: int = 1024, page_kb: int = 0
) -> Hardware:
    each = count // numa_nodes
    requests = tuple(
        NumaNodeRequest(tuple(range(start * each, start * each + each)), memory_mb)
        for start in range(numa_nodes)
    )
    return Hardware(
        numa_nodes=requests, dedicated=frozenset(range(count)), threads=threads, page_kb=page_kb
    )


def pins(assignment: HardwareAssignment | None) -> list[int]:
    assert assignment is not None
    return [host for part in assignment.numa_nodes for host in part.pins.values()]


def test_fit_without_requirements_returns_empty_assignment() -> None:
    assert fit([], [], [], Hardware()) == HardwareAssignment()


def test_fit_gives_each_guest_numa_node_its_own_host_numa_node() -> None:
    assignment = fit([numa_node(0), numa_node(1)], [], [], dedicated_cpus(4, numa_nodes=2))
    assert assignment is not None and [part.numa_node for part in assignment.numa_nodes] == [0, 1]
    assert assignment.numa_nodes[1] == AssignedNumaNode(1, [2, 3], {"2": 100, "3": 101}, 1024, 0)
    assert fit([numa_node(0, pcpus=16)], [], [], dedicated_cpus(4, numa_nodes=2)) is None
    assert fit([numa_node(0), numa_node(1)], [], [], dedicated_cpus(8)) is None, (
        "one NUMA node of the guest is not spread over two"
    )


def test_fit_places_shared_cpus_on_a_numa_node_with_enough_cpus_and_memory() -> None:
    requirement = Hardware(numa_nodes=(NumaNodeRequest((0, 1, 2, 3), 4096),))
    assignments = [HardwareAssignment([AssignedNumaNode(0, [0], {}, 1024, 0)])]
    assignment = fit([numa_node(0), numa_node(1)], [], assignments, requirement)
    assert assignment == HardwareAssignment([AssignedNumaNode(1, [0, 1, 2, 3], {}, 4096, 0)])
    assert fit([numa_node(0, shared=3)], [], [], requirement) is None
    assert fit([numa_node(0, memory_mb=4095)], [], [], requirement) is None


def test_fit_pins_only_the_dedicated_cpus_of_a_mixed_guest() -> None:
    requirement = Hardware(numa_nodes=(NumaNodeRequest((0, 1, 2), 512),), dedicated=frozenset({1}))
    assignment = fit([numa_node(0)], [], [], requirement)
    assert (
        assignment is not None
        and assignment.numa_nodes[0].pins == {"1": 0}
        and assignment.numa_nodes[0].cpus == [0, 1, 2]
    )
    assert fit([numa_node(0, shared=1)], [], [], requirement) is None


@pytest.mark.parametrize(
    ("policy", "count", "expected"),
    [
        ("", 2, [0, 1]),
        ("prefer", 3, [0, 1, 2]),
        ("require", 2, [0, 1]),
        ("require", 3, [0, 1, 2]),
        ("isolate", 2, [0, 2]),
        ("prefer", 8, list(range(8))),
    ],
)
def test_fit_chooses_threads_by_the_thread_policy(
    policy: str, count: int, expected: list[int]
) -> None:
    assert (
        pins(fit([numa_node(0, pcpus=8)], [], [], dedicated_cpus(count, threads=policy)))
        == expected
    )


def test_fit_prefers_a_core_with_a_used_thread_over_an_idle_core() -> None:
    first = fit([numa_node(0, pcpus=4)], [], [], dedicated_cpus(1))
    assert pins(first) == [0] and first is not None
    second = fit([numa_node(0, pcpus=4)], [], [first], dedicated_cpus(1))
    assert pins(second) == [1], "the free thread of the core in use"


def test_fit_with_isolate_policy_keeps_sibling_threads_idle() -> None:
    host = [numa_node(0, pcpus=4)]
    alone = fit(host, [], [], dedicated_cpus(1, threads="isolate"))
    assert alone is not None and len(alone.numa_nodes[0].idle) == 1
    other = fit(host, [], [alone], dedicated_cpus(2))
    assert other is not None and not {*pins(alone), *alone.numa_nodes[0].idle} & {*pins(other)}
    assert fit(host, [], [alone], dedicated_cpus(3)) is None
    assert fit(host, [], [alone, other], dedicated_cpus(1)) is None
    split = fit(host, [], [], dedicated_cpus(3))
    assert (
        split is not None and fit(host, [], [split], dedicated_cpus(1, threads="isolate")) is None
    ), "a sibling thread is in use"
    half = NumaNode(0, [1], [0], 1024, [[0, 1]])
    assert fit([half], [], [], dedicated_cpus(1, threads="isolate")) is None, (
        "others run on the core's other thread"
    )
    assert fit([numa_node(0, threads=1)], [], [], dedicated_cpus(4, threads="isolate")) is not None


def test_fit_with_require_policy_needs_cores_with_free_threads() -> None:
    assert fit([numa_node(0, threads=1)], [], [], dedicated_cpus(2, threads="require")) is None
    broken = [HardwareAssignment([AssignedNumaNode(0, [0, 1], {"0": 0, "1": 2}, 16, 0)])]
    assert fit([numa_node(0, pcpus=4)], [], broken, dedicated_cpus(2, threads="require")) is None
    assert pins(fit([numa_node(0, pcpus=4)], [], broken, dedicated_cpus(2))) == [1, 3]
    assert (
        len(
            pins(
                fit(
                    [numa_node(0, pcpus=9, threads=3)], [], [], dedicated_cpus(8, threads="require")
                )
            )
        )
        == 8
    )


def test_fit_counts_free_pages_of_each_size() -> None:
    host = [numa_node(0, memory_mb=8192, pages={"4": 2**20, "2048": 1024, "1048576": 2})]

    def page(requirement: int, memory_mb: int, *assignments: HardwareAssignment) -> int | None:
        assignment = fit(
            host,
            [],
            list(assignments),
            Hardware(numa_nodes=(NumaNodeRequest((0,), memory_mb),), page_kb=requirement),
        )
        return assignment.numa_nodes[0].page_kb if assignment else None

    assert [
        page(-1, 1024),
        page(-1, 512),
        page(2048, 2048),
        page(4, 4096),
        page(-2, 3),
        page(0, 4096),
    ] == [1 << 20, 2048, 2048, 4, 4, 0]
    assert (page(-1, 4096), page(2048, 2049), page(4, 4097), page(0, 4097), page(64, 1)) == (
        None,
    ) * 5
    two = HardwareAssignment([AssignedNumaNode(0, [0], {}, 2048, 1 << 20)])
    assert (
        page(1 << 20, 1024, two),
        page(-1, 1024, two),
        page(-1, 2048, two, HardwareAssignment([AssignedNumaNode(0, [0], {}, 2, 2048)])),
    ) == (None, 2048, None)
    without_small = [numa_node(0, memory_mb=4096, pages={"2048": 1024})]
    assert fit(without_small, [], [], Hardware(numa_nodes=(NumaNodeRequest((0,), 2049),))) is None


def test_fit_chooses_the_smallest_sufficient_numa_node() -> None:
    host = [numa_node(0, pcpus=8), numa_node(1, pcpus=4)]
    assignment = fit(host, [], [], dedicated_cpus(4))
    assert assignment is not None and assignment.numa_nodes[0].numa_node == 1


# --- devices ---
def device(address: str, node_ids: int, kind: tuple[str, str] = GPU) -> Device:
    return Device(address, *kind, node_ids)


def device_requirement(
    count: int, numa_nodes: int = 1, policy: str = "", kinds: tuple[tuple[str, str], ...] = (GPU,)
) -> Hardware:
    requests = tuple(NumaNodeRequest((number,), 16) for number in range(numa_nodes))
    return Hardware(
        numa_nodes=requests,
        devices=(DeviceRequest("x", count, kinds),),
        options={"pci_policy": policy} if policy else {},
    )


@pytest.mark.parametrize(
    ("policy", "node_ids", "fits"),
    [
        ("", (0, 1), False),
        ("", (1, 1), True),
        ("", (1, -1), True),
        ("required", (1, -1), False),
        ("required", (1, 1), True),
        ("preferred", (0, 1), True),
        ("preferred", (1, 1), True),
        ("legacy", (0, 1), False),
    ],
)
def test_fit_places_devices_near_the_guest_by_the_pci_policy(
    policy: str, node_ids: tuple[int, int], fits: bool
) -> None:
    devices = [device(str(number), place) for number, place in enumerate(node_ids)]
    assignment = fit(
        [numa_node(0), numa_node(1)], devices, [], device_requirement(2, policy=policy)
    )
    assert (assignment is not None) == fits
    if assignment:
        assert assignment.devices == ["0", "1"]
        assert assignment.numa_nodes[0].numa_node == 1 or node_ids == (0, 1)


def test_fit_assigns_devices_to_guest_without_numa_and_spares_device_nodes() -> None:
    devices = [device("a", 0), device("b", 1, NIC)]
    assert fit(
        [], devices, [], Hardware(devices=(DeviceRequest("n", 1, (NIC,)),))
    ) == HardwareAssignment([], ["b"])
    assert (
        fit(
            [],
            devices,
            [HardwareAssignment([], ["b"])],
            Hardware(devices=(DeviceRequest("n", 1, (NIC,)),)),
        )
        is None
    )
    both = Hardware(devices=(DeviceRequest("any", 1, (GPU, NIC)), DeviceRequest("gpu", 1, (GPU,))))
    assert fit([], devices, [], both) == HardwareAssignment([], ["b", "a"]), (
        "the first request must leave the GPU to the second"
    )
    assignment = fit(
        [numa_node(0), numa_node(1)],
        devices[:1],
        [],
        Hardware(numa_nodes=(NumaNodeRequest((0,), 16),)),
    )
    assert assignment is not None and assignment.numa_nodes[0].numa_node == 1, (
        "the NUMA node with the device stays free for guests with devices"
    )


# --- compared with a search that tries all combinations ---
@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[NumaNode], list[Device]]:
    numa_nodes = [
        numa_node(
            number,
            pcpus=draw(st.integers(0, 5)),
            shared=draw(st.integers(0, 2)),
            threads=draw(st.sampled_from([1, 2, 2, 3])),
            memory_mb=draw(st.integers(0, 16)),
            pages=draw(st.dictionaries(st.sampled_from(["4", "2048", "4096"]), st.integers(0, 4))),
        )
        for number in range(draw(st.integers(1, 3)))
    ]
    devices = [
        Device(
            f"d{number}",
            *draw(st.sampled_from([GPU, NIC])),
            draw(st.integers(-1, len(numa_nodes) - 1)),
        )
        for number in range(draw(st.integers(0, 3)))
    ]
    return numa_nodes, devices


@st.composite
def guests(draw: st.DrawFn) -> Hardware:
    sizes = draw(st.lists(st.integers(1, 3), min_size=0, max_size=2))
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    requests = tuple(
        NumaNodeRequest(tuple(range(start, start + size)), draw(st.integers(1, 8)))
        for start, size in zip(starts, sizes, strict=True)
    )
    own = draw(st.sets(st.integers(0, sum(sizes) - 1))) if sizes else set()
    kinds = st.sampled_from([(GPU,), (NIC,), (GPU, NIC)])
    devices = tuple(
        DeviceRequest(f"w{number}", draw(st.integers(1, 2)), draw(kinds))
        for number in range(draw(st.integers(0, 2)))
    )
    return Hardware(
        numa_nodes=requests,
        dedicated=frozenset(own),
        devices=devices,
        threads=draw(st.sampled_from(["", "prefer", "isolate", "require"])),
        page_kb=draw(st.sampled_from([0, 4, -1, -2, 2048, 4096])),
        options={"pci_policy": draw(st.sampled_from(["preferred", "legacy", "required"]))},
    )


def group(host: NumaNode, cpu: int) -> list[int]:
    return next((group for group in host.siblings if cpu in group), [cpu])


def follows_policy(
    host: NumaNode, chosen: Sequence[int], idle: set[int], used: set[int], policy: str
) -> bool:
    """Return True if the chosen and idle CPUs follow the thread policy."""
    per_core = Counter(tuple(group(host, cpu)) for cpu in chosen)
    if policy == "isolate":
        return all(
            count == 1 and not set(core) & (used | set(host.cpus))
            for core, count in per_core.items()
        ) and (
            idle == {cpu for core in per_core for cpu in core if cpu in host.pcpus} - set(chosen)
        )
    if policy == "require":
        alone = sum(count == 1 for count in per_core.values())
        return all(len(core) > 1 for core in per_core) and alone <= len(chosen) % 2 and not idle
    return not idle


def arrangements(
    host: NumaNode,
    request: NumaNodeRequest,
    requirement: Hardware,
    earlier: Sequence[HardwareAssignment],
) -> Iterator[AssignedNumaNode]:
    """Yield each assignment of a guest's NUMA node to a NUMA node of the host.

    There is one assignment for each choice of pages and CPUs.
    """
    parts = [part for assignment in earlier for part in assignment.numa_nodes]
    used = {cpu for part in parts for cpu in (*part.pins.values(), *part.idle)}
    own = [cpu for cpu in request.cpus if cpu in requirement.dedicated]
    if len(request.cpus) - len(own) > len(host.cpus):
        return
    for page in suitable_pages(host, request.memory_mb, requirement.page_kb, parts):
        for chosen in itertools.combinations(
            [cpu for cpu in host.pcpus if cpu not in used], len(own)
        ):
            idle = {
                other for cpu in chosen for other in group(host, cpu) if other in host.pcpus
            } - set(chosen)
            idle = idle if requirement.threads == "isolate" else set()
            if follows_policy(host, chosen, idle, used, requirement.threads):
                yield AssignedNumaNode(
                    host.id,
                    list(request.cpus),
                    dict(zip(map(str, own), chosen, strict=True)),
                    request.memory_mb,
                    page,
                    sorted(idle),
                )


def suitable_pages(
    host: NumaNode, memory_mb: int, requirement: int, parts: Sequence[AssignedNumaNode]
) -> Iterator[int]:
    sizes = {int(size): number * int(size) for size, number in host.pages.items()}
    sizes.setdefault(4, host.memory_mb * 1024 - sum(kb for size, kb in sizes.items() if size > 4))
    for part in parts:
        if part.numa_node == host.id:
            sizes[max(4, part.page_kb)] -= part.memory_mb * 1024
    for size, left in sizes.items():
        fits = memory_mb * 1024 <= left and memory_mb * 1024 % size == 0
        if fits and (
            requirement == size
            or requirement == -2
            or (requirement == -1 and size > 4)
            or (requirement == 0 and size == 4)
        ):
            yield 0 if requirement == 0 else size


def is_near_enough(node_ids: Sequence[int], numa_nodes: set[int], policy: str) -> bool:
    if not numa_nodes or policy == "preferred":
        return True
    return set(node_ids) <= (numa_nodes if policy == "required" else numa_nodes | {-1})


def has_any_fit(
    numa_nodes: list[NumaNode],
    devices: list[Device],
    earlier: list[HardwareAssignment],
    requirement: Hardware,
) -> bool:
    """Return True if any combination of NUMA nodes and devices fits."""
    used = {address for assignment in earlier for address in assignment.devices}
    left = [device for device in devices if device.address not in used]
    slots = [request.kinds for request in requirement.devices for _ in range(request.count)]
    for chosen in itertools.permutations(numa_nodes, len(requirement.numa_nodes)):
        if all(
            any(True for _ in arrangements(host, request, requirement, earlier))
            for host, request in zip(chosen, requirement.numa_nodes, strict=True)
        ):
            for chosen_devices in itertools.permutations(left, len(slots)):
                if all(
                    (candidate.vendor, candidate.product) in kinds
                    for candidate, kinds in zip(chosen_devices, slots, strict=True)
                ) and (
                    is_near_enough(
                        [candidate.numa_node for candidate in chosen_devices],
                        {host.id for host in chosen},
                        requirement.options["pci_policy"],
                    )
                ):
                    return True
    return False


def assert_valid_assignment(
    numa_nodes: list[NumaNode],
    devices: list[Device],
    earlier: list[HardwareAssignment],
    requirement: Hardware,
    result: HardwareAssignment,
) -> None:
    """Assert that an assignment meets the request and takes no resources of other guests."""
    assert [part.cpus for part in result.numa_nodes] == [
        list(request.cpus) for request in requirement.numa_nodes
    ]
    assert len({part.numa_node for part in result.numa_nodes}) == len(result.numa_nodes)
    for part, request in zip(result.numa_nodes, requirement.numa_nodes, strict=True):
        host = next(host for host in numa_nodes if host.id == part.numa_node)
        same = [
            (sorted(way.pins.values()), way.page_kb, way.idle)
            for way in arrangements(host, request, requirement, earlier)
        ]
        assert (sorted(part.pins.values()), part.page_kb, sorted(part.idle)) in same
    used = [address for assignment in (*earlier, result) for address in assignment.devices]
    assert len(used) == len(set(used))
    places = {device.address: device for device in devices}
    slots = [request.kinds for request in requirement.devices for _ in range(request.count)]
    chosen_devices = [places[address] for address in result.devices]
    assert all(
        (candidate.vendor, candidate.product) in kinds
        for candidate, kinds in zip(chosen_devices, slots, strict=True)
    )
    assert is_near_enough(
        [candidate.numa_node for candidate in chosen_devices],
        {part.numa_node for part in result.numa_nodes},
        requirement.options["pci_policy"],
    )
    pins_of_all = [
        cpu
        for assignment in (*earlier, result)
        for part in assignment.numa_nodes
        for cpu in part.pins.values()
    ]
    assert len(pins_of_all) == len(set(pins_of_all))


@given(host=hosts(), requests=st.lists(guests(), min_size=1, max_size=4))
def test_fit_finds_valid_assignment_if_one_exists_in_any_input_order(
    host: tuple[list[NumaNode], list[Device]], requests: list[Hardware]
) -> None:
    numa_nodes, devices = host
    earlier: list[HardwareAssignment] = []
    for requirement in requests:
        result = fit(numa_nodes, devices, earlier, requirement)
        assert result == fit(numa_nodes[::-1], devices[::-1], earlier, requirement), (
            "the result does not depend on the order of the input"
        )
        if requirement.needs_assignment:
            assert (result is not None) == has_any_fit(numa_nodes, devices, earlier, requirement)
        if result is not None:
            assert_valid_assignment(numa_nodes, devices, earlier, requirement, result)
            earlier.append(result)


# --- duration ---
@pytest.mark.parametrize(
    "requirement",
    [
        dedicated_cpus(1024, numa_nodes=64),
        dedicated_cpus(1024, numa_nodes=64, threads="require"),
        dedicated_cpus(64, numa_nodes=64, threads="isolate"),
        Hardware(
            numa_nodes=tuple(NumaNodeRequest((number,), 1 + number % 2) for number in range(63)),
            devices=(DeviceRequest("a", 32, (GPU, NIC)), DeviceRequest("b", 32, (GPU,))),
        ),
        Hardware(
            numa_nodes=tuple(NumaNodeRequest((number,), 16) for number in range(8)),
            options={"pci_policy": "required"},
            devices=(DeviceRequest("a", 64, (GPU, NIC)),),
        ),
    ],
)
def test_fit_of_large_requests_ends_within_seconds(requirement: Hardware) -> None:
    numa_nodes = [
        numa_node(number, pcpus=15, memory_mb=20000 * (number < 62)) for number in range(64)
    ]
    devices = [
        device(f"{number:04}", number % 64, GPU if number % 9 else NIC) for number in range(560)
    ]
    started = time.monotonic()
    fit(numa_nodes, devices, [], requirement)
    assert time.monotonic() - started < 5
