# SPDX-License-Identifier: Apache-2.0
"""Both ends of the link between a host and the control plane, for sealed messages.

A host reads only its own queue, and writes to one exchange with routing keys that end in its name.
RabbitMQ enforces both (``common.security.broker_identities``). The control plane writes into the
hosts' queues through the default exchange.

With each new connection, a host requests its queue, and a conductor declares the queue. The host's
own user has no permission for that. Why: RabbitMQ lets the declaring user choose the type of the
queue, and dead-letter messages into the conductors' queue in another host's name.

Each queue is at one node of the broker. If this node is down, cut off or hangs, the readers of the
queue notice this and read the queue under another name (``common.rpc.host_queues``). A host's
requests contain the number of the name that the host reads.

Replays: a host remembers the ids of its messages. A host's message contains a cookie that proves
its age (``conductor.hosts.sync_cookies``), and processing a message twice changes no state.
"""

from __future__ import annotations

import random
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
from common.rpc.broker import ACCESS_REFUSED, BROKEN, Channel, Connect, Connection
from common.rpc.broker_client import Listener, Probe, Sender, Take
from common.rpc.door_watch import DoorWatch
from common.rpc.host_bindings import HostBindings
from common.rpc.host_messages import REMEMBERED, Header, Refusals, claimed_host, pack, unpack
from common.rpc.newest_first import NewestFirst
from common.rpc.problems import result, run_method
from common.rpc.silent_names import SilentNames
from common.security.broker_names import (
    ANSWERS,
    CONDUCTOR,
    HEARTBEATS,
    NAMES,
    PREFIX,
    REPORTS,
    exchange,
    host_queue,
    names_of,
)
from common.security.host_keys import AllKeys, Keys, NotGenuine, Purpose
from common.service.log import get_logger

log = get_logger(__name__)
ANSWER = "answer"
#: The method by which a host requests its queue.
DECLARE_QUEUE = "declare_queue"
#: The thread that reads the messages of hosts.
FROM_HOSTS = "from-hosts"
#: Pauses in seconds before a host looks for its queue again.
QUEUE_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
#: A host without answers for so long checks whether its queue exists.
DOUBT_SECONDS = 8.0
#: A host without answers for so long connects to another node of the broker, and again after a
#: time that doubles up to ``MAX_SILENCE_SECONDS``. Times vary, so that hosts do not move at once.
SILENCE_SECONDS, MAX_SILENCE_SECONDS, VARIATION = 20.0, 300.0, 1.5
#: Seconds between two checks of a host for a better name of its queue.
BETTER_NAME_SECONDS = 30.0
#: Seconds between two checks whether the node of a listener in the control plane answers.
NODE_CHECK_SECONDS = 5.0
#: Requests of hosts that a conductor processes at the same time.
AT_ONCE = 64
#: Time after which the broker drops an unread answer or command.
SECONDS_FOR_ANSWERS = 10.0
SECONDS_FOR_COMMANDS = 10.0
#: Longer than a host waits for an answer.
STALE_SECONDS = 5.0
#: The queues and the key purposes with which hosts may request their queues.
QUEUE_REQUESTS = {(REPORTS, Purpose.COMMAND), (REPORTS, Purpose.JOIN)}
Method = Callable[..., object]
#: ``Header.answer_to`` of a host's request, by the number of the name of the host's queue.
_NUMBERS = ["", *(str(number) for number in range(1, NAMES))]


def _number_of(header: Header) -> int:
    """Return the number of the name under which the host of a request reads its queue.

    Raises:
        NotGenuine: The header contains no such number.
    """
    if header.answer_to not in _NUMBERS:
        raise NotGenuine("the message names no queue for the answer")
    return _NUMBERS.index(header.answer_to)


