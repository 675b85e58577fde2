# SPDX-License-Identifier: Apache-2.0
"""The two processes of a network agent without root's rights: the privileged helper and its client.

The client calls fixed verbs of the helper over a Unix socket.
`Helper` may change the kernel's networks and talks to one client only. `HelperClient` is that
client. The client talks to the network service and to guests, and has no rights. A description is
parsed in both, so an attacker in the client can choose networks, and no more. Invariant: arguments
only reach commands, paths and rules through `description` and the names made from it. The kernel's
user id of the peer decides about access.
"""

import json
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType

from common.service.log import get_logger
from deploy.one_machine.services.json_types import Body, JsonValue
from deploy.one_machine.services.network.host.dnsmasq_config import METADATA
from deploy.one_machine.services.network.host.host_part import HostPart, LocalHostPart
from deploy.one_machine.services.network.host.kernel import Kernel, KernelError
from deploy.one_machine.services.network.host.metadata import PORT

LOG = get_logger("network.helper")
LENGTH, CREDENTIALS = struct.Struct("!I"), struct.Struct("3i")
# A description of some ten thousand ports.
MAX_MESSAGE_BYTES = 64 << 20
# The first descriptor that systemd passes (sd_listen_fds).
SYSTEMD_DESCRIPTOR = 3
#: Verb -> arguments with their types.
VERBS: dict[str, dict[str, tuple[type, ...]]] = {
    "prepare": {},
    "restore": {},
    "keep": {},
    "apply": {"tree": (dict, NoneType), "full": (bool,)},
    "listen": {"space": (str,)},
}


class InvalidMessage(ValueError):
    """A message that does not follow this protocol."""


def listening_socket(path: Path | None) -> socket.socket:
    """Return the listening socket that systemd passed, or otherwise a new socket at this path.

    An existing file at the path is replaced.

    Raises:
        SystemExit: systemd passed no socket, and ``path`` is None.
        OSError: The socket cannot be bound to the path.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        return socket.socket(fileno=SYSTEMD_DESCRIPTOR)
    if path is None:
        raise SystemExit("There is no socket: systemd passed none, and --socket is missing.")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


class Helper:
    """The privileged process. It serves one caller at a time.

    Args:
        host: The network agent that does the work.
        kernel: The kernel.
        user: The id of the only user whose processes may call.
    """

    def __init__(self, host: LocalHostPart, kernel: Kernel, user: int) -> None:
        self._host, self._kernel, self._user = host, kernel, user

    def serve(self, where: socket.socket) -> None:
        """Serve one caller after the other until the process ends.

        A broken connection, an invalid message or a refused caller is logged, and ends only that
        connection.
        """
        while True:
            caller, _ = where.accept()
            with caller:
                try:
                    self.serve_caller(caller)
                except (OSError, InvalidMessage) as error:
                    LOG.warning("the connection of the caller is closed", problem=error)

    def serve_caller(self, caller: socket.socket) -> None:
        """Serve one caller until the end of the connection.

        If a verb fails, the answer contains the error, and the connection continues.

        Raises:
            OSError: The connection breaks off.
            InvalidMessage: The caller is another user, or sends an invalid message.
        """
        user = CREDENTIALS.unpack(
            caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )[1]
        if user != self._user:
            raise InvalidMessage(f"user {user} may not call the helper, only user {self._user} may")
        while (message := _receive(caller)) is not None:
            verb, arguments = validate(message)
            descriptors: list[int] = []
            try:
                answer = self._do(verb, arguments, descriptors)
            except (KernelError, OSError) as error:
                answer = {"error": str(error)}
            try:
                _send(caller, answer, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _do(self, verb: str, arguments: Mapping[str, JsonValue], descriptors: list[int]) -> Body:
        host, failed = self._host, None
        match verb:
            case "prepare":
                host.prepare()
            case "restore":
                failed = host.restore()
                return {"failed": failed, "tree": host.tree, **self._state()}
            case "keep":
                host.save()
            case "apply":
                if arguments["tree"] is not None and not host.accept(arguments["tree"]):
                    return {"error": "the description is invalid; see the log of the helper"}
                failed = host.apply(arguments["full"])
            case "listen":
                if arguments["space"] not in host.listening:
                    raise KernelError(
                        f"the namespace {arguments['space'][:200]!r} needs no metadata listener"
                    )
                descriptors.append(self._kernel.listen(arguments["space"], METADATA, PORT).detach())
        return {"failed": failed, **self._state()}

    def _state(self) -> Body:
        namespaces = {}
        for name, network in self._host.listening.items():
            with suppress(OSError):
                namespaces[name] = [network, self._kernel.namespace_id(name)]
        return {"whole": self._host.is_whole, "spaces": namespaces}


class HelperClient(HostPart):
    """A network agent that leaves the privileged work to a helper.

    An OSError or KernelError of ``prepare``, ``restore``, ``apply`` or ``save`` ends the agent's
    process, and the next process starts anew.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._namespaces: dict[str, tuple[str, int]] = {}
        # True if the helper has the description.
        self._is_sent = True

    def prepare(self) -> None:
        self._call("prepare")

    def restore(self) -> dict[str, str] | None:
        answer = self._call("restore")
        if answer["failed"] is None or not self.accept(answer["tree"]):
            return None
        self._is_sent = True
        return self._finish(answer)

    def accept(self, tree: JsonValue) -> bool:
        is_understood = super().accept(tree)
        self._is_sent = self._is_sent and not is_understood
        return is_understood

    def apply(self, full: bool = False) -> dict[str, str]:
        answer = self._call("apply", tree=None if self._is_sent else self.tree, full=full)
        self._is_sent = True
        return self._finish(answer)

    def save(self) -> None:
        self._call("keep")

    def listen(self, namespace: str, address: str, port: int) -> socket.socket:
        """Return a socket that listens for metadata requests in a namespace.

        ``address`` and ``port`` are ignored, because the helper opens sockets for metadata only.

        Raises:
            OSError: The helper refuses, sends no socket, or has ended.
        """
        answer, descriptors = self._exchange("listen", space=namespace)
        if "error" in answer or len(descriptors) != 1:
            raise OSError(answer.get("error", "the helper sent no socket"))
        return socket.socket(fileno=descriptors[0])

    def namespace_id(self, namespace: str) -> int:
        """Return a number that changes when a namespace is deleted and made again.

        Raises:
            OSError: The helper's last report does not contain the namespace.
        """
        if namespace not in self._namespaces:
            raise FileNotFoundError(f"the helper reported no namespace {namespace}")
        return self._namespaces[namespace][1]

    def _finish(self, answer: Body) -> dict[str, str]:
        self._namespaces = {
            name: (network, id_) for name, (network, id_) in answer["spaces"].items()
        }
        networks = {name: network for name, (network, _) in self._namespaces.items()}
        self.is_whole = self._listen_to_metadata(networks) and answer["whole"]
        self.revision = self.description.revision
        return dict(answer["failed"])

    def _call(self, verb: str, **arguments: object) -> Body:
        answer, _ = self._exchange(verb, **arguments)
        if "error" in answer:
            raise KernelError(answer["error"])
        return answer

    def _exchange(self, verb: str, **arguments: object) -> tuple[Body, list[int]]:
        _send(self._socket, {"verb": verb, **arguments})
        descriptors: list[int] = []
        try:
            answer = _receive(self._socket, descriptors)
        except InvalidMessage as error:
            raise OSError(f"the helper's answer is invalid: {error}") from error
        if not isinstance(answer, dict):
            raise OSError("the helper has closed the connection")
        return answer, descriptors


