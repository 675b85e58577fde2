# SPDX-License-Identifier: Apache-2.0
"""Is there a place for a guest that needs parts of its host to itself: NUMA cells, CPUs, huge pages, PCI devices?

Called by ``placement.promises``; what NUMATopologyFilter and PciPassthroughFilter ask in Nova. Each host is asked by
itself, and only when it passed all else; hosts that are alike and hold nothing are asked once.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from common import errors, numa
from common.hardware import Hardware, hardware
from common.models import RequestSpec
from scheduler.filters.check import Check
from scheduler.snapshot import Mask, Parts, Snapshot


def parts(snapshot: Snapshot, spec: RequestSpec, passing: Mask, count: int) -> Iterable[Check]:
    """The host has the cells, and then the devices, that the guest needs; room up to ``count``."""
    if spec.flavor is None:
        return
    try:
        wanted = hardware(spec.flavor, spec.image_properties)
    except errors.BadRequest as problem:    # of an older flavor, say: no host makes it, and others are asked beside it
        yield Check(np.zeros(len(snapshot.names), np.bool_), f"not able to make its hardware: {problem.text}")
        return
    if not wanted.needs_fitting:
        return
    cells = replace(wanted, devices=())
    if cells.needs_fitting:
        yield _check(snapshot, cells, passing, count, _cells_text(cells, spec.flavor.memory_mb))
    if wanted.devices:
        devices = ", ".join(f"{wish.count} of {wish.name}" for wish in wanted.devices)
        yield _check(snapshot, wanted, passing, count, f"without free PCI devices ({devices})")


def _cells_text(wanted: Hardware, memory_mb: int) -> str:
    number = len(wanted.cells)
    needs = [f"{number} NUMA cell{'s' * (number > 1)} with {memory_mb} MiB"] if number else []
    needs += [f"{len(wanted.dedicated)} CPUs of its own"] if wanted.dedicated else []
    needs += [f"pages of {wanted.page_kb} KiB" if wanted.page_kb > 0 else "large pages"] if wanted.page_kb else []
    return f"without a place for a guest with {', '.join(needs)}"


def _check(snapshot: Snapshot, wanted: Hardware, passing: Mask, count: int, text: str) -> Check:
    room = np.zeros(len(snapshot.names), np.int64)
    known: dict[int, int] = {}      # hosts that are alike share one record: what fits there is found once
    for row in np.flatnonzero(passing).tolist():
        host = snapshot.parts.get(row)
        if host is not None:
            if id(host) not in known:
                known[id(host)] = _room(host, wanted, count)
            room[row] = known[id(host)]
    return Check(room > 0, text, room=room)


def _room(host: Parts, wanted: Hardware, count: int) -> int:
    """How many such guests fit there, counted up to ``count``."""
    held, fitted = list(host.held), 0
    while fitted < count and (fitting := numa.fit(host.cells, host.devices, held, wanted)) is not None:
        held.append(fitting)
        fitted += 1
    return fitted
