# SPDX-License-Identifier: Apache-2.0
"""Filters that compare the request with the metadata of the aggregates that a host is in.

A value of metadata may be a list with commas; of several aggregates with one key all values count
together. Each aggregate is compared once; its hosts are a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import eq

import numpy as np
from oslo_config import cfg

from common.domain.models import RequestSpec
from scheduler.filters.check import Check, Filter
from scheduler.filters.images import properties
from scheduler.filters.requirements import meets
from scheduler.snapshot import Mask, Snapshot

SCOPE = "aggregate_instance_extra_specs"
TENANTS = "filter_tenant_id"


def extra_specs(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Each extra spec, in the scope ``aggregate_instance_extra_specs`` or in none, is met by the
    host's aggregates."""
    for name, wanted in sorted(spec.flavor.extra_specs.items() if spec.flavor else ()):
        scope, colon, rest = name.partition(":")
        if colon and scope != SCOPE:
            continue
        key = rest if colon else name
        _, given = _given(snapshot, partial(eq, key), partial(meets, wanted))
        yield Check(given, f"in no aggregate whose {key} is as the flavor wants it")


def image_properties(conf: cfg.ConfigOpts) -> Filter:
    """Image properties, where aggregates have a key of the same name, have one of the values that
    they list there. With a namespace only keys in it are compared."""
    namespace = conf.scheduler.aggregate_image_properties_isolation_namespace
    prefix = (
        namespace + conf.scheduler.aggregate_image_properties_isolation_separator
        if namespace
        else ""
    )

    def ask(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
        found = properties(spec)
        keys = {
            key
            for aggregate in snapshot.aggregates
            for key in aggregate.meta
            if key.startswith(prefix)
        }
        for name in sorted(keys & found.keys()):
            if found[name]:
                asked, given = _given(snapshot, partial(eq, name), partial(eq, found[name]))
                yield Check(~asked | given, f"kept for images with another {name[:64]}")

    return ask


def tenants(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Where keys that begin with ``filter_tenant_id`` list projects, the request's project is one
    of them."""
    kept, ours = _given(snapshot, lambda key: key.startswith(TENANTS), partial(eq, spec.project_id))
    yield Check(~kept | ours, "kept for other projects")


def type_affinity(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Where ``instance_type`` lists flavors by name, the request's flavor is one of them."""
    name = spec.flavor.name if spec.flavor else None
    kept, ours = _given(snapshot, partial(eq, "instance_type"), partial(eq, name))
    yield Check(~kept | ours, "kept for other flavors")


def _given(
    snapshot: Snapshot, asks: Callable[[str], bool], holds: Callable[[str], bool]
) -> tuple[Mask, Mask]:
    """The hosts in an aggregate with a key that ``asks`` is true of, and those where ``holds`` is
    of a value of one."""
    asked, given = (np.zeros(len(snapshot.names), np.bool_) for _ in range(2))
    for aggregate in snapshot.aggregates:
        values = [
            value for key, text in aggregate.meta.items() if asks(key) for value in _listed(text)
        ]
        if values:
            asked |= aggregate.members
            if any(holds(value) for value in values):
                given |= aggregate.members
    return asked, given


def _listed(text: str) -> Iterator[str]:
    return (part.strip() for part in text.split(","))
