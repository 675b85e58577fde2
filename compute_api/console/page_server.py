# SPDX-License-Identifier: Apache-2.0
"""Serve the pages of the console service, and check the origin of websockets.

``service`` calls ``PageServer.answer`` for every request. Files are found at the start and served
by exact path. No path of a request becomes a file name, and no response redirects.

A websocket is accepted from pages of the console service and of ``allowed_origins``. Origins are
compared exactly with the configuration, never with other headers of the request. A request without
Origin is accepted too: all browsers send one, so the client is a program that no foreign page
controls, and the token decides. A browser that fetches a page for a token gets the cookie that
binds the token to this browser (``browser_cookies``).

Browsers show a page only in frames of the console service and of ``allowed_origins``. In other
frames the page would be blank, so browsers get ``framed.html``, which names the option. Over http,
browsers do not report frames. Then every page that links here from another origin gets
``framed.html``, and its script continues to the console unless it runs in a frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import orjson
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from common.domain.console_types import SPICE_PAGE
from common.service.log import get_logger
from compute_api.console.browser_cookies import INSIDE, BrowserCookies
from compute_api.http.health import Health

log = get_logger(__name__)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".mp3": "audio/mpeg",
    ".oga": "audio/ogg",
    ".ttf": "font/ttf",
    ".woff": "font/woff",
}
MAX_FILE_BYTES = 4 * 1024 * 1024
#: Folder with the page of the serial console.
OWN_FOLDER = Path(__file__).parent
FRAMED_PAGE = OWN_FOLDER / "framed.html"
#: Content security policy of that page, which may appear in any frame.
FRAMED_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
#: Query parameter of a page that is not in a frame.
ALONE = "alone=1"
#: Page in the URLs of VNC consoles.
SCREEN_PAGE = "vnc_lite.html"
WEBSOCKETS = ("/", "/websockify")
_INSTALL = (
    "an operator can install the package spice-html5, or set [spice] html5 to the folder, and then restart "
    "the console service"
)


class PageServer:
    """The pages of the console service.

    Args:
        novnc: Folder with noVNC.
        public_url: URL of the console service.
        browsers: The cookies.
        allowed_origins: Further origins that may embed pages and open websockets.
        health: Health of the process.
        spice: Folder with spice-html5, or None if it is not installed.
    """

    def __init__(
        self,
        novnc: Path,
        public_url: str,
        browsers: BrowserCookies,
        allowed_origins: Iterable[str] = (),
        health: Health | None = None,
        spice: Path | None = None,
    ) -> None:
        self._health = health or Health(())
        own_origin, self._browsers = origin(public_url), browsers
        self._origins = frozenset((own_origin, *allowed_origins))
        self._files = {**_list_files(novnc), **_list_files(OWN_FOLDER)}
        if spice is not None:
            self._files |= _list_files(spice, SPICE_PAGE.rpartition("/")[0])
        if f"/{SCREEN_PAGE}" not in self._files:
            log.warning(
                "VNC consoles cannot be shown, because their page is missing: install novnc, or "
                "set [console] novnc to the folder",
                file=SCREEN_PAGE,
                path=novnc,
            )
        self._policy = "; ".join(
            (
                "default-src 'self'",
                "script-src 'self' 'unsafe-inline'",
                "style-src 'self' 'unsafe-inline'",
                "img-src 'self' data:",
                # SPICE plays videos from blobs.
                "media-src 'self' blob:",
                f"connect-src 'self' {own_origin.replace('http', 'ws', 1)}",
                "base-uri 'none'",
                "form-action 'none'",
                f"frame-ancestors 'self' {' '.join(sorted(self._origins))}",
            )
        )

    def answer(self, request: Request) -> Response | None:
        """Return the response to a request, or None if a websocket may be opened.

        The response is the health report, a file, or an error. An HTML page sets the browser's
        cookie, if ``BrowserCookies`` returns a cookie. For a websocket this checks path and origin,
        and ``ConsoleSessions.serve`` checks the token later.
        """
        path = urlsplit(request.path).path if request.path.startswith("/") else ""
        if (
            "websocket" in request.headers.get_all("Upgrade")
            or "Sec-WebSocket-Key" in request.headers
        ):
            return self._check_websocket(path, request.headers)
        if (health_report := self._health.answer(path)) is not None:
            return self._build_response(
                HTTPStatus(health_report[0]), orjson.dumps(health_report[1]), "application/json"
            )
        file = self._files.get(path)
        content = _read_file(file) if file is not None else None
        if file is None and path == f"/{SPICE_PAGE}":
            log.warning(
                "SPICE consoles cannot be shown, because spice-html5 is missing", remedy=_INSTALL
            )
            return self._build_response(
                HTTPStatus.NOT_FOUND,
                f"The console service has no spice-html5: {_INSTALL}.\n".encode(),
                "text/plain; charset=utf-8",
            )
        if file is None or content is None:
            return self._build_response(
                HTTPStatus.NOT_FOUND,
                b"The console service has no such page.\n",
                "text/plain; charset=utf-8",
            )
        if file.suffix == ".html" and self._is_framed(request):
            return self._build_response(
                HTTPStatus.OK, FRAMED_PAGE.read_bytes(), TYPES[".html"], FRAMED_POLICY
            )
        response = self._build_response(HTTPStatus.OK, content, TYPES[file.suffix])
        cookie = (
            self._browsers.new_cookie(request.path, request.headers)
            if file.suffix == ".html"
            else None
        )
        if cookie is not None:
            response.headers["Set-Cookie"] = cookie
        return response

    def _is_framed(self, request: Request) -> bool:
        """Return True if a page of an origin outside ``_origins`` may show this page in a frame.

        Over http, each link from such an origin counts, unless the query contains ``ALONE``, which
        the script of ``framed.html`` adds outside of frames. Without Referer the result is False.
        """
        referers = request.headers.get_all("Referer")
        if not referers or self._origins.issuperset(map(origin, referers)):
            return False
        target = request.headers.get_all("Sec-Fetch-Dest")
        if target:
            return target[0] in INSIDE
        return ALONE not in urlsplit(request.path).query.split("&")

    def _check_websocket(self, path: str, headers: Headers) -> Response | None:
        origins = headers.get_all("Origin")
        if path not in WEBSOCKETS:
            return self._build_response(
                HTTPStatus.NOT_FOUND,
                b"No console is served at this path; use the URL of the console.\n",
                "text/plain; charset=utf-8",
            )
        if len(origins) > 1 or not self._origins.issuperset(origins):
            return self._build_response(
                HTTPStatus.FORBIDDEN,
                b"Pages of this origin may not open consoles; an operator can add "
                b"the origin to [console] allowed_origins.\n",
                "text/plain; charset=utf-8",
            )
        return None

    def _build_response(
        self, status: HTTPStatus, content: bytes, content_type: str, policy: str = ""
    ) -> Response:
        """Build a response with security headers.

        The URL of a page contains a token. Therefore browsers send no referrer and store no page.

        Args:
            status: The status.
            content: The body.
            content_type: The type of the body.
            policy: The content security policy. Empty: the policy of all pages.
        """
        headers = Headers(
            {
                "Content-Type": content_type,
                "Content-Length": str(len(content)),
                "Connection": "close",
                "Cache-Control": "no-store"
                if content_type.startswith(("text/html", "application/json"))
                else "no-cache",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
                "Content-Security-Policy": policy or self._policy,
            }
        )
        return Response(status.value, status.phrase, headers, content)


def origin(url: str) -> str:
    """Return the Origin that a browser sends for a page with this URL, or "" on a parse error."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        return ""
    if ":" in host:
        host = f"[{host}]"
    default_port = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}" + (f":{port}" if port and port != default_port else "")


def _list_files(folder: Path, below: str = "") -> dict[str, Path]:
    """Return the files in and below the folder with a suffix in ``TYPES``, by URL path.

    Links that lead out of the folder are left out.

    Args:
        folder: The folder.
        below: URL path of the folder without slashes at the ends. Empty: the root.
    """
    root, prefix = folder.resolve(), f"/{below}" if below else ""
    files = {}
    for path in root.rglob("*"):
        if path.suffix in TYPES and path.is_file() and path.resolve().is_relative_to(root):
            files[f"{prefix}/{path.relative_to(root).as_posix()}"] = path
    return files


def _read_file(file: Path) -> bytes | None:
    """Return the content of a file, or None if it cannot be read or exceeds ``MAX_FILE_BYTES``."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        log.warning("a page cannot be read", problem=error)
        return None
    return content if len(content) <= MAX_FILE_BYTES else None
