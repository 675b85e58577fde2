# SPDX-License-Identifier: Apache-2.0
"""The image service as the conductor uses it (``saga.Images``): as Kilonova's own user."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from common import errors
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
        """A token that is not accepted any more is given up; the call is made again later with a new one."""
        token = self._identity.token()
        try:
            return call(token)
        except errors.Unauthorized as problem:
            self._identity.forget_token(token)
            raise errors.Unavailable("The image service does not accept Kilonova's token.") from problem
