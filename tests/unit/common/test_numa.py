# SPDX-License-Identifier: Apache-2.0
"""Where a guest fits: the cases that people ask about, and against a search that tries
everything."""

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
    """A NUMA node whose first CPUs are dedicated; its cores have ``threads`` threads."""
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


def own_cpus(
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


def test_nothing_is_needed() -> None:
    assert fit([], [], [], Hardware()) == HardwareAssignment()


def test_each_guest_cell_has_a_host_cell_of_its_own() -> None:
    found = fit([numa_node(0), numa_node(1)], [], [], own_cpus(4, numa_nodes=2))
    assert found is not None and [part.numa_node for part in found.numa_nodes] == [0, 1]
    assert found.numa_nodes[1] == AssignedNumaNode(1, [2, 3], {"2": 100, "3": 101}, 1024, 0)
    assert fit([numa_node(0, pcpus=16)], [], [], own_cpus(4, numa_nodes=2)) is None
    assert fit([numa_node(0), numa_node(1)], [], [], own_cpus(8)) is None, (
        "one NUMA node of the guest is not spread over two"
    )


def test_shared_cpus_need_a_cell_as_large_and_go_where_memory_is() -> None:
    wanted = Hardware(numa_nodes=(NumaNodeRequest((0, 1, 2, 3), 4096),))
    held = [HardwareAssignment([AssignedNumaNode(0, [0], {}, 1024, 0)])]
    found = fit([numa_node(0), numa_node(1)], [], held, wanted)
    assert found == HardwareAssignment([AssignedNumaNode(1, [0, 1, 2, 3], {}, 4096, 0)])
    assert fit([numa_node(0, shared=3)], [], [], wanted) is None
    assert fit([numa_node(0, memory_mb=4095)], [], [], wanted) is None


def test_mixed_cpus() -> None:
    wanted = Hardware(numa_nodes=(NumaNodeRequest((0, 1, 2), 512),), dedicated=frozenset({1}))
    found = fit([numa_node(0)], [], [], wanted)
    assert (
        found is not None
        and found.numa_nodes[0].pins == {"1": 0}
        and found.numa_nodes[0].cpus == [0, 1, 2]
    )
    assert fit([numa_node(0, shared=1)], [], [], wanted) is None


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
def test_threads(policy: str, count: int, expected: list[int]) -> None:
    assert pins(fit([numa_node(0, pcpus=8)], [], [], own_cpus(count, threads=policy))) == expected


def test_whole_cores_are_left_whole() -> None:
    first = fit([numa_node(0, pcpus=4)], [], [], own_cpus(1))
    assert pins(first) == [0] and first is not None
    second = fit([numa_node(0, pcpus=4)], [], [first], own_cpus(1))
    assert pins(second) == [1], "the other thread of the core that is split already"


def test_isolated_cores_stay_idle_beside_the_guest() -> None:
    host = [numa_node(0, pcpus=4)]
    alone = fit(host, [], [], own_cpus(1, threads="isolate"))
    assert alone is not None and len(alone.numa_nodes[0].idle) == 1
    other = fit(host, [], [alone], own_cpus(2))
    assert other is not None and not {*pins(alone), *alone.numa_nodes[0].idle} & {*pins(other)}
    assert fit(host, [], [alone], own_cpus(3)) is None
    assert fit(host, [], [alone, other], own_cpus(1)) is None
    split = fit(host, [], [], own_cpus(3))
    assert split is not None and fit(host, [], [split], own_cpus(1, threads="isolate")) is None, (
        "a neighbour"
    )
    half = NumaNode(0, [1], [0], 1024, [[0, 1]])
    assert fit([half], [], [], own_cpus(1, threads="isolate")) is None, (
        "others run on the core's other thread"
    )
    assert fit([numa_node(0, threads=1)], [], [], own_cpus(4, threads="isolate")) is not None


def test_required_threads_need_threads() -> None:
    assert fit([numa_node(0, threads=1)], [], [], own_cpus(2, threads="require")) is None
    broken = [HardwareAssignment([AssignedNumaNode(0, [0, 1], {"0": 0, "1": 2}, 16, 0)])]
    assert fit([numa_node(0, pcpus=4)], [], broken, own_cpus(2, threads="require")) is None
    assert pins(fit([numa_node(0, pcpus=4)], [], broken, own_cpus(2))) == [1, 3]
    assert (
        len(pins(fit([numa_node(0, pcpus=9, threads=3)], [], [], own_cpus(8, threads="require"))))
        == 8
    )


def test_pages_are_counted() -> None:
    host = [numa_node(0, memory_mb=8192, pages={"4": 2**20, "2048": 1024, "1048576": 2})]

    def page(wanted: int, memory_mb: int, *held: HardwareAssignment) -> int | None:
        found = fit(
            host,
            [],
            list(held),
            Hardware(numa_nodes=(NumaNodeRequest((0,), memory_mb),), page_kb=wanted),
        )
        return found.numa_nodes[0].page_kb if found else None

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


def test_the_fullest_cell_that_will_do_is_taken() -> None:
    host = [numa_node(0, pcpus=8), numa_node(1, pcpus=4)]
    found = fit(host, [], [], own_cpus(4))
    assert found is not None and found.numa_nodes[0].numa_node == 1


# --- devices ---
def device(address: str, where: int, kind: tuple[str, str] = GPU) -> Device:
    return Device(address, *kind, where)


def wanting(
    count: int, numa_nodes: int = 1, policy: str = "", kinds: tuple[tuple[str, str], ...] = (GPU,)
) -> Hardware:
    requests = tuple(NumaNodeRequest((number,), 16) for number in range(numa_nodes))
    return Hardware(
        numa_nodes=requests,
        devices=(DeviceRequest("x", count, kinds),),
        options={"pci_policy": policy} if policy else {},
    )


@pytest.mark.parametrize(
    ("policy", "where", "fits"),
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
def test_how_near_devices_must_be(policy: str, where: tuple[int, int], fits: bool) -> None:
    devices = [device(str(number), place) for number, place in enumerate(where)]
    found = fit([numa_node(0), numa_node(1)], devices, [], wanting(2, policy=policy))
    assert (found is not None) == fits
    if found:
        assert found.devices == ["0", "1"]
        assert found.numa_nodes[0].numa_node == 1 or where == (0, 1)


def test_devices_without_cells_and_guests_that_leave_devices_alone() -> None:
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
        "the first gives way to the second"
    )
    found = fit(
        [numa_node(0), numa_node(1)],
        devices[:1],
        [],
        Hardware(numa_nodes=(NumaNodeRequest((0,), 16),)),
    )
    assert found is not None and found.numa_nodes[0].numa_node == 1, (
        "the NUMA node with the device is kept for who wants it"
    )


# --- against a search that tries everything ---
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


def allowed(
    host: NumaNode, chosen: Sequence[int], idle: set[int], taken: set[int], policy: str
) -> bool:
    """Are these CPUs what the policy says?"""
    per_core = Counter(tuple(group(host, cpu)) for cpu in chosen)
    if policy == "isolate":
        return all(
            count == 1 and not set(core) & (taken | set(host.cpus))
            for core, count in per_core.items()
        ) and (
            idle == {cpu for core in per_core for cpu in core if cpu in host.pcpus} - set(chosen)
        )
    if policy == "require":
        alone = sum(count == 1 for count in per_core.values())
        return all(len(core) > 1 for core in per_core) and alone <= len(chosen) % 2 and not idle
    return not idle


def arrangements(
    host: NumaNode, request: NumaNodeRequest, wanted: Hardware, held: Sequence[HardwareAssignment]
) -> Iterator[AssignedNumaNode]:
    """All ways to make this NUMA node of the guest on this NUMA node of the host: one for each
    choice of pages and CPUs."""
    parts = [part for assignment in held for part in assignment.numa_nodes]
    taken = {cpu for part in parts for cpu in (*part.pins.values(), *part.idle)}
    own = [cpu for cpu in request.cpus if cpu in wanted.dedicated]
    if len(request.cpus) - len(own) > len(host.cpus):
        return
    for page in pages_that_do(host, request.memory_mb, wanted.page_kb, parts):
        for chosen in itertools.combinations(
            [cpu for cpu in host.pcpus if cpu not in taken], len(own)
        ):
            idle = {
                other for cpu in chosen for other in group(host, cpu) if other in host.pcpus
            } - set(chosen)
            idle = idle if wanted.threads == "isolate" else set()
            if allowed(host, chosen, idle, taken, wanted.threads):
                yield AssignedNumaNode(
                    host.id,
                    list(request.cpus),
                    dict(zip(map(str, own), chosen, strict=True)),
                    request.memory_mb,
                    page,
                    sorted(idle),
                )


def pages_that_do(
    host: NumaNode, memory_mb: int, wanted: int, parts: Sequence[AssignedNumaNode]
) -> Iterator[int]:
    sizes = {int(size): number * int(size) for size, number in host.pages.items()}
    sizes.setdefault(4, host.memory_mb * 1024 - sum(kb for size, kb in sizes.items() if size > 4))
    for part in parts:
        if part.numa_node == host.id:
            sizes[max(4, part.page_kb)] -= part.memory_mb * 1024
    for size, left in sizes.items():
        fits = memory_mb * 1024 <= left and memory_mb * 1024 % size == 0
        if fits and (
            wanted == size
            or wanted == -2
            or (wanted == -1 and size > 4)
            or (wanted == 0 and size == 4)
        ):
            yield 0 if wanted == 0 else size


def near_enough(where: Sequence[int], numa_nodes: set[int], policy: str) -> bool:
    if not numa_nodes or policy == "preferred":
        return True
    return set(where) <= (numa_nodes if policy == "required" else numa_nodes | {-1})


def everything(
    numa_nodes: list[NumaNode],
    devices: list[Device],
    held: list[HardwareAssignment],
    wanted: Hardware,
) -> bool:
    """Is there any way at all?"""
    taken = {address for assignment in held for address in assignment.devices}
    left = [device for device in devices if device.address not in taken]
    slots = [request.kinds for request in wanted.devices for _ in range(request.count)]
    for chosen in itertools.permutations(numa_nodes, len(wanted.numa_nodes)):
        if all(
            any(True for _ in arrangements(host, request, wanted, held))
            for host, request in zip(chosen, wanted.numa_nodes, strict=True)
        ):
            for given_ones in itertools.permutations(left, len(slots)):
                if all(
                    (one.vendor, one.product) in kinds
                    for one, kinds in zip(given_ones, slots, strict=True)
                ) and (
                    near_enough(
                        [one.numa_node for one in given_ones],
                        {host.id for host in chosen},
                        wanted.options["pci_policy"],
                    )
                ):
                    return True
    return False


def check(
    numa_nodes: list[NumaNode],
    devices: list[Device],
    held: list[HardwareAssignment],
    wanted: Hardware,
    found: HardwareAssignment,
) -> None:
    """Is it a right answer, and does it take nothing that others hold?"""
    assert [part.cpus for part in found.numa_nodes] == [
        list(request.cpus) for request in wanted.numa_nodes
    ]
    assert len({part.numa_node for part in found.numa_nodes}) == len(found.numa_nodes)
    for part, request in zip(found.numa_nodes, wanted.numa_nodes, strict=True):
        host = next(host for host in numa_nodes if host.id == part.numa_node)
        same = [
            (sorted(way.pins.values()), way.page_kb, way.idle)
            for way in arrangements(host, request, wanted, held)
        ]
        assert (sorted(part.pins.values()), part.page_kb, sorted(part.idle)) in same
    taken = [address for assignment in (*held, found) for address in assignment.devices]
    assert len(taken) == len(set(taken))
    places = {device.address: device for device in devices}
    slots = [request.kinds for request in wanted.devices for _ in range(request.count)]
    given_ones = [places[address] for address in found.devices]
    assert all(
        (one.vendor, one.product) in kinds for one, kinds in zip(given_ones, slots, strict=True)
    )
    assert near_enough(
        [one.numa_node for one in given_ones],
        {part.numa_node for part in found.numa_nodes},
        wanted.options["pci_policy"],
    )
    pins_of_all = [
        cpu
        for assignment in (*held, found)
        for part in assignment.numa_nodes
        for cpu in part.pins.values()
    ]
    assert len(pins_of_all) == len(set(pins_of_all))


@given(host=hosts(), requests=st.lists(guests(), min_size=1, max_size=4))
def test_what_fits_is_found_and_nothing_is_given_twice(
    host: tuple[list[NumaNode], list[Device]], requests: list[Hardware]
) -> None:
    numa_nodes, devices = host
    held: list[HardwareAssignment] = []
    for wanted in requests:
        found = fit(numa_nodes, devices, held, wanted)
        assert found == fit(numa_nodes[::-1], devices[::-1], held, wanted), (
            "whatever the order in which things are told"
        )
        if wanted.needs_assignment:
            assert (found is not None) == everything(numa_nodes, devices, held, wanted)
        if found is not None:
            check(numa_nodes, devices, held, wanted, found)
            held.append(found)


# --- and not for long ---
@pytest.mark.parametrize(
    "wanted",
    [
        own_cpus(1024, numa_nodes=64),
        own_cpus(1024, numa_nodes=64, threads="require"),
        own_cpus(64, numa_nodes=64, threads="isolate"),
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
def test_the_worst_wishes_take_moments(wanted: Hardware) -> None:
    numa_nodes = [
        numa_node(number, pcpus=15, memory_mb=20000 * (number < 62)) for number in range(64)
    ]
    devices = [
        device(f"{number:04}", number % 64, GPU if number % 9 else NIC) for number in range(560)
    ]
    started = time.monotonic()
    fit(numa_nodes, devices, [], wanted)
    assert time.monotonic() - started < 5
