# SPDX-License-Identifier: Apache-2.0
"""Protocols of the store's rows: one per table, and one per selection with other columns.

SQLAlchemy's rows satisfy the protocols without a copy, and mypy finds a column that a row does not
have. A test compares each protocol with its table. JSON columns are parsed, except in
``ServerRecord``. Times are in µs.
"""

from common.store.rows.cleanups import (
    CleanupRow,
)
from common.store.rows.columns import (
    Numbered,
    Values,
)
from common.store.rows.hosts import (
    AggregateRow,
    AskedImage,
    FailedImage,
    HeardServiceRow,
    HostActionRow,
    MarkedImage,
    ServiceRow,
)
from common.store.rows.notifications import (
    NotificationRow,
)
from common.store.rows.placement import (
    ConsumerAllocation,
    Holding,
    InventoryRow,
    LockedProvider,
    ProviderAllocation,
    ProviderRow,
)
from common.store.rows.servers import (
    ActionInHandRow,
    ActionRow,
    BlockDeviceRow,
    ConsoleTokenRow,
    EventRow,
    GuestRow,
    LockedActionRow,
    LostActionRow,
    MigrationRow,
    PlacedServerRow,
    ReadingActionRow,
    RemovalRow,
    RequestedControl,
    ServerFacts,
    ServerKey,
    ServerPlace,
    ServerRecord,
    ServerRow,
    ServerState,
    ShareMappingRow,
    ShownMigrationRow,
    ShownServerRecord,
)
from common.store.rows.tenants import (
    FlavorRow,
    IdempotencyKeyRow,
    KeypairRow,
    ServerGroupRow,
)

__all__ = [
    "ActionInHandRow",
    "ActionRow",
    "AggregateRow",
    "AskedImage",
    "BlockDeviceRow",
    "CleanupRow",
    "ConsoleTokenRow",
    "ConsumerAllocation",
    "EventRow",
    "FailedImage",
    "FlavorRow",
    "GuestRow",
    "HeardServiceRow",
    "Holding",
    "HostActionRow",
    "IdempotencyKeyRow",
    "InventoryRow",
    "KeypairRow",
    "LockedActionRow",
    "LockedProvider",
    "LostActionRow",
    "MarkedImage",
    "MigrationRow",
    "NotificationRow",
    "Numbered",
    "PlacedServerRow",
    "ProviderAllocation",
    "ProviderRow",
    "ReadingActionRow",
    "RemovalRow",
    "RequestedControl",
    "ServerFacts",
    "ServerGroupRow",
    "ServerKey",
    "ServerPlace",
    "ServerRecord",
    "ServerRow",
    "ServerState",
    "ServiceRow",
    "ShareMappingRow",
    "ShownMigrationRow",
    "ShownServerRecord",
    "Values",
]
