# SPDX-License-Identifier: Apache-2.0
"""Services that the catalogue does not name although records need them: their ports and rules wait
until an operator has registered them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.doctor.finding import Finding
from common.store.neighbours import cleanups
from common.store.schema import cleanups as cleanups_table
from common.store.schema import servers, share_mappings

NETWORK, SHARE = "network", "share"  #: sections of the configuration
NAMES = {NETWORK: "network service", SHARE: "shared file system service"}
_INTERFACES = sa.type_coerce(servers.c.interfaces, sa.Text)
#: A server with interfaces, or with an action that may be about to make some.
_WITH_PORTS = (
    sa.select(servers.c.id)
    .where(
        servers.c.deleted == 0,
        servers.c.interfaces.is_not(None),
        sa.or_(_INTERFACES.not_in(("[]", "null")), servers.c.action.is_not(None)),
    )
    .order_by(servers.c.id)
    .limit(1)
)
_WITH_SHARES = sa.select(share_mappings.c.server_id).order_by(share_mappings.c.server_id).limit(1)


def compare_catalogue(missing: Collection[str], tx: Connection) -> list[Finding]:
    """What needs these services (NETWORK, SHARE), which the catalogue does not name."""
    return sorted(_findings(missing, tx))


def _findings(missing: Collection[str], tx: Connection) -> Iterator[Finding]:
    pending = tx.execute(sa.select(cleanups_table).order_by(cleanups_table.c.id)).all()
    kinds = {NETWORK: cleanups.OF_PORTS, SHARE: (cleanups.SHARE,)}
    for section, query in ((NETWORK, _WITH_PORTS), (SHARE, _WITH_SHARES)):
        if section not in missing:
            continue
        server = tx.scalar(query)
        left = next((row for row in pending if row.kind in kinds[section]), None)
        if server is not None:
            needs = f"server {server} has {'ports' if section == NETWORK else 'shares'} there"
        elif left is not None:
            needs = f"it has still to remove {cleanups.worded(left)} of server {left.server_id}"
        else:
            continue
        yield Finding(
            "service-registered",
            NAMES[section],
            f"{needs}, and the catalogue names none: register it in the region of [identity] region, "
            f"or set [{section}] endpoint. It is seen within a minute; nothing has to be started anew",
        )
