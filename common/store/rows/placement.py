# SPDX-License-Identifier: Apache-2.0
"""Rows about resource providers, what they have and who holds how much of it."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy.engine import RowMapping


class ProviderRow(Protocol):
    """One of ``providers``."""

    id: int
    uuid: str
    name: str
    host: str | None
    parent_uuid: str | None
    root_uuid: str
    generation: int
    created_at: int
    changed_at: int
    failures: int
    failed_at: int | None


class LockedProvider(Protocol):
    """A host's provider, locked, with its failed builds and the time of the lock."""

    id: int
    host: str
    failures: int
    failed_at: int | None
    at: int


class InventoryRow(Protocol):
    """One of ``inventories``."""

    provider_id: int
    resource_class: str
    total: int
    reserved: int
    min_unit: int
    max_unit: int
    step_size: int
    allocation_ratio: float
    host_reserved: int | None
    host_ratio: float | None
    set_reserved: int | None
    set_ratio: float | None
    excess: int

    @property
    def _mapping(self) -> RowMapping: ...


class ConsumerAllocation(Protocol):
    """What a consumer holds of one class at one provider, with the consumer's facts."""

    resource_class: str
    used: int
    uuid: str
    generation: int
    project_id: str
    user_id: str
    type: str
    created_at: int
    consumer_generation: int


class ProviderAllocation(Protocol):
    """What is held of one class of a provider, by whom."""

    consumer_id: str
    resource_class: str
    used: int
    created_at: int
    consumer_generation: int


class Holding(Protocol):
    """What one type of consumers holds of one class."""

    type: str
    resource_class: str
    used: int
