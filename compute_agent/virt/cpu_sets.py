# SPDX-License-Identifier: Apache-2.0
"""Which CPUs of the host guests share, and which are given to one guest each, as the operator wrote
them.

Read by ``compute_agent.service`` from [agent] cpu_shared_set and cpu_dedicated_set; both drivers
describe their host with the result. Pure. Must stay true: no CPU is in both sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from common.domain.errors import ConfigError

PART = re.compile(r"(\^?)(\d{1,5})(?:-(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class CpuSets:
    """``shared`` None: guests share all CPUs, or none where some are ``dedicated`` and nobody said
    which are shared."""

    shared: frozenset[int] | None = None
    dedicated: frozenset[int] = frozenset()

    def split(self, cpus: Iterable[int]) -> tuple[list[int], list[int]]:
        """Of these CPUs of the host: those that guests share, and those that are dedicated."""
        here = sorted(cpus)
        if self.shared is None:
            shared = [] if self.dedicated else here
        else:
            shared = [cpu for cpu in here if cpu in self.shared]
        return shared, [cpu for cpu in here if cpu in self.dedicated]


def opened(shared: str, dedicated: str, present: Iterable[int] | None = None) -> CpuSets:
    """As configured; ``present``: the CPUs that the host has, where that is known.

    Raises:
        ConfigError: a text is no list of CPUs, names one that is not there, or both name the same.
    """
    sets = CpuSets(
        parse(shared, "cpu_shared_set") if shared.strip() else None,
        parse(dedicated, "cpu_dedicated_set") if dedicated.strip() else frozenset(),
    )
    named = (sets.shared or frozenset()) | sets.dedicated
    if both := sorted((sets.shared or frozenset()) & sets.dedicated):
        raise ConfigError(
            f"[agent] cpu_shared_set and cpu_dedicated_set both name {listed(both)}; a CPU can be in one"
        )
    if present is not None and (missing := sorted(named - set(present))):
        raise ConfigError(
            f"[agent] cpu_shared_set, cpu_dedicated_set: this host has no CPU {listed(missing)}"
        )
    return sets


def parse(text: str, option: str) -> frozenset[int]:
    """The CPUs that a text like "0-7,^3,12" names: ranges and single ones; with ^ they are left
    out."""
    named: set[int] = set()
    without: set[int] = set()
    for part in text.split(","):
        found = PART.fullmatch(part.strip())
        if found is None or int(found[3] or found[2]) < int(found[2]):
            raise ConfigError(
                f"[agent] {option}: {part.strip()!r} names no CPUs; write them as 0-7,^3,12"
            )
        (without if found[1] else named).update(range(int(found[2]), int(found[3] or found[2]) + 1))
    if not named - without:
        raise ConfigError(
            f"[agent] {option}: {text!r} leaves no CPU; leave the option empty instead"
        )
    return frozenset(named - without)


def listed(cpus: Iterable[int]) -> str:
    """The shortest text for these CPUs: "0-2,7"."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
