# SPDX-License-Identifier: Apache-2.0
"""External services that records need and the catalogue does not name.

Actions on ports, shares and volumes wait until an operator registers the service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store import cleanups
from common.store.schema import block_devices, servers, share_mappings
from common.store.schema import cleanups as cleanups_table
from deploy.operator.doctor.finding import Finding

#: Names of sections of the configuration.
NETWORK, SHARE, VOLUME = "network", "share", "volume"
NAMES = {
    NETWORK: "network service",
    SHARE: "shared file system service",
    VOLUME: "block storage service",
}
_INTERFACES = sa.type_coerce(servers.c.interfaces, sa.Text)
#: A server with interfaces, or with an action that may create some.
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

_WITH_VOLUMES = sa.select(block_devices.c.server_id).order_by(block_devices.c.server_id).limit(1)
#: Section -> query for a server that needs the service, its resources there, kinds of cleanups that
#: need the service.
_NEEDS = {
    NETWORK: (_WITH_PORTS, "ports", cleanups.OF_PORTS),
    SHARE: (_WITH_SHARES, "shares", (cleanups.SHARE,)),
    VOLUME: (_WITH_VOLUMES, "volumes", cleanups.OF_VOLUMES),
}


def compare_catalogue(missing: Collection[str], tx: Connection) -> list[Finding]:
    """Return a finding for each missing service that a server or a pending cleanup needs.

    Args:
        missing: Services that the catalogue does not name (NETWORK, SHARE, VOLUME).
        tx: The transaction.
    """
    return sorted(_findings(missing, tx))


def _findings(missing: Collection[str], tx: Connection) -> Iterator[Finding]:
    pending = tx.execute(sa.select(cleanups_table).order_by(cleanups_table.c.id)).all()
    for section, (query, resources, kinds) in _NEEDS.items():
        if section not in missing:
            continue
        server = tx.scalar(query)
        cleanup = next((row for row in pending if row.kind in kinds), None)
        if server is not None:
            needs = f"server {server} has {resources} there"
        elif cleanup is not None:
            needs = (
                f"it has still to remove {cleanups.describe(cleanup)} of server {cleanup.server_id}"
            )
        else:
            continue
        yield Finding(
            "service-registered",
            NAMES[section],
            f"{needs}, but the catalogue does not name this service. Register the service in the region of [identity] "
            f"region, or set [{section}] endpoint. A registered service is used within a minute, without a restart",
        )
