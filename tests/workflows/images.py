# SPDX-License-Identifier: Apache-2.0
"""An image service in memory, for conductor and agents.

For the errors that a test can cause see ``service_doubles``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from common.clients.image import Image
from common.domain import errors
from common.domain.models import ImageRef
from conductor.engine.external_services import ImageApi
from tests.workflows.service_doubles import ServiceDouble


class Images(ServiceDouble, interface=ImageApi):
    """Implement ``conductor.engine.external_services.ImageApi``, and the upload of agents."""

    def __init__(self) -> None:
        super().__init__("image service")
        self.records: dict[str, dict[str, Any]] = {}
        #: Text of the 403 for each new image, or None to accept new images.
        self.refuses: str | None = None
        #: Image id -> fields of the ``Image`` from ``look`` that differ from the defaults.
        self.changed: dict[str, dict[str, Any]] = {}
        #: Sort key of an image by its number. Images within the same second have the same age.
        self.age: Callable[[int], int] = operator.neg

    def create(self, record: dict[str, Any]) -> None:
        self._speak("create", record["id"])
        if self.refuses:
            raise errors.Forbidden(self.refuses)
        self.records.setdefault(
            record["id"], {**record, "number": len(self.records), "data": None, "status": "queued"}
        )
        self._answer(None)

    def show(self, image_id: str) -> ImageRef:
        self._speak("show", image_id)
        if image_id not in self.records:
            raise errors.NotFound(f"Image {image_id} could not be found.")
        return self._answer(ImageRef(image_id, "qcow2", len(self.records[image_id]["data"] or b"")))

    def look(self, image_id: str) -> Image:
        """Return the image's record. An unknown image counts as active."""
        self._speak("look", image_id)
        record = self.records.get(image_id, {"status": "active"})
        image = Image(ImageRef(image_id, "qcow2", 1), status=record["status"])
        return self._answer(replace(image, **self.changed.get(image_id, {})))

    def delete(self, image_id: str) -> None:
        self._speak("delete", image_id)
        self.records.pop(image_id, None)
        self._answer(None)

    def leave_empty(self, image_id: str) -> None:
        self._speak("leave_empty", image_id)
        if image_id not in self.records:
            raise errors.NotFound(f"Image {image_id} could not be found.")
        self.records[image_id].update(data=b"", status="active")
        self._answer(None)

    def find(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        self._speak("find")
        matches = [
            record
            for record in self.records.values()
            if all(record.get(name) == value for name, value in filters.items())
        ]
        return self._answer(sorted(matches, key=lambda record: self.age(int(record["number"]))))

    def writer(self, image_id: str) -> Callable[[Iterator[bytes]], None]:
        """Return the function with which an agent uploads the data of an image."""

        def write(chunks: Iterator[bytes]) -> None:
            data = b"".join(chunks)
            if image_id in self.records:
                self.records[image_id].update(data=data, status="active")

        return write
