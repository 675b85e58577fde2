# SPDX-License-Identifier: Apache-2.0
"""Rows about what is still to be put right at a neighbour."""

from __future__ import annotations

from typing import Protocol

from common.domain.json_types import JsonObject


class CleanupRow(Protocol):
    """One of ``cleanups``."""

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
