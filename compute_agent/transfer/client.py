# SPDX-License-Identifier: Apache-2.0
"""Read the files of a guest from the agent of another host.

``assembly.make_transfer`` binds the TLS files to ``peer``, and verbs call ``peer(address, server,
secret)``. The address comes from the other host's ``facts["transfer"]``. No connection is made
before the first ``parts`` or ``read``. A broken connection is opened again, and the transfer
resumes at the last offset. If no frame has arrived for ``SILENCE_TIMEOUT_SECONDS``, the next broken
connection results in Unavailable.

Invariant: ``read`` yields only data with the checksum of the sender. With TLS the client reads only
from a host with a valid certificate.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Generator, Iterator
from typing import TypeVar

from common.domain import errors
from common.security.tls import Tls
from common.service.log import get_logger
from compute_agent.transfer.frames import (
    DATA,
    END,
    FAILURE,
    FRAME_TIMEOUT_SECONDS,
    LIST,
    Frame,
    Frames,
    TransferCorrupted,
    TransferInterrupted,
    TransferRequest,
    meaning,
    send_request,
)
from compute_agent.verb_context import Part, Peer, VerbFailed

log = get_logger(__name__)
Kind = TypeVar("Kind")
#: Seconds: timeout to connect, time without a frame after which an interruption is final, and pause
#: between two attempts.
CONNECT_TIMEOUT_SECONDS, SILENCE_TIMEOUT_SECONDS, RETRY_SECONDS = 5.0, 15.0, 0.5


def peer(
    address: str,
    server: str,
    secret: str,
    *,
    tls: Tls | None = None,
    silence_timeout: float = SILENCE_TIMEOUT_SECONDS,
    frame_seconds: float = FRAME_TIMEOUT_SECONDS,
) -> Peer:
    """Return the ``Peer`` that reads a server's files at another host. No connection is made yet.

    Args:
        address: Address of the host's transfer service, "ip:port".
        server: Id of the server.
        secret: Secret under which the host offers the files.
        tls: TLS files of this host, or None for plain connections.
        silence_timeout: Seconds without a frame after which a broken connection is final.
        frame_seconds: Time limit for each frame.

    Raises:
        VerbFailed: The address is empty or malformed, because the host serves no files.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal():
        raise VerbFailed(
            "The source host does not serve the server's files to other hosts.",
            retryable=True,
            details=f"the source host's address for transfers is {address!r}; see [migration] transfer_port of "
            "its agent",
        )
    return _Peer(host.strip("[]"), int(port), server, secret, tls, silence_timeout, frame_seconds)


