# SPDX-License-Identifier: Apache-2.0
"""Weighers rank the hosts that pass the filters.

A weigher returns a number for each host. More is better, and a negative multiplier reverses the
order. ``load`` creates the enabled weighers when the scheduler starts. They come from ``BUILT_IN``,
with Nova's names, or from entry points of installed distributions.

``scores`` normalizes the numbers of each weigher to 0 to 1 over the passing hosts, multiplies them,
and adds them up. Near ties are broken by a number that depends on the server's id and the host's
name, so that parallel requests spread.

The name of a multiplier is an option of ``[scheduler]`` and a key in the metadata of aggregates.
Metadata takes precedence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import numpy as np
from oslo_config import cfg

from common.domain.hardware import hardware
from common.domain.models import RequestSpec
from scheduler import third_parties
from scheduler.columns import seed
from scheduler.snapshot import Floats, Numbers, Snapshot

#: Scores that differ by less than this share of the sum of multipliers count as equal.
NEAR_TIE = 0.01
#: Larger multipliers are meant to dominate, and must not widen the near ties of other weighers.
MAX_BLURRED_MULTIPLIER = 10.0
ENTRY_POINTS = "kilonova.scheduler.weighers"
#: Free devices beyond this number do not affect the rank.
MAX_COUNTED_DEVICES = 100
Weigh = Callable[[Snapshot, RequestSpec, Numbers], "Floats | None"]
Step = Callable[[Snapshot, RequestSpec], float]


class UnknownWeigher(ValueError):
    """A weigher does not exist or cannot be created. The text names the weigher and its option."""


def _no_step(snapshot: Snapshot, spec: RequestSpec) -> float:
    """Return 0, the step of a weigher whose numbers do not change when a server is placed."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Weigher:
    """A weigher and its weight.

    Attributes:
        key: Name of the multiplier.
        weigh: Returns the numbers of the hosts in the given rows, or None if the weigher does not
            distinguish hosts for this request.
        step: Returns the change of a host's number when the server is placed there.
        multiplier: Weight of this weigher if no aggregate overrides it.
    """

    key: str
    weigh: Weigh
    step: Step = _no_step
    multiplier: float = 1.0


Factory = Callable[[cfg.ConfigOpts], Weigher]


