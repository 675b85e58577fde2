# SPDX-License-Identifier: Apache-2.0
"""The CPUs of the host that guests share, and those that one guest at a time uses alone.

``compute_agent.assembly`` reads the sets from [agent] cpu_shared_set and cpu_dedicated_set. Both
drivers describe their host with the result.

Invariant: no CPU is in both sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from common.domain.errors import ConfigError

PART = re.compile(r"(\^?)(\d{1,5})(?:-(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class CpuSets:
    """The shared and the dedicated CPUs.

    ``shared`` is None if the option is not set. Then guests share all CPUs, or none if there are
    dedicated CPUs.
    """

    shared: frozenset[int] | None = None
    dedicated: frozenset[int] = frozenset()

    def split(self, cpus: Iterable[int]) -> tuple[list[int], list[int]]:
        """Split the host's CPUs into the shared and the dedicated CPUs, each in rising order.

        Host CPUs of neither set are left out. If ``shared`` is None, all CPUs are shared, or none
        if there are dedicated CPUs.
        """
        present_cpus = sorted(cpus)
        if self.shared is None:
            shared = [] if self.dedicated else present_cpus
        else:
            shared = [cpu for cpu in present_cpus if cpu in self.shared]
        return shared, [cpu for cpu in present_cpus if cpu in self.dedicated]


def read_cpu_sets(shared: str, dedicated: str, present: Iterable[int] | None = None) -> CpuSets:
    """Return the CPU sets that these two options define.

    Args:
        shared: Value of [agent] cpu_shared_set, for example "0-7,^3,12". May be empty.
        dedicated: Value of [agent] cpu_dedicated_set. May be empty.
        present: The CPUs of the host, or None to skip the check for missing CPUs.

    Raises:
        ConfigError: A value is malformed, names a missing CPU, or both values name the same CPU.
    """
    sets = CpuSets(
        parse(shared, "cpu_shared_set") if shared.strip() else None,
        parse(dedicated, "cpu_dedicated_set") if dedicated.strip() else frozenset(),
    )
    named = (sets.shared or frozenset()) | sets.dedicated
    if common_cpus := sorted((sets.shared or frozenset()) & sets.dedicated):
        raise ConfigError(
            f"[agent] cpu_shared_set and cpu_dedicated_set both name {listed(common_cpus)}; remove them from one"
        )
    if present is not None and (missing := sorted(named - set(present))):
        raise ConfigError(
            f"[agent] cpu_shared_set, cpu_dedicated_set: this host has no CPU {listed(missing)}"
        )
    return sets


def parse(text: str, option: str) -> frozenset[int]:
    """Return the CPUs of a list like "0-7,^3,12", in which ^ excludes a CPU or a range.

    Raises:
        ConfigError: The list is malformed or leaves no CPU. The message names ``option``.
    """
    included: set[int] = set()
    excluded: set[int] = set()
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        if match is None or int(match[3] or match[2]) < int(match[2]):
            raise ConfigError(
                f"[agent] {option}: {part.strip()!r} is not a CPU or a range; write, for example, 0-7,^3,12"
            )
        (excluded if match[1] else included).update(
            range(int(match[2]), int(match[3] or match[2]) + 1)
        )
    if not included - excluded:
        raise ConfigError(
            f"[agent] {option}: {text!r} leaves no CPU; leave the option empty instead"
        )
    return frozenset(included - excluded)


def listed(cpus: Iterable[int]) -> str:
    """Format CPUs as the shortest list, for example "0-2,7"."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
