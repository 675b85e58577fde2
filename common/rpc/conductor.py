# SPDX-License-Identifier: Apache-2.0
"""The interface of conductors: wake-ups (``wake``), reports of agents (``sync``) and heartbeats.

An idle agent sends a heartbeat in place of a report. The API wakes a conductor by
``ConductorWakeup``, which never blocks. One background thread sends one message for all wake-ups
since the last message. A lost wake-up costs at most the time until the conductor's next sweep.
"""

from __future__ import annotations

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
from common.service.log import get_logger

log = get_logger(__name__)
TOPIC = "kilonova-conductor"
HostMessage = TypeVar("HostMessage", Sync, Heartbeat)


class ConductorApi(Protocol):
    """The interface that a conductor process serves."""

    def wake(self, service_calls: bool = False) -> None:
        """Wake the threads that carry out due actions.

        Args:
            service_calls: True to wake also the threads whose steps call external services.
        """

    def loop_back(self) -> None:
        """Note that a message of this conductor to itself arrived, so the broker works."""

    def sync(self, request: Sync) -> tuple[SyncAnswer, Access | None]:
        """Process an agent's report, unless the cookie in the report is not fresh.

        Args:
            request: The report. Its cookie is that of the last answer, and proves that the report
                is new.

        Returns:
            The answer, and the access to the images of its commands (None if they have no images).
            If the access cannot be made, the commands are left out. With a cookie that is not
            fresh, the answer has only a new cookie and the session 0, and the agent registers
            again.

        Raises:
            Unavailable: The report was not processed. The agent repeats the report.
            TimeoutError: The report was not processed in time, and may be processed later.
        """

    def heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
        """Answer a heartbeat. If no report is needed, the next sweep renews the host's lease.

        Args:
            beat: The heartbeat.

        Returns:
            The answer. If ``nothing`` is False, the host must send a report of all domains: work
            waits for the host, the session has ended, the cookie is not fresh, the domains have
            changed, or such a report is due.

        Raises:
            Unavailable: The database does not answer.
        """


def serve(transport: Transport, name: str, conductor: ConductorApi) -> None:
    """Serve ``wake`` and ``loop_back`` to other processes of the control plane.

    Args:
        transport: Receives the messages.
        name: This conductor's name at the broker.
        conductor: Processes the messages.
    """
    transport.serve(TOPIC, name, {"wake": conductor.wake, "loop_back": conductor.loop_back})


def listen(
    link: ControlSide,
    conductor: ConductorApi,
    joins: host_credentials.HostJoinsApi | None = None,
    certificates: host_credentials.HostCertificatesApi | None = None,
    secrets: host_credentials.HostSecretsApi | None = None,
) -> None:
    """Serve agents, and machines that join the cloud.

    Invariant: a host can only change its own state. A message that names another host than the
    owner of its key is refused.

    Args:
        link: The conductor's end of the link to hosts.
        conductor: Processes reports and heartbeats.
        joins: Serves machines that join the cloud. None: joins are refused.
        certificates: Serves hosts whose certificate ends soon. None: renewals are refused.
        secrets: Serves hosts that ask for their newest keys. None: such requests are refused.
    """

    def sync(host: str, request: dict[str, object]) -> dict[str, object]:
        answer, access = conductor.sync(_check_sender(host, from_wire(Sync, request)))
        return {"answer": to_wire(answer), "access": to_wire(access)}

    def heartbeat(host: str, beat: dict[str, object]) -> object:
        return to_wire(conductor.heartbeat(_check_sender(host, from_wire(Heartbeat, beat))))

    link.serve(
        {"sync": sync}
        | (host_credentials.certificate_methods(certificates) if certificates else {})
        | (host_credentials.secrets_methods(secrets) if secrets else {}),
        {"heartbeat": heartbeat},
        host_credentials.join_methods(joins) if joins else {},
    )


def _check_sender(host: str, message: HostMessage) -> HostMessage:
    if message.host != host:
        raise NotGenuine(f"the message's content is about host {message.host}")
    return message


def read_answer(content: dict[str, object]) -> SyncAnswer:
    """Parse a conductor's answer. Commands that cannot be parsed are logged and left out."""
    answer = from_wire(SyncAnswer, {**content, "commands": []})
    return replace(
        answer, commands=commands_of(cast("list[JsonObject]", content.get("commands", [])))
    )


class ConductorClient:
    """The agent's client of the conductors."""

    def __init__(self, link: HostSide) -> None:
        self._link = link

    def sync(self, request: Sync, timeout: float) -> tuple[SyncAnswer, Access | None]:
        """Send a report and return the answer, with access to images as in ``ConductorApi.sync``.

        Args:
            request: The report.
            timeout: Seconds to wait for the answer.

        Raises:
            NoAnswer: No conductor answered in time, or the report could not be sent.
            Problem: The answer is this error, for example because the conductor ends.
        """
        reply = self._link.ask(REPORTS, "sync", {"request": to_wire(request)}, timeout)
        access = reply["access"]
        return read_answer(reply["answer"]), from_wire(Access, access) if access else None

    def heartbeat(self, beat: Heartbeat, timeout: float) -> HeartbeatAnswer | None:
        """Send a heartbeat and return the answer.

        Args:
            beat: The heartbeat.
            timeout: Seconds to wait for the answer.

        Returns:
            None if no answer came in time, or if the answer is an error. Both are logged.
        """
        try:
            return from_wire(
                HeartbeatAnswer,
                self._link.ask(HEARTBEATS, "heartbeat", {"beat": to_wire(beat)}, timeout),
            )
        except errors.Problem as problem:
            log.info("a heartbeat was not answered, so a report follows", problem=problem)
            return None


class ConductorWakeup:
    """Wakes a conductor without blocking the caller.

    Args:
        transport: Sends the messages.
        server: Name of the conductor. None: any conductor.
        method: The method to call, ``wake`` or ``loop_back``.
    """

    def __init__(
        self, transport: Transport, server: str | None = None, method: str = "wake"
    ) -> None:
        self._transport, self._server, self._method = transport, server, method
        self._woken, self._service_calls = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="conductor-wakeup", daemon=True).start()

    def wake(self, service_calls: bool = False) -> None:
        """Let the background thread send a message that calls ``method`` of a conductor.

        Calls before the thread sends the message share the message. ``service_calls`` is as for
        ``ConductorApi.wake``, and stays False for ``loop_back``.
        """
        if service_calls:
            self._service_calls.set()
        self._woken.set()

    def _run(self) -> None:
        while True:
            self._woken.wait()
            self._woken.clear()
            arguments = {"service_calls": True} if self._service_calls.is_set() else {}
            self._service_calls.clear()
            try:
                self._transport.cast(TOPIC, self._method, server=self._server, **arguments)
            except Exception:
                log.exception(
                    "a wake-up message to the conductors was lost; the next wake-up sends another"
                )
