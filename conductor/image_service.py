# SPDX-License-Identifier: Apache-2.0
"""The image service as the conductor uses it (``saga.Images``): as Kilonova's own user, with a short token."""
from __future__ import annotations

from typing import Any

from common.clients.identity import Identity
from common.clients.image import Client
from common.models import ImageRef


class ImageService:
    """One process's way to it; made after the process has forked. Only the lane OUTSIDE calls it."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def create(self, record: dict[str, Any]) -> None:
        self._client().create(record, self._token())

    def show(self, image_id: str) -> ImageRef:
        return self._client().look(image_id, self._token()).ref

    def delete(self, image_id: str) -> None:
        self._client().delete(image_id, self._token())

    def find(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._client().find(filters, self._token())
        return sorted(found, key=lambda image: str(image.get("created_at", "")), reverse=True)

    def _client(self) -> Client:
        return Client(self._identity.image_access().url, cache_seconds=0)

    def _token(self) -> str:
        return self._identity.image_access().token
