# SPDX-License-Identifier: Apache-2.0
"""Rows of resource providers, inventories and allocations."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy.engine import RowMapping


class ProviderRow(Protocol):
    """A row of ``providers``."""

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
    """A row of ``inventories``."""

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
    """A consumer's allocation of one class at a provider, with the consumer's columns."""

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
    """An allocation of a provider, with the consumer."""

    consumer_id: str
    resource_class: str
    used: int
    created_at: int
    consumer_generation: int


class Holding(Protocol):
    """The usage of one class by one type of consumers."""

    type: str
    resource_class: str
    used: int
