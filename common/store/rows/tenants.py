# SPDX-License-Identifier: Apache-2.0
"""Rows of key pairs, flavors and server groups."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy.engine import RowMapping

from common.domain.json_types import JsonObject


class KeypairRow(Protocol):
    """A row of ``keypairs``."""

    id: int
    user_id: str
    name: str
    type: str
    fingerprint: str
    public_key: str
    created_at: int

    @property
    def _mapping(self) -> RowMapping: ...


class IdempotencyKeyRow(Protocol):
    """A row of ``idempotency_keys``."""

    project_id: str
    key: str
    digest: str
    reservation_id: str
    server_id: str
    created_at: int


class FlavorRow(Protocol):
    """A row of ``flavors``."""

    id: int
    flavorid: str
    name: str
    vcpus: int
    memory_mb: int
    root_gb: int
    ephemeral_gb: int
    swap_mb: int
    rxtx_factor: float
    is_public: bool
    description: str | None
    extra_specs: dict[str, str]
    created_at: int

    @property
    def _mapping(self) -> RowMapping: ...


class ServerGroupRow(Protocol):
    """A row of ``server_groups``."""

    id: str
    project_id: str
    user_id: str
    name: str
    policy: str
    rules: JsonObject
    created_at: int
