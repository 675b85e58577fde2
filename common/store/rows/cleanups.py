# SPDX-License-Identifier: Apache-2.0
"""Rows of pending cleanups at external services."""

from __future__ import annotations

from typing import Protocol

from common.domain.json_types import JsonObject


class CleanupRow(Protocol):
    """A row of ``cleanups``."""

    id: int
    kind: str
    target: str
    place: str
    args: JsonObject
    server_id: str
    project_id: str
    why: str
    tries: int
    created_at: int
    due_at: int
