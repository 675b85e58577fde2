# SPDX-License-Identifier: Apache-2.0
"""Filters: each looks at all hosts at once and says which may not take a server, and why.

A filter is a function (snapshot, request spec) -> checks; ``scheduler.select`` applies the checks in order
and counts a host for the first that it does not pass. ``FILTERS`` has those that an operator can name in
``enabled_filters``; placement (forced, excluded, resources) is always checked.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.models import RequestSpec
from scheduler.snapshot import Mask, Numbers, Snapshot


@dataclass(frozen=True, slots=True)
class Check:
    """One question to all hosts. ``text`` says what is true of a host that does not pass; with ``need``,
    ``free`` has each host's number beside it. ``room``: how many such servers a host that passes can take, where that
    is limited; every server that is placed there makes it one less."""

    passes: Mask
    text: str
    need: int = 0
    free: Numbers | None = None
    room: Numbers | None = None

    def for_many(self, rejected: Mask) -> str:
        """The text for all rejected hosts together."""
        if self.free is None:
            return self.text
        return f"{self.text} (need {self.need}, most free {max(0, int(self.free[rejected].max()))})"

    def for_one(self, row: int) -> str:
        """The text for the host in this row."""
        if self.free is None:
            return self.text
        return f"{self.text} (need {self.need}, free {max(0, int(self.free[row]))})"


Filter = Callable[[Snapshot, RequestSpec], Iterable[Check]]


def compute_status(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """The host's agent is known, enabled, not forced down and heard from."""
    yield Check(snapshot.served, "without a compute service")
    yield Check(~snapshot.disabled, "disabled")
    yield Check(~snapshot.forced_down, "forced down")
    yield Check(snapshot.up, "not heard from")


def availability_zone(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """The host is in the zone that was asked for; any will do when none was."""
    if spec.availability_zone is not None:
        number = snapshot.zone_numbers.get(spec.availability_zone, -1)
        yield Check(snapshot.zones == number, f"not in zone {spec.availability_zone}")


FILTERS: dict[str, Filter] = {
    "ComputeFilter": compute_status,
    "AvailabilityZoneFilter": availability_zone,
}
