# SPDX-License-Identifier: Apache-2.0
"""What agents answer: commands (``do``, cast), images to fetch ahead (``cache_images``, cast), and
questions that the API asks at once (``query``). Only conductors have the keys for the first two."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.models import Access, Command, ImageRef
from common.domain.text import one_line
from common.domain.wire import from_wire, to_wire
from common.rpc.host_link import ControlSide, HostSide
from common.security.host_keys import Purpose

log = logging.getLogger(__name__)


class AgentApi(Protocol):
    """The interface that an agent process serves."""

    def do(self, commands: list[Command], access: Access | None) -> None:
        """Take these commands in hand; ``access`` opens their images."""

    def cache_images(self, images: list[ImageRef], access: Access) -> None:
        """Fetch these into the host's image cache, one after the other; those in hand or there
        already are not fetched again. What became of each is told as ``Sync.cached``, also of one
        that was there."""

    def query(self, verb: str, arguments: JsonObject) -> JsonObject:
        """Answer a question about a guest, or the host, at once."""


def serve(link: HostSide, agent: AgentApi) -> None:
    """Answer conductors and the API."""

    def do(commands: list[JsonObject], access: JsonObject | None) -> None:
        agent.do(commands_of(commands), from_wire(Access, access) if access else None)

    def cache_images(images: list[JsonObject], access: JsonObject) -> None:
        agent.cache_images(
            [from_wire(ImageRef, image) for image in images], from_wire(Access, access)
        )

    def query(verb: str, arguments: JsonObject) -> JsonObject:
        return agent.query(verb, arguments)

    link.serve(
        {
            "do": (Purpose.COMMAND, do),
            "cache_images": (Purpose.COMMAND, cache_images),
            "query": (Purpose.QUERY, query),
        }
    )


def commands_of(said: Iterable[JsonObject]) -> list[Command]:
    """Those of them that can be read: one that cannot holds up no other. It is sent again, and its
    action looked at by whoever reads the log."""
    found = []
    for one in said:
        try:
            found.append(from_wire(Command, one))
        except (TypeError, ValueError, AttributeError) as problem:
            log.error(
                "a command cannot be read and is left out: %s: %s", type(problem).__name__, problem
            )
    return found


class AgentClient:
    """For conductors (``do``, ``cache_images``) and the API (``query``)."""

    def __init__(self, link: ControlSide) -> None:
        self._link = link

    def do(self, host: str, commands: Sequence[Command], access: Access | None) -> bool:
        """Cast commands to a host; False when they were lost: the next sync sends them again."""
        return self._cast(
            host, "do", {"commands": to_wire(list(commands)), "access": to_wire(access)}
        )

    def cache_images(self, host: str, images: Sequence[ImageRef], access: Access) -> bool:
        """Cast images to fetch ahead; False when they were lost: the conductor's sweep repeats
        them."""
        return self._cast(
            host, "cache_images", {"images": to_wire(list(images)), "access": to_wire(access)}
        )

    def _cast(self, host: str, method: str, content: JsonObject) -> bool:
        try:
            return self._link.cast(host, method, Purpose.COMMAND, content)
        except errors.Unavailable:  # a host without a key is as good as away
            return False

    def query(self, host: str, verb: str, arguments: JsonObject, timeout: float = 10) -> JsonObject:
        """Ask a host; raises NoAnswer, or the Problem that it answers with.

        The text of the Problem is one printable line, whatever the host sends.
        """
        try:
            answer: JsonObject = self._link.call(
                host, "query", Purpose.QUERY, {"verb": verb, "arguments": arguments}, timeout
            )
        except errors.Problem as problem:
            problem.text = one_line(problem.text)
            problem.args = (problem.text,)
            raise
        return answer
