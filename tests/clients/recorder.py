# SPDX-License-Identifier: Apache-2.0
"""A proxy between clients and a cloud: it passes everything on, remembers each answer of 500 and
more, and has Nova's schemas judge the answers of the compute service.

Clients that know nothing of it find it by the variable http_proxy. It also stands for the web
server of a DevStack, where the identity service is below /identity.
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
#: Of one connection, not of what is passed on (RFC 9110, 7.6.1).
OWN = ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "te", "upgrade")
#: Seconds that a service may take.
PATIENCE = 300
#: Seconds until the end is noticed.
PAUSE = 0.05


class Recorder:
    """Listens from ``__enter__`` on. ``faults``: "METHOD path: status" of each answer of 500 and
    more; ``answers``: how many of each status; ``judged``: how many answers of the compute service,
    whose URL is ``compute``, were held against Nova's schemas; ``disagreements``: the first of each
    kind, in words."""

    def __init__(self, compute: str = "") -> None:
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

    def note(self, method: str, url: str, status: int) -> None:
        """What a service answered; of the URL without its query, in which there may be a secret."""
        with self._lock:
            self.answers[status] += 1
            if status >= http.client.INTERNAL_SERVER_ERROR:
                self.faults.append(f"{method} {url.partition('?')[0]}: {status}")

    def judge(
        self,
        method: str,
        url: str,
        asked: bytes | None,
        answer: http.client.HTTPResponse,
        body: bytes,
    ) -> None:
        """Would Nova have given this answer? Of an error it says nothing."""
        if not self._compute or not url.startswith(self._compute):
            return
        version = answer.getheader(HEADER, "2.1").removeprefix("compute ")
        found = [
            *nova.find_disagreements(
                method,
                urlsplit(url).path,
                _document(asked),
                microversions.number(version),
                answer.status,
                _document(body),
            )
        ]
        with self._lock:
            self.judged += answer.status < http.client.MULTIPLE_CHOICES
            for place, words in found:
                self._disagreements.setdefault(place, words)


def _document(data: bytes | None) -> Any:
    """What is no JSON is None: the schemas have no other bodies."""
    try:
        return json.loads(data or b"null")
    except ValueError:
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recorder: Recorder

    def log_message(self, form: str, *values: Any) -> None:
        """Nothing on the terminal."""

    def _pass_on(self) -> None:
        url = urlsplit(self.path)
        path = (url.path.removeprefix(PREFIX) or "/") + (f"?{url.query}" if url.query else "")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN}
        asked = self._body()
        connection = http.client.HTTPConnection(
            url.hostname or "", url.port or 80, timeout=PATIENCE
        )
        try:
            connection.request(self.command, path, asked, headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            self.recorder.note(self.command, self.path, http.client.BAD_GATEWAY)
            self.send_error(http.client.BAD_GATEWAY)
            return
        finally:
            connection.close()
        self.recorder.note(self.command, self.path, answer.status)
        self.recorder.judge(self.command, self.path, asked, answer, body)
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in (*OWN, "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        if length is not None and answer.status not in (
            http.client.NO_CONTENT,
            http.client.NOT_MODIFIED,
        ):
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes | None:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            length = self.headers.get("Content-Length")
            return None if length is None else self.rfile.read(int(length))
        found = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()  # no trailers are sent by these clients
        return found

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on
