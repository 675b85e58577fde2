# SPDX-License-Identifier: Apache-2.0
"""The interface of filters: a filter is a function that returns checks of all hosts.

``scheduler.selection`` applies the checks in order and counts a host for the first check that
rejects it. Tenants read the texts. A text therefore only names objects that the request named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from oslo_config import cfg

from common.domain.json_types import JsonMapping
from common.domain.models import RequestSpec
from scheduler.snapshot import Mask, Numbers, Snapshot

#: Value of ``room`` for a host where the check does not limit the number of servers.
UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class Check:
    """One condition on all hosts.

    Attributes:
        passes: The hosts that meet the condition.
        text: Describes the rejected hosts, for example "short of VCPU".
        need: Required amount, shown beside ``free``.
        free: Available amount of each host, or None if the text has no numbers.
        room: How many such servers fit on each host, or None if the check does not limit the
            number. Each placed server reduces the room by one.
        each: Returns the text for the host in a row, if the text differs between hosts.
        settles: True if the first placed server changes which hosts pass. The check is then
            repeated for the next server.
    """

    passes: Mask
    text: str
    need: int = 0
    free: Numbers | None = None
    room: Numbers | None = None
    each: Callable[[int], str] | None = None
    settles: bool = False

    def for_many(self, rejected: Mask) -> str:
        """Return one text for all rejected hosts, with the needed and largest free amount if any.

        Args:
            rejected: Mask of the rejected hosts, at least one.
        """
        if self.free is None:
            return self.text
        return f"{self.text} (need {self.need}, most free {max(0, int(self.free[rejected].max()))})"

    def for_one(self, row: int) -> str:
        """Return the text for the rejected host in this row, with its own amounts if any."""
        if self.each is not None:
            return self.each(row)
        if self.free is None:
            return self.text
        return f"{self.text} (need {self.need}, free {max(0, int(self.free[row]))})"


Filter = Callable[[Snapshot, RequestSpec], Iterable[Check]]

#: Creates a filter from the options of the process. The factory must read them before it returns. A
#: factory with a true attribute ``on_rebuild`` creates a filter that depends on the image, and the
#: filter then also applies to rebuilds.
Factory = Callable[[cfg.ConfigOpts], Filter]


def of_facts(snapshot: Snapshot, holds: Callable[[JsonMapping], bool]) -> Mask:
    """Return the hosts whose facts meet the condition, evaluated once per distinct facts."""
    return np.array([holds(facts) for facts in snapshot.facts], np.bool_)[snapshot.kinds]
