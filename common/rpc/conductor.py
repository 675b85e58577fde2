# SPDX-License-Identifier: Apache-2.0
"""What conductors answer: the wakeup message (``wake``), the one exchange with agents (``sync``),
and the heartbeat that an idle agent sends in its place.

``ConductorWakeup`` is how the API wakes a conductor: it never blocks, and one background thread
sends one message for all wakeups since the last; a wakeup that is lost costs at most the
conductor's next sweep.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Protocol, TypeVar, cast

from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.models import Access, Heartbeat, HeartbeatAnswer, Sync, SyncAnswer
from common.domain.wire import from_wire, to_wire
from common.rpc import host_credentials
from common.rpc.agent import commands_of
from common.rpc.host_link import ControlSide, HostSide
from common.rpc.transport import Transport
from common.security.broker_names import HEARTBEATS, REPORTS
from common.security.host_keys import NotGenuine

log = logging.getLogger(__name__)
TOPIC = "kilonova-conductor"
Said = TypeVar("Said", Sync, Heartbeat)


class ConductorApi(Protocol):
    """The interface that a conductor process serves."""

    def wake(self, neighbours: bool = False) -> None:
        """There may be due actions; ``neighbours``: also among those that wait for a neighbour."""

    def loop_back(self) -> None:
        """A conductor's message to itself came back through the broker."""

    def sync(self, request: Sync) -> tuple[SyncAnswer, Access | None]:
        """Take in what an agent says; answer what it should know, and what opens its images."""

    def heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
        """Does nothing wait for this idle host? Else it is to sync, with all its domains."""


def serve(transport: Transport, name: str, conductor: ConductorApi) -> None:
    """Answer wakeup messages."""
    transport.serve(TOPIC, name, {"wake": conductor.wake, "loop_back": conductor.loop_back})


def listen(
    link: ControlSide,
    conductor: ConductorApi,
    joins: host_credentials.HostJoinsApi | None = None,
    certificates: host_credentials.HostCertificatesApi | None = None,
) -> None:
    """Answer agents, with ``joins`` those that are to become one, and with ``certificates`` those
    whose certificate ends. What a host says concerns that host: a message in which it calls itself
    by another name than its key has is refused."""

    def sync(host: str, request: dict[str, object]) -> dict[str, object]:
        answer, access = conductor.sync(_of(host, from_wire(Sync, request)))
        return {"answer": to_wire(answer), "access": to_wire(access)}

    def heartbeat(host: str, beat: dict[str, object]) -> object:
        return to_wire(conductor.heartbeat(_of(host, from_wire(Heartbeat, beat))))

    link.serve(
        {"sync": sync}
        | (host_credentials.certificate_methods(certificates) if certificates else {}),
        {"heartbeat": heartbeat},
        host_credentials.join_methods(joins) if joins else {},
    )


def _of(host: str, said: Said) -> Said:
    if said.host != host:
        raise NotGenuine(f"it speaks of host {said.host}")
    return said


def read_answer(said: dict[str, object]) -> SyncAnswer:
    """A conductor's answer, without those of its commands that cannot be read."""
    answer = from_wire(SyncAnswer, {**said, "commands": []})
    return replace(answer, commands=commands_of(cast("list[JsonObject]", said.get("commands", []))))


class ConductorClient:
    """For agents."""

    def __init__(self, link: HostSide) -> None:
        self._link = link

    def sync(self, request: Sync, timeout: float) -> tuple[SyncAnswer, Access | None]:
        """Exchange once. Raises NoAnswer."""
        reply = self._link.ask(REPORTS, "sync", {"request": to_wire(request)}, timeout)
        access = reply["access"]
        return read_answer(reply["answer"]), from_wire(Access, access) if access else None

    def heartbeat(self, beat: Heartbeat, timeout: float) -> HeartbeatAnswer | None:
        """Does nothing wait for this host? None: no answer came."""
        try:
            return from_wire(
                HeartbeatAnswer,
                self._link.ask(HEARTBEATS, "heartbeat", {"beat": to_wire(beat)}, timeout),
            )
        except errors.Problem as problem:
            log.info("a heartbeat has no answer: %s", problem)
            return None


class ConductorWakeup:
    """Wakes any conductor, or the one named ``server``, without ever making the caller wait."""

    def __init__(
        self, transport: Transport, server: str | None = None, method: str = "wake"
    ) -> None:
        self._transport, self._server, self._method = transport, server, method
        self._woken, self._neighbours = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="conductor-wakeup", daemon=True).start()

    def wake(self, neighbours: bool = False) -> None:
        if neighbours:
            self._neighbours.set()
        self._woken.set()

    def _run(self) -> None:
        while True:
            self._woken.wait()
            self._woken.clear()
            more = {"neighbours": True} if self._neighbours.is_set() else {}
            self._neighbours.clear()
            try:
                self._transport.cast(TOPIC, self._method, server=self._server, **more)
            except Exception:
                log.exception("a wakeup message was lost; the next one is tried all the same")
