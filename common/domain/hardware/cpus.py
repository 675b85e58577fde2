# SPDX-License-Identifier: Apache-2.0
"""The guest's CPUs and memory: topology, dedicated CPUs, NUMA nodes and page size. Pure.

As in Nova, numbers are preferences and maximums are limits. Of the topologies with exactly the
flavor's CPUs, the choice is the topology that meets most preferences, then the topology with most
sockets. A guest with dedicated CPUs or a page size has at least one NUMA node, because both are
assigned per NUMA node.

Invariant: a number is bounded before use, because tenants write image properties.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from common.domain.hardware.specs import (
    ANY,
    LARGE,
    MAX_CPUS,
    MAX_NUMA_NODES,
    HardwareSpecs,
    NumaNodeRequest,
    cpus,
    one_of,
    page_kb,
    refusal,
    whole,
)

KINDS = ("sockets", "cores", "threads")
_NUMBER = whole(1, 65536)
POLICIES, THREADS = ("shared", "dedicated", "mixed"), ("prefer", "isolate", "require")
_NUMBERED = re.compile(r"hw[:_]numa_(cpus|mem)\.(.{1,20})", re.DOTALL)


def topology(requested: HardwareSpecs) -> tuple[int, int, int]:
    """Return (sockets, cores per socket, threads per core), or zeros if no topology is requested.

    Of the topologies with the flavor's CPUs and within the limits, the result meets the most
    requested numbers, then has the most sockets. The image's numbers count only if the flavor has
    no numbers.

    Raises:
        BadRequest: A number is invalid or above its limit, an image's limit is above the flavor's,
            the flavor has more than ``MAX_CPUS`` CPUs, or no topology is within the limits.
    """
    limits = [_limit(requested, kind) for kind in KINDS]
    flavors = [requested.spec(f"hw:cpu_{kind}", _NUMBER) for kind in KINDS]
    images = [requested.image(f"hw_cpu_{kind}", _NUMBER) for kind in KINDS]
    preferred = flavors if any(flavors) else images
    if not any(preferred) and not any(limits):
        return 0, 0, 0
    for kind, number, limit in zip(KINDS, preferred, limits, strict=True):
        if number and limit and number > limit:
            raise refusal(
                f"hw:cpu_{kind}" if any(flavors) else f"hw_cpu_{kind}",
                f"{number} is more than the limit, which is {limit}.",
            )
    vcpus = requested.flavor.vcpus
    if vcpus > MAX_CPUS:
        raise refusal("hw:cpu_sockets", f"a topology has at most {MAX_CPUS} CPUs.")
    possible = [
        sizes
        for sizes in _topologies(vcpus)
        if all(not limit or size <= limit for size, limit in zip(sizes, limits, strict=True))
    ]
    if not possible:
        raise refusal(
            _first_limit(requested),
            f"the flavor's {vcpus} CPUs cannot be divided within the limits.",
        )
    return max(
        possible,
        key=lambda sizes: (
            sum(map(int.__eq__, sizes, (number or 0 for number in preferred))),
            sizes,
        ),
    )


def _limit(requested: HardwareSpecs, kind: str) -> int | None:
    spec, name = f"hw:cpu_max_{kind}", f"hw_cpu_max_{kind}"
    flavors, images = requested.spec(spec, _NUMBER), requested.image(name, _NUMBER)
    if flavors and images and images > flavors:
        raise refusal(
            name, f"{images} is more than the flavor's {spec} allows, which is {flavors}."
        )
    return images or flavors


def _first_limit(requested: HardwareSpecs) -> str:
    names = [name for kind in KINDS for name in (f"hw:cpu_max_{kind}", f"hw_cpu_max_{kind}")]
    return next(
        (name for name in names if name in requested.specs or name in requested.properties),
        names[0],
    )


def _topologies(vcpus: int) -> list[tuple[int, int, int]]:
    divisors = [number for number in range(1, vcpus + 1) if vcpus % number == 0]
    return [
        (sockets, cores, vcpus // sockets // cores)
        for sockets in divisors
        for cores in divisors
        if vcpus // sockets % cores == 0
    ]


def dedicated_cpus(requested: HardwareSpecs) -> tuple[frozenset[int], str]:
    """Return the numbers of the dedicated guest CPUs, and their thread policy.

    The thread policy is "", prefer, isolate or require. Without dedicated CPUs the result is empty
    and "".

    Raises:
        BadRequest: The requests of flavor and image are invalid or contradict each other, or a
            flavor with dedicated CPUs has more than ``MAX_CPUS`` CPUs.
    """
    policy = _policy(requested)
    vcpus, mask = requested.flavor.vcpus, requested.spec("hw:cpu_dedicated_mask", cpus)
    threads = (
        requested.combine("hw:cpu_thread_policy", "hw_cpu_thread_policy", one_of(*THREADS)) or ""
    )
    if mask is not None and policy != "mixed":
        raise refusal("hw:cpu_dedicated_mask", "only allowed with hw:cpu_policy=mixed.")
    if policy == "shared":
        if threads:
            name = (
                "hw:cpu_thread_policy"
                if "hw:cpu_thread_policy" in requested.specs
                else "hw_cpu_thread_policy"
            )
            raise refusal(name, "only for dedicated CPUs; set hw:cpu_policy to dedicated or mixed.")
        return frozenset(), ""
    if vcpus > MAX_CPUS:
        raise refusal("hw:cpu_policy", f"a flavor with dedicated CPUs has at most {MAX_CPUS} CPUs.")
    if policy == "dedicated":
        return frozenset(range(vcpus)), threads
    if not mask or max(mask) >= vcpus or len(mask) == vcpus:
        raise refusal(
            "hw:cpu_dedicated_mask",
            f"hw:cpu_policy=mixed needs at least one, and not all, of the CPUs 0 to {vcpus - 1} here.",
        )
    return mask, threads


def _policy(requested: HardwareSpecs) -> str:
    policy = requested.combine("hw:cpu_policy", "hw_cpu_policy", one_of(*POLICIES))
    shared, own = (requested.spec(f"resources:{name}", whole()) for name in ("VCPU", "PCPU"))
    if own:
        if "hw:cpu_policy" in requested.specs or shared:
            raise refusal(
                "resources:PCPU",
                "cannot be combined with hw:cpu_policy or resources:VCPU.",
            )
        if own != requested.flavor.vcpus:
            raise refusal("resources:PCPU", f"must be the flavor's CPUs, {requested.flavor.vcpus}.")
        if policy not in (None, "dedicated"):
            raise refusal("hw_cpu_policy", "the flavor's resources:PCPU makes all CPUs dedicated.")
        return "dedicated"
    if policy in ("dedicated", "mixed"):
        for name in ("resources:VCPU", "resources:PCPU"):
            if name in requested.specs:
                raise refusal(
                    name,
                    f"cannot be combined with hw:cpu_policy={policy}, which defines this amount.",
                )
    return policy or "shared"


def pages(requested: HardwareSpecs) -> int:
    """Return the page size in KiB, or LARGE, ANY or NOT_ASKED (0), as in ``Hardware.page_kb``.

    An image may repeat the flavor's size. It may choose any other size if the flavor has "any", and
    a size above 4 KiB if the flavor has "large".

    Raises:
        BadRequest: A size is malformed, or the flavor does not allow the image's page size.
    """
    flavors, images = (
        requested.spec("hw:mem_page_size", page_kb),
        requested.image("hw_mem_page_size", page_kb),
    )
    if images is None or images == flavors:
        return flavors or 0
    if flavors == ANY or (flavors == LARGE and (images == LARGE or images > 4)):
        return images
    raise refusal(
        "hw_mem_page_size",
        "an image may choose a page size only if the flavor's hw:mem_page_size is any, or is large "
        "and the image's size is large too.",
    )


def numa_nodes(requested: HardwareSpecs, needed: bool, page: int) -> tuple[NumaNodeRequest, ...]:
    """Return the guest's NUMA nodes, or an empty tuple if they are neither requested nor needed.

    Without requests for single NUMA nodes, CPUs and memory are split evenly.

    Args:
        requested: The extra specs and image properties.
        needed: True: without a requested number, return one NUMA node.
        page: The page size, as in ``Hardware.page_kb``.

    Raises:
        BadRequest: CPUs or memory cannot be divided as requested, a request is invalid, or the
            flavor has more than ``MAX_CPUS`` CPUs.
    """
    count = requested.combine("hw:numa_nodes", "hw_numa_nodes", whole(1, MAX_NUMA_NODES))
    for name in (*requested.specs, *requested.properties):
        if match := _NUMBERED.fullmatch(name):
            number = match[2] if re.fullmatch("[0-9]{1,9}", match[2], re.ASCII) else ""
            if not number or not count or int(number) >= count or str(int(number)) != number:
                raise refusal(
                    name,
                    f"hw:numa_nodes requests {count or 'no'} NUMA nodes, which are numbered from 0.",
                )
    if not count and not needed:
        return ()
    count, flavor = count or 1, requested.flavor
    if flavor.vcpus > MAX_CPUS:
        raise refusal("hw:numa_nodes", f"a guest with NUMA nodes has at most {MAX_CPUS} CPUs.")
    numbers = _read_numbered(requested, "cpus", count, cpus)
    memory = _read_numbered(requested, "mem", count, whole(1))
    if numbers is None:
        numbers = [
            frozenset(range(first, first + _share(flavor.vcpus, count, "CPUs")))
            for first in range(0, flavor.vcpus, flavor.vcpus // count or 1)
        ]
    if memory is None:
        memory = [_share(flavor.memory_mb, count, "MiB of memory")] * count
    if sorted(cpu for numa_node in numbers for cpu in numa_node) != list(range(flavor.vcpus)):
        raise refusal(
            "hw:numa_cpus.0",
            f"each of the CPUs 0 to {flavor.vcpus - 1} must be in exactly one NUMA node.",
        )
    if sum(memory) != flavor.memory_mb:
        raise refusal(
            "hw:numa_mem.0",
            f"the NUMA nodes have {sum(memory)} MiB, the flavor has {flavor.memory_mb}.",
        )
    if not all(numbers):
        raise refusal("hw:numa_cpus.0", "each NUMA node needs at least one CPU.")
    if page > 0 and any(size * 1024 % page for size in memory):
        raise refusal(
            "hw:mem_page_size", f"a NUMA node's memory cannot be divided into pages of {page} KiB."
        )
    return tuple(
        NumaNodeRequest(tuple(sorted(own)), size) for own, size in zip(numbers, memory, strict=True)
    )


def _read_numbered(
    requested: HardwareSpecs, noun: str, count: int, parse: Callable[[str], Any]
) -> list[Any] | None:
    """Return a value for each guest NUMA node, or None if no NUMA node has a value.

    ``parse`` parses the extra spec ``hw:numa_NOUN.NUMBER`` or the image property
    ``hw_numa_NOUN.NUMBER``. The noun is "cpus" or "mem".

    Raises:
        BadRequest: A value is invalid, flavor and image have different values, or only some NUMA
            nodes have a value.
    """
    values = [
        requested.combine(f"hw:numa_{noun}.{number}", f"hw_numa_{noun}.{number}", parse)
        for number in range(count)
    ]
    if all(value is None for value in values):
        return None
    if None in values:
        raise refusal(
            f"hw:numa_{noun}.{values.index(None)}",
            "is missing; set it for each NUMA node, or for no NUMA node.",
        )
    return values


def _share(amount: int, count: int, words: str) -> int:
    if amount % count or amount < count:
        raise refusal(
            "hw:numa_nodes",
            f"{amount} {words} cannot be split evenly among {count} NUMA nodes; set "
            "hw:numa_cpus.N and hw:numa_mem.N.",
        )
    return amount // count
