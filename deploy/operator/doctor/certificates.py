# SPDX-License-Identifier: Apache-2.0
"""Certificates of hosts that expire soon, as their agents report.

An agent renews the certificate early. If a certificate still expires soon, an operator has to look.
"""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.clock import SECOND, iso
from common.security.certificates import DAY_SECONDS, SOON_SECONDS
from common.store.engine import moment
from common.store.schema import hosts
from deploy.operator.doctor.finding import Finding

#: Agents check once an hour, and report to conductors within another half hour.
LATE_SECONDS = SOON_SECONDS - DAY_SECONDS
_FACTS = sa.select(hosts.c.name, hosts.c.facts)


def check(tx: Connection) -> Iterator[Finding]:
    """Yield a finding for each host whose agent should have renewed its certificate a day ago."""
    until = moment(tx) // SECOND + LATE_SECONDS
    for row in tx.execute(_FACTS):
        ends = (row.facts or {}).get("certificate_ends")
        if ends is not None and ends < until:
            yield Finding(
                "certificate-lasts",
                row.name,
                f"its certificate ends at {iso(ends * SECOND)}. The log of the agent on the host has the reason why "
                "it was not renewed: journalctl -u kilonova-agent (docs/encryption.md, Certificates of hosts)",
            )
