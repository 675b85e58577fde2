# SPDX-License-Identifier: Apache-2.0
"""The two ends of the link between a host and the control plane, for sealed messages.

A host reads one queue, its own, and writes to one exchange, under routing keys that end in its
name. So RabbitMQ can hold it to both (``common.security.broker_identities``). The control plane
writes into the hosts' queues through the default exchange.

A conductor declares a host's queue whenever the host asks for it, which it does with each new
connection. The host's user may not: RabbitMQ lets the declaring user choose the type of the queue,
and dead-letter its messages into the conductors' queue in another host's name.

Replays: a host remembers the ids of its messages. A message of a host carries a cookie that proves
that it is new (``conductor.hosts.sync_cookies``), and a message that a conductor takes in twice
changes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kombu.transport.pyamqp import Transport as AmqpTransport

from common.domain import errors
from common.domain.json_types import JsonObject, JsonValue
from common.rpc import host_bounds, host_queues
from common.rpc.broker import Channel, Connect, Connection
from common.rpc.broker_client import Listener, Sender, Take
from common.rpc.host_bindings import HostBindings
from common.rpc.host_messages import REMEMBERED, Header, Refusals, claimed_host, pack, unpack
from common.rpc.problems import answered, result
from common.security.broker_names import (
    ANSWERS,
    CONDUCTOR,
    HEARTBEATS,
    PREFIX,
    REPORTS,
    exchange,
    host_queue,
)
from common.security.host_keys import AllKeys, Keys, NotGenuine, Purpose

log = logging.getLogger(__name__)
ANSWER = "answer"
DECLARE_QUEUE = "declare_queue"  #: the method by which a host asks for its queue
FROM_HOSTS = "from-hosts"  #: the thread that takes in what hosts say
#: Pauses in seconds before a host looks for its queue again.
QUEUE_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
AT_ONCE = 64  #: questions in hand at a time
SECONDS_FOR_ANSWERS = 10.0  #: until the broker drops one that nobody takes in
SECONDS_FOR_COMMANDS = 10.0
STALE_SECONDS = 5.0  #: longer than a host waits for an answer
#: Where hosts ask for their queues, and with keys of which purposes.
QUEUES_ASKED = {(REPORTS, Purpose.COMMAND), (REPORTS, Purpose.JOIN)}
Method = Callable[..., object]


class _Questions:
    """Those that were sent and have no answer yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Header, Future[JsonObject]]] = {}

    def put(self, header: Header) -> Future[JsonObject]:
        future: Future[JsonObject] = Future()
        self._waiting[header.id] = header, future
        return future

    def drop(self, header: Header) -> None:
        self._waiting.pop(header.id, None)

    def answered(self, header: Header, content: JsonObject) -> None:
        """An answer counts when it is of the host that was asked, under the key of the question."""
        asked, future = self._waiting.get(header.id, (None, None))
        if asked is None or future is None:
            return
        if (asked.host, asked.generation, asked.purpose) != (
            header.host,
            header.generation,
            header.purpose,
        ):
            raise NotGenuine("it answers what another host was asked")
        if self._waiting.pop(header.id, None) is not None:
            future.set_result(content)


class _Side(ABC):
    """What both ends have: the thread that listens, begun when it is first needed, and questions
    that wait."""

    def __init__(self, connect: Connect, keys: Keys, prefix: str, thread: str) -> None:
        self._connect, self._keys, self._prefix, self._thread = connect, keys, prefix, thread
        self._questions, self.refusals = _Questions(), Refusals()
        self._lock = threading.Lock()
        self._listener: Listener | None = None

    @abstractmethod
    def _declare(self, channel: Channel) -> dict[str, Take]:
        """The queues that it reads, and what takes in their messages."""

    def _listening(self) -> Listener:
        with self._lock:
            if self._listener is None:
                self._listener = Listener(self._connect, self._thread, self._declare)
            return self._listener

    def wait_until_ready(self, timeout: float) -> bool:
        """Start listening, and return True once the queues are declared and read.

        Args:
            timeout: Seconds to wait. After that the method returns False.
        """
        return self._listening().is_ready.wait(timeout)

    def _asked(
        self, who: str, message: tuple[Header, bytes], timeout: float, send: Callable[[bytes], bool]
    ) -> JsonValue:
        """What they answer, once answers can be heard and the question is sent. Raises NoAnswer,
        Problem."""
        until, (header, body) = time.monotonic() + timeout, message
        future = self._questions.put(header)
        try:
            if self.wait_until_ready(timeout) and send(body):
                return result(future.result(max(0.0, until - time.monotonic())))
        except TimeoutError:
            pass
        finally:
            self._questions.drop(header)
        raise errors.NoAnswer(f"{who} did not answer {header.method} within {timeout:g} s.")

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