class _PendingRequests:
    """Requests that were sent and have no answer yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Header, Future[JsonObject]]] = {}

    def put(self, header: Header) -> Future[JsonObject]:
        future: Future[JsonObject] = Future()
        self._waiting[header.id] = header, future
        return future

    def drop(self, header: Header) -> None:
        self._waiting.pop(header.id, None)

    def complete(self, header: Header, content: JsonObject) -> None:
        """Pass an answer to the thread that waits for it. An unknown or late answer is ignored.

        Raises:
            NotGenuine: The answer is sealed with another key than the request.
        """
        request, future = self._waiting.get(header.id, (None, None))
        if request is None or future is None:
            return
        if (request.host, request.generation, request.purpose) != (
            header.host,
            header.generation,
            header.purpose,
        ):
            raise NotGenuine("the message answers a request that was sealed with another key")
        if self._waiting.pop(header.id, None) is not None:
            future.set_result(content)


class _Silence:
    """Decides when a host that gets no answers connects to another node of the broker."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._limit = SILENCE_SECONDS * _vary()

    def end(self) -> None:
        """Note that an answer came."""
        if self._since is not None:
            self._since, self._limit = None, SILENCE_SECONDS * _vary()

    def begin(self, seconds: float) -> None:
        """Note that no answer came within these seconds."""
        if self._since is None:
            self._since = time.monotonic() - seconds

    @property
    def seconds(self) -> float:
        """Return the duration of the silence, 0.0 without silence."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def is_too_long(self) -> bool:
        """Return True if it is time to move, and measure the next silence from now on."""
        if self.seconds < self._limit:
            return False
        self._since = time.monotonic()
        self._limit = min(self._limit * 2, MAX_SILENCE_SECONDS) * _vary()
        return True


def _vary() -> float:
    return random.uniform(1.0, VARIATION)  # noqa: S311 - needs no cryptography


class _Side(ABC):
    """The common part of both ends: the listening thread and pending requests."""

    def __init__(self, connect: Connect, keys: Keys, prefix: str, thread: str) -> None:
        self._connect, self._keys, self._prefix, self._thread = connect, keys, prefix, thread
        self._requests, self.refusals = _PendingRequests(), Refusals()
        self._silent_names = SilentNames(connect.has_nodes)
        self._lock = threading.Lock()
        self._listener: Listener | None = None

    @abstractmethod
    def _declare(self, channel: Channel) -> dict[str, Take]:
        """Declare the queues of this end over the channel of a new connection.

        Returns:
            Name of a queue -> function that processes its messages.
        """

    def _start_listener(self) -> Listener:
        with self._lock:
            if self._listener is None:
                self._listener = Listener(
                    self._connect,
                    self._thread,
                    self._declare,
                    self._look,
                    self._silent_names.refuse,
                )
            return self._listener

    def _look(self, connection: Connection) -> bool:
        """Return False if the listener's connection must be replaced. Called once a second."""
        return True

    def wait_until_ready(self, timeout: float) -> bool:
        """Start listening if necessary, and return True once the queues are declared and read.

        Args:
            timeout: Seconds to wait. After that the method returns False.
        """
        return self._start_listener().is_ready.wait(timeout)

    def _call(
        self,
        request: str,
        make: Callable[[], tuple[Header, bytes]],
        timeout: float,
        send: Callable[[bytes], bool],
    ) -> JsonValue:
        """Send a request once answers can be received, and return the answer.

        Args:
            request: The other end and the method, for the error.
            make: Returns header and bytes of the request.
            timeout: Seconds to wait for the answer.
            send: Sends the bytes. Returns False if they could not be sent.

        Raises:
            NoAnswer: No answer came in time, or the request could not be sent.
            Problem: The answer is this error.
        """
        until = time.monotonic() + timeout
        if self.wait_until_ready(timeout):
            header, body = make()
            future = self._requests.put(header)
            try:
                if send(body):
                    return result(future.result(max(0.0, until - time.monotonic())))
            except TimeoutError:
                pass
            finally:
                self._requests.drop(header)
        raise errors.NoAnswer(f"{request} within {timeout:g} s.")

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


