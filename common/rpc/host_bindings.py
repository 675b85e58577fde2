# SPDX-License-Identifier: Apache-2.0
"""The bindings at the broker that route hosts' messages into the conductors' queues.

By default each queue has one binding, which matches the messages of every host. While a host is in
quarantine, the queues have a binding for each other host instead. So the broker drops the messages
of the flooding host, and no conductor spends time on them.

The bindings of single hosts stay at the broker afterwards, where they change nothing. Each
conductor restores the default binding once a minute unless it has a host in quarantine. So if the
conductor that removed the default binding dies, messages of new hosts are lost for at most a
minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from common.domain import errors
from common.rpc.broker import BROKEN, Channel, Connect
from common.security.broker_names import exchange
from common.service.log import get_logger

log = get_logger(__name__)
ALL = "#"
#: Interval at which new hosts get their binding during a quarantine.
REPEAT_SECONDS = 10.0
RESTORE_SECONDS = 60.0


class HostBindings:
    """A thread that changes the bindings of the conductors' queues when quarantines begin and end.

    While a quarantine lasts, the thread sets the bindings again every ten seconds, and so notices
    the end. Without a quarantine the thread restores the default bindings once a minute.

    Args:
        connect: Opens a connection to the broker.
        prefix: Prefix of every name at the broker.
        queues: Returns the names of the conductors' queues by door, REPORTS or HEARTBEATS, which is
            the first part of the routing keys.
        hosts: Returns the names of all hosts with a key, or raises Unavailable.
        quarantined: Returns the names of the hosts in quarantine.
    """

    def __init__(
        self,
        connect: Connect,
        prefix: str,
        queues: Callable[[], Mapping[str, str]],
        hosts: Callable[[], Iterable[str]],
        quarantined: Callable[[], Collection[str]],
    ) -> None:
        self._connect, self._prefix, self._queues = connect, prefix, queues
        self._hosts, self._quarantined = hosts, quarantined
        self._wakes, self._stops = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-bindings", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the thread change the bindings now, because a quarantine begins."""
        self._wakes.set()

    def close(self) -> None:
        self._stops.set()
        self._wakes.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        seconds = RESTORE_SECONDS
        while True:
            self._wakes.wait(seconds)
            self._wakes.clear()
            if self._stops.is_set():
                return
            quarantined = self._quarantined()
            seconds = REPEAT_SECONDS if quarantined else RESTORE_SECONDS
            try:
                with self._connect(read_timeout=self._connect.reply_seconds) as connection:
                    self._apply(connection.default_channel, quarantined)
            except (*BROKEN, errors.Unavailable) as problem:
                log.warning(
                    "the bindings of hosts at the broker cannot be changed, and the change is "
                    "tried again; if the broker refuses it, run: kilonova broker restore",
                    seconds=seconds,
                    problem=problem,
                )

    def _apply(self, channel: Channel, quarantined: Collection[str]) -> None:
        queues = self._queues()
        if not quarantined:
            self._bind(channel, queues, [ALL])
            channel.close()  # Wait until the broker has bound the queues.
            return
        # In this order, so that no message of another host is lost in between.
        self._bind(channel, queues, [host for host in self._hosts() if host not in quarantined])
        for door, queue in queues.items():
            for host in (ALL, *quarantined):
                channel.queue_unbind(queue, exchange(self._prefix), f"{door}.{host}")

    def _bind(self, channel: Channel, queues: Mapping[str, str], hosts: Sequence[str]) -> None:
        for door, queue in queues.items():
            for host in hosts:
                channel.queue_bind(queue, exchange(self._prefix), f"{door}.{host}", nowait=True)
