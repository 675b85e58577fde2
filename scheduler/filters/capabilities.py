# SPDX-License-Identifier: Apache-2.0
"""ComputeCapabilitiesFilter: extra specs of a flavor that ask something of the host's facts.

``capabilities:cpu_info:arch = x86_64`` looks into a fact; what no host tells, no host meets. A key
without a scope counts only where it is the name of a fact, as it does in Nova for the sake of old
flavors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from common.domain.json_types import JsonMapping
from common.domain.models import RequestSpec
from scheduler.filters.check import Check, of_facts
from scheduler.filters.requirements import meets
from scheduler.snapshot import Mask, Numbers, Snapshot, Stock

SCOPE = "capabilities"


def _of(resource_class: str, what: Callable[[Stock], Numbers]) -> Callable[[Snapshot], Numbers]:
    """A number of an inventory; 0 where no host has one."""
    return lambda found: (
        what(found.stock[resource_class])
        if resource_class in found.stock
        else np.zeros(len(found.names), np.int64)
    )


def _free(stock: Stock) -> Numbers:
    return stock.free


def _total(stock: Stock) -> Numbers:
    return stock.most


#: Facts that are a number of each host, under the names that Nova's filters know them by.
COLUMNS: Mapping[str, Callable[[Snapshot], Numbers]] = {
    "free_ram_mb": _of("MEMORY_MB", _free),
    "total_usable_ram_mb": _of("MEMORY_MB", _total),
    "free_disk_mb": _of("DISK_GB", lambda stock: stock.free * 1024),
    "total_usable_disk_gb": _of("DISK_GB", _total),
    "vcpus_total": _of("VCPU", _total),
    "num_instances": lambda found: found.servers,
    "num_io_ops": lambda found: found.working,
    "failed_builds": lambda found: found.failures,
}


def compute_capabilities(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """The host's facts meet each extra spec that speaks of one."""
    for path, wanted, scoped in _asked(spec.flavor.extra_specs if spec.flavor else {}):
        text = f"whose {':'.join(path)} is not as the flavor wants it"
        if path[0] in COLUMNS:
            yield Check(_column_meets(snapshot, path, wanted), text)
        else:
            yield Check(of_facts(snapshot, partial(_facts_meet, path, wanted, scoped)), text)


def _asked(extra_specs: Mapping[str, str]) -> Iterator[tuple[list[str], str, bool]]:
    """The path to each fact, what is required of it, and whether its scope says that it is one."""
    for key, wanted in sorted(extra_specs.items()):
        scope, *path = key.split(":")
        if key == "hw:maxphysaddr_bits":
            yield ["cpu_info", "maxphysaddr", "bits"], f">= {wanted}", True
        elif not path:
            yield [key], wanted, False
        elif scope == SCOPE:
            yield path, wanted, True


def _column_meets(snapshot: Snapshot, path: list[str], wanted: str) -> Mask:
    if len(path) > 1:  # a number has no parts
        return np.zeros(len(snapshot.names), np.bool_)
    values, places = np.unique(COLUMNS[path[0]](snapshot), return_inverse=True)
    return np.array([meets(wanted, str(value)) for value in values], np.bool_)[places]


def _facts_meet(path: list[str], wanted: str, scoped: bool, facts: JsonMapping) -> bool:
    if not scoped and path[0] not in facts:
        return True
    found: Any = facts
    for name in path:
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except ValueError:
                return False
        found = found.get(name) if isinstance(found, Mapping) else None
    return found is not None and meets(wanted, str(found))
