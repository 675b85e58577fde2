# SPDX-License-Identifier: Apache-2.0
"""Images as an agent gets and stores them: at the image gateway, never at the image service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from common.domain import errors
from common.domain.errors import ConfigError
from common.domain.models import Access

if TYPE_CHECKING:
    from common.clients.image import ImageClient

_OLD_TICKET = "the image gateway does not accept the ticket (any more)"


class ImageGatewayAccess:
    """The image gateway, with the access that came with a command. A ticket that is not accepted
    any more means that the command is sent again with a new one. ``protect``: what the certificate
    at a URL is verified with; raises ConfigError where that would be plain text to another
    machine."""

    def __init__(self, protect: Callable[[str], bool | str] = lambda url: True) -> None:
        self._protect = protect

    def download(self, access: Access, image: str) -> Iterator[bytes]:
        """An image's bytes."""
        try:
            yield from self._client(access).download(image, access.token)
        except errors.Unauthorized as problem:
            raise errors.Unavailable(_OLD_TICKET) from problem

    def upload(self, access: Access, image: str, chunks: Iterator[bytes]) -> None:
        """Store an image's bytes."""
        try:
            self._client(access).upload(image, access.token, chunks)
        except errors.Conflict:
            # Our own bytes, when the answer to an earlier upload was lost.
            if not self._client(access).show(image, access.token).is_active:
                raise
        except errors.Unauthorized as problem:
            raise errors.Unavailable(_OLD_TICKET) from problem

    def _client(self, access: Access) -> ImageClient:
        from common.clients.image import ImageClient

        try:
            return ImageClient(access.url, verify=self._protect(access.url))
        except ConfigError as problem:
            raise errors.Unavailable(str(problem)) from problem
