# SPDX-License-Identifier: Apache-2.0
"""A proxy between clients and a cloud, which records faults and differences from Nova's schemas.

Unchanged clients use the proxy because of the variable http_proxy. The proxy also removes the
prefix /identity of URLs, which the web server of DevStack has for the identity service.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from compute_api.compute.request import microversions
from compute_api.http.microversions import HEADER
from tests.nova import schemas as nova

PREFIX = "/identity"
#: Headers of a single connection, which a proxy must not forward (RFC 9110, 7.6.1).
HOP_BY_HOP = ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "te", "upgrade")
#: Timeout of a service in seconds.
TIMEOUT = 300
#: Seconds between two checks of the server for its end.
PAUSE = 0.05


class Recorder:
    """The proxy, which listens while the context is open.

    Attributes:
        faults: "METHOD URL: status" of each answer of 500 or above, without the query.
        answers: Number of answers by status.
        judged: Number of successful answers of the compute service, compared with Nova's schemas.
        disagreements: A text for the first difference of each operation and place.
    """

    def __init__(self, compute: str = "") -> None:
        """Create a proxy.

        Args:
            compute: URL of the compute service, or "" to compare no answers.
        """
        self.faults: list[str] = []
        self.answers: Counter[int] = Counter()
        self.judged = 0
        self._disagreements: dict[str, str] = {}
        self._compute = compute
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"recorder": self})
        )

    @property
    def disagreements(self) -> list[str]:
        return [*self._disagreements.values()]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Recorder:
        threading.Thread(
            target=self._server.serve_forever, args=(PAUSE,), name="recorder", daemon=True
        ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def record(self, method: str, url: str, status: int) -> None:
        """Count an answer and record a fault, without the query, which may have a secret."""
        with self._lock:
            self.answers[status] += 1
            if status >= http.client.INTERNAL_SERVER_ERROR:
                self.faults.append(f"{method} {url.partition('?')[0]}: {status}")

    def judge(
        self,
        method: str,
        url: str,
        request_body: bytes | None,
        answer: http.client.HTTPResponse,
        body: bytes,
    ) -> None:
        """Compare an answer of the compute service with Nova's schemas. Errors have no schema."""
        if not self._compute or not url.startswith(self._compute):
            return
        version = answer.getheader(HEADER, "2.1").removeprefix("compute ")
        differences = [
            *nova.find_disagreements(
                method,
                urlsplit(url).path,
                _parse(request_body),
                microversions.number(version),
                answer.status,
                _parse(body),
            )
        ]
        with self._lock:
            self.judged += answer.status < http.client.MULTIPLE_CHOICES
            for place, text in differences:
                self._disagreements.setdefault(place, text)


def _parse(data: bytes | None) -> Any:
    """Return the JSON document of a body, or None for any other body, which has no schema."""
    try:
        return json.loads(data or b"null")
    except ValueError:
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recorder: Recorder

    def log_message(self, form: str, *values: Any) -> None:
        """Suppress the log on the terminal."""

    def _forward(self) -> None:
        url = urlsplit(self.path)
        path = (url.path.removeprefix(PREFIX) or "/") + (f"?{url.query}" if url.query else "")
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP
        }
        request_body = self._read_body()
        connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=TIMEOUT)
        try:
            connection.request(self.command, path, request_body, headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            self.recorder.record(self.command, self.path, http.client.BAD_GATEWAY)
            self.send_error(http.client.BAD_GATEWAY)
            return
        finally:
            connection.close()
        self.recorder.record(self.command, self.path, answer.status)
        self.recorder.judge(self.command, self.path, request_body, answer, body)
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in (*HOP_BY_HOP, "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        if length is not None and answer.status not in (
            http.client.NO_CONTENT,
            http.client.NOT_MODIFIED,
        ):
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body)

    def _read_body(self) -> bytes | None:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            length = self.headers.get("Content-Length")
            return None if length is None else self.rfile.read(int(length))
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        # Read the empty line at the end. These clients send no trailers.
        self.rfile.readline()
        return body

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _forward
