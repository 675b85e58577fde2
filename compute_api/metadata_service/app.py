# SPDX-License-Identifier: Apache-2.0
"""The WSGI application of the metadata service: what guests find at 169.254.169.254.

``create`` is called once a process by ``service.application``, and by tests. The order for every request: who asks
(signed by the proxy), how often, which guest that is, and only then what it asks for. What is answered comes from
``common.instance_data``; a path without a first part that we know is one of EC2's tree.
Must stay true: a guest is told of nobody but itself; every refusal is logged, without secrets.
"""
from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Sequence
from typing import Any

import falcon
from gunicorn.http.errors import ParseException

from common import errors
from common.instance_data import (
    DOCUMENTS,
    EC2_VERSIONS,
    LATEST,
    PASSWORD,
    SEED_BYTES,
    VERSIONS,
    InstanceData,
    find,
    text,
)
from compute_api.metadata_service.asker import ADDRESS, SERVER, identify
from compute_api.metadata_service.guests import Guest, Guests
from compute_api.metadata_service.rate import Rate

logger = logging.getLogger(__name__)
PLAIN, JSON = "text/plain; charset=UTF-8", "application/json"
LONGEST_PASSWORD = 4 * 255          # bytes, as guests' agents know it
READING, WRITING = ("GET", "HEAD"), "POST"


def create(guests: Guests, proxy_secret: str, rate: Rate) -> Any:
    """The application over these guests."""
    app: Any = falcon.App(media_type=PLAIN)
    app.add_sink(Metadata(guests, proxy_secret, rate).serve, "/")
    app.set_error_serializer(_serialize)
    app.add_error_handler(Exception, _unexpected)
    app.add_error_handler(errors.Problem, _refuse)
    return app


class Metadata:
    """Every path and method."""

    def __init__(self, guests: Guests, proxy_secret: str, rate: Rate) -> None:
        self._guests, self._secret, self._rate = guests, proxy_secret, rate

    def serve(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Called by falcon."""
        asker = identify(req.headers, self._secret)
        wait, is_news = self._rate.take(asker.server)
        if is_news:
            logger.warning("server %r asks more often than [metadata] rate allows", asker.server)
        if wait:
            raise falcon.HTTPTooManyRequests(description="Too many requests.", retry_after=math.ceil(wait))
        guest = self._guests.find(asker)
        parts = [part for part in req.path.split("/") if part]
        if _is_password(parts):
            self._password(req, resp, asker.server, guest)
            return
        if req.method not in READING:
            raise falcon.HTTPMethodNotAllowed(READING)
        found = look_up(guest.data, parts)
        if found is None:
            raise falcon.HTTPNotFound(description="There is nothing of that name.")
        resp.data, resp.content_type = found

    def _password(self, req: falcon.Request, resp: falcon.Response, server: str, guest: Guest) -> None:
        if req.method in READING:
            resp.text = guest.password
        elif req.method == WRITING:
            self._guests.post_password(server, _posted(req))
        else:
            raise falcon.HTTPMethodNotAllowed([*READING, WRITING])


def look_up(data: InstanceData, parts: Sequence[str]) -> tuple[bytes, str] | None:
    """What a guest finds at this path, and its type; None for nothing."""
    tree, parts = (parts[0], parts[1:]) if parts[:1] in (["openstack"], ["ec2"]) else ("ec2", parts)
    versions = VERSIONS if tree == "openstack" else EC2_VERSIONS
    if not parts:
        return text(list(versions)), PLAIN
    version, *rest = parts
    if version not in versions:
        return None
    if tree == "ec2":
        node = find(data.ec2(version), rest)
        return None if node is None else (text(node), PLAIN)
    names = data.names(version)
    if not rest:
        return text(names), PLAIN
    if rest[0] not in names or len(rest) > 1:
        return None
    content = data.document(version, rest[0], secrets.token_bytes(SEED_BYTES))
    return content, JSON if rest[0].endswith(".json") else PLAIN


def _is_password(parts: Sequence[str]) -> bool:
    return len(parts) == 3 and parts[0] == "openstack" and parts[2] == PASSWORD and parts[1] in VERSIONS \
        and DOCUMENTS[PASSWORD] <= parts[1] <= LATEST


def _posted(req: falcon.Request) -> str:
    """The password in the body. Raises BadRequest."""
    stream = req.stream if req.content_length is None and req.env.get("wsgi.input_terminated") else req.bounded_stream
    if (req.content_length or 0) > LONGEST_PASSWORD:
        raise errors.BadRequest(f"Request is too large; a password has at most {LONGEST_PASSWORD} bytes.")
    try:
        body = stream.read(LONGEST_PASSWORD + 1)
        password = body.decode()
    except (OSError, ParseException) as problem:
        raise errors.BadRequest("The request body ended early or is badly chunked.") from problem
    except UnicodeDecodeError as problem:
        raise errors.BadRequest("The password is not text in UTF-8.") from problem
    if len(body) > LONGEST_PASSWORD:
        raise errors.BadRequest(f"Request is too large; a password has at most {LONGEST_PASSWORD} bytes.")
    if len(body) < (req.content_length or 0):
        raise errors.BadRequest("The request body ended early.")
    if not password or "\x00" in password:
        raise errors.BadRequest("The password is empty, or holds the character NUL.")
    return password


def _refuse(req: falcon.Request, resp: falcon.Response, problem: errors.Problem, params: Any) -> None:
    """A refusal or a failure that was foreseen."""
    logger.warning("refused %s %.200r, said to be of server %.64r at %.64r: %s", req.method, req.path,
                   req.headers.get(SERVER), req.headers.get(ADDRESS), problem.text)
    if problem.status == 404:
        raise falcon.HTTPNotFound          # a proxy need not learn which of its guesses was right
    raise falcon.HTTPError(problem.status, description=problem.text,
                           headers={"Retry-After": "1"} if problem.retryable else None)


def _unexpected(req: falcon.Request, resp: falcon.Response, problem: Exception, params: Any) -> None:
    """A bug, with its traceback in the log."""
    logger.error("%s %.200r failed", req.method, req.path, exc_info=problem)
    raise falcon.HTTPInternalServerError(description="Unexpected error; the operator's log says more.")


def _serialize(req: falcon.Request, resp: falcon.Response, problem: falcon.HTTPError) -> None:
    resp.content_type, resp.text = PLAIN, f"{problem.title}\n{problem.description or ''}".strip() + "\n"
