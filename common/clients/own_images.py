# SPDX-License-Identifier: Apache-2.0
"""The image service as Kilonova's own user, for conductors, the image gateway and the API's look
before a create.

What tenants may use, this user must be able to read too, whoever owns it; what it cannot for lack
of a role is told as that, with the user and its roles, and never as an image that is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from common.clients.http import require_answer
from common.clients.identity import IdentityClient
from common.clients.image import Image, ImageClient
from common.domain import errors

T = TypeVar("T")
#: Images of these kinds are seen by everybody who knows their id.
OPEN = ("public", "community")
#: With it the image service's own rules hide nothing.
ROLE = "admin"


class OwnImages:
    """One process's way to it; made after the process has forked. Thread-safe. ``timeout``: seconds
    for an answer to begin."""

    def __init__(self, identity: IdentityClient, timeout: float = 10) -> None:
        self._identity, self._client = (
            identity,
            ImageClient(identity.image_url, timeout=timeout),
        )

    def require_answer(self) -> None:
        """Raises Unavailable unless the image service answers."""
        require_answer(self._identity.image_url())

    def ask(self, call: Callable[[ImageClient, str], T]) -> T:
        """What the call answers, given the client and our token.

        Raises:
            Forbidden: the user's roles do not suffice, or a quota is used up. NotFound: the image
            is gone, or hidden from a user without the role. Unavailable: no answer, or the token is
            not accepted any more.
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
            raise errors.NotFound(f"{problem.text} Or it is hidden: {self._needs()}") from problem

    def require_readable(self, image: Image) -> None:
        """A tenant sees this image: so must we, or no host gets it. An image service that is silent
        stops nobody.

        Raises:
            Forbidden: it is hidden from us.
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
            f"Kilonova's own user, {self._identity.described()}, needs the role {ROLE} at the image service, or "
            "one that its policy lets read and make images of all projects; its operator can give it that."
        )
