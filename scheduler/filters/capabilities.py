# SPDX-License-Identifier: Apache-2.0
"""ComputeCapabilitiesFilter: match the extra specs of a flavor with the host's facts.

For example, ``capabilities:cpu_info:arch = x86_64`` requires the value in the fact ``cpu_info``. A
fact that a host does not report is never met. A key without a scope counts only if a fact has this
name, as in Nova, for compatibility with old flavors.
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


def _build_column(
    resource_class: str, read_stock: Callable[[Stock], Numbers]
) -> Callable[[Snapshot], Numbers]:
    """Return a function that applies ``read_stock`` to the resource class of a snapshot.

    If the snapshot has no stock of the class, the function returns zeros.
    """
    return lambda snapshot: (
        read_stock(snapshot.stock[resource_class])
        if resource_class in snapshot.stock
        else np.zeros(len(snapshot.names), np.int64)
    )


def _read_free(stock: Stock) -> Numbers:
    return stock.free


def _read_total(stock: Stock) -> Numbers:
    return stock.most


#: Facts that are a number per host, under the names in Nova's filters.
COLUMNS: Mapping[str, Callable[[Snapshot], Numbers]] = {
    "free_ram_mb": _build_column("MEMORY_MB", _read_free),
    "total_usable_ram_mb": _build_column("MEMORY_MB", _read_total),
    "free_disk_mb": _build_column("DISK_GB", lambda stock: stock.free * 1024),
    "total_usable_disk_gb": _build_column("DISK_GB", _read_total),
    "vcpus_total": _build_column("VCPU", _read_total),
    "num_instances": lambda snapshot: snapshot.servers,
    "num_io_ops": lambda snapshot: snapshot.working,
    "failed_builds": lambda snapshot: snapshot.failures,
}


def compute_capabilities(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Require that the host's facts match each extra spec about a fact.

    A host without the fact is rejected, unless the extra spec has no scope.
    """
    for path, requirement, is_scoped in _parse_extra_specs(
        spec.flavor.extra_specs if spec.flavor else {}
    ):
        text = f"without the {':'.join(path)} that the flavor requires"
        if path[0] in COLUMNS:
            yield Check(_match_column(snapshot, path, requirement), text)
        else:
            yield Check(
                of_facts(snapshot, partial(_match_facts, path, requirement, is_scoped)), text
            )


def _parse_extra_specs(extra_specs: Mapping[str, str]) -> Iterator[tuple[list[str], str, bool]]:
    """Yield the path to each fact, its requirement, and whether the key has a scope.

    Keys in scopes other than ``SCOPE`` are left out, except ``hw:maxphysaddr_bits``, which becomes
    a minimum of the fact cpu_info:maxphysaddr:bits.
    """
    for key, requirement in sorted(extra_specs.items()):
        scope, *path = key.split(":")
        if key == "hw:maxphysaddr_bits":
            yield ["cpu_info", "maxphysaddr", "bits"], f">= {requirement}", True
        elif not path:
            yield [key], requirement, False
        elif scope == SCOPE:
            yield path, requirement, True


def _match_column(snapshot: Snapshot, path: list[str], requirement: str) -> Mask:
    # A number has no subordinate keys.
    if len(path) > 1:
        return np.zeros(len(snapshot.names), np.bool_)
    values, places = np.unique(COLUMNS[path[0]](snapshot), return_inverse=True)
    return np.array([meets(requirement, str(value)) for value in values], np.bool_)[places]


def _match_facts(path: list[str], requirement: str, is_scoped: bool, facts: JsonMapping) -> bool:
    if not is_scoped and path[0] not in facts:
        return True
    value: Any = facts
    for name in path:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return False
        value = value.get(name) if isinstance(value, Mapping) else None
    return value is not None and meets(requirement, str(value))
