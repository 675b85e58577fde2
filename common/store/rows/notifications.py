# SPDX-License-Identifier: Apache-2.0
"""Rows of notifications that must be sent."""

from __future__ import annotations

from typing import Protocol

from common.domain.json_types import JsonObject


class NotificationRow(Protocol):
    """A row of ``notifications``."""

    id: int
    event: str
    key: str
    publisher: str
    body: JsonObject
    created_at: int
