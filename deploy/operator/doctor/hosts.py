# SPDX-License-Identifier: Apache-2.0
"""The invariants of hosts.

Registered hosts have complete rows, and heartbeats are not in the future. ``doctor.check`` calls
this module, which only reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.service_binaries import Binary
from common.store.engine import now
from common.store.schema import heartbeats, host_keys, hosts, inventories, providers, services
from deploy.operator.doctor.finding import Finding
from deploy.operator.doctor.unattended import AHEAD

# Queries are built once, because monitoring runs the checks often.
_INVENTORIED = sa.select(inventories.c.provider_id).distinct().subquery()
_HOSTS = sa.select(
    hosts.c.name,
    services.c.id.label("service"),
    heartbeats.c.host.label("heartbeat"),
    providers.c.id.label("provider"),
    _INVENTORIED.c.provider_id.label("gives"),
    host_keys.c.host.label("key"),
).select_from(
    hosts.outerjoin(
        services, sa.and_(services.c.host == hosts.c.name, services.c.binary == Binary.COMPUTE)
    )
    .outerjoin(
        heartbeats,
        sa.and_(heartbeats.c.host == hosts.c.name, heartbeats.c.binary == Binary.COMPUTE),
    )
    .outerjoin(providers, providers.c.host == hosts.c.name)
    .outerjoin(_INVENTORIED, _INVENTORIED.c.provider_id == providers.c.id)
    .outerjoin(host_keys, host_keys.c.host == hosts.c.name)
)
_PROVIDERS = sa.select(providers.c.id, providers.c.name).where(
    providers.c.host.is_not(None), providers.c.host.not_in(sa.select(hosts.c.name))
)
_AHEAD = sa.select(heartbeats.c.host, heartbeats.c.binary).where(
    heartbeats.c.seen_at > now() + AHEAD
)


def check(tx: Connection) -> Iterator[Finding]:
    """Yield the findings about hosts, providers and heartbeats.

    A host has a service, a heartbeat and a provider with inventory. It also has a key if any host
    has one. The provider of a host does not outlive the host. A heartbeat is at most ``AHEAD`` in
    the future.
    """
    rows = list(tx.execute(_HOSTS))
    with_keys = any(row.key is not None for row in rows)
    for row in rows:
        if row.service is None or row.heartbeat is None:
            missing = "service" if row.service is None else "heartbeat"
            yield Finding("host-known", row.name, f"has no {missing}", "host-without-service")
        if row.provider is None or row.gives is None:
            missing = "provider" if row.provider is None else "inventory"
            yield Finding("host-known", row.name, f"has no {missing}", "host-without-provider")
        if with_keys and row.key is None:
            yield Finding("host-known", row.name, "has no key", "host-without-key")
    for provider in tx.execute(_PROVIDERS):
        yield Finding(
            "host-known",
            provider.name,
            "is the provider of a host that does not exist any more",
            "provider-without-host",
            (str(provider.id),),
        )
    for beat in tx.execute(_AHEAD):
        yield Finding(
            "heartbeat",
            beat.host,
            f"the heartbeat of {beat.binary} is more than an hour in the future",
            facts=(beat.binary,),
        )
