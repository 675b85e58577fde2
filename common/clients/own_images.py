# SPDX-License-Identifier: Apache-2.0
"""The image service with Kilonova's own user, for conductors, image gateway and API.

This user must be able to read every image that tenants use, whichever project owns the image. If a
role is missing, the error names the user and its roles, and does not report the image as missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from common.clients.http import require_answer
from common.clients.identity import IdentityClient
from common.clients.image import Image, ImageClient
from common.domain import errors

T = TypeVar("T")
#: Visibilities of images that every user can read by id.
OPEN = ("public", "community")
#: With this role the image service's default policy hides no image.
ROLE = "admin"


class OwnImages:
    """A client of the image service that sends the token of Kilonova's own user.

    Created after the process has forked. Thread-safe.

    Args:
        timeout: Seconds until the first byte of a response.
    """

    def __init__(self, identity: IdentityClient, timeout: float = 10) -> None:
        self._identity, self._client = (
            identity,
            ImageClient(identity.image_url, timeout=timeout),
        )

    def require_answer(self) -> None:
        """Check that the image service answers.

        Raises:
            Unavailable: The service does not answer, or its URL is unknown.
        """
        require_answer(self._identity.image_url())

    def ask(self, call: Callable[[ImageClient, str], T]) -> T:
        """Call a function with the client and Kilonova's token, and return its result.

        Errors of the function are passed on. If a missing role may be the cause, the text names the
        user and the role.

        Raises:
            Forbidden: The user's roles do not suffice, or a quota is exceeded.
            NotFound: The image does not exist, or is hidden from a user without the role.
            Unavailable: The service does not answer or refused the token, or there is no token.
        """
        try:
            return self._identity.with_token(
                lambda token: call(self._client, token), "The image service"
            )
        except errors.Forbidden as problem:
            raise errors.Forbidden(f"{problem.text} {self._needs()}") from problem
        except errors.NotFound as problem:
            if ROLE in self._identity.roles():
                raise
            raise errors.NotFound(
                f"{problem.text} Or the image is hidden: {self._needs()}"
            ) from problem

    def require_readable(self, image: Image) -> None:
        """Check that Kilonova's user can read an image that a tenant sees.

        Hosts get the image's data through this user. A public or community image passes without a
        query. If the image service does not answer, or there is no token, the image passes too.

        Raises:
            Forbidden: The image is hidden from Kilonova's user.
            Problem: The image service refuses for another reason.
        """
        if image.visibility in OPEN:
            return
        try:
            self.ask(lambda client, token: client.look(image.ref.id, token))
        except errors.Unavailable:
            return
        except (errors.NotFound, errors.Forbidden) as problem:
            raise errors.Forbidden(
                f"The cloud cannot read image {image.ref.id} for its hosts. {self._needs()}"
            ) from problem

    def _needs(self) -> str:
        return (
            f"Kilonova's own user, {self._identity.describe_user()}, needs the role {ROLE} at the image service, or "
            "another role that may read and create images of all projects. An operator can assign the role."
        )
