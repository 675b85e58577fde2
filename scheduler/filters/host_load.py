# SPDX-License-Identifier: Apache-2.0
"""Filters that limit the number of servers or of running disk copies per host.

The limit is an option. In the Aggregate filters, metadata of the host's aggregates overrides the
option, and the smallest value applies. If one value of a host is not a number, all its values are
ignored and the option applies.
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
    """Require fewer servers on the host than ``max_instances_per_host``.

    Args:
        conf: The configuration.
        by_aggregate: True if metadata of the host's aggregates override the option.
    """
    return partial(
        _check_number,
        lambda snapshot: snapshot.servers,
        "servers",
        conf.scheduler.max_instances_per_host,
        "max_instances_per_host" if by_aggregate else "",
    )


def io_ops(conf: cfg.ConfigOpts, by_aggregate: bool = False) -> Filter:
    """Require fewer running disk copies on the host than ``max_io_ops_per_host``.

    A disk copy is a command that copies whole disks, for example a build, a snapshot or a cold
    migration.

    Args:
        conf: The configuration.
        by_aggregate: True if metadata of the host's aggregates override the option.
    """
    return partial(
        _check_number,
        lambda snapshot: snapshot.working,
        "disk copies",
        conf.scheduler.max_io_ops_per_host,
        "max_io_ops_per_host" if by_aggregate else "",
    )


def _check_number(
    column: Column, noun: str, default_limit: int, key: str, snapshot: Snapshot, spec: RequestSpec
) -> Iterable[Check]:
    numbers = column(snapshot)
    limits = _read_limits(snapshot, key, default_limit)
    room = limits - numbers
    full: Mask = room <= 0
    lowest = int(limits[full].min()) if full.any() else default_limit
    yield Check(
        ~full,
        f"with {lowest} or more {noun}",
        room=room,
        each=lambda row: f"with {int(numbers[row])} {noun} (at most {int(limits[row])})",
    )


def _read_limits(snapshot: Snapshot, key: str, default_limit: int) -> Numbers:
    """Return each host's limit: the smallest value of the key in its aggregates' metadata.

    A host without a value, or with any value that is not an integer, has ``default_limit``. An
    empty key means that metadata is not used.
    """
    least = np.full(len(snapshot.names), UNLIMITED, np.int64)
    invalid = np.zeros(len(snapshot.names), np.bool_)
    for aggregate in snapshot.aggregates:
        if key in aggregate.meta:
            try:
                limit = max(0, min(int(aggregate.meta[key]), UNLIMITED - 1))
            except ValueError:
                invalid |= aggregate.members
            else:
                least = np.where(aggregate.members, np.minimum(least, limit), least)
    return np.where(invalid | (least == UNLIMITED), default_limit, least)
