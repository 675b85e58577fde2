# SPDX-License-Identifier: Apache-2.0
"""All tables of Kilonova's database.

Times are in µs since the epoch, by the database's clock. JSON columns hold data that is only read
and written as a whole. The tables have no foreign keys, because the insert of a child would lock
the parent against the lock order. ``kilonova doctor`` checks the references
instead.
"""

from common.store.schema.cleanups import cleanups
from common.store.schema.columns import DamagedObject, Json, metadata
from common.store.schema.hosts import (
    aggregate_hosts,
    aggregates,
    heartbeats,
    host_action_events,
    host_actions,
    host_images,
    host_joins,
    host_keys,
    hosts,
    services,
)
from common.store.schema.notifications import leases, notifications
from common.store.schema.placement import (
    allocations,
    consumers,
    inventories,
    provider_aggregates,
    provider_traits,
    providers,
    resource_classes,
    traits,
)
from common.store.schema.servers import (
    actions,
    block_devices,
    console_tokens,
    events,
    guests,
    migrations,
    servers,
    share_mappings,
)
from common.store.schema.tenants import (
    flavor_access,
    flavors,
    idempotency_keys,
    keypairs,
    projects,
    quotas,
    server_group_members,
    server_groups,
)

__all__ = [
    "DamagedObject",
    "Json",
    "actions",
    "aggregate_hosts",
    "aggregates",
    "allocations",
    "block_devices",
    "cleanups",
    "console_tokens",
    "consumers",
    "events",
    "flavor_access",
    "flavors",
    "guests",
    "heartbeats",
    "host_action_events",
    "host_actions",
    "host_images",
    "host_joins",
    "host_keys",
    "hosts",
    "idempotency_keys",
    "inventories",
    "keypairs",
    "leases",
    "metadata",
    "migrations",
    "notifications",
    "projects",
    "provider_aggregates",
    "provider_traits",
    "providers",
    "quotas",
    "resource_classes",
    "server_group_members",
    "server_groups",
    "servers",
    "services",
    "share_mappings",
    "traits",
]
