# SPDX-License-Identifier: Apache-2.0
"""Rows about hosts, the services on them, and the aggregates that they are in."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy.engine import RowMapping

from common.domain.json_types import JsonObject


class ServiceRow(Protocol):
    """One of ``services``."""

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


class HeardServiceRow(ServiceRow, Protocol):
    """With when it was heard last, and whether it is judged to be up; None: never."""

    seen_at: int | None
    up: bool | None


class HostActionRow(Protocol):
    """One of ``host_actions``."""

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
    """An image that a host shall fetch ahead."""

    host: str
    image_id: str
    image: JsonObject


class MarkedImage(Protocol):
    """An image that a host was asked for, and whether that is too long ago."""

    host: str
    image_id: str
    image: JsonObject
    error: str | None
    late: bool


class FailedImage(Protocol):
    """An image that a host was asked for in vain, and why."""

    host: str
    image_id: str
    error: str | None


class AggregateRow(Protocol):
    """One of ``aggregates``."""

    id: int
    uuid: str
    name: str
    meta: dict[str, str]
    created_at: int
    updated_at: int | None

    @property
    def _mapping(self) -> RowMapping: ...
