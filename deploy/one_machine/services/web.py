# SPDX-License-Identifier: Apache-2.0
"""The HTTP edge of the embedded services: bodies, responses and errors, the log, the server.

`application` builds a falcon app whose errors have the shape {"error": {"code", "title",
"message"}}. `read_object` reads a bounded JSON body. `serve` runs an app under gunicorn until
SIGTERM and lets running requests finish. Invariant: headers, bodies and query strings are never
logged, because they may contain secrets.
"""

import argparse
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import FrameType
from typing import Any
from wsgiref.types import WSGIApplication

import falcon
import orjson
from gunicorn.app.base import BaseApplication
from gunicorn.http.errors import ParseException

from common.service.log import TextFormatter, get_logger
from common.service.service import UMASK
from compute_api.http.request_data import MAX_DEPTH, is_too_deep
from compute_api.http.worker.limits import ClientLimits
from compute_api.http.worker.server import worker
from deploy.one_machine.services.json_types import JsonValue

LOG = get_logger("standalone")
BODY_LIMIT = 256 * 1024
App = falcon.App[falcon.Request, falcon.Response]


def application(middleware: list[Any]) -> App:
    """Return a falcon app without routes, with the request log and with errors as JSON.

    The handlers of errors are `write_error` and `answer_unexpected`. A slash at the end of a path
    is ignored.

    Args:
        middleware: Falcon middleware that runs after the request log.
    """
    app: App = falcon.App(middleware=[RequestLog(), *middleware])
    app.req_options.strip_url_path_trailing_slash = True
    app.req_options.keep_blank_qs_values = True
    app.set_error_serializer(write_error)
    app.add_error_handler(Exception, answer_unexpected)
    return app


class RequestLog:
    """Falcon middleware that gives each request an id and logs a line after the response."""

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        req.context.id = f"req-{uuid.uuid4()}"
        req.context.started = time.monotonic()
        resp.set_header("X-Openstack-Request-Id", req.context.id)

    def process_response(
        self, req: falcon.Request, resp: falcon.Response, resource: object, ok: bool
    ) -> None:
        took = 1000 * (time.monotonic() - req.context.started)
        LOG.info(
            "request",
            method=req.method,
            path=req.path[:200],
            status=resp.status_code,
            ms=took,
            request=req.context.id,
        )


def write_error(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError) -> None:
    """Set the body of an error response in Keystone's form.

    openstacksdk accepts this form from any service.
    """
    title = HTTPStatus(error.status_code).phrase
    message = error.description or f"{title}."
    answer(resp, {"error": {"code": error.status_code, "title": title, "message": message}})


def answer_unexpected(
    req: falcon.Request, resp: falcon.Response, error: Exception, params: object
) -> None:
    """Log an unexpected exception with its traceback, and answer 500 with the request id only."""
    LOG.error("a request failed unexpectedly", request=req.context.id, exc_info=error)
    raise falcon.HTTPInternalServerError(
        description=f"Unexpected error; see the service's log for request {req.context.id}."
    )


def answer(resp: falcon.Response, body: object) -> None:
    """Set the JSON body of a response."""
    resp.content_type = falcon.MEDIA_JSON
    # Names of columns are a subclass of str, which orjson accepts as keys only with this option.
    resp.data = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)


def read_bytes(req: falcon.Request, limit: int) -> bytes:
    """Read up to `limit` bytes of the body, chunked or not. Return b"" at the end of the body.

    Raises:
        HTTPBadRequest: The client broke off, or sent a malformed chunk.
    """
    try:
        return bytes(req.stream.read(limit))
    except (OSError, ParseException) as error:
        raise falcon.HTTPBadRequest(
            description="The request body ended early or is badly chunked."
        ) from error


def read_json(req: falcon.Request) -> JsonValue:
    """Return the body as JSON.

    Raises:
        HTTPContentTooLarge: The body is larger than 256 KiB.
        HTTPBadRequest: The body is incomplete, not JSON in UTF-8, or too deeply nested.
    """
    raw = b"" if (req.content_length or 0) > BODY_LIMIT else read_bytes(req, BODY_LIMIT + 1)
    if (req.content_length or 0) > BODY_LIMIT or len(raw) > BODY_LIMIT:
        raise falcon.HTTPContentTooLarge(
            description=f"The request body is larger than {BODY_LIMIT} bytes."
        )
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise falcon.HTTPBadRequest(
            description=f"The request body is not valid JSON: {error}."
        ) from error
    if is_too_deep(raw, body):
        raise falcon.HTTPBadRequest(
            description=f"The request body has more than {MAX_DEPTH} nested levels."
        )
    return body


