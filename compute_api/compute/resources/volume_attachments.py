# SPDX-License-Identifier: Apache-2.0
"""The volumes of a server: none, as long as the cloud has no volume service."""

from __future__ import annotations

from common import errors
from common.json_types import JsonObject
from common.store.rows import ServerRecord
from compute_api.compute.request import Request


def index(request: Request, server: ServerRecord) -> JsonObject:
    """GET …/os-volume_attachments"""
    return {"volumeAttachments": []}


def show(request: Request, server: ServerRecord, volume_id: str) -> None:
    """GET …/os-volume_attachments/{id}"""
    raise errors.NotFound(f"Instance {server.id} is not attached to volume {volume_id[:80]}.")