def _weigh_free(resource_class: str, key: str) -> Factory:
    def weigh(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats | None:
        stock = snapshot.stock.get(resource_class)
        return None if stock is None else stock.free[rows].astype(np.float64)

    return _without_options(
        Weigher(key, weigh, lambda snapshot, spec: -float(spec.resources.get(resource_class, 0)))
    )


def _weigh_column(
    key: str, column: Callable[[Snapshot], Numbers], sign: int = 1, step: float = 0.0
) -> Factory:
    return _without_options(
        Weigher(
            key,
            lambda snapshot, spec, rows: sign * column(snapshot)[rows].astype(np.float64),
            lambda snapshot, spec: step,
        )
    )


def _without_options(weigher: Weigher) -> Factory:
    """Return a factory that copies the weigher with the multiplier from the configuration."""
    return lambda conf: replace(weigher, multiplier=conf.scheduler[weigher.key])


def _weigh_devices(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats | None:
    """Return the negative number of free PCI devices, so that hosts with few are preferred.

    Hosts with many free devices are kept for servers that need many. Hosts with
    ``MAX_COUNTED_DEVICES`` or more free devices are equal.
    """
    return -np.minimum(snapshot.devices[rows], MAX_COUNTED_DEVICES).astype(np.float64)


def _step_devices(snapshot: Snapshot, spec: RequestSpec) -> float:
    if spec.flavor is None or spec.is_rebuild or not snapshot.devices.any():
        return 0.0
    return float(
        sum(request.count for request in hardware(spec.flavor, spec.image_properties).devices)
    )


def _weigh_members(policy: str, sign: int, key: str) -> Factory:
    """Return the factory of a weigher by the number of the server group's servers on each host.

    The weigher has no effect on requests without a group, or with a group of another policy.

    Args:
        policy: The policy of the group.
        sign: 1 to prefer hosts with many servers of the group, -1 for the opposite.
        key: Name of the multiplier.
    """

    def weigh(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats | None:
        group = snapshot.groups.get(spec.group or "")
        if group is None or group.policy != policy:
            return None
        members = np.zeros(len(snapshot.names))
        members[list(group.members)] = list(group.members.values())
        return sign * members[rows]

    def step(snapshot: Snapshot, spec: RequestSpec) -> float:
        group = snapshot.groups.get(spec.group or "")
        return float(sign) if group is not None and group.policy == policy else 0.0

    return _without_options(Weigher(key, weigh, step))


def _weigh_metrics(conf: cfg.ConfigOpts) -> Weigher:
    """Return the weigher by the sum of metrics of agents, each multiplied by its ratio.

    A host that lacks any of the metrics gets [metrics] weight_of_unavailable instead of the sum.
    Without ratios the weigher has no effect.

    Raises:
        UnknownWeigher: A text in [metrics] weight_setting has no name, or no finite number.
    """
    ratios = pairs("[metrics] weight_setting", conf.metrics.weight_setting)
    missing_weight = conf.metrics.weight_of_unavailable

    def weigh(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats | None:
        total, is_missing = np.zeros(rows.size), np.zeros(rows.size, np.bool_)
        for name, ratio in ratios.items():
            values = snapshot.metrics.get(name)
            host_values = np.full(rows.size, np.nan) if values is None else values[rows]
            is_missing |= np.isnan(host_values)
            total += ratio * host_values
        return np.where(is_missing, missing_weight, total) if ratios else None

    return Weigher("metrics_weight_multiplier", weigh, multiplier=conf.metrics.weight_multiplier)


def _weigh_image_properties(conf: cfg.ConfigOpts) -> Weigher:
    """Return the weigher by image properties that the request shares with servers on the host.

    For each server on the host, the properties that its image has in common with the request's
    image are added up, each with its ratio. Without configured ratios each counts as 1. With
    ratios, a property without a ratio counts as 0. A common property has the same value.

    Raises:
        UnknownWeigher: A text in image_props_weight_setting has no name, or no finite number.
    """
    ratios = pairs(
        "[scheduler] image_props_weight_setting", conf.scheduler.image_props_weight_setting
    )

    def count_common(spec: RequestSpec, properties: Mapping[str, str]) -> float:
        return sum(
            ratios.get(name, 0.0) if ratios else 1.0
            for name, value in spec.image_properties.items()
            if properties.get(name) == value
        )

    def weigh(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats | None:
        total = np.zeros(len(snapshot.names))
        for image in snapshot.images:
            total[image.rows] += image.counts * count_common(spec, image.properties)
        return total[rows]

    return Weigher(
        "image_props_weight_multiplier",
        weigh,
        lambda snapshot, spec: (
            count_common(spec, spec.image_properties) if snapshot.images else 0.0
        ),
        conf.scheduler.image_props_weight_multiplier,
    )


BUILT_IN: dict[str, Factory] = {
    "RAMWeigher": _weigh_free("MEMORY_MB", "ram_weight_multiplier"),
    "CPUWeigher": _weigh_free("VCPU", "cpu_weight_multiplier"),
    "DiskWeigher": _weigh_free("DISK_GB", "disk_weight_multiplier"),
    "MetricsWeigher": _weigh_metrics,
    "IoOpsWeigher": _weigh_column(
        "io_ops_weight_multiplier", lambda snapshot: snapshot.working, step=1.0
    ),
    "PCIWeigher": _without_options(Weigher("pci_weight_multiplier", _weigh_devices, _step_devices)),
    "ServerGroupSoftAffinityWeigher": _weigh_members(
        "soft-affinity", 1, "soft_affinity_weight_multiplier"
    ),
    "ServerGroupSoftAntiAffinityWeigher": _weigh_members(
        "soft-anti-affinity", -1, "soft_anti_affinity_weight_multiplier"
    ),
    "BuildFailureWeigher": _weigh_column(
        "build_failure_weight_multiplier", lambda snapshot: snapshot.failures, -1
    ),
    "HypervisorVersionWeigher": _weigh_column(
        "hypervisor_version_weight_multiplier", lambda snapshot: snapshot.versions
    ),
    "NumInstancesWeigher": _weigh_column(
        "num_instances_weight_multiplier", lambda snapshot: snapshot.servers, step=1.0
    ),
    "ImagePropertiesWeigher": _weigh_image_properties,
}


def load(conf: cfg.ConfigOpts) -> tuple[Weigher, ...]:
    """Create the weighers in ``[scheduler] enabled_weighers``, in this order without duplicates.

    Raises:
        UnknownWeigher: A name is unknown, the weigher of an installed distribution cannot be
            created, or a ratio of a built-in weigher is invalid.
    """
    names = dict.fromkeys(conf.scheduler.enabled_weighers)
    foreign = third_parties.find_entry_points(
        "enabled_weighers", names, ENTRY_POINTS, BUILT_IN, UnknownWeigher
    )
    return tuple(
        _load_entry_point(foreign[name], conf) if name in foreign else BUILT_IN[name](conf)
        for name in names
    )


def _load_entry_point(point: metadata.EntryPoint, conf: cfg.ConfigOpts) -> Weigher:
    """Create the weigher of an installed distribution.

    Raises:
        UnknownWeigher: The third-party code raised an exception, of any class, or did not return a
            ``Weigher``.
    """
    try:
        weigher = point.load()(conf)
    except Exception as problem:
        raise UnknownWeigher(third_parties.refusal("enabled_weighers", point, problem)) from problem
    if not isinstance(weigher, Weigher):
        raise UnknownWeigher(
            f"[scheduler] enabled_weighers: {point.name} ({point.value}) did not return a Weigher"
        )
    return weigher


def pairs(option: str, texts: Sequence[str]) -> dict[str, float]:
    """Parse texts of the form ``name=ratio``, and return the ratio by name.

    Args:
        option: Name of the option with these texts, for the error.
        texts: The texts.

    Raises:
        UnknownWeigher: A text has no name, or no finite number.
    """
    ratios = {}
    for text in texts:
        name, _, ratio = text.partition("=")
        try:
            ratios[name.strip()] = float(ratio)
        except ValueError:
            ratios[name.strip()] = math.nan
        if not name.strip() or not math.isfinite(ratios[name.strip()]):
            raise UnknownWeigher(f"{option}: {text!r} is not name=number")
    return ratios


# --- Scores ---
@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of hosts, in the order of the rows.

    Attributes:
        score: The score of each host.
        step: Change of a host's score when a server is placed there.
    """

    score: Floats
    step: Floats | float


def scores(
    snapshot: Snapshot, spec: RequestSpec, rows: Numbers, weighers: Sequence[Weigher]
) -> Scores:
    """Return the score of each host in these rows, and its change when a server is placed there.

    Args:
        snapshot: The hosts.
        spec: The request.
        rows: Rows of the hosts that passed the filters, at least one.
        weighers: The enabled weighers.
    """
    score, steps, spread = np.zeros(rows.size), _Steps(), 0.0
    overridden = _read_multipliers(snapshot, weighers)
    for weigher in weighers:
        multiplier: Floats | float = weigher.multiplier
        if weigher.key in overridden:
            multiplier = overridden[weigher.key][rows]
        elif not weigher.multiplier:
            continue
        weights = weigher.weigh(snapshot, spec, rows)
        if weights is None:
            continue
        low, high = float(weights.min()), float(weights.max())
        step = weigher.step(snapshot, spec)
        if high > low:
            weights -= low
            weights *= multiplier / (high - low)
            score += weights
            spread += min(MAX_BLURRED_MULTIPLIER, float(np.abs(multiplier).max()))
        if step:
            steps.add(multiplier * (step / max(high - low, abs(step))))
    score += NEAR_TIE * (spread or 1.0) * _draw_lots(snapshot, spec, rows)
    return Scores(score, steps.total)


class _Steps:
    """A sum of numbers and columns. It becomes a column with the first column that is added."""

    def __init__(self) -> None:
        self.total: Floats | float = 0.0

    def add(self, part: Floats | float) -> None:
        self.total = self.total + part


def _read_multipliers(snapshot: Snapshot, weighers: Sequence[Weigher]) -> dict[str, Floats]:
    """Return the multipliers that metadata of aggregates set, as a column by name.

    If aggregates of a host set several values, the smallest applies. The option applies to a host
    without a value, or with any value that is not a number. Infinite values and NaN are ignored.

    Returns:
        Only multipliers that an aggregate sets have a column.
    """
    multipliers: dict[str, Floats] = {}
    invalid: dict[str, list[int]] = {}
    options = {weigher.key: weigher.multiplier for weigher in weighers}
    for number, aggregate in enumerate(snapshot.aggregates):
        for key in aggregate.meta.keys() & options.keys():
            least = multipliers.setdefault(key, np.full(len(snapshot.names), np.inf))
            try:
                value = float(aggregate.meta[key])
            except ValueError:
                invalid.setdefault(key, []).append(number)
            else:
                if np.isfinite(value):
                    np.minimum(least, value, out=least, where=aggregate.members)
    for key, least in multipliers.items():
        for number in invalid.get(key, ()):
            least[snapshot.aggregates[number].members] = np.inf
        least[np.isinf(least)] = options[key]
    return multipliers


def _draw_lots(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats:
    """Return a number from 0 to below 1 per host, derived from the server's id and host's name."""
    mixed = (snapshot.seeds[rows] ^ np.uint64(seed(spec.server))) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(40)).astype(np.float64) / 2.0**24
