# SPDX-License-Identifier: Apache-2.0
"""Weighers: a number for each host, of which more is better; a negative multiplier turns it round.

``load`` makes those of a configuration, once, when the scheduler starts: the table has Nova's
names, installed distributions add their own as entry points. ``scores`` says how good each host is
for a request: each weigher is spread over 0 to 1, over the hosts that passed, and multiplied; near
ties are broken by a number drawn from the server's id and the host's name, so that parallel
requests spread. The multiplier's name is an option of ``[scheduler]`` and a key of aggregates'
metadata, which comes first.
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

# hosts whose scores differ by less, of the sum of multipliers, count as equally good
NEAR_TIE = 0.01
# a multiplier beyond it is there to settle all, and blurs no other
MAX_BLURRED_MULTIPLIER = 10.0
ENTRY_POINTS = "kilonova.scheduler.weighers"
MAX_COUNTED_DEVICES = 100  # free devices of a host beyond which more make no difference
Weigh = Callable[[Snapshot, RequestSpec, Numbers], "Floats | None"]
Step = Callable[[Snapshot, RequestSpec], float]


class UnknownWeigher(ValueError):
    """A weigher is not there or cannot be made; the text names it, the option and what there is."""


def _still(snapshot: Snapshot, spec: RequestSpec) -> float:
    """A server that is placed changes nothing."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Weigher:
    """weigh: the numbers of the hosts in these rows; None when all are alike. step: what a server
    that is placed adds to its host's number. key: name of the multiplier; multiplier: how much it
    counts."""

    key: str
    weigh: Weigh
    step: Step = _still
    multiplier: float = 1.0


Factory = Callable[[cfg.ConfigOpts], Weigher]


