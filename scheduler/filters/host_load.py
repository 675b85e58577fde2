# SPDX-License-Identifier: Apache-2.0
"""Filters that limit how much goes on at a host: servers there, and work in hand.

A limit comes from the configuration; the Aggregate filters let the metadata of a host's aggregates
say another, of several the smallest. Metadata that is no number counts for nothing, together with
all else said for that host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from oslo_config import cfg

from common.domain.models import RequestSpec
from scheduler.filters.check import UNLIMITED, Check, Filter
from scheduler.snapshot import Mask, Numbers, Snapshot

Column = Callable[[Snapshot], Numbers]


def num_instances(conf: cfg.ConfigOpts, by_aggregate: bool = False) -> Filter:
    """There are fewer servers on the host than ``max_instances_per_host``."""
    return partial(
        _fewer,
        lambda snapshot: snapshot.servers,
        "servers",
        conf.scheduler.max_instances_per_host,
        "max_instances_per_host" if by_aggregate else "",
    )


def io_ops(conf: cfg.ConfigOpts, by_aggregate: bool = False) -> Filter:
    """Fewer servers than ``max_io_ops_per_host`` are being built, copied or moved on the host."""
    return partial(
        _fewer,
        lambda snapshot: snapshot.working,
        "servers in work",
        conf.scheduler.max_io_ops_per_host,
        "max_io_ops_per_host" if by_aggregate else "",
    )


def _fewer(
    column: Column, what: str, most: int, key: str, snapshot: Snapshot, spec: RequestSpec
) -> Iterable[Check]:
    there = column(snapshot)
    limits = _limits(snapshot, key, most)
    room = limits - there
    full: Mask = room <= 0
    lowest = int(limits[full].min()) if full.any() else most
    yield Check(
        ~full,
        f"with {lowest} or more {what}",
        room=room,
        each=lambda row: f"with {int(there[row])} {what} (at most {int(limits[row])})",
    )


def _limits(snapshot: Snapshot, key: str, most: int) -> Numbers:
    """Each host's limit; an empty key stands for no aggregate's metadata."""
    least = np.full(len(snapshot.names), UNLIMITED, np.int64)
    wrong = np.zeros(len(snapshot.names), np.bool_)
    for aggregate in snapshot.aggregates:
        if key in aggregate.meta:
            try:
                limit = max(0, min(int(aggregate.meta[key]), UNLIMITED - 1))
            except ValueError:
                wrong |= aggregate.members
            else:
                least = np.where(aggregate.members, np.minimum(least, limit), least)
    return np.where(wrong | (least == UNLIMITED), most, least)
