# SPDX-License-Identifier: Apache-2.0
"""Which of the guest's CPUs have host CPUs of their own, which NUMA cells it has, and the size of its memory's pages.

Pure. A guest with CPUs of its own or with a page size has at least one cell: both are given out by cell.
Must stay true: nothing is made of a number before it is bounded, because images ask too.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from common.hardware.asked import Asked, refusal
from common.hardware.records import ANY, LARGE, CellWish
from common.hardware.values import MOST_CELLS, MOST_CPUS, cpus, one_of, page_kb, whole

POLICIES, THREADS = ("shared", "dedicated", "mixed"), ("prefer", "isolate", "require")
_NUMBERED = re.compile(r"hw[:_]numa_(cpus|mem)\.(.{1,20})", re.DOTALL)


def dedicated(asked: Asked) -> tuple[frozenset[int], str]:
    """The guest CPUs with host CPUs of their own, and which of a core's threads these shall be."""
    policy = _policy(asked)
    vcpus, mask = asked.flavor.vcpus, asked.spec("hw:cpu_dedicated_mask", cpus)
    threads = asked.agreed("hw:cpu_thread_policy", "hw_cpu_thread_policy", one_of(*THREADS)) or ""
    if mask is not None and policy != "mixed":
        raise refusal("hw:cpu_dedicated_mask", "only beside hw:cpu_policy=mixed.")
    if policy == "shared":
        if threads:
            name = "hw:cpu_thread_policy" if "hw:cpu_thread_policy" in asked.specs else "hw_cpu_thread_policy"
            raise refusal(name, "only for dedicated CPUs; set hw:cpu_policy to dedicated or mixed.")
        return frozenset(), ""
    if vcpus > MOST_CPUS:
        raise refusal("hw:cpu_policy", f"at most {MOST_CPUS} CPUs can be dedicated.")
    if policy == "dedicated":
        return frozenset(range(vcpus)), threads
    if not mask or max(mask) >= vcpus or len(mask) == vcpus:
        raise refusal("hw:cpu_dedicated_mask", f"hw:cpu_policy=mixed needs some, and not all, of the CPUs 0 to "
                                               f"{vcpus - 1} here.")
    return mask, threads


def _policy(asked: Asked) -> str:
    policy = asked.agreed("hw:cpu_policy", "hw_cpu_policy", one_of(*POLICIES))
    shared, own = (asked.spec(f"resources:{name}", whole()) for name in ("VCPU", "PCPU"))
    if own:
        if "hw:cpu_policy" in asked.specs or shared:
            raise refusal("resources:PCPU", "not beside hw:cpu_policy or resources:VCPU, which say it otherwise.")
        if own != asked.flavor.vcpus:
            raise refusal("resources:PCPU", f"must be the flavor's CPUs, {asked.flavor.vcpus}.")
        if policy not in (None, "dedicated"):
            raise refusal("hw_cpu_policy", "the flavor's resources:PCPU makes all CPUs dedicated.")
        return "dedicated"
    if policy in ("dedicated", "mixed"):
        for name in ("resources:VCPU", "resources:PCPU"):
            if name in asked.specs:
                raise refusal(name, f"not beside CPUs that are {policy}; what these take follows from the policy.")
    return policy or "shared"


def pages(asked: Asked) -> int:
    """The page size, as ``Hardware.page_kb``. An image chooses only where the flavor says large or any."""
    flavors, images = asked.spec("hw:mem_page_size", page_kb), asked.image("hw_mem_page_size", page_kb)
    if images is None or images == flavors:
        return flavors or 0
    if flavors == ANY or flavors == LARGE and (images == LARGE or images > 4):
        return images
    raise refusal("hw_mem_page_size", "an image may choose pages only where the flavor's hw:mem_page_size is any, or "
                                      "large and the image's are.")


def cells(asked: Asked, needed: bool, page: int) -> tuple[CellWish, ...]:
    """The guest's NUMA cells; ``needed``: one at least."""
    count = asked.agreed("hw:numa_nodes", "hw_numa_nodes", whole(1, MOST_CELLS))
    for name in (*asked.specs, *asked.properties):
        if match := _NUMBERED.fullmatch(name):
            number = match[2] if re.fullmatch("[0-9]{1,9}", match[2], re.ASCII) else ""
            if not number or not count or int(number) >= count or str(int(number)) != number:
                raise refusal(name, f"hw:numa_nodes makes {count or 'no'} cells; the first is 0.")
    if not count and not needed:
        return ()
    count, flavor = count or 1, asked.flavor
    if flavor.vcpus > MOST_CPUS:
        raise refusal("hw:numa_nodes", f"a guest with NUMA cells has at most {MOST_CPUS} CPUs.")
    numbers = _lists(asked, "cpus", count, cpus)
    memory = _lists(asked, "mem", count, whole(1))
    if numbers is None:
        numbers = [frozenset(range(first, first + _share(flavor.vcpus, count, "CPUs")))
                   for first in range(0, flavor.vcpus, flavor.vcpus // count or 1)]
    if memory is None:
        memory = [_share(flavor.memory_mb, count, "MiB of memory")] * count
    if sorted(cpu for cell in numbers for cpu in cell) != list(range(flavor.vcpus)):
        raise refusal("hw:numa_cpus.0", f"each of the CPUs 0 to {flavor.vcpus - 1} must be in one cell, and no other.")
    if sum(memory) != flavor.memory_mb:
        raise refusal("hw:numa_mem.0", f"the cells have {sum(memory)} MiB, the flavor has {flavor.memory_mb}.")
    if not all(numbers):
        raise refusal("hw:numa_cpus.0", "a cell without CPUs cannot be made.")
    if page > 0 and any(size * 1024 % page for size in memory):
        raise refusal("hw:mem_page_size", f"a cell's memory cannot be divided into pages of {page} KiB.")
    return tuple(CellWish(tuple(sorted(own)), size) for own, size in zip(numbers, memory, strict=True))


def _lists(asked: Asked, what: str, count: int, parse: Callable[[str], Any]) -> list[Any] | None:
    """What the numbered extra specs say for each cell; None when nobody wrote any."""
    found = [asked.agreed(f"hw:numa_{what}.{number}", f"hw_numa_{what}.{number}", parse) for number in range(count)]
    if all(one is None for one in found):
        return None
    if None in found:
        raise refusal(f"hw:numa_{what}.{found.index(None)}", "is missing; give it for each cell, or for none.")
    return found


def _share(amount: int, count: int, words: str) -> int:
    if amount % count or amount < count:
        raise refusal("hw:numa_nodes", f"{amount} {words} cannot be split evenly among {count} cells; say "
                                       "hw:numa_cpus.N and hw:numa_mem.N.")
    return amount // count
