# SPDX-License-Identifier: Apache-2.0
"""Rows about what is still to be told to others."""

from __future__ import annotations

from typing import Protocol

from common.domain.json_types import JsonObject


class NotificationRow(Protocol):
    """One of ``notifications``."""

    id: int
    event: str
    key: str
    publisher: str
    body: JsonObject
    created_at: int