class HostSide(_Side):
    """A host's end of the link: that of an agent, or of a machine that joins the cloud.

    Args:
        connect: Opens connections to the broker.
        keys: The keys of the host.
        host: Name of the host.
        prefix: Prefix of every name at the broker.
        purpose: The key for requests to conductors: COMMAND, or JOIN for a machine that joins.
    """

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
        self._seen_ids: OrderedDict[str, None] = OrderedDict()
        #: Separate pools, because queries wait for the hypervisor and must not delay commands.
        self._pools = {
            Purpose.COMMAND: ThreadPoolExecutor(2, thread_name_prefix="commands"),
            Purpose.QUERY: ThreadPoolExecutor(16, thread_name_prefix="queries"),
        }
        self._sender = Sender(connect)
        self._names = names_of(host_queues.name_of(prefix, host, purpose))
        #: The name of the queue that the listener reads.
        self._queue = self._names[0]
        self._silence, self._looked_at = _Silence(), 0.0

    def serve(self, methods: Mapping[str, tuple[Purpose, Method]]) -> None:
        """Serve methods by name, and start listening.

        Args:
            methods: For each name the purpose of the key that a request needs, and the function.
        """
        self._methods.update(methods)
        self._start_listener()

    def ask(self, door: str, method: str, content: JsonObject, timeout: float) -> JsonValue:
        """Call a method of the conductors.

        Args:
            door: The queue of the conductors, REPORTS or HEARTBEATS.
            method: Name of the method.
            content: Arguments of the method.
            timeout: Seconds to wait for the answer.

        Raises:
            NoAnswer: No conductor answered in time, or the request could not be sent.
            Problem: The answer is this error.
        """

        def make() -> tuple[Header, bytes]:
            key = self._keys.newest(self._host, self._purpose)
            number = _NUMBERS[self._names.index(self._queue)]
            return pack(key, method, content, answer_to=number)

        try:
            answer = self._call(
                f"The conductors did not answer {method}",
                make,
                timeout,
                lambda body: self._sender.send(
                    exchange(self._prefix), [f"{door}.{self._host}"], body, timeout
                ),
            )
        except errors.NoAnswer:
            self._silence.begin(timeout)
            if self._connect.has_nodes and self._silence.is_too_long():
                log.warning("no conductor answers, so the agent uses another node of the broker")
                self._sender.move()
                self._start_listener().reconnect()
            raise
        except errors.Problem:
            self._silence.end()
            raise
        self._silence.end()
        return answer

    def change_broker(self, connect: Connect) -> None:
        """Use the broker of another ``Connect`` from now on. Pending requests get no answer."""
        self._connect.become(connect)
        self._silent_names.has_nodes = connect.has_nodes
        self._sender.move()
        self._start_listener().reconnect()

    def _declare(self, channel: Channel) -> dict[str, Take]:
        """Request this host's queue from the conductors, and wait until the queue exists.

        Returns:
            Name of the queue -> function that processes its messages.

        Raises:
            amqp.NotFound: The queue is missing after ``QUEUE_PAUSES``. ``Listener`` connects and
                tries again.
            TimeoutError: The broker does not answer. The next call uses another name of the queue.
        """
        connection, names = channel.connection, self._silent_names.list_usable(self._names)
        first = names[0]
        self._exists(connection, first)  # Fails if the node of the queue hangs.
        key = self._keys.newest(self._host, self._purpose)
        number = _NUMBERS[self._names.index(first)]
        self._sender.send(
            exchange(self._prefix),
            [f"{REPORTS}.{self._host}"],
            pack(key, DECLARE_QUEUE, {}, answer_to=number)[1],
            SECONDS_FOR_ANSWERS,
        )
        for pause in QUEUE_PAUSES:
            if self._exists(connection, first):
                return self._read(first)
            time.sleep(pause)
        for name in names:
            if self._exists(connection, name):
                return self._read(name)
        self._silent_names.forget()
        connection.channel().queue_declare(first, passive=True)
        return self._read(first)

    def _exists(self, connection: Connection, queue: str) -> bool:
        return host_queues.exists(connection, queue, self._silent_names)

    def _read(self, queue: str) -> dict[str, Take]:
        self._queue, self._looked_at = queue, time.monotonic()
        return {queue: self._take}

    def _look(self, connection: Connection) -> bool:
        """Return False if the queue is gone, or exists under a better name.

        The host queries the broker only during a silence, or while it reads a further name.
        """
        seconds, number = time.monotonic() - self._looked_at, self._names.index(self._queue)
        if self._silence.seconds > DOUBT_SECONDS and seconds > DOUBT_SECONDS:
            self._looked_at = time.monotonic()
            return self._exists(connection, self._queue)
        if number == 0 or seconds < BETTER_NAME_SECONDS:
            return True
        self._looked_at = time.monotonic()
        better = {*self._names[:number]} & {*self._silent_names.list_usable(self._names)}
        # Over another connection, whose replies are not mixed with the messages of the queue.
        probe = Probe(self._connect)
        try:
            return not any(self._exists(probe.open(), name) for name in better)
        except BROKEN:  # The better name is still at a node that hangs.
            return True
        finally:
            probe.close()

    def _take(self, body: bytes, key: str) -> None:
        try:
            header, content = unpack(self._keys, body)
            if header.method == ANSWER:
                self._requests.complete(header, content)
                return
            purpose, method = self._methods.get(header.method, (None, None))
            if method is None or purpose != header.purpose:
                raise NotGenuine(
                    f"no method {header.method} may be called with a key of purpose {header.purpose}"
                )
            self._remember(header)
        except NotGenuine as problem:
            self.refusals.count(self._host, problem)
            return
        self._pools[purpose].submit(self._answer, header, method, content, time.monotonic())

    def _remember(self, header: Header) -> None:
        if header.id in self._seen_ids:
            raise NotGenuine("the message repeats the id of an earlier message")
        self._seen_ids[header.id] = None
        if len(self._seen_ids) > REMEMBERED:
            self._seen_ids.popitem(last=False)

    def _answer(self, header: Header, method: Method, content: JsonObject, came_at: float) -> None:
        """Run a method, and send its result or Problem if the request has an ``answer_to``.

        A request that waited for a thread of the pool longer than ``SECONDS_FOR_ANSWERS`` is
        dropped, because its sender has given up. ``came_at`` is the monotonic time of its arrival.
        """
        if time.monotonic() - came_at > SECONDS_FOR_ANSWERS:
            return
        answer = run_method(method, content)
        if header.answer_to:
            key = self._keys.find(header.host, header.generation, Purpose(header.purpose))
            self._sender.send(
                exchange(self._prefix),
                [f"{ANSWERS}.{header.answer_to}.{self._host}"],
                pack(key, ANSWER, answer, header.id)[1],
                SECONDS_FOR_ANSWERS,
            )

    def close(self) -> None:
        super().close()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._sender.close()