class HostSide(_Side):
    """An agent's end, or with ``purpose`` JOIN that of who is to become this host. ``prefix``
    begins every name at the broker."""

    def __init__(
        self,
        connect: Connect,
        keys: Keys,
        host: str,
        prefix: str = PREFIX,
        purpose: Purpose = Purpose.COMMAND,
    ) -> None:
        super().__init__(connect, keys, prefix, "from-control")
        self._host, self._purpose = host, purpose
        self._methods: dict[str, tuple[Purpose, Method]] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        #: Questions wait for the hypervisor, and commands are not to wait for them.
        self._pools = {
            Purpose.COMMAND: ThreadPoolExecutor(2, thread_name_prefix="commands"),
            Purpose.QUERY: ThreadPoolExecutor(16, thread_name_prefix="queries"),
        }
        self._sender = Sender(connect)

    def serve(self, methods: Mapping[str, tuple[Purpose, Method]]) -> None:
        """Answer these, each asked under a key of this purpose."""
        self._methods.update(methods)
        self._listening()

    def ask(self, door: str, method: str, content: JsonObject, timeout: float) -> JsonValue:
        """Ask the conductors, at one of their doors: REPORTS, HEARTBEATS.

        Raises:
            NoAnswer: none answered in time. Problem: what it answered with.
        """
        message = pack(self._keys.newest(self._host, self._purpose), method, content)
        return self._asked(
            "The conductors",
            message,
            timeout,
            lambda body: self._sender.send(
                exchange(self._prefix), f"{door}.{self._host}", body, timeout
            ),
        )

    def _declare(self, channel: Channel) -> dict[str, Take]:
        """Ask the conductors for this host's queue, and wait until the broker has it.

        Raises:
            NotFound: the queue is still missing. ``Listener`` connects and asks again.
        """
        queue, connection = (
            host_queues.name_of(self._prefix, self._host, self._purpose),
            channel.connection,
        )
        body = pack(self._keys.newest(self._host, self._purpose), DECLARE_QUEUE, {})[1]
        self._sender.send(
            exchange(self._prefix), f"{REPORTS}.{self._host}", body, SECONDS_FOR_ANSWERS
        )
        for pause in QUEUE_PAUSES:
            if host_queues.exists(connection, queue):
                return {queue: self._take}
            time.sleep(pause)
        with connection.channel() as last:
            last.queue_declare(queue, passive=True)
        return {queue: self._take}

    def _take(self, body: bytes, key: str) -> None:
        try:
            header, content = unpack(self._keys, body)
            if header.method == ANSWER:
                self._questions.answered(header, content)
                return
            purpose, method = self._methods.get(header.method, (None, None))
            if method is None or purpose != header.purpose:
                raise NotGenuine(
                    f"nobody may ask {header.method} with a key of purpose {header.purpose}"
                )
            self._remember(header)
        except NotGenuine as problem:
            self.refusals.count(self._host, problem)
            return
        self._pools[purpose].submit(self._answer, header, method, content, time.monotonic())

    def _remember(self, header: Header) -> None:
        if header.id in self._seen:
            raise NotGenuine("it has come before")
        self._seen[header.id] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def _answer(self, header: Header, method: Method, content: JsonObject, came_at: float) -> None:
        """Who asks what has waited here for long has given up, and asks again."""
        if time.monotonic() - came_at > SECONDS_FOR_ANSWERS:
            return
        answer = answered(method, content)
        if header.answer_to:
            key = self._keys.find(header.host, header.generation, Purpose(header.purpose))
            self._sender.send(
                exchange(self._prefix),
                f"{ANSWERS}.{header.answer_to}.{self._host}",
                pack(key, ANSWER, answer, header.id)[1],
                SECONDS_FOR_ANSWERS,
            )

    def close(self) -> None:
        super().close()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._sender.close()