def validate(message: object) -> tuple[str, Body]:
    """Return a message's verb and arguments.

    Raises:
        InvalidMessage: The verb is missing or unknown, or the arguments are not exactly those of
            the verb in ``VERBS``, with their types.
    """
    if not isinstance(message, dict) or not isinstance(message.get("verb"), str):
        raise InvalidMessage("the message has no verb")
    arguments = {name: value for name, value in message.items() if name != "verb"}
    expected = VERBS.get(message["verb"])
    if expected is None or arguments.keys() != expected.keys():
        raise InvalidMessage(f"the verb {message['verb'][:20]!r} or its arguments are unknown")
    if not all(type(arguments[name]) in types for name, types in expected.items()):
        raise InvalidMessage(f"an argument of the verb {message['verb']} has the wrong type")
    return message["verb"], arguments


def _send(connection: socket.socket, message: object, descriptors: list[int] | None = None) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(data))], descriptors or [])
    connection.sendall(data)


def _receive(connection: socket.socket, descriptors: list[int] | None = None) -> object:
    """Return the next message, or None at the end of the connection.

    Args:
        connection: The socket of the other process.
        descriptors: The list to which a received file descriptor is added. None accepts none.

    Raises:
        OSError: The connection breaks off.
        InvalidMessage: The message is empty, too long, incomplete or not JSON.
    """
    head, received_descriptors, _, _ = socket.recv_fds(
        connection, LENGTH.size, 1 if descriptors is not None else 0, socket.MSG_WAITALL
    )
    if descriptors is not None:
        descriptors.extend(received_descriptors)
    if not head:
        return None
    if len(head) < LENGTH.size or not 0 < LENGTH.unpack(head)[0] <= MAX_MESSAGE_BYTES:
        raise InvalidMessage("the length of the message is incomplete, zero or too large")
    data = bytearray()
    while len(data) < LENGTH.unpack(head)[0]:
        piece = connection.recv(min(LENGTH.unpack(head)[0] - len(data), 1 << 20))
        if not piece:
            raise InvalidMessage("the message is incomplete")
        data += piece
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"the message is not JSON: {type(error).__name__}") from error
