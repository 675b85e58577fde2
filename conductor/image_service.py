# SPDX-License-Identifier: Apache-2.0
"""The image service as the conductor uses it (``saga.Images``): as Kilonova's own user."""
from __future__ import annotations

from typing import Any

from common.clients.identity import Identity
from common.clients.own_images import OwnImages
from common.models import ImageRef


class ImageService:
    """One process's way to it; made after the process has forked. Only its lane and the cleanups call it."""

    def __init__(self, identity: Identity) -> None:
        self._images = OwnImages(identity)

    def create(self, record: dict[str, Any]) -> None:
        self._images.ask(lambda client, token: client.create(record, token))

    def show(self, image_id: str) -> ImageRef:
        return self._images.ask(lambda client, token: client.look(image_id, token)).ref

    def delete(self, image_id: str) -> None:
        self._images.ask(lambda client, token: client.delete(image_id, token))

    def find(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        found = self._images.ask(lambda client, token: client.find(filters, token))
        return sorted(found, key=lambda image: str(image.get("created_at", "")), reverse=True)
