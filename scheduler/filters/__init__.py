# SPDX-License-Identifier: Apache-2.0
"""Filters reject hosts that cannot take a server, with a reason.

A filter examines all hosts at once. ``load`` creates the enabled filters when the scheduler starts.
They come from ``BUILT_IN``, with Nova's names, or from entry points of installed distributions.

``Filters.checks`` defines the order of all checks: requested and excluded hosts, failing hosts, the
availability zone, disabled hosts, aggregates with damaged metadata, the enabled filters, and the
checks in ``resources`` that no option disables. Rebuilds and requests with ``force_host`` have only
some of these checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import numpy as np
from oslo_config import cfg

from common.domain.models import RequestSpec
from common.service.log import get_logger
from scheduler import third_parties
from scheduler.filters import aggregates, capabilities, hints, host_load, hosts, images, resources
from scheduler.filters.check import Check, Factory, Filter, of_facts
from scheduler.snapshot import Mask, Snapshot

__all__ = ["Check", "Factory", "Filter", "Filters", "UnknownFilter", "load", "of_facts"]
log = get_logger(__name__)
ENTRY_POINTS = "kilonova.scheduler.filters"


class UnknownFilter(ValueError):
    """A filter does not exist or cannot be created. The text names the filter and its option."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A built-in filter.

    Attributes:
        make: The factory, or None for a check of ``Filters.checks`` that no option disables.
        on_rebuild: True if the filter also applies to rebuilds.
    """

    make: Factory | None = None
    on_rebuild: bool = False


def _without_options(filter_: Filter) -> Factory:
    """Return a factory that always returns this filter, and that has the filter's docstring."""

    def make(conf: cfg.ConfigOpts) -> Filter:
        return filter_

    make.__doc__ = filter_.__doc__
    return make


#: A check of every request (``Filters.checks``). Its name in the option has no effect.
PROMISED = Entry()
BUILT_IN: dict[str, Entry] = {
    "AggregateImagePropertiesIsolation": Entry(aggregates.image_properties, on_rebuild=True),
    "AggregateInstanceExtraSpecsFilter": Entry(_without_options(aggregates.extra_specs)),
    "AggregateIoOpsFilter": Entry(partial(host_load.io_ops, by_aggregate=True)),
    "AggregateMultiTenancyIsolation": Entry(_without_options(aggregates.tenants)),
    "AggregateNumInstancesFilter": Entry(partial(host_load.num_instances, by_aggregate=True)),
    "AggregateTypeAffinityFilter": Entry(_without_options(aggregates.type_affinity)),
    "AllHostsFilter": Entry(_without_options(hosts.all_hosts)),
    "AvailabilityZoneFilter": PROMISED,
    "ComputeCapabilitiesFilter": Entry(_without_options(capabilities.compute_capabilities)),
    "ComputeFilter": Entry(_without_options(hosts.compute_status)),
    "DifferentHostFilter": Entry(_without_options(hints.different_host)),
    "ImagePropertiesFilter": Entry(images.image_properties, on_rebuild=True),
    "IoOpsFilter": Entry(host_load.io_ops),
    "IsolatedHostsFilter": Entry(images.isolated_hosts, on_rebuild=True),
    "NUMATopologyFilter": PROMISED,
    "NumInstancesFilter": Entry(host_load.num_instances),
    "PciPassthroughFilter": PROMISED,
    "SameHostFilter": Entry(_without_options(hints.same_host)),
    "ServerGroupAffinityFilter": PROMISED,
    "ServerGroupAntiAffinityFilter": PROMISED,
}


@dataclass(frozen=True, slots=True)
class Filters:
    """The enabled filters.

    Attributes:
        enabled: Each filter, in the order of the option, and whether it applies to rebuilds.
        failures: Consecutive failed builds after which a host is paused. 0 means never.
    """

    enabled: tuple[tuple[Filter, bool], ...]
    failures: int = 0

    def checks(
        self, snapshot: Snapshot, spec: RequestSpec, passing: Mask, count: int = 1
    ) -> Iterator[Check]:
        """Yield all checks of the request, in order. Each check is computed when it is requested.

        Args:
            snapshot: The hosts.
            spec: The request.
            passing: The hosts that passed so far. The caller must clear rejected hosts in this mask
                before it requests the next check, because expensive checks only examine passing
                hosts.
            count: Number of equal servers. The room by NUMA nodes and devices is not counted beyond
                this.
        """
        yield from resources.named_hosts(snapshot, spec)
        if spec.is_rebuild:
            applicable = [filter_ for filter_, on_rebuild in self.enabled if on_rebuild]
        elif spec.force_host is not None:
            yield from resources.alive(snapshot)
            applicable = []
        else:
            yield from resources.failing_hosts(snapshot, self.failures)
            yield from hosts.availability_zone(snapshot, spec)
            yield from hosts.enabled(snapshot, spec)
            yield from hosts.known_aggregates(snapshot, spec)
            applicable = [filter_ for filter_, _ in self.enabled]
        for filter_ in applicable:
            yield from filter_(snapshot, spec)
        yield from resources.promises(snapshot, spec, passing, count)


def load(conf: cfg.ConfigOpts) -> Filters:
    """Create the filters in ``[scheduler] enabled_filters``, in this order without duplicates.

    Names of checks that no option disables are accepted and have no effect.

    Raises:
        UnknownFilter: A name is unknown, or the filter of an installed distribution cannot be
            created.
    """
    names = dict.fromkeys(conf.scheduler.enabled_filters)
    foreign = third_parties.find_entry_points(
        "enabled_filters", names, ENTRY_POINTS, BUILT_IN, UnknownFilter
    )
    enabled = []
    for name in names:
        if name in foreign:
            enabled.append(_load_entry_point(foreign[name], conf))
        elif (make := BUILT_IN[name].make) is not None:
            enabled.append((make(conf), BUILT_IN[name].on_rebuild))
    return Filters(tuple(enabled), conf.scheduler.build_failure_limit)


def _load_entry_point(point: metadata.EntryPoint, conf: cfg.ConfigOpts) -> tuple[Filter, bool]:
    """Return the filter of an installed distribution, and whether it applies to rebuilds.

    The filter is guarded (``_guard``).

    Raises:
        UnknownFilter: The third-party code raised an exception, of any class.
    """
    try:
        factory = point.load()
        return _guard(point.name, factory(conf)), bool(getattr(factory, "on_rebuild", False))
    except Exception as problem:
        raise UnknownFilter(third_parties.refusal("enabled_filters", point, problem)) from problem


def _guard(name: str, apply_filter: Filter) -> Filter:
    """Return a third-party filter that rejects all hosts after an exception or malformed check.

    The problem is logged. Why: other requests of the same call must not fail.
    """

    def apply_guarded(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
        size = len(snapshot.names)
        try:
            checks = list(apply_filter(snapshot, spec))
            malformed = [
                check
                for check in checks
                if check.passes.dtype != np.bool_ or check.passes.shape != (size,)
            ]
            if malformed:
                raise ValueError(
                    f"passes must be {size} booleans, one for each host, in the check: {malformed[0].text}"
                )
        except Exception:
            log.exception(
                "a filter failed; repair it or take it out of [scheduler] enabled_filters",
                filter=name,
            )
            return [
                Check(
                    np.zeros(size, np.bool_),
                    f"rejected because the filter {name} failed (see the scheduler's log)",
                )
            ]
        return checks

    return apply_guarded