class ControlSide(_Side):
    """The control plane's end of the link.

    A conductor calls ``serve``. The API, the console service and operators' commands only call
    hosts.

    Args:
        connect: Opens connections to the broker.
        keys: The keys of all hosts.
        prefix: Prefix of every name at the broker.
        role: The broker user of this process, a part of the name of its queue for answers.
    """

    def __init__(
        self, connect: Connect, keys: AllKeys, prefix: str = PREFIX, role: str = CONDUCTOR
    ) -> None:
        super().__init__(connect, keys, prefix, FROM_HOSTS)
        self._hosts = keys.hosts
        self._role, self._name = role, uuid.uuid4().hex
        self._doors: dict[str, dict[str, Method]] = {}
        self._allowances, self._quarantine = host_bounds.Allowances(), host_bounds.Quarantine()
        self._bindings: HostBindings | None = None
        self._watch: DoorWatch | None = None
        self._looked_at = 0.0
        #: Names of the conductors' queues that the listener reads, by door.
        self._door_queues: dict[str, str] = {}
        #: The number of the queue's name that a host reads, if it is not 0. Known from the host's
        #: requests.
        self._numbers: dict[str, int] = {}
        self._joins: dict[str, Method] = {}
        self._pool = NewestFirst[tuple[Header, Method, JsonObject]](
            lambda request: self._answer(*request), AT_ONCE, STALE_SECONDS, "from-hosts"
        )
        #: Separate, because a host without a queue gets no answer to any other request.
        self._declarations = ThreadPoolExecutor(1, thread_name_prefix="host-queues")
        self._asking, self._answering = Sender(connect, confirms=True), Sender(connect)
        self._declaring = Sender(connect)

    def serve(
        self,
        reports: Mapping[str, Method],
        heartbeats: Mapping[str, Method],
        joins: Mapping[str, Method] | None = None,
    ) -> None:
        """Serve hosts, and start listening. Each method gets the host's name as argument ``host``.

        Args:
            reports: Methods for requests in the queue of reports.
            heartbeats: Methods for requests in the queue of heartbeats. One thread runs them, one
                after the other.
            joins: Methods for requests with the key of a join token. They also get the generation
                of the key as argument ``generation``. None: such requests are refused.
        """
        self._doors = {REPORTS: dict(reports), HEARTBEATS: dict(heartbeats)}
        self._joins = dict(joins or {})
        self._door_queues = {
            door: host_queues.door_names(self._prefix, door)[0] for door in self._doors
        }
        self._bindings = HostBindings(
            self._connect,
            self._prefix,
            self._door_queues.copy,
            self._hosts,
            self._quarantine.hosts,
        )
        self._watch = DoorWatch(
            self._connect,
            self._prefix,
            self._door_queues.copy,
            self._silent_names,
            self._start_listener().reconnect,
            self._answering.check,
        )

    def cast(self, host: str, method: str, purpose: Purpose, content: JsonObject) -> bool:
        """Call a method of a host without waiting for an answer.

        Args:
            host: Name of the host.
            method: Name of the method.
            purpose: The key with which the message is sealed.
            content: Arguments of the method.

        Returns:
            False if the broker is unreachable, or the host's queue does not exist.

        Raises:
            Unavailable: The host has no key, this process has no secret for ``purpose``, or the
                database does not answer.
        """
        body = pack(self._keys.newest(host, purpose), method, content)[1]
        return self._send_to_host(host, body, SECONDS_FOR_COMMANDS)

    def call(
        self, host: str, method: str, purpose: Purpose, content: JsonObject, timeout: float
    ) -> JsonValue:
        """Call a method of a host and return its result.

        Args:
            host: Name of the host.
            method: Name of the method.
            purpose: The key with which the message is sealed.
            content: Arguments of the method.
            timeout: Seconds to wait for the answer.

        Raises:
            NoAnswer: The host did not answer in time, cannot be reached, or is in quarantine.
            Unavailable: The host has no key, this process has no secret for ``purpose``, or the
                database does not answer.
            Problem: The answer is this error.
        """
        if host in self._quarantine.hosts():
            raise errors.NoAnswer(
                f"{method} was not sent to host {host}: the host sent too many messages and is in "
                "quarantine."
            )
        key = self._keys.newest(host, purpose)
        return self._call(
            f"{host} did not answer {method}",
            lambda: pack(key, method, content, answer_to=self._name),
            timeout,
            lambda body: self._send_to_host(host, body, timeout),
        )

    def _send_to_host(self, host: str, body: bytes, seconds: float) -> bool:
        """Send a message to a host, which reads its queue under one of several names.

        A conductor knows the name from the host's requests. Other processes send the message to
        each queue of the host that exists, and the host drops a message with an id that it knows.

        Args:
            host: Name of the host.
            body: The sealed message.
            seconds: Time after which the broker drops the unread message.

        Returns:
            False if the broker is unreachable, or the host has no queue.
        """
        names, number = names_of(host_queue(self._prefix, host)), self._numbers.get(host, 0)
        if not self._connect.has_nodes:
            return self._asking.send("", [names[number]], body, seconds)
        by_use = [*names[number:], *names[:number]]
        return self._asking.send("", by_use, body, seconds, to_each=not self._doors)

    def _declare(self, channel: Channel) -> dict[str, Take]:
        own = host_queues.declare_answers(channel, self._prefix, self._role, self._name)
        takes: dict[str, Take] = {own: self._take_answer}
        for door in self._doors:
            queue = host_queues.declare_door(channel, self._prefix, door, self._silent_names)
            self._door_queues[door] = queue
            takes[queue] = partial(self._take, door)
        return takes

    def _look(self, connection: Connection) -> bool:
        """Check every few seconds that the listener's own node answers, and return True.

        Why: the broker goes on delivering messages to a connection at a node that hangs.

        Raises:
            TimeoutError: The node does not answer.
        """
        if self._connect.has_nodes and time.monotonic() - self._looked_at > NODE_CHECK_SECONDS:
            self._looked_at = time.monotonic()
            connection.default_channel.basic_qos(0, 0, a_global=False)
        return True

    def _take_answer(self, body: bytes, key: str) -> None:
        sender = key.removeprefix(f"{ANSWERS}.").partition(".")[2]
        if self._may_send(sender, len(body), self._rename):
            self._process(body, self._requests.complete)

    def _rename(self) -> None:
        """Receive hosts' answers under a new name, which a host in quarantine does not know.

        Answers to earlier requests are lost, so that their calls raise NoAnswer.
        """
        self._name = uuid.uuid4().hex
        self._start_listener().reconnect()

    def _may_send(self, sender: str, size: int, escape: Callable[[], None]) -> bool:
        """Count a message, and return True if it is within the allowance of its sender.

        Otherwise the message is counted in ``refusals``, and may begin a quarantine.

        Args:
            sender: The host in the routing key. The broker enforces that this is the sender.
            size: Bytes of the message.
            escape: Called when a quarantine of the sender begins, so that the broker drops its
                messages.
        """
        try:
            self._allowances.take(sender, size)
        except NotGenuine as problem:
            self.refusals.count(sender, problem)
            if seconds := self._quarantine.count(sender, size):
                log.warning(
                    "a host is in quarantine, because it sends too many messages above its "
                    "allowance, and the broker drops its messages: look at the host, and give it "
                    "a new key: kilonova host rotate",
                    host=sender[:80],
                    seconds=seconds,
                    messages=host_bounds.FLOOD_MESSAGES,
                    period_seconds=host_bounds.FLOOD_SECONDS,
                )
                escape()
            return False
        return True

    def _take(self, door: str, body: bytes, key: str) -> None:
        assert self._bindings is not None  # ``serve`` creates the bindings before the listener.
        if not self._may_send(key.removeprefix(f"{door}."), len(body), self._bindings.wake):
            return

        def take(header: Header, content: JsonObject) -> None:
            host_bounds.require_bounded(content)
            purpose, number = Purpose(header.purpose), _number_of(header)
            if header.method == DECLARE_QUEUE and (door, purpose) in QUEUE_REQUESTS:
                self._declarations.submit(self._declare_queue_of, header, time.monotonic())
                return
            if purpose == Purpose.COMMAND:
                self._note_number(header.host, number)
            method = self._methods_at(door, purpose).get(header.method)
            if method is None:
                raise NotGenuine(
                    f"no method {header.method} may be called in the queue {door} with a key of purpose "
                    f"{header.purpose}"
                )
            if door == HEARTBEATS:
                self._answer(header, method, content)
            else:
                self._pool.put((header, method, content))

        self._process(body, take)

    def _note_number(self, host: str, number: int) -> None:
        """Note the number of the name under which a host reads its queue."""
        self._asking.record_answer(names_of(host_queue(self._prefix, host))[number])
        if number:
            self._numbers[host] = number
        else:
            self._numbers.pop(host, None)

    def _methods_at(self, door: str, purpose: Purpose) -> dict[str, Method]:
        """Return the methods that messages in this queue may call with a key of this purpose."""
        if purpose == Purpose.JOIN:
            return self._joins if door == REPORTS else {}
        return self._doors[door] if purpose == Purpose.COMMAND else {}

    def _process(self, body: bytes, take: Callable[[Header, JsonObject], None]) -> None:
        try:
            take(*unpack(self._keys, body))
        except NotGenuine as problem:
            self.refusals.count(claimed_host(body), problem)
        except errors.Problem as problem:
            log.warning(
                "a message of a host is dropped", host=claimed_host(body)[:80], problem=problem
            )

    def _declare_queue_of(self, header: Header, came_at: float) -> None:
        """Declare the queue of the host that requested it with the message of this header.

        The queue gets the first name from the requested one on that the broker accepts. A request
        that waited longer than ``STALE_SECONDS`` for a thread is dropped, because the host has sent
        another. ``came_at`` is the monotonic time of the arrival. If conductors have no permission
        to declare queues, that is logged.
        """
        queue = host_queues.name_of(self._prefix, header.host, Purpose(header.purpose))
        if time.monotonic() - came_at > STALE_SECONDS:
            return

        def declare(connection: Connection) -> None:
            try:
                host_queues.declare(connection, names_of(queue)[_number_of(header) :])
            except AmqpTransport.channel_errors as problem:
                if getattr(problem, "reply_code", None) != ACCESS_REFUSED:
                    raise
                log.warning(
                    "the conductors have no permission to declare the queue of a host, so the "
                    "host cannot be reached; run: kilonova broker restore",
                    queue=queue,
                    problem=problem,
                )

        self._declaring.run(f"the declaration of {queue}", declare)

    def _answer(self, header: Header, method: Method, content: JsonObject) -> None:
        """Run a method and send its result to the host.

        If the method raises NotGenuine, or the key is not valid any more or cannot be read, the
        request is counted in ``refusals`` and gets no answer.
        """
        arguments = {**content, "host": header.host}
        if header.purpose == Purpose.JOIN:
            arguments["generation"] = header.generation
        try:
            answer = run_method(method, arguments, NotGenuine)
            key = self._keys.find(header.host, header.generation, Purpose(header.purpose))
        except (NotGenuine, errors.Unavailable) as problem:
            self.refusals.count(header.host, problem)
            return
        queue = host_queues.name_of(self._prefix, header.host, Purpose(header.purpose))
        self._answering.send(
            "",
            [names_of(queue)[_number_of(header)]],
            pack(key, ANSWER, answer, header.id)[1],
            SECONDS_FOR_ANSWERS,
        )

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        super().close()
        if self._bindings is not None:
            self._bindings.close()
        if self._watch is not None:
            self._watch.close()
        self._pool.close()
        self._declarations.shutdown(wait=False, cancel_futures=True)
        self._asking.close()
        self._answering.close()
        self._declaring.close()
