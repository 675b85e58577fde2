# SPDX-License-Identifier: Apache-2.0
"""Certificates of hosts that end soon, as their agents tell: an agent renews its own, so one that
still ends soon needs somebody to look."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.clock import SECOND, iso
from common.security.certificates import DAY_SECONDS, SOON_SECONDS
from common.store.engine import moment
from common.store.schema import hosts
from deploy.operator.doctor.finding import Finding

#: Agents look once an hour, and conductors are told within the half hour after.
LATE_SECONDS = SOON_SECONDS - DAY_SECONDS
_FACTS = sa.select(hosts.c.name, hosts.c.facts)


def check(tx: Connection) -> Iterator[Finding]:
    """A finding for each host whose agent should have renewed it a day ago."""
    until = moment(tx) // SECOND + LATE_SECONDS
    for row in tx.execute(_FACTS):
        ends = (row.facts or {}).get("certificate_ends")
        if ends is not None and ends < until:
            yield Finding(
                "certificate-lasts",
                row.name,
                f"its certificate ends at {iso(ends * SECOND)}: journalctl -u kilonova-agent there says what keeps "
                "the agent from renewing it (docs/encryption.md, Certificates of hosts)",
            )
