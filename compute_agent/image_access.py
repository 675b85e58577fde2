# SPDX-License-Identifier: Apache-2.0
"""Download and upload of images for an agent, through the image gateway.

The agent has no access to the image service itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from common.domain import errors
from common.domain.errors import ConfigError
from common.domain.models import Access

if TYPE_CHECKING:
    from common.clients.image import ImageClient

_OLD_TICKET = "The image gateway refused the ticket for the image, which may have expired."


class ImageGatewayAccess:
    """Client of the image gateway. Each call uses the access (URL and ticket) of a command.

    A refused ticket raises Unavailable. The conductor then sends the command again with a new
    ticket.

    Args:
        protect: Returns the CA file that verifies the certificate of a URL, or True for the CA
            files of the system. Raises ConfigError for plain HTTP to another machine.
    """

    def __init__(self, protect: Callable[[str], bool | str] = lambda url: True) -> None:
        self._protect = protect

    def download(self, access: Access, image: str) -> Iterator[bytes]:
        """Yield the data of an image in chunks of at most 1 MiB.

        All errors occur during iteration.

        Raises:
            Unavailable: The gateway does not answer or refuses the ticket, or the URL is plain HTTP
                to another machine.
            Problem: The gateway refuses for another reason.
        """
        try:
            yield from self._client(access).download(image, access.token)
        except errors.Unauthorized as problem:
            raise errors.Unavailable(_OLD_TICKET) from problem

    def upload(self, access: Access, image: str, chunks: Iterator[bytes]) -> None:
        """Store the data of an image. An image that is active already counts as stored.

        Raises:
            Unavailable: As for ``download``.
            Problem: The gateway refuses for another reason.
        """
        client = self._client(access)
        try:
            try:
                client.upload(image, access.token, chunks)
            except errors.Conflict:
                # An active image contains the data of this upload: the response to an earlier
                # attempt was lost.
                if not client.show(image, access.token).is_active:
                    raise
        except errors.Unauthorized as problem:
            raise errors.Unavailable(_OLD_TICKET) from problem

    def _client(self, access: Access) -> ImageClient:
        from common.clients.image import ImageClient

        try:
            return ImageClient(access.url, verify=self._protect(access.url))
        except ConfigError as problem:
            raise errors.Unavailable(str(problem)) from problem
