# SPDX-License-Identifier: Apache-2.0
"""The interface of agents: commands (``do``), images to prefetch, and queries.

``do`` and ``cache_images`` are casts, and only conductors have the keys for them. The API, the
console service and operators' commands send a ``query`` and wait for the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.models import Access, Command, ImageRef
from common.domain.text import one_line
from common.domain.wire import from_wire, to_wire
from common.rpc.host_link import ControlSide, HostSide
from common.security.host_keys import Purpose
from common.service.log import get_logger

log = get_logger(__name__)


class AgentApi(Protocol):
    """The interface that an agent process serves."""

    def do(self, commands: list[Command], access: Access | None) -> None:
        """Accept commands, which worker threads of the agent carry out later.

        Args:
            commands: Commands of conductors, in any order. Repeated commands are harmless.
            access: Access to the images of the commands, or None if they have no images.
        """

    def cache_images(self, images: list[ImageRef], access: Access) -> None:
        """Queue images for the host's image cache. A thread of the agent fetches one at a time.

        Images that are cached or being fetched are not fetched again. The agent reports the outcome
        of each image in ``Sync.cached``, also for cached images. If the agent restarts before that,
        the queue is lost, and the conductor sends the images again.

        Args:
            images: The images to fetch.
            access: The image gateway's URL, and a ticket for reading these images.
        """

    def query(self, verb: str, arguments: JsonObject) -> JsonObject:
        """Return the answer to a query about a guest or the host.

        Args:
            verb: Name of the query, as in ``AgentClient.query``.
            arguments: Arguments of the query.

        Raises:
            Problem: The query failed or is unknown. The link passes this error to the caller.
        """


def serve(link: HostSide, agent: AgentApi) -> None:
    """Serve the methods of ``agent`` to the control plane.

    Requests to ``do`` and ``cache_images`` need the host's command key, requests to ``query`` the
    query key.

    Args:
        link: The host's end of the link, which starts to listen.
        agent: Carries out the requests.
    """

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


def commands_of(contents: Iterable[JsonObject]) -> list[Command]:
    """Parse commands. Leave out commands that cannot be parsed, and log the error.

    A faulty command thus delays no other. The conductor repeats the command.
    """
    commands = []
    for content in contents:
        try:
            commands.append(from_wire(Command, content))
        except (TypeError, ValueError, AttributeError) as problem:
            log.error(
                "a faulty command is ignored, and the conductor sends it again",
                kind=type(problem).__name__,
                problem=problem,
            )
    return commands


class AgentClient:
    """The client of agents. Conductors call ``do`` and ``cache_images``.

    The API, the console service and operators' commands call ``query``.
    """

    def __init__(self, link: ControlSide) -> None:
        self._link = link

    def do(self, host: str, commands: Sequence[Command], access: Access | None) -> bool:
        """Send commands to a host, with the access to their images, if any.

        Returns:
            False if the broker did not take the message, or no key of the host is available. The
            answer to the host's next report contains the commands.
        """
        return self._cast(
            host, "do", {"commands": to_wire(list(commands)), "access": to_wire(access)}
        )

    def cache_images(self, host: str, images: Sequence[ImageRef], access: Access) -> bool:
        """Request a host to prefetch images. ``access`` has a ticket for reading the images.

        Returns:
            False if the broker did not take the message, or no key of the host is available. The
            conductor's sweep repeats the message.
        """
        return self._cast(
            host, "cache_images", {"images": to_wire(list(images)), "access": to_wire(access)}
        )

    def _cast(self, host: str, method: str, content: JsonObject) -> bool:
        try:
            return self._link.cast(host, method, Purpose.COMMAND, content)
        except errors.Unavailable:  # A host without a key is treated like an unreachable host.
            return False

    def query(self, host: str, verb: str, arguments: JsonObject, timeout: float = 10) -> JsonObject:
        """Send a query to a host and return the answer.

        The text of a Problem is one printable line, even if a host sends more.

        Args:
            host: Name of the host.
            verb: Name of the query in the table of ``compute_agent.queries.HostQueries``.
            arguments: Arguments of the query.
            timeout: Seconds to wait for the answer.

        Raises:
            NoAnswer: The host did not answer in time, cannot be reached, or is in quarantine.
            Unavailable: The host has no key, this process has no secret for queries, or the
                database does not answer.
            Problem: The host's answer is this error.
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
