# SPDX-License-Identifier: Apache-2.0
"""Which host CPUs of a NUMA node become the guest's own, by what is wanted of the threads of a
core.

Pure. prefer (and nothing said): whole cores first, the rest from the core that it splits least.
isolate: one CPU of a core, whose other threads stay idle. require: threads of the same cores, at
least two of each; one CPU of an odd number may be alone on a core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.domain.models import NumaNode


@dataclass(frozen=True, slots=True)
class Core:
    """threads: all that the core has; own: those that guests can have for themselves; free: of
    these, not held."""

    threads: tuple[int, ...]
    own: tuple[int, ...]
    free: tuple[int, ...]
    is_shared: bool = False


def cores(numa_node: NumaNode, free: set[int]) -> list[Core]:
    """The cores that have free CPUs, most free ones first."""
    core_of = {cpu: tuple(sorted(set(group))) for group in numa_node.siblings for cpu in group}
    own, shared = set(numa_node.pcpus), set(numa_node.cpus)
    groups = sorted({core_of.get(cpu, (cpu,)) for cpu in free})
    found = [
        Core(
            group,
            tuple(cpu for cpu in group if cpu in own),
            tuple(cpu for cpu in group if cpu in free),
            not shared.isdisjoint(group),
        )
        for group in groups
    ]
    return sorted(found, key=lambda core: (-len(core.free), core.threads))


def choose(found: Sequence[Core], count: int, policy: str) -> tuple[list[int], list[int]] | None:
    """The ``count`` CPUs that the guest gets, and those that stay idle for it; None when there are
    not enough."""
    if count > sum(len(core.free) for core in found):
        return None
    if policy == "isolate":
        return _isolated(found, count)
    pins = _paired(found, count) if policy == "require" else _preferred(found, count)
    return None if pins is None else (pins, [])


def _preferred(found: Sequence[Core], count: int) -> list[int]:
    pins: list[int] = []
    passed_over: list[Core] = []
    for core in found:
        if len(core.free) <= count - len(pins):
            pins += core.free
        else:
            passed_over.append(core)
    if len(pins) < count:
        pins += min(passed_over, key=_smallest).free[: count - len(pins)]
    return pins


def _smallest(core: Core) -> tuple[int, tuple[int, ...]]:
    return len(core.free), core.threads


def _isolated(found: Sequence[Core], count: int) -> tuple[list[int], list[int]] | None:
    usable = [core for core in found if len(core.free) == len(core.own) and not core.is_shared]
    # Cores with one thread first: nothing stays idle for them.
    chosen = sorted(usable, key=_smallest)[:count]
    if len(chosen) < count:
        return None
    return [core.free[0] for core in chosen], [cpu for core in chosen for cpu in core.free[1:]]


def _paired(found: Sequence[Core], count: int) -> list[int] | None:
    threaded = [core for core in found if len(core.threads) > 1]
    for alone in range(count % 2 + 1):
        parts = _parts([len(core.free) for core in threaded], count - alone)
        if parts is None:
            continue
        pins = [cpu for core, part in zip(threaded, parts, strict=True) for cpu in core.free[:part]]
        if not alone:
            return pins
        unused = [core for core, part in zip(threaded, parts, strict=True) if not part]
        if unused:
            return [*pins, min(unused, key=_smallest).free[0]]
    return None


def _parts(sizes: Sequence[int], count: int) -> list[int] | None:
    """How many to take of each so that it is ``count`` in all, and no part is 1; None: there is no
    way."""
    ways: dict[int, tuple[int, ...]] = {0: ()}  # sum -> parts of the sizes so far
    for place, size in enumerate(sizes):
        for total in sorted(ways, reverse=True):
            for part in range(min(size, count - total), 1, -1):
                if total + part not in ways:
                    ways[total + part] = (*ways[total], *[0] * (place - len(ways[total])), part)
        if count in ways:
            break
    return [*ways[count], *[0] * (len(sizes) - len(ways[count]))] if count in ways else None
