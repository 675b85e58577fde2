# SPDX-License-Identifier: Apache-2.0
"""An image service in memory, as conductor and agents use it; it can refuse, be silent, and tell what it holds."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from common import errors
from common.models import ImageRef


class Images:
    """Implements ``conductor.saga.Images`` and gives agents their writers."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.refuses: str | None = None
        self.silent = 0
        self.same_age = False       # all were made within one second: no order can be told

    def create(self, record: dict[str, Any]) -> None:
        self._speak()
        if self.refuses:
            raise errors.Forbidden(self.refuses)
        self.records.setdefault(record["id"], {**record, "number": len(self.records), "data": None})

    def show(self, image_id: str) -> ImageRef:
        self._speak()
        if image_id not in self.records:
            raise errors.NotFound(f"Image {image_id} could not be found.")
        return ImageRef(image_id, "qcow2", len(self.records[image_id]["data"] or b""))

    def delete(self, image_id: str) -> None:
        self._speak()
        self.records.pop(image_id, None)

    def find(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        self._speak()
        found = [record for record in self.records.values()
                 if all(record.get(name) == value for name, value in filters.items())]
        return sorted(found, key=lambda record: 0 if self.same_age else -int(record["number"]))

    def writer(self, image_id: str) -> Callable[[Iterator[bytes]], None]:
        """What an agent stores the bytes of an image with."""
        def write(chunks: Iterator[bytes]) -> None:
            data = b"".join(chunks)
            if image_id in self.records:
                self.records[image_id]["data"] = data
        return write

    def _speak(self) -> None:
        if self.silent:
            self.silent -= 1
            raise errors.NoAnswer("the image service is silent")