class _Peer:
    def __init__(
        self,
        host: str,
        port: int,
        server: str,
        secret: str,
        tls: Tls | None,
        silence_timeout: float,
        frame_seconds: float,
    ) -> None:
        self._host, self._port = host, port
        self._server, self._secret = server, secret
        self._tls, self._silence_timeout, self._frame_seconds = tls, silence_timeout, frame_seconds

    def parts(self) -> list[Part]:
        with self._translate_errors():
            return [part for frame in self._frames("") for part in _parts(frame)]

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        with self._translate_errors(), contextlib.closing(self._frames(name)) as frames:
            for frame in frames:
                if frame.kind == DATA:
                    yield frame.offset, frame.data

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise Unavailable for TransferInterrupted, retryable VerbFailed for TransferCorrupted."""
        where = f"{self._host}:{self._port}, server {self._server}"
        try:
            yield
        except TransferInterrupted as problem:
            raise errors.Unavailable(
                f"The files at {where} cannot be read now: {problem}."
            ) from problem
        except TransferCorrupted as problem:
            raise VerbFailed(
                "The server's files could not be copied intact from the source host.",
                retryable=True,
                details=f"{where}: {problem}; check that both agents have the same version, and that both or "
                "neither have [migration] transfer_cert",
            ) from problem

    def _frames(self, name: str) -> Generator[Frame, None, None]:
        """Yield the frames of the response. Reconnect after interruptions, at the last offset.

        Args:
            name: Name of the file, or "" for the list of files.

        Raises:
            TransferInterrupted: The connection broke, and no frame came for ``silence_timeout``
                seconds.
            TransferCorrupted: The data is not valid, or TLS failed.
            VerbFailed: The host refuses, or this host's TLS files cannot be used.
        """
        at, deadline = 0, time.monotonic() + self._silence_timeout
        while True:
            try:
                with contextlib.closing(
                    self._exchange(TransferRequest(self._server, self._secret, name, at))
                ) as frames:
                    for frame in frames:
                        if frame.kind == DATA and frame.data:
                            if frame.offset < at:
                                raise TransferCorrupted(
                                    f"data at offset {frame.offset} came after data up to {at}"
                                )
                            at = frame.offset + len(frame.data)
                        yield frame
                        deadline = time.monotonic() + self._silence_timeout
                return
            except TransferInterrupted as problem:
                if time.monotonic() > deadline:
                    raise
                log.info(
                    "a transfer resumes",
                    file=name or "the list of files",
                    server=self._server,
                    peer=f"{self._host}:{self._port}",
                    offset=at,
                    problem=problem,
                )
                time.sleep(RETRY_SECONDS)

    def _exchange(self, request: TransferRequest) -> Generator[Frame, None, None]:
        """Yield the frames of one connection, up to the last frame of the response.

        Raises:
            TransferInterrupted: The connection failed, ended or was silent, or the host cannot send
                now.
            TransferCorrupted: The data is not valid, or TLS failed.
            VerbFailed: The host refuses, or this host's TLS files cannot be used.
        """
        with self._connect() as connection:
            send_request(connection, request)
            frames = Frames(connection, self._frame_seconds)
            expected, last = (DATA, END) if request.name else (LIST, LIST)
            while True:
                frame = frames.receive()
                if frame.kind == FAILURE:
                    raise _failure_of(frame)
                if frame.kind not in (expected, last):
                    raise TransferCorrupted(
                        f"a frame of kind {frame.kind!r} came, and {expected!r} was requested"
                    )
                yield frame
                if frame.kind == last:
                    return

    def _connect(self) -> socket.socket:
        try:
            context = self._tls.for_client() if self._tls else None
        except (OSError, ValueError) as problem:
            raise VerbFailed(
                "This host cannot prove itself to the source host, because its TLS files cannot be used.",
                retryable=True,
                details=f"[migration] transfer_cert, transfer_key, transfer_ca: {problem}",
            ) from problem
        try:
            plain = socket.create_connection((self._host, self._port), CONNECT_TIMEOUT_SECONDS)
        except OSError as problem:
            raise TransferInterrupted(str(problem)) from problem
        if context is None:
            return plain
        plain.settimeout(CONNECT_TIMEOUT_SECONDS)
        try:
            return context.wrap_socket(plain, server_hostname=self._host)
        except OSError as problem:
            plain.close()
            raise meaning(problem) from problem


def _failure_of(frame: Frame) -> Exception:
    payload = _json(frame, dict)
    text = str(payload.get("text", ""))[:1000]
    if payload.get("kind") == "unavailable":
        return TransferInterrupted(text)
    return VerbFailed(
        "The source host refused to send the server's files.",
        retryable=True,
        details=f"the source host answered: {text}",
    )


def _parts(frame: Frame) -> list[Part]:
    try:
        parts = [Part(**payload) for payload in _json(frame, list)]
    except TypeError as error:
        raise TransferCorrupted("the list of files is malformed") from error
    if not all(
        isinstance(part.name, str)
        and type(part.size) is int
        and type(part.bytes) is int
        and min(part.bytes, part.size) >= 0
        for part in parts
    ):
        raise TransferCorrupted("the list of files is malformed")
    return parts


def _json(frame: Frame, kind: type[Kind]) -> Kind:
    try:
        payload = json.loads(frame.data)
    except (ValueError, RecursionError) as error:
        raise TransferCorrupted("a frame of the response is not JSON") from error
    if not isinstance(payload, kind):
        raise TransferCorrupted(f"a frame of the response is not a JSON {kind.__name__}")
    return payload
