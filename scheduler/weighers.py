# SPDX-License-Identifier: Apache-2.0
"""Weighers: a number for each host, of which more is better; a negative multiplier turns it round.

Called by ``scheduler.select``, which normalises each weigher over the hosts that passed, multiplies and
adds. ``WEIGHERS`` maps the option of the multiplier to the weigher.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from scheduler.snapshot import Snapshot

Weights = NDArray[np.float64]
Weigher = Callable[[Snapshot], Weights]


def _free(resource_class: str) -> Weigher:
    def weigh(snapshot: Snapshot) -> Weights:
        stock = snapshot.stock.get(resource_class)
        return np.zeros(len(snapshot.names)) if stock is None else stock.free.astype(np.float64)
    return weigh


WEIGHERS: dict[str, Weigher] = {
    "cpu_weight_multiplier": _free("VCPU"),
    "ram_weight_multiplier": _free("MEMORY_MB"),
    "disk_weight_multiplier": _free("DISK_GB"),
}


def normalised(weights: Weights) -> Weights:
    """Spread over 0 to 1; all 0 when the hosts are equal."""
    low, high = weights.min(), weights.max()
    return np.zeros_like(weights) if low == high else (weights - low) / (high - low)
