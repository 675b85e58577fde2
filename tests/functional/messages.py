# SPDX-License-Identifier: Apache-2.0
"""Transports that count messages and lose some of them, around the real transports.

Topics have a suffix that no other test uses. A message is lost at the sender, as when a broker is
wiped. A lost cast disappears. A lost call raises NoAnswer after its full timeout.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.domain import errors
from common.rpc.transport import Transport
from common.security.host_keys import Purpose

Lose = Callable[[str], bool]


def lose_no_message(method: str) -> bool:
    return False


@dataclass
class Network:
    """The data that the transports of one cloud share.

    Attributes:
        lose: Decides whether a message is lost. The argument is the method before the message is
            sent, and "answer to METHOD" when the answer has arrived.
        sent: Number of messages by method. A call counts as two.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    lose: Lose = lose_no_message
    sent: Counter[str] = field(default_factory=Counter)

    def lose_next(self, method: str) -> Callable[[], bool]:
        """Lose the next message of a method. Return a function that is true after the loss."""
        lost: list[str] = []

        def lose(message: str) -> bool:
            if message != method or lost:
                return False
            lost.append(message)
            return True

        self.lose = lose
        return lambda: bool(lost)


class PrivateTransport:
    """The connection of a process, with the interface of ``common.rpc.transport.Transport``."""

    def __init__(self, real: Transport, network: Network) -> None:
        self._real, self._network = real, network

    def cast(self, topic: str, method: str, server: str | None = None, **arguments: Any) -> bool:
        self._network.sent[method] += 1
        if self._network.lose(method):
            return True
        return self._real.cast(self._own(topic), method, server, **arguments)

    def call(
        self,
        topic: str,
        method: str,
        server: str | None = None,
        timeout: float = 10,
        **arguments: Any,
    ) -> Any:
        self._network.sent[method] += 2
        began = time.monotonic()
        if not self._network.lose(method):
            answer = self._real.call(self._own(topic), method, server, timeout, **arguments)
            if not self._network.lose(f"answer to {method}"):
                return answer
        # A message that was lost is noticed when its time is over.
        time.sleep(max(0.0, began + timeout - time.monotonic()))
        raise errors.NoAnswer(f"{topic} did not answer {method}: the test lost it")

    def serve(self, topic: str, server: str, methods: dict[str, Callable[..., Any]]) -> None:
        self._real.serve(self._own(topic), server, methods)

    def close(self) -> None:
        self._real.close()

    def _own(self, topic: str) -> str:
        return f"{topic}-{self._network.name}"


class _Lossy:
    """The common part of both ends of the messages between hosts and conductors."""

    def __init__(self, real: Any, network: Network) -> None:
        self._real, self._network = real, network
        self.serve, self.refusals = real.serve, real.refusals

    def _exchange(self, method: str, timeout: float, ask: Callable[[], Any]) -> Any:
        self._network.sent[method] += 2
        began = time.monotonic()
        if not self._network.lose(method):
            answer = ask()
            if not self._network.lose(f"answer to {method}"):
                return answer
        # A message that was lost is noticed when its time is over.
        time.sleep(max(0.0, began + timeout - time.monotonic()))
        raise errors.NoAnswer(f"nobody did not answer {method}: the test lost it")

    def close(self) -> None:
        self._real.close()


class LossyControlSide(_Lossy):
    """The conductors' end, with the interface of ``common.rpc.host_link.ControlSide``."""

    def cast(self, host: str, method: str, purpose: Purpose, content: dict[str, Any]) -> bool:
        self._network.sent[method] += 1
        return self._network.lose(method) or bool(self._real.cast(host, method, purpose, content))

    def call(
        self, host: str, method: str, purpose: Purpose, content: dict[str, Any], timeout: float
    ) -> Any:
        return self._exchange(
            method, timeout, lambda: self._real.call(host, method, purpose, content, timeout)
        )


class LossyHostSide(_Lossy):
    """A host's end, with the interface of ``common.rpc.host_link.HostSide``."""

    def ask(self, door: str, method: str, content: dict[str, Any], timeout: float) -> Any:
        return self._exchange(
            method, timeout, lambda: self._real.ask(door, method, content, timeout)
        )