class ControlSide(_Side):
    """The end of a conductor, which serves, or of the API, which only asks."""

    def __init__(
        self, connect: Connect, keys: AllKeys, prefix: str = PREFIX, role: str = CONDUCTOR
    ) -> None:
        super().__init__(connect, keys, prefix, FROM_HOSTS)
        self._hosts = keys.hosts
        self._role, self._name = role, uuid.uuid4().hex
        self._doors: dict[str, dict[str, Method]] = {}
        self._allowances, self._quarantine = host_bounds.Allowances(), host_bounds.Quarantine()
        self._bindings: HostBindings | None = None
        self._joins: dict[str, Method] = {}
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="from-hosts")
        self._asking, self._answering = Sender(connect, confirms=True), Sender(connect)
        self._declaring = Sender(connect)

    def serve(
        self,
        reports: Mapping[str, Method],
        heartbeats: Mapping[str, Method],
        joins: Mapping[str, Method] | None = None,
    ) -> None:
        """Take in what hosts say; each method gets the host's name first. Heartbeats are answered
        by one thread, one after the other. ``joins``: what may be asked with a token; these get
        the generation of its key too."""
        self._doors = {REPORTS: dict(reports), HEARTBEATS: dict(heartbeats)}
        self._joins = dict(joins or {})
        self._bindings = HostBindings(
            self._connect, self._prefix, self._doors, self._hosts, self._quarantine.hosts
        )
        self._listening()

    def cast(self, host: str, method: str, purpose: Purpose, content: JsonObject) -> bool:
        """Send and forget; False when it is lost: the broker is away, or the host has no queue
        there."""
        return self._asking.send(
            "",
            host_queue(self._prefix, host),
            pack(self._keys.newest(host, purpose), method, content)[1],
            SECONDS_FOR_COMMANDS,
        )

    def call(
        self, host: str, method: str, purpose: Purpose, content: JsonObject, timeout: float
    ) -> JsonValue:
        """Ask a host.

        Raises:
            NoAnswer: it did not answer in time, or is in quarantine. Problem: what it answered
                with.
        """
        if host in self._quarantine.hosts():
            raise errors.NoAnswer(
                f"Host {host} is not asked {method}: it sent far more messages than it may, and is "
                "in quarantine."
            )
        message = pack(self._keys.newest(host, purpose), method, content, answer_to=self._name)
        return self._asked(
            host,
            message,
            timeout,
            lambda body: self._asking.send("", host_queue(self._prefix, host), body, timeout),
        )

    def _declare(self, channel: Channel) -> dict[str, Take]:
        own = host_queues.declare_answers(channel, self._prefix, self._role, self._name)
        takes: dict[str, Take] = {own: self._take_answer}
        for door in self._doors:
            takes[host_queues.declare_door(channel, self._prefix, door)] = partial(self._take, door)
        return takes

    def _take_answer(self, body: bytes, key: str) -> None:
        sender = key.removeprefix(f"{ANSWERS}.").partition(".")[2]
        if self._may_send(sender, len(body), self._rename):
            self._opened(body, self._questions.answered)

    def _rename(self) -> None:
        """Await answers under a name that a host in quarantine does not know."""
        self._name = uuid.uuid4().hex
        self._listening().reconnect()

    def _may_send(self, sender: str, size: int, escape: Callable[[], None]) -> bool:
        """Whether a message is within the allowance of its sender.

        Args:
            sender: the host that the routing key names. The broker holds each host to its own.
            size: bytes of the message.
            escape: called when the sender begins to flood, so that the broker drops its messages.
        """
        try:
            self._allowances.take(sender, size)
        except NotGenuine as problem:
            self.refusals.count(sender, problem)
            if seconds := self._quarantine.count(sender, size):
                log.warning(
                    "host %.80s is in quarantine for %d s: more than %d of its messages came within "
                    "%d s above its allowance. The broker drops its messages. Look at the host, "
                    "and give it a new key: kilonova host rotate",
                    sender,
                    seconds,
                    host_bounds.FLOOD_MESSAGES,
                    host_bounds.FLOOD_SECONDS,
                )
                escape()
            return False
        return True

    def _take(self, door: str, body: bytes, key: str) -> None:
        assert self._bindings is not None  # a door is open once there are bindings
        if not self._may_send(key.removeprefix(f"{door}."), len(body), self._bindings.wake):
            return

        def take(header: Header, content: JsonObject) -> None:
            host_bounds.require_bounded(content)
            purpose = Purpose(header.purpose)
            if header.method == DECLARE_QUEUE and (door, purpose) in QUEUES_ASKED:
                self._pool.submit(self._declare_queue_of, header, time.monotonic())
                return
            method = self._asked_there(door, purpose).get(header.method)
            if method is None:
                raise NotGenuine(f"{header.method} is not asked there")
            if door == HEARTBEATS:
                self._answer(header, method, content, time.monotonic())
            else:
                self._pool.submit(self._answer, header, method, content, time.monotonic())

        self._opened(body, take)

    def _asked_there(self, door: str, purpose: Purpose) -> dict[str, Method]:
        """What may be asked at this door with a key of this purpose."""
        if purpose == Purpose.JOIN:
            return self._joins if door == REPORTS else {}
        return self._doors[door] if purpose == Purpose.COMMAND else {}

    def _opened(self, body: bytes, take: Callable[[Header, JsonObject], None]) -> None:
        try:
            take(*unpack(self._keys, body))
        except NotGenuine as problem:
            self.refusals.count(claimed_host(body), problem)
        except errors.Problem as problem:
            log.warning("a message of host %.80s waits: %s", claimed_host(body), problem)

    def _declare_queue_of(self, header: Header, came_at: float) -> None:
        """Declare the queue of a host. The host asks again if this conductor is too late."""
        queue = host_queues.name_of(self._prefix, header.host, Purpose(header.purpose))
        if time.monotonic() - came_at > STALE_SECONDS:
            return

        def declare(connection: Connection) -> None:
            try:
                host_queues.declare(connection, queue)
            except AmqpTransport.channel_errors as problem:
                if getattr(problem, "reply_code", None) != host_queues.ACCESS_REFUSED:
                    raise
                log.warning(
                    "the broker does not let the conductors declare the queue %s, so the host "
                    "cannot be reached; run: kilonova broker add conductor. The broker answered: "
                    "%s",
                    queue,
                    problem,
                )

        self._declaring.run(f"the declaration of {queue}", declare)

    def _answer(self, header: Header, method: Method, content: JsonObject, came_at: float) -> None:
        """A refusal is told to nobody else than the log: who has a key says nothing that is
        refused. A host does not wait for the answer to what has waited here for long, as while the
        database is away: it asks again."""
        if time.monotonic() - came_at > STALE_SECONDS:
            return
        said = {**content, "host": header.host}
        if header.purpose == Purpose.JOIN:
            said["generation"] = header.generation
        try:
            answer = answered(method, said, NotGenuine)
            key = self._keys.find(header.host, header.generation, Purpose(header.purpose))
        except (NotGenuine, errors.Unavailable) as problem:
            self.refusals.count(header.host, problem)
            return
        self._answering.send(
            "",
            host_queues.name_of(self._prefix, header.host, Purpose(header.purpose)),
            pack(key, ANSWER, answer, header.id)[1],
            SECONDS_FOR_ANSWERS,
        )

    def close(self) -> None:
        super().close()
        if self._bindings is not None:
            self._bindings.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._asking.close()
        self._answering.close()
        self._declaring.close()
