# SPDX-License-Identifier: Apache-2.0
"""Ambiguous and malformed requests as raw bytes, and checks of the worker's answers.

Two servers in a row could parse an ambiguous request differently (request smuggling).
``python -m tests.fuzz.raw PORT`` serves an application that echoes facts of each request.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from gunicorn.http.errors import ParseException

from deploy.one_machine.cloud.probes import answers as is_answered
from deploy.testing.servers import free_ports
from tests.waiting import await_true

LINE = b"POST /asked HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
#: Ambiguous requests. A proxy in front of the worker could forward and parse them differently, so
#: the worker must refuse them and close the connection.
REFUSED: dict[str, bytes] = {
    "both lengths": LINE
    + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "both, chunked first": LINE
    + b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "two lengths": LINE + b"Content-Length: 0\r\nContent-Length: 35\r\n\r\n" + SMUGGLED,
    "the same length twice": LINE
    + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd"
    + SMUGGLED,
    "a list of lengths": LINE + b"Content-Length: 4, 4\r\n\r\nabcd" + SMUGGLED,
    **{
        f"length {value!r}": LINE + b"Content-Length: " + value + b"\r\n\r\nabcd" + SMUGGLED
        for value in (
            b"-1",
            b"+4",
            b"4x",
            b"0x4",
            b"4.0",
            b"4 4",
            b"\xd9\xa4",
            b"\xb2",
            b"1_0",
            b"",
            b"4;a=b",
        )
    },
    **{
        f"encoding {value!r}": LINE
        + b"Transfer-Encoding: "
        + value
        + b"\r\n\r\n0\r\n\r\n"
        + SMUGGLED
        for value in (
            b"xchunked",
            b"chunked, identity",
            b"identity, chunked",
            b"\x0bchunked",
            b"chunked\x0b",
            b"gzip, chunked",
            b"chunked, chunked",
            b"'chunked'",
            b"chunked;q=1",
        )
    },
    "two encodings": LINE
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "an encoding in HTTP/1.0": (
        b"POST /asked HTTP/1.0\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n"
        b"0\r\n\r\n" + SMUGGLED
    ),
    "a folded header": LINE + b"X-A: b\r\n Transfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
    "a folded encoding": LINE + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a blank before the colon": LINE + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a tabulator before the colon": LINE + b"Content-Length\t: 4\r\n\r\nabcd" + SMUGGLED,
    "a header after a blank": b"POST /asked HTTP/1.1\r\n Content-Length: 4\r\nHost: x\r\n\r\nabcd"
    + SMUGGLED,
    "a header without a colon": LINE + b"Content-Length\r\n\r\n" + SMUGGLED,
    "an empty name": LINE + b": x\r\n\r\n" + SMUGGLED,
    "NUL in a value": LINE + b"X-A: a\x00b\r\n\r\n" + SMUGGLED,
    "NUL in a name": LINE + b"X\x00A: b\r\n\r\n" + SMUGGLED,
    "CR in a value": LINE + b"X-A: a\rContent-Length: 4\r\n\r\nabcd" + SMUGGLED,
    "LF alone": LINE + b"X-A: a\nContent-Length: 4\r\n\r\nabcd" + SMUGGLED,
    **{
        f"chunk {size!r}": LINE
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + size
        + b"\r\nabcd\r\n0\r\n\r\n"
        + SMUGGLED
        for size in (
            b"0x4",
            b"+4",
            b"-4",
            b"4_",
            b"4 4",
            b"\t4",
            b"",
            b"g",
            b"4\xb2",
            b"f" * 20,
            b"4\n",
        )
    },
    "a chunk that is longer": LINE
    + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcdef\r\n0\r\n\r\n"
    + SMUGGLED,
    "a chunk with LF alone": LINE + b"Transfer-Encoding: chunked\r\n\r\n4\nabcd\n0\n\n" + SMUGGLED,
    "a line that is too long": b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a header that is too long": LINE + b"X-A: " + b"a" * 9000 + b"\r\n\r\n",
    "too many headers": LINE + b"X-A: a\r\n" * 300 + b"\r\n",
    "an invalid version": b"GET / HTTP/x.y\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "no method": b" / HTTP/1.1\r\n\r\n",
    "no path": b"GET  HTTP/1.1\r\n\r\n",
    "a method with a parenthesis": b"GE(T / HTTP/1.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}
#: Statuses of the answers on such a connection before the worker closes it.
REFUSALS = ([400], [431], [414], [501], [505])
#: Valid requests that the worker must read completely before the next request.
TAKEN: dict[str, bytes] = {
    "a length": LINE + b"Content-Length: 35\r\n\r\n" + SMUGGLED,
    "one chunk": LINE + b"Transfer-Encoding: chunked\r\n\r\n23\r\n" + SMUGGLED + b"\r\n0\r\n\r\n",
    "Chunked": LINE + b"Transfer-Encoding: Chunked\r\n\r\n23;a=b\r\n" + SMUGGLED + b"\r\n0\r\n\r\n",
    "a trailer": LINE
    + b"Transfer-Encoding: chunked\r\n\r\n23\r\n"
    + SMUGGLED
    + b"\r\n0\r\nX-T: a\r\n\r\n",
}
#: Headers with underscores. In WSGI they have the same names as headers with hyphens.
UNDERSCORED = (
    b"X_Auth_Token: t\r\nX_Roles: admin\r\nX-Identity_Status: Confirmed\r\nContent_Length: 35\r\n"
    b"Transfer_Encoding: chunked\r\nx_user_id: admin\r\n"
)
#: Headers that gunicorn accepts from local clients by default.
FORWARDED = b"SCRIPT_NAME: /elsewhere\r\nPATH_INFO: /smuggled\r\nScript-Name: /x\r\n"
#: Parts of generated requests.
LINES = (
    b"GET / HTTP/1.1",
    b"POST /a HTTP/1.1",
    b"POST /a HTTP/1.0",
    b"GET /%ff%00?a=\xff HTTP/1.1",
    b"GET http://evil.example/ HTTP/1.1",
    b"OPTIONS * HTTP/1.1",
    b"CONNECT a:1 HTTP/1.1",
    b"GET / HTTP/1.2",
    b"get / http/1.1",
    b"GET //a/../b HTTP/1.1",
    b"G" * 100 + b" / HTTP/1.1",
    b"GET /\xe2\x98\x83 HTTP/1.1",
    b"",
)
HEADERS = (
    b"Host: x",
    b"Host: a, b",
    b"Host:",
    b"Content-Length: 4",
    b"Content-Length: 0",
    b"Content-Length: 1000",
    b"Transfer-Encoding: chunked",
    b"Connection: keep-alive, close",
    b"Connection: x",
    b"Expect: 100-continue",
    b"Expect: \xff",
    b"Upgrade: websocket",
    b"X: \xff\xfe",
    b"X_Y: z",
    b"Content-Type: application/json",
    b" x: y",
    b"X-Forwarded-Proto: ftp",
    b"SCRIPT_NAME: /x",
    b"Script-Name: /x",
    b"Trailer: a",
    b"TE: trailers",
    b"Proxy: x",
    b'Forwarded: for="',
    b"x:" + b"y" * 4000,
    b"\x7f: x",
    b"Range: bytes=0-",
)
BODIES = (
    b"",
    b"abcd",
    b"4\r\nabcd\r\n0\r\n\r\n",
    b"0\r\n\r\n",
    b"\x00" * 50,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\r\n\r\n\r\n",
    b"ffffffff\r\nab",
    b"4;" + b"x" * 100 + b"\r\nabcd\r\n0\r\n\r\n",
)


@dataclass(frozen=True)
class Answer:
    """One answer on a connection."""

    status: int
    kind: str
    body: bytes


def ask(port: int, payload: bytes, seconds: float = 20) -> list[Answer]:
    """Send bytes, shut down the sending side and return all answers.

    Raises:
        TimeoutError: The worker does not close the connection.
    """
    with socket.create_connection(("127.0.0.1", port), seconds) as client:
        received = bytearray()
        try:
            client.sendall(payload)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(65536):
                received += piece
        except (ConnectionResetError, BrokenPipeError):
            # The worker has refused the request before reading all of it.
            pass
    return answers(bytes(received))


def answers(received: bytes) -> list[Answer]:
    """Split received bytes into answers by their Content-Length, without status 100."""
    parsed = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        fields = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        }
        length = int(fields.get(b"content-length", b"0"))
        parsed.append(Answer(status, fields.get(b"content-type", b"").decode(), rest[:length]))
        received = rest[length:]
    return [answer for answer in parsed if answer.status != 100]


def by_chance(seed: int, number: int) -> bytes:
    """Return request ``number`` of a seed. Most requests are malformed."""
    chance = Random(f"{seed}:{number}")
    lines = [chance.choice(LINES), *chance.choices(HEADERS, k=chance.choice((0, 1, 2, 3, 6)))]
    payload = (
        chance.choices((b"\r\n", b"\n", b"\r"), (90, 6, 4))[0].join(lines)
        + b"\r\n\r\n"
        + chance.choice(BODIES)
    )
    for _ in range(chance.choices((0, 1, 4), (60, 25, 15))[0]):
        at = chance.randrange(len(payload))
        payload = (
            payload[:at] + bytes([chance.randrange(256)]) + payload[at + chance.choice((0, 1)) :]
        )
    return payload


def faults(received_answers: list[Answer]) -> list[str]:
    """Return the faults of answers that no request may cause."""
    wrong = []
    for answer in received_answers:
        if answer.status >= 500 and answer.status not in (501, 503, 505):
            wrong.append(f"status {answer.status}")
        if answer.status >= 400 and not answer.kind.startswith("application/json"):
            wrong.append(f"status {answer.status} without JSON: {answer.kind} {answer.body[:80]!r}")
        if b"html" in answer.body or re.search(rb"Traceback|gunicorn|\.py\b", answer.body):
            wrong.append(f"says {answer.body[:200]!r}")
    return wrong


def wrong_of(port: int, seed: int, number: int) -> str:
    """Send request ``number`` of a seed and return its faults with the request, or ""."""
    payload = by_chance(seed, number)
    try:
        problems = faults(ask(port, payload))
    except (TimeoutError, ValueError, IndexError) as problem:
        problems = [f"no answer that can be read: {type(problem).__name__}: {problem}"]
    return f"{'; '.join(problems)}\n  {payload[:300]!r}" if problems else ""


def ambiguous(port: int) -> list[str]:
    """Return a line for each request of ``REFUSED`` that the worker does not refuse once."""
    wrong = []
    for name, payload in REFUSED.items():
        received_answers = ask(port, payload)
        if [answer.status for answer in received_answers] not in REFUSALS or faults(
            received_answers
        ):
            wrong.append(f"{name}: {received_answers}")
    return wrong


@contextmanager
def serving() -> Iterator[int]:
    """Run a process that serves ``echo`` and yield its port.

    Raises:
        AssertionError: The process ends with an error status.
    """
    port = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.raw", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        await_true(lambda: is_answered(port), story="it listens")
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(20)
    assert status == 0, f"the worker ended with {status}"


def echo(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """Answer with the path, the length of the body and the header names of the request.

    An incomplete body is the client's fault and returns 400, as in all services.
    """
    status = "200 OK"
    try:
        body = environ["wsgi.input"].read() if environ["REQUEST_METHOD"] == "POST" else b""
    except (OSError, ParseException):
        status, body = "400 Bad Request", b""
    content = json.dumps(
        {
            "path": environ["PATH_INFO"],
            "body": len(body),
            "headers": sorted(name for name in environ if name.startswith(("HTTP_", "CONTENT_"))),
        }
    ).encode()
    start_response(
        status, [("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
    )
    return [content]


if __name__ == "__main__":
    from compute_api.http.worker.server import Server

    Server("raw", "127.0.0.1", int(sys.argv[1]), lambda: echo, lambda: None, threads=4).run()
