# SPDX-License-Identifier: Apache-2.0
"""Filters that compare the request with the metadata of a host's aggregates.

A value of metadata may be a comma-separated list. If several aggregates of a host have the same
key, their values are combined. Each aggregate is compared once, and its hosts are a mask.
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
    """Require that the metadata of the host's aggregates meet each extra spec of the flavor.

    Only extra specs without a scope, or with the scope ``aggregate_instance_extra_specs``, count. A
    host without an aggregate with the key is rejected.
    """
    for name, requirement in sorted(spec.flavor.extra_specs.items() if spec.flavor else ()):
        scope, colon, rest = name.partition(":")
        if colon and scope != SCOPE:
            continue
        key = rest if colon else name
        _, matching = _match_metadata(snapshot, partial(eq, key), partial(meets, requirement))
        yield Check(matching, f"in no aggregate with the {key} that the flavor requires")


def image_properties(conf: cfg.ConfigOpts) -> Filter:
    """Require that image properties match aggregate metadata of the same name.

    If the image has a property and a host's aggregates have this key, the image's value must be
    among their values. With a configured namespace, only keys in this namespace are compared.
    """
    namespace = conf.scheduler.aggregate_image_properties_isolation_namespace
    prefix = (
        namespace + conf.scheduler.aggregate_image_properties_isolation_separator
        if namespace
        else ""
    )

    def ask(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
        image = properties(spec)
        keys = {
            key
            for aggregate in snapshot.aggregates
            for key in aggregate.meta
            if key.startswith(prefix)
        }
        for name in sorted(keys & image.keys()):
            if image[name]:
                with_key, with_value = _match_metadata(
                    snapshot, partial(eq, name), partial(eq, image[name])
                )
                yield Check(~with_key | with_value, f"reserved for images with another {name[:64]}")

    return ask


def tenants(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Reject hosts that aggregates reserve for other projects by metadata ``filter_tenant_id*``."""
    restricted, permitted = _match_metadata(
        snapshot, lambda key: key.startswith(TENANTS), partial(eq, spec.project_id)
    )
    yield Check(~restricted | permitted, "reserved for other projects")


def type_affinity(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Reject hosts that aggregates reserve for other flavors by the metadata ``instance_type``.

    The value lists the names of the permitted flavors.
    """
    name = spec.flavor.name if spec.flavor else None
    restricted, permitted = _match_metadata(
        snapshot, partial(eq, "instance_type"), partial(eq, name)
    )
    yield Check(~restricted | permitted, "reserved for other flavors")


def _match_metadata(
    snapshot: Snapshot, key_matches: Callable[[str], bool], value_matches: Callable[[str], bool]
) -> tuple[Mask, Mask]:
    """Return masks of the hosts with a matching key, and of those with a matching value of it.

    A host has the keys and values of all its aggregates.

    Args:
        snapshot: The hosts.
        key_matches: True for matching keys of metadata.
        value_matches: True for matching values. Called with each part of a comma-separated list.
    """
    with_key, with_value = (np.zeros(len(snapshot.names), np.bool_) for _ in range(2))
    for aggregate in snapshot.aggregates:
        values = [
            value
            for key, text in aggregate.meta.items()
            if key_matches(key)
            for value in _split_list(text)
        ]
        if values:
            with_key |= aggregate.members
            if any(value_matches(value) for value in values):
                with_value |= aggregate.members
    return with_key, with_value


def _split_list(text: str) -> Iterator[str]:
    return (part.strip() for part in text.split(","))
