# SPDX-License-Identifier: Apache-2.0
"""Rows of hosts, services and aggregates."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy.engine import RowMapping

from common.domain.json_types import JsonObject


class ServiceRow(Protocol):
    """A row of ``services``."""

    id: int
    uuid: str
    host: str
    binary: str
    disabled: bool
    disabled_reason: str | None
    forced_down: bool
    created_at: int
    updated_at: int
    fenced_at: int | None
    version: str | None


class HeardServiceRow(ServiceRow, Protocol):
    """A service with its last heartbeat, and whether it is up. None: no heartbeat row exists."""

    seen_at: int | None
    up: bool | None


class HostActionRow(Protocol):
    """A row of ``host_actions``."""

    id: str
    host: str
    open_host: str | None
    name: str
    state: str
    args: JsonObject
    progress: JsonObject
    message: str
    user_id: str
    project_id: str
    request_id: str
    locked_by: str | None
    locked_until: int
    next_seq: int
    created_at: int
    updated_at: int
    finished_at: int | None


class AskedImage(Protocol):
    """An image that a host should fetch ahead."""

    host: str
    image_id: str
    image: JsonObject


class MarkedImage(Protocol):
    """A requested image, and whether the request is too old.

    ``error`` is None without a result, and "" if the host has cached the image.
    """

    host: str
    image_id: str
    image: JsonObject
    error: str | None
    late: bool


class FailedImage(Protocol):
    """A request that was deleted as too old, with the last error.

    ``error`` is None without a result, and "" if the host has cached the image.
    """

    host: str
    image_id: str
    error: str | None


class AggregateRow(Protocol):
    """A row of ``aggregates``."""

    id: int
    uuid: str
    name: str
    meta: dict[str, str]
    created_at: int
    updated_at: int | None

    @property
    def _mapping(self) -> RowMapping: ...
