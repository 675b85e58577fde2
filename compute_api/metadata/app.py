# SPDX-License-Identifier: Apache-2.0
"""The WSGI application of the metadata service for guests at 169.254.169.254.

``service.application`` calls ``create`` once per process, and tests call it too. Each request
passes these steps in order: the proxy's signature, the rate limit, the guest's record, the path.
The documents come from ``common.domain.instance_data``. A path that begins neither with "openstack"
nor with "ec2" belongs to the EC2 tree.

Invariant: a guest only receives its own data. Every refusal is logged, without secrets.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any
from wsgiref.types import WSGIApplication

import falcon
from gunicorn.http.errors import ParseException

from common.domain import errors
from common.domain.instance_data import (
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
from common.domain.json_types import JsonObject
from common.security.rate_limit import RateLimiter
from common.service.log import get_logger
from compute_api.http import access_log, request_data
from compute_api.http.faults import TEXT_TYPE, TextFaults
from compute_api.http.response import JSON_TYPE
from compute_api.metadata.guest_cache import GuestCache, GuestRecord
from compute_api.metadata.proxy_headers import ADDRESS, SERVER, identify

logger = get_logger(__name__)
#: The limit that agents in guests expect.
MAX_PASSWORD_BYTES = 4 * 255
READ_METHODS, WRITE_METHOD = ("GET", "HEAD"), "POST"


def create(guests: GuestCache, proxy_secret: str, rate: RateLimiter) -> WSGIApplication:
    """Build the WSGI application of the metadata service.

    Args:
        guests: Finds guests, and stores posted passwords.
        proxy_secret: The secret with which the proxies sign.
        rate: Limits the requests of each guest.
    """
    app: Any = falcon.App(media_type=TEXT_TYPE)
    app.add_sink(MetadataResource(guests, proxy_secret, rate).serve, "/")
    TextFaults(logger, _describe_refusal, with_title=True, hides_missing=True).install(app)
    application: WSGIApplication = app
    return application


class MetadataResource:
    """Answers requests of guests for all paths and methods."""

    def __init__(self, guests: GuestCache, proxy_secret: str, rate: RateLimiter) -> None:
        self._guests, self._secret, self._rate = guests, proxy_secret, rate

    def serve(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Answer a request. Falcon calls this.

        Raises:
            Problem: The signature is wrong, or the guest is unknown (``identify``,
                ``GuestCache.find``), or a posted password is refused.
            HTTPError: The guest sends too many requests, or the path or method does not exist.
        """
        identity = identify(req.headers, self._secret)
        access_log.note(req.env, server=identity.server)
        wait, is_first_refusal = self._rate.take(identity.server)
        if is_first_refusal:
            logger.warning("a server exceeds [metadata] rate", server=identity.server)
        if wait:
            raise falcon.HTTPTooManyRequests(
                description="Too many requests.", retry_after=math.ceil(wait)
            )
        guest = self._guests.find(identity)
        parts = [part for part in req.path.split("/") if part]
        if _is_password(parts):
            self._serve_password(req, resp, identity.server, guest)
            return
        if req.method not in READ_METHODS:
            raise falcon.HTTPMethodNotAllowed(READ_METHODS)
        content = look_up(guest.data, parts)
        if content is None:
            raise falcon.HTTPNotFound(description="The metadata service has no such path.")
        resp.data, resp.content_type = content

    def _serve_password(
        self, req: falcon.Request, resp: falcon.Response, server: str, guest: GuestRecord
    ) -> None:
        if req.method in READ_METHODS:
            resp.text = guest.password
        elif req.method == WRITE_METHOD:
            self._guests.post_password(server, _read_password(req))
        else:
            raise falcon.HTTPMethodNotAllowed([*READ_METHODS, WRITE_METHOD])


def look_up(data: InstanceData, parts: Sequence[str]) -> tuple[bytes, str] | None:
    """Return the content at this path and its content type, or None if the path does not exist.

    The content of a folder is a list of names.

    Args:
        data: The guest's data.
        parts: The parts of the path between slashes, without empty parts. Not the path of the
            password, which the caller serves.

    Raises:
        Unavailable: A required vendor data service has no usable answer.
    """
    tree, parts = (parts[0], parts[1:]) if parts[:1] in (["openstack"], ["ec2"]) else ("ec2", parts)
    versions = VERSIONS if tree == "openstack" else EC2_VERSIONS
    if not parts:
        return text(list(versions)), TEXT_TYPE
    version, *rest = parts
    if version not in versions:
        return None
    if tree == "ec2":
        node = find(data.ec2(version), rest)
        return None if node is None else (text(node), TEXT_TYPE)
    names = data.names(version)
    if not rest:
        return text(names), TEXT_TYPE
    if rest[0] not in names or len(rest) > 1:
        return None
    content = data.document(version, rest[0], secrets.token_bytes(SEED_BYTES))
    return content, JSON_TYPE if rest[0].endswith(".json") else TEXT_TYPE


def _is_password(parts: Sequence[str]) -> bool:
    return (
        len(parts) == 3
        and parts[0] == "openstack"
        and parts[2] == PASSWORD
        and parts[1] in VERSIONS
        and DOCUMENTS[PASSWORD] <= parts[1] <= LATEST
    )


def _read_password(req: falcon.Request) -> str:
    """Return the password in the body.

    Raises:
        BadRequest: The body is too long, incomplete or empty, is not UTF-8, or contains the
            character NUL.
    """
    if (req.content_length or 0) > MAX_PASSWORD_BYTES:
        raise errors.BadRequest(
            f"The request is too large; a password has at most {MAX_PASSWORD_BYTES} bytes."
        )
    try:
        body = request_data.stream_of(req).read(MAX_PASSWORD_BYTES + 1)
        password = body.decode()
    except (OSError, ParseException) as problem:
        raise errors.BadRequest(request_data.UNREADABLE_BODY) from problem
    except UnicodeDecodeError as problem:
        raise errors.BadRequest("The password is not text in UTF-8.") from problem
    if len(body) > MAX_PASSWORD_BYTES:
        raise errors.BadRequest(
            f"The request is too large; a password has at most {MAX_PASSWORD_BYTES} bytes."
        )
    if len(body) < (req.content_length or 0):
        raise errors.BadRequest("The request body ended early.")
    if not password or "\x00" in password:
        raise errors.BadRequest("The password is empty, or contains the character NUL.")
    return password


def _describe_refusal(req: falcon.Request, problem: errors.Problem) -> JsonObject:
    return {
        "method": req.method,
        "path": req.path[:200],
        "server": req.headers.get(SERVER, "")[:64],
        "address": req.headers.get(ADDRESS, "")[:64],
        "problem": problem.text,
    }
