# SPDX-License-Identifier: Apache-2.0
"""Chooses dedicated host CPUs of a NUMA node by the thread policy. Pure.

"prefer" (the default) takes whole cores first, and the rest from the smallest core that has enough.
"isolate" takes one CPU per core, and the core's other threads stay idle. "require" takes at least
two threads of each core. If the number is odd, one CPU may be alone on a core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.domain.models import NumaNode


@dataclass(frozen=True, slots=True)
class Core:
    """A core of a host and its CPUs."""

    #: All threads of the core.
    threads: tuple[int, ...]
    #: CPUs that can be dedicated to guests.
    own: tuple[int, ...]
    #: CPUs of ``own`` that no guest has.
    free: tuple[int, ...]
    #: True if the core also has CPUs that guests share.
    is_shared: bool = False


def cores(numa_node: NumaNode, free: set[int]) -> list[Core]:
    """Return the cores with CPUs in ``free``, in descending order of the number of free CPUs.

    A CPU without known siblings is a core of one thread.
    """
    core_of = {cpu: tuple(sorted(set(group))) for group in numa_node.siblings for cpu in group}
    own, shared = set(numa_node.pcpus), set(numa_node.cpus)
    groups = sorted({core_of.get(cpu, (cpu,)) for cpu in free})
    cores_with_room = [
        Core(
            group,
            tuple(cpu for cpu in group if cpu in own),
            tuple(cpu for cpu in group if cpu in free),
            not shared.isdisjoint(group),
        )
        for group in groups
    ]
    return sorted(cores_with_room, key=lambda core: (-len(core.free), core.threads))


def choose(cores: Sequence[Core], count: int, policy: str) -> tuple[list[int], list[int]] | None:
    """Return ``count`` CPUs for a guest, and the CPUs that stay idle because of them.

    ``policy`` is the thread policy: "isolate", "require", or any other text for "prefer". Only
    "isolate" leaves CPUs idle. None if the free CPUs do not suffice for the policy.
    """
    if count > sum(len(core.free) for core in cores):
        return None
    if policy == "isolate":
        return _choose_isolated(cores, count)
    pins = _choose_pairs(cores, count) if policy == "require" else _choose_preferred(cores, count)
    return None if pins is None else (pins, [])


def _choose_preferred(cores: Sequence[Core], count: int) -> list[int]:
    pins: list[int] = []
    larger_cores: list[Core] = []
    for core in cores:
        if len(core.free) <= count - len(pins):
            pins += core.free
        else:
            larger_cores.append(core)
    if len(pins) < count:
        pins += min(larger_cores, key=_size).free[: count - len(pins)]
    return pins


def _size(core: Core) -> tuple[int, tuple[int, ...]]:
    return len(core.free), core.threads


def _choose_isolated(cores: Sequence[Core], count: int) -> tuple[list[int], list[int]] | None:
    usable = [core for core in cores if len(core.free) == len(core.own) and not core.is_shared]
    # Cores with one thread come first, because no thread stays idle there.
    chosen = sorted(usable, key=_size)[:count]
    if len(chosen) < count:
        return None
    return [core.free[0] for core in chosen], [cpu for core in chosen for cpu in core.free[1:]]


def _choose_pairs(cores: Sequence[Core], count: int) -> list[int] | None:
    threaded = [core for core in cores if len(core.threads) > 1]
    for alone in range(count % 2 + 1):
        parts = _parts([len(core.free) for core in threaded], count - alone)
        if parts is None:
            continue
        pins = [cpu for core, part in zip(threaded, parts, strict=True) for cpu in core.free[:part]]
        if not alone:
            return pins
        unused = [core for core, part in zip(threaded, parts, strict=True) if not part]
        if unused:
            return [*pins, min(unused, key=_size).free[0]]
    return None


def _parts(sizes: Sequence[int], count: int) -> list[int] | None:
    """Return the number of CPUs to take from each core: 0 or at least 2, in all ``count``.

    ``sizes`` are the numbers of free CPUs of each core. None if no such numbers exist.
    """
    ways: dict[int, tuple[int, ...]] = {0: ()}  # sum -> parts of the sizes so far
    for place, size in enumerate(sizes):
        for total in sorted(ways, reverse=True):
            for part in range(min(size, count - total), 1, -1):
                if total + part not in ways:
                    ways[total + part] = (*ways[total], *[0] * (place - len(ways[total])), part)
        if count in ways:
            break
    return [*ways[count], *[0] * (len(sizes) - len(ways[count]))] if count in ways else None
