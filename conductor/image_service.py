# SPDX-License-Identifier: Apache-2.0
"""The image service as the conductor uses it (``saga.Images``): as Kilonova's own user."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from common.clients.identity import Identity
from common.clients.image import Client
from common.models import ImageRef

T = TypeVar("T")


class ImageService:
    """One process's way to it; made after the process has forked. Only its lane and the cleanups call it."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._client = Client(lambda: identity.image_access().url, cache_seconds=0)

    def create(self, record: dict[str, Any]) -> None:
        self._ask(lambda token: self._client.create(record, token))

    def show(self, image_id: str) -> ImageRef:
        return self._ask(lambda token: self._client.look(image_id, token)).ref

    def delete(self, image_id: str) -> None:
        self._ask(lambda token: self._client.delete(image_id, token))

    def find(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        found = self._ask(lambda token: self._client.find(filters, token))
        return sorted(found, key=lambda image: str(image.get("created_at", "")), reverse=True)

    def _ask(self, call: Callable[[str], T]) -> T:
        return self._identity.with_token(call, "The image service")
