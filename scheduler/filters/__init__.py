# SPDX-License-Identifier: Apache-2.0
"""Filters: each looks at all hosts at once and says which may not take a server, and why.

``load`` makes those of a configuration, once, when the scheduler starts: the table below has Nova's
names, installed distributions add their own as entry points. ``Filters.checks`` is the one order in
which hosts are asked: named hosts, failing hosts, the zone, disabled hosts, the enabled filters,
and then what is promised whatever the operator enables (``resources``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import numpy as np
from oslo_config import cfg

from common.domain.models import RequestSpec
from scheduler import third_parties
from scheduler.filters import aggregates, capabilities, hints, host_load, hosts, images, resources
from scheduler.filters.check import Check, Factory, Filter, of_facts
from scheduler.snapshot import Mask, Snapshot

__all__ = ["Check", "Factory", "Filter", "Filters", "UnknownFilter", "load", "of_facts"]
log = logging.getLogger(__name__)
ENTRY_POINTS = "kilonova.scheduler.filters"


class UnknownFilter(ValueError):
    """A filter is not there or cannot be made; the text names it, the option and what there is."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A filter of ours: what makes it, and whether it is asked of rebuilds."""

    make: Factory | None = None
    on_rebuild: bool = False


def _plain(filter_: Filter) -> Factory:
    """For a filter without options; what it does is what the filter says of itself."""

    def make(conf: cfg.ConfigOpts) -> Filter:
        return filter_

    make.__doc__ = filter_.__doc__
    return make


PROMISED = Entry()  # asked in any case (Filters.checks); the name in the option changes nothing
BUILT_IN: dict[str, Entry] = {
    "AggregateImagePropertiesIsolation": Entry(aggregates.image_properties, on_rebuild=True),
    "AggregateInstanceExtraSpecsFilter": Entry(_plain(aggregates.extra_specs)),
    "AggregateIoOpsFilter": Entry(partial(host_load.io_ops, by_aggregate=True)),
    "AggregateMultiTenancyIsolation": Entry(_plain(aggregates.tenants)),
    "AggregateNumInstancesFilter": Entry(partial(host_load.num_instances, by_aggregate=True)),
    "AggregateTypeAffinityFilter": Entry(_plain(aggregates.type_affinity)),
    "AllHostsFilter": Entry(_plain(hosts.all_hosts)),
    "AvailabilityZoneFilter": PROMISED,
    "ComputeCapabilitiesFilter": Entry(_plain(capabilities.compute_capabilities)),
    "ComputeFilter": Entry(_plain(hosts.compute_status)),
    "DifferentHostFilter": Entry(_plain(hints.different_host)),
    "ImagePropertiesFilter": Entry(images.image_properties, on_rebuild=True),
    "IoOpsFilter": Entry(host_load.io_ops),
    "IsolatedHostsFilter": Entry(images.isolated_hosts, on_rebuild=True),
    "NUMATopologyFilter": PROMISED,
    "NumInstancesFilter": Entry(host_load.num_instances),
    "PciPassthroughFilter": PROMISED,
    "SameHostFilter": Entry(_plain(hints.same_host)),
    "ServerGroupAffinityFilter": PROMISED,
    "ServerGroupAntiAffinityFilter": PROMISED,
}


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of one configuration, in its order, and whether each is asked of rebuilds.

    failures: builds that fail in a row before a host is left out; 0: never.
    """

    enabled: tuple[tuple[Filter, bool], ...]
    failures: int = 0

    def checks(
        self, snapshot: Snapshot, spec: RequestSpec, passing: Mask, count: int = 1
    ) -> Iterator[Check]:
        """Every question to the hosts, in order; each is made when it is asked for.

        Args:
            passing: the caller's own mask of the hosts that passed so far, narrowed in place
            between two checks:
                what is costly asks only those.
            count: so many equal servers are wanted: no host's room needs to be known beyond it.
        """
        yield from resources.named_hosts(snapshot, spec)
        if spec.is_rebuild:
            asked = [filter_ for filter_, on_rebuild in self.enabled if on_rebuild]
        elif spec.force_host is not None:
            yield from resources.alive(snapshot)
            asked = []
        else:
            yield from resources.failing_hosts(snapshot, self.failures)
            yield from hosts.availability_zone(snapshot, spec)
            yield from hosts.enabled(snapshot, spec)
            yield from hosts.known_aggregates(snapshot, spec)
            asked = [filter_ for filter_, _ in self.enabled]
        for filter_ in asked:
            yield from filter_(snapshot, spec)
        yield from resources.promises(snapshot, spec, passing, count)


def load(conf: cfg.ConfigOpts) -> Filters:
    """The filters that ``[scheduler] enabled_filters`` names, made.

    Raises:
        UnknownFilter: a name that neither we nor an installed distribution have, or a third party's
        filter that
            cannot be made.
    """
    names = dict.fromkeys(conf.scheduler.enabled_filters)
    foreign = third_parties.installed(
        "enabled_filters", names, ENTRY_POINTS, BUILT_IN, UnknownFilter
    )
    enabled = []
    for name in names:
        if name in foreign:
            enabled.append(_foreign(foreign[name], conf))
        elif (make := BUILT_IN[name].make) is not None:
            enabled.append((make(conf), BUILT_IN[name].on_rebuild))
    return Filters(tuple(enabled), conf.scheduler.build_failure_limit)


def _foreign(point: metadata.EntryPoint, conf: cfg.ConfigOpts) -> tuple[Filter, bool]:
    """A third party's filter. Its code runs here for the first time, so anything may go wrong."""
    try:
        factory = point.load()
        return _guarded(point.name, factory(conf)), bool(getattr(factory, "on_rebuild", False))
    except Exception as problem:
        raise UnknownFilter(third_parties.refusal("enabled_filters", point, problem)) from problem


def _guarded(name: str, ask: Filter) -> Filter:
    """A third party's filter that fails lets nobody in, and says so: other requests are in hand
    beside this one."""

    def guarded(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
        size = len(snapshot.names)
        try:
            checks = list(ask(snapshot, spec))
            wrong = [
                check
                for check in checks
                if check.passes.dtype != np.bool_ or check.passes.shape != (size,)
            ]
            if wrong:
                raise ValueError(
                    f"passes must be {size} booleans, one a host, where it says: {wrong[0].text}"
                )
        except Exception:
            log.exception(
                "the filter %s failed; repair it or take it out of [scheduler] enabled_filters",
                name,
            )
            return [
                Check(
                    np.zeros(size, np.bool_),
                    f"not let in because {name} failed (see the scheduler's log)",
                )
            ]
        return checks

    return guarded