def read_object(req: falcon.Request, key: str) -> JsonValue:
    """Return the value under `key` in the body, for example {"project": ...} for "project".

    Raises:
        HTTPContentTooLarge: The body is larger than 256 KiB.
        HTTPBadRequest: The body is incomplete, not valid JSON, too deeply nested, or not an object
            with this key.
    """
    return part_of(read_json(req), key)


def part_of(body: object, key: str) -> JsonValue:
    """Return the value under `key` in a body.

    Raises:
        HTTPBadRequest: The body is not an object with this key.
    """
    if not isinstance(body, dict) or key not in body:
        raise falcon.HTTPBadRequest(description=f"The request body must be an object with '{key}'.")
    return body[key]


def secret(path: str | None, variable: str) -> str:
    """Return a password from the first line of a file, or from an environment variable.

    The variable is used only if there is no path.

    Raises:
        SystemExit: There is no password. The message contains advice.
        OSError: The file cannot be read.
    """
    if path:
        with open(path, encoding="utf-8") as file:
            value = file.readline().rstrip("\n")
    else:
        value = os.environ.get(variable, "")
    if not value:
        remedy = f"write it to the file {path!r}" if path else f"set {variable}"
        raise SystemExit(f"No password: {remedy}.")
    return value


def log_to_stdout() -> None:
    """Log to stdout, from the level INFO on."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def add_options(parser: argparse.ArgumentParser, bind: str) -> None:
    """Add the options that `serve` reads. The default of --bind is ``bind``."""
    parser.add_argument("--bind", default=bind, metavar="HOST:PORT")
    parser.add_argument("--threads", type=int, default=8, help="requests at a time")
    parser.add_argument(
        "--idle-seconds", type=float, default=10.0, help="for how long a client may stall a request"
    )


def before_sigterm(action: Callable[[], None]) -> None:
    """Let SIGTERM run `action` and then the present handler, which must be a Python function.

    For example, `action` ends waiting requests, which would delay the end of the process.
    """
    handler = signal.getsignal(signal.SIGTERM)

    def handle(received: int, frame: FrameType | None) -> None:
        action()
        if callable(handler):
            handler(received, frame)

    signal.signal(signal.SIGTERM, handle)


class _Server(BaseApplication):  # type: ignore[misc]
    def __init__(self, load: Callable[[], WSGIApplication], settings: Mapping[str, object]) -> None:
        self._load, self._settings = load, settings
        super().__init__()

    def load_config(self) -> None:
        for name, value in self._settings.items():
            self.cfg.set(name, value)

    def load(self) -> WSGIApplication:
        return self._load()


def serve(
    load: Callable[[], WSGIApplication], options: argparse.Namespace, when_ready: Callable[[], None]
) -> None:
    """Run one gunicorn worker until SIGTERM.

    At most half of the threads, but at least one, serve bodies longer than BODY_LIMIT, which are
    images. The process logs to stdout.

    Args:
        load: Builds the app, in the worker process.
        options: The parsed command line, with the options of `add_options`.
        when_ready: Called once in the parent process after the address is bound, before the worker
            starts. For example, a service cleans up after a crash here.
    """
    os.umask(UMASK)
    log_to_stdout()
    limits = ClientLimits(
        stall_timeout_seconds=options.idle_seconds,
        max_body_bytes=BODY_LIMIT,
        max_streams=max(1, options.threads // 2),
    )
    _Server(
        load,
        {
            "bind": options.bind,
            "threads": options.threads,
            "workers": 1,
            "worker_class": worker(limits),
            "sendfile": False,
            "backlog": 2048,
            # `server list` looks up the images by id in one line.
            "limit_request_line": 8190,
            "graceful_timeout": 30,
            "control_socket_disable": True,
            "when_ready": lambda _server: when_ready(),
        },
    ).run()
