# SPDX-License-Identifier: Apache-2.0
"""What is checked of every request: the hosts it names, and room for its resources.

Called by ``scheduler.select``. The arithmetic of a resource class is Placement's, and must stay the same as
that of the claim (``common.store.allocations``): a host passes here exactly when a claim on it would.
"""
from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from common.models import RequestSpec
from scheduler.filters import Check
from scheduler.snapshot import Snapshot


def named_hosts(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """The forced host is the only one; an excluded host is none."""
    if spec.force_host is not None:
        only = np.zeros(len(snapshot.names), np.bool_)
        if spec.force_host in snapshot.rows:
            only[snapshot.rows[spec.force_host]] = True
        yield Check(only, f"not the requested host {spec.force_host}")
    if spec.excluded:
        others = np.ones(len(snapshot.names), np.bool_)
        others[[snapshot.rows[name] for name in spec.excluded if name in snapshot.rows]] = False
        yield Check(others, "excluded after an earlier attempt")


def resources(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """The host has every resource class of the request, in this amount, free."""
    for name, amount in sorted(spec.resources.items()):
        if amount <= 0:
            continue
        stock = snapshot.stock.get(name)
        if stock is None:
            yield Check(np.zeros(len(snapshot.names), np.bool_), f"without {name}")
            continue
        yield Check(stock.most > 0, f"without {name}")
        allowed = (amount >= stock.least) & (amount <= stock.most) & (amount % stock.step == 0)
        yield Check(allowed, f"not able to give one server {amount} of {name}")
        yield Check(stock.free >= amount, f"short of {name}", amount, stock.free)
