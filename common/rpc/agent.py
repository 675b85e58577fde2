# SPDX-License-Identifier: Apache-2.0
"""What agents answer: commands (``do``, cast), images to fetch ahead (``cache_images``, cast), and questions that the
API asks at once (``query``)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from common.models import Access, Command, ImageRef
from common.rpc.transport import Transport
from common.wire import from_wire, to_wire

TOPIC = "kilonova-agent"


class Agent(Protocol):
    """The interface that an agent process serves."""

    def do(self, commands: list[Command], access: Access | None) -> None:
        """Take these commands in hand; ``access`` opens the image service for them."""

    def cache_images(self, images: list[ImageRef], access: Access) -> None:
        """Fetch these into the host's image cache, one after the other; those in hand or there already are not
        fetched again. What became of each is told as ``Sync.cached``, also of one that was there."""

    def query(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer a question about a guest, or the host, at once."""


def serve(transport: Transport, host: str, agent: Agent) -> None:
    """Answer conductors and the API."""
    def do(commands: list[dict[str, Any]], access: dict[str, Any] | None) -> None:
        agent.do([from_wire(Command, command) for command in commands],
                 from_wire(Access, access) if access else None)

    def cache_images(images: list[dict[str, Any]], access: dict[str, Any]) -> None:
        agent.cache_images([from_wire(ImageRef, image) for image in images], from_wire(Access, access))

    def query(verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return agent.query(verb, arguments)
    transport.serve(TOPIC, host, {"do": do, "cache_images": cache_images, "query": query})


class Client:
    """For conductors (``do``, ``cache_images``) and the API (``query``)."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def do(self, host: str, commands: Sequence[Command], access: Access | None) -> bool:
        """Cast commands to a host; False when they were lost: the next sync sends them again."""
        return self._transport.cast(TOPIC, "do", server=host, commands=to_wire(list(commands)),
                                    access=to_wire(access))

    def cache_images(self, host: str, images: Sequence[ImageRef], access: Access) -> bool:
        """Cast images to fetch ahead; False when they were lost: the conductor's sweep repeats them."""
        return self._transport.cast(TOPIC, "cache_images", server=host, images=to_wire(list(images)),
                                    access=to_wire(access))

    def query(self, host: str, verb: str, arguments: dict[str, Any], timeout: float = 10) -> dict[str, Any]:
        """Ask a host; raises NoAnswer, or the Problem that it answers with."""
        answer: dict[str, Any] = self._transport.call(TOPIC, "query", server=host, timeout=timeout, verb=verb,
                                                      arguments=arguments)
        return answer
