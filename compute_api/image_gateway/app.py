# SPDX-License-Identifier: Apache-2.0
"""The WSGI application of the image gateway: the part of the image API that hosts use, for those who have a ticket.

``create`` is called once a process by ``service.application``, and by tests. The order for every request: is it one of
the three that are answered, may this ticket do that with this image, and only then the image service is asked, with
Kilonova's own token (``images``). Bytes are passed on as they come, a MiB at a time.
Must stay true: what breaks off at one end breaks off at the other, never ends; no answer names where the image service
keeps an image; every refusal is logged, without tickets.
"""
from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import falcon
import orjson
from gunicorn.http.errors import ParseException

from common import errors
from common.clients.image import CHUNK
from common.clients.own_images import OwnImages
from common.image_tickets import Ticket, Tickets

logger = logging.getLogger(__name__)
TOKEN = "X-AUTH-TOKEN"
PATH = re.compile(r"/v2/images/([0-9A-Za-z-]{1,64})(/file)?")
TOLD = ("id", "status", "size", "virtual_size", "disk_format", "container_format", "checksum", "os_hash_algo",
        "os_hash_value", "min_disk", "min_ram")
#: Seconds that a host may stall in the middle of an image: its disk may be busy.
PATIENCE = 60


def create(images: OwnImages, tickets: Tickets) -> Any:
    """The application."""
    app: Any = falcon.App(media_type=falcon.MEDIA_TEXT)
    app.add_sink(Gateway(images, tickets).serve, "/")
    app.set_error_serializer(_serialize)
    app.add_error_handler(Exception, _unexpected)
    app.add_error_handler(errors.Problem, _refuse)
    return app


class Gateway:
    """Every path and method."""

    def __init__(self, images: OwnImages, tickets: Tickets) -> None:
        self._images, self._tickets = images, tickets

    def serve(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Called by falcon."""
        found = PATH.fullmatch(req.path)
        kind = (req.method, bool(found and found[2]))
        if found is None or kind not in (("GET", False), ("GET", True), ("PUT", True)):
            raise errors.NotFound("There is nothing of that name here.")
        ticket = self._tickets.check(req.headers.get(TOKEN, ""))
        req.context.host = ticket.host
        _admit(ticket, found[1], *kind)
        if connection := req.env.get("gunicorn.socket"):
            connection.settimeout(PATIENCE)
        match kind:
            case "GET", False:
                resp.data, resp.content_type = orjson.dumps(self._told(found[1])), falcon.MEDIA_JSON
            case "GET", True:
                data = self._images.ask(lambda client, token: client.open(found[1], token))
                resp.content_type, resp.content_length, resp.stream = "application/octet-stream", data.size, data
            case _:
                self._images.ask(lambda client, token: client.put(found[1], token, _body(req)))
                resp.status = falcon.HTTP_204

    def _told(self, image: str) -> dict[str, Any]:
        record = self._images.ask(lambda client, token: client.record(image, token))
        return {key: record[key] for key in TOLD if key in record}


def _admit(ticket: Ticket, image: str, method: str, of_bytes: bool) -> None:
    """Raises Unauthorized unless the ticket opens this image for that: with another one it may be opened."""
    opens = ticket.writes if method == "PUT" else ticket.reads if of_bytes else ticket.reads | ticket.writes
    if image not in opens:
        raise errors.Unauthorized("The ticket does not open this image for that.")


def _body(req: falcon.Request) -> Iterator[bytes]:
    """The bytes that a host sends; BadRequest when they break off, so that the image service is not told of an end."""
    stream = req.stream if req.content_length is None and req.env.get("wsgi.input_terminated") else req.bounded_stream
    size = 0
    try:
        while chunk := stream.read(CHUNK):
            size += len(chunk)
            yield chunk
    except (OSError, ParseException) as problem:
        raise errors.BadRequest("The image broke off while it was being sent, or is badly chunked.") from problem
    if size < (req.content_length or 0):
        raise errors.BadRequest(f"The image broke off: {size} of {req.content_length} bytes came.")


def _refuse(req: falcon.Request, resp: falcon.Response, problem: errors.Problem, params: Any) -> None:
    """A refusal or a failure that was foreseen, the image service's own with its status."""
    found = PATH.fullmatch(req.path)            # of another path nothing is logged: who knows what stands in it
    logger.warning("refused %s of image %s to host %.64r: %s %s", req.method, found[1] if found else "?",
                   getattr(req.context, "host", "?"), problem.text, problem.__cause__ or "")
    raise falcon.HTTPError(problem.status, description=problem.text,
                           headers={"Retry-After": "1"} if problem.retryable else None)


def _unexpected(req: falcon.Request, resp: falcon.Response, problem: Exception, params: Any) -> None:
    """A bug, with its traceback in the log."""
    logger.error("%s %.100r failed", req.method, req.path, exc_info=problem)
    raise falcon.HTTPInternalServerError(description="Unexpected error; the operator's log says more.")


def _serialize(req: falcon.Request, resp: falcon.Response, problem: falcon.HTTPError) -> None:
    resp.content_type, resp.text = falcon.MEDIA_TEXT, f"{problem.description or problem.title}\n"
