# SPDX-License-Identifier: Apache-2.0
"""The volumes of a server: none, as long as the cloud has no volume service."""
from __future__ import annotations

from typing import Any

from common import errors
from compute_api.request import Request


def index(request: Request, server: Any) -> dict[str, Any]:
    """GET …/os-volume_attachments"""
    return {"volumeAttachments": []}


def show(request: Request, server: Any, volume_id: str) -> None:
    """GET …/os-volume_attachments/{id}"""
    raise errors.NotFound(f"Instance {server.id} is not attached to volume {volume_id[:80]}.")