def _free(resource_class: str, key: str) -> Factory:
    def weigh(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats | None:
        stock = snapshot.stock.get(resource_class)
        return None if stock is None else stock.free[rows].astype(np.float64)

    return _plain(
        Weigher(key, weigh, lambda snapshot, spec: -float(spec.resources.get(resource_class, 0)))
    )


def _column(
    key: str, column: Callable[[Snapshot], Numbers], sign: int = 1, step: float = 0.0
) -> Factory:
    return _plain(
        Weigher(
            key,
            lambda snapshot, spec, rows: sign * column(snapshot)[rows].astype(np.float64),
            lambda snapshot, spec: step,
        )
    )


def _plain(weigher: Weigher) -> Factory:
    """For a weigher without other options than its multiplier."""
    return lambda conf: replace(weigher, multiplier=conf.scheduler[weigher.key])


def _devices(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats | None:
    """Hosts with few free devices first: those with many are kept for servers that want many."""
    return -np.minimum(snapshot.devices[rows], MAX_COUNTED_DEVICES).astype(np.float64)


def _devices_step(snapshot: Snapshot, spec: RequestSpec) -> float:
    if spec.flavor is None or spec.is_rebuild or not snapshot.devices.any():
        return 0.0
    return float(
        sum(request.count for request in hardware(spec.flavor, spec.image_properties).devices)
    )


def _members(policy: str, sign: int, key: str) -> Factory:
    """Servers of the request's group on each host, where the group has this policy."""

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

    return _plain(Weigher(key, weigh, step))


def _metrics(conf: cfg.ConfigOpts) -> Weigher:
    """What agents measure, each metric times its ratio."""
    ratios = pairs("[metrics] weight_setting", conf.metrics.weight_setting)
    unknown = conf.metrics.weight_of_unavailable

    def weigh(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats | None:
        total, untold = np.zeros(rows.size), np.zeros(rows.size, np.bool_)
        for name, ratio in ratios.items():
            values = snapshot.metrics.get(name)
            found = np.full(rows.size, np.nan) if values is None else values[rows]
            untold |= np.isnan(found)
            total += ratio * found
        return np.where(untold, unknown, total) if ratios else None

    return Weigher("metrics_weight_multiplier", weigh, multiplier=conf.metrics.weight_multiplier)


def _image_properties(conf: cfg.ConfigOpts) -> Weigher:
    """Servers on each host whose image has properties in common with the request's, each property
    times its ratio."""
    ratios = pairs(
        "[scheduler] image_props_weight_setting", conf.scheduler.image_props_weight_setting
    )

    def alike(spec: RequestSpec, properties: Mapping[str, str]) -> float:
        return sum(
            ratios.get(name, 0.0) if ratios else 1.0
            for name, value in spec.image_properties.items()
            if properties.get(name) == value
        )

    def weigh(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats | None:
        total = np.zeros(len(snapshot.names))
        for image in snapshot.images:
            total[image.rows] += image.counts * alike(spec, image.properties)
        return total[rows]

    return Weigher(
        "image_props_weight_multiplier",
        weigh,
        lambda snapshot, spec: alike(spec, spec.image_properties) if snapshot.images else 0.0,
        conf.scheduler.image_props_weight_multiplier,
    )


BUILT_IN: dict[str, Factory] = {
    "RAMWeigher": _free("MEMORY_MB", "ram_weight_multiplier"),
    "CPUWeigher": _free("VCPU", "cpu_weight_multiplier"),
    "DiskWeigher": _free("DISK_GB", "disk_weight_multiplier"),
    "MetricsWeigher": _metrics,
    "IoOpsWeigher": _column(
        "io_ops_weight_multiplier", lambda snapshot: snapshot.working, step=1.0
    ),
    "PCIWeigher": _plain(Weigher("pci_weight_multiplier", _devices, _devices_step)),
    "ServerGroupSoftAffinityWeigher": _members(
        "soft-affinity", 1, "soft_affinity_weight_multiplier"
    ),
    "ServerGroupSoftAntiAffinityWeigher": _members(
        "soft-anti-affinity", -1, "soft_anti_affinity_weight_multiplier"
    ),
    "BuildFailureWeigher": _column(
        "build_failure_weight_multiplier", lambda snapshot: snapshot.failures, -1
    ),
    "HypervisorVersionWeigher": _column(
        "hypervisor_version_weight_multiplier", lambda snapshot: snapshot.versions
    ),
    "NumInstancesWeigher": _column(
        "num_instances_weight_multiplier", lambda snapshot: snapshot.servers, step=1.0
    ),
    "ImagePropertiesWeigher": _image_properties,
}


def load(conf: cfg.ConfigOpts) -> tuple[Weigher, ...]:
    """The weighers that ``[scheduler] enabled_weighers`` names, made.

    Raises:
        UnknownWeigher: a name that neither we nor an installed distribution have, or a third
        party's weigher that
            cannot be made.
    """
    names = dict.fromkeys(conf.scheduler.enabled_weighers)
    foreign = third_parties.installed(
        "enabled_weighers", names, ENTRY_POINTS, BUILT_IN, UnknownWeigher
    )
    return tuple(
        _foreign(foreign[name], conf) if name in foreign else BUILT_IN[name](conf) for name in names
    )


def _foreign(point: metadata.EntryPoint, conf: cfg.ConfigOpts) -> Weigher:
    """A third party's weigher. Its code runs here for the first time, so anything may go wrong."""
    try:
        made = point.load()(conf)
    except Exception as problem:
        raise UnknownWeigher(third_parties.refusal("enabled_weighers", point, problem)) from problem
    if not isinstance(made, Weigher):
        raise UnknownWeigher(
            f"[scheduler] enabled_weighers: {point.name} ({point.value}) makes no Weigher"
        )
    return made


def pairs(option: str, texts: Sequence[str]) -> dict[str, float]:
    """name=ratio as numbers.

    Raises:
        UnknownWeigher: one is not a name and a number.
    """
    found = {}
    for text in texts:
        name, _, ratio = text.partition("=")
        try:
            found[name.strip()] = float(ratio)
        except ValueError:
            found[name.strip()] = math.nan
        if not name.strip() or not math.isfinite(found[name.strip()]):
            raise UnknownWeigher(f"{option}: {text!r} is not name=number")
    return found


# --- scores ---
@dataclass(frozen=True, slots=True)
class Scores:
    """Of the hosts in the rows asked for: the score, and what each server that is placed adds to
    it."""

    score: Floats
    step: Floats | float


def scores(
    snapshot: Snapshot, spec: RequestSpec, rows: Numbers, weighers: Sequence[Weigher]
) -> Scores:
    """Score the hosts in these rows."""
    score, steps, spread = np.zeros(rows.size), _Steps(), 0.0
    overridden = _overridden(snapshot, weighers)
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
    score += NEAR_TIE * (spread or 1.0) * _lots(snapshot, spec, rows)
    return Scores(score, steps.total)


class _Steps:
    """A sum that stays one number while all its parts are."""

    def __init__(self) -> None:
        self.total: Floats | float = 0.0

    def add(self, part: Floats | float) -> None:
        self.total = self.total + part


def _overridden(snapshot: Snapshot, weighers: Sequence[Weigher]) -> dict[str, Floats]:
    """Multipliers that aggregates set, a number a host: the smallest of several, the option's where
    none sets it. A word that is no number counts for nothing, together with all else that is said
    for that host."""
    found: dict[str, Floats] = {}
    wrong: dict[str, list[int]] = {}
    options = {weigher.key: weigher.multiplier for weigher in weighers}
    for number, aggregate in enumerate(snapshot.aggregates):
        for key in aggregate.meta.keys() & options.keys():
            least = found.setdefault(key, np.full(len(snapshot.names), np.inf))
            try:
                value = float(aggregate.meta[key])
            except ValueError:
                wrong.setdefault(key, []).append(number)
            else:
                if np.isfinite(value):
                    np.minimum(least, value, out=least, where=aggregate.members)
    for key, least in found.items():
        for number in wrong.get(key, ()):
            least[snapshot.aggregates[number].members] = np.inf
        least[np.isinf(least)] = options[key]
    return found


def _lots(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats:
    """A number from 0 to 1 for each host, drawn from the server's id and the host's name."""
    mixed = (snapshot.seeds[rows] ^ np.uint64(seed(spec.server))) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(40)).astype(np.float64) / 2.0**24
