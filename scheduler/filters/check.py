# SPDX-License-Identifier: Apache-2.0
"""What a filter is: a function that asks all hosts at once whether they may take a server.

Every filter makes ``Check``s; ``scheduler.selection`` applies them in order and counts a host for
the first that it does not pass. The texts reach tenants: they name nothing that the request did not
name itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from oslo_config import cfg

from common.domain.json_types import JsonMapping
from common.domain.models import RequestSpec
from scheduler.snapshot import Mask, Numbers, Snapshot

#: The room of a host that this check does not limit.
UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class Check:
    """One question to all hosts. ``text`` says what is true of hosts that do not pass; with
    ``need``, ``free`` has each host's number beside it; ``each`` says it of the host in one row,
    where hosts differ.

    room: how many such servers a host that passes can take, where that is limited; every server
    that is placed there makes it one less. settles: the first server placed changes which hosts
    pass, so ask again for the next.
    """

    passes: Mask
    text: str
    need: int = 0
    free: Numbers | None = None
    room: Numbers | None = None
    each: Callable[[int], str] | None = None
    settles: bool = False

    def for_many(self, rejected: Mask) -> str:
        """The text for all rejected hosts together."""
        if self.free is None:
            return self.text
        return f"{self.text} (need {self.need}, most free {max(0, int(self.free[rejected].max()))})"

    def for_one(self, row: int) -> str:
        """The text for the host in this row."""
        if self.each is not None:
            return self.each(row)
        if self.free is None:
            return self.text
        return f"{self.text} (need {self.need}, free {max(0, int(self.free[row]))})"


Filter = Callable[[Snapshot, RequestSpec], Iterable[Check]]

#: Makes a filter, once, from the process's options. What it reads of them it must have read before
#: it returns. One with an attribute ``on_rebuild`` that is true depends on the image, so it is
#: asked of rebuilds too.
Factory = Callable[[cfg.ConfigOpts], Filter]


def of_facts(snapshot: Snapshot, holds: Callable[[JsonMapping], bool]) -> Mask:
    """The hosts whose facts this is true of; asked once of those that many hosts have in common."""
    return np.array([holds(facts) for facts in snapshot.facts], np.bool_)[snapshot.kinds]
