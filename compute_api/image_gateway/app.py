# SPDX-License-Identifier: Apache-2.0
"""The WSGI application of the image gateway: the part of the image API that hosts use, for those
who have a ticket.

``create`` is called once a process by ``service.application``, and by tests. The order for every
request: is it one of the three that are answered, may this ticket do that with this image, and only
then the image service is asked, with Kilonova's own token (``images``). Bytes are passed on as they
come, a MiB at a time. Must stay true: what breaks off at one end breaks off at the other, never
ends; no answer names where the image service keeps an image; every refusal is logged, without
tickets.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any
from wsgiref.types import WSGIApplication

import falcon
import orjson
from gunicorn.http.errors import ParseException

from common.clients.image import CHUNK
from common.clients.own_images import OwnImages
from common.domain import errors
from common.domain.json_types import JsonObject
from common.security.image_tickets import Ticket, Tickets
from compute_api.http import access_log, request_data
from compute_api.http.faults import TextFaults

logger = logging.getLogger(__name__)
TOKEN = "X-AUTH-TOKEN"  # noqa: S105 - the name of a header
PATH = re.compile(r"/v2/images/([0-9A-Za-z-]{1,64})(/file)?")
SHOWN_KEYS = (
    "id",
    "status",
    "size",
    "virtual_size",
    "disk_format",
    "container_format",
    "checksum",
    "os_hash_algo",
    "os_hash_value",
    "min_disk",
    "min_ram",
)


def create(images: OwnImages, tickets: Tickets) -> WSGIApplication:
    """The application."""
    app: Any = falcon.App(media_type=falcon.MEDIA_TEXT)
    app.add_sink(ImageGateway(images, tickets).serve, "/")
    TextFaults(logger, _refusal).install(app)
    application: WSGIApplication = app
    return application


class ImageGateway:
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
        access_log.note(req.env, host=ticket.host)
        _admit(ticket, found[1], *kind)
        match kind:
            case "GET", False:
                resp.data, resp.content_type = (
                    orjson.dumps(self._shown(found[1])),
                    falcon.MEDIA_JSON,
                )
            case "GET", True:
                data = self._images.ask(lambda client, token: client.open(found[1], token))
                resp.content_type, resp.content_length, resp.stream = (
                    "application/octet-stream",
                    data.size,
                    data,
                )
            case _:
                self._images.ask(lambda client, token: client.put(found[1], token, _body(req)))
                resp.status = falcon.HTTP_204

    def _shown(self, image: str) -> JsonObject:
        record = self._images.ask(lambda client, token: client.record(image, token))
        return {key: record[key] for key in SHOWN_KEYS if key in record}


def _admit(ticket: Ticket, image: str, method: str, of_bytes: bool) -> None:
    """Raises Unauthorized unless the ticket opens this image for that: with another one it may be
    opened."""
    opens = (
        ticket.writes
        if method == "PUT"
        else ticket.reads
        if of_bytes
        else ticket.reads | ticket.writes
    )
    if image not in opens:
        raise errors.Unauthorized("The ticket does not open this image for that.")


def _body(req: falcon.Request) -> Iterator[bytes]:
    """The bytes that a host sends; BadRequest when they break off, so that the image service is not
    told of an end."""
    stream, size = request_data.stream_of(req), 0
    try:
        while chunk := stream.read(CHUNK):
            size += len(chunk)
            yield chunk
    except (OSError, ParseException) as problem:
        raise errors.BadRequest(
            "The image broke off while it was being sent, or is badly chunked."
        ) from problem
    if size < (req.content_length or 0):
        raise errors.BadRequest(f"The image broke off: {size} of {req.content_length} bytes came.")


def _refusal(req: falcon.Request, problem: errors.Problem) -> str:
    """A refusal of ours, or the image service's own."""
    # of another path nothing is logged: who knows what stands in it
    found = PATH.fullmatch(req.path)
    host = str(getattr(req.context, "host", "?"))[:64]
    return (
        f"{req.method} of image {found[1] if found else '?'} to host {host!r}: {problem.text} "
        f"{problem.__cause__ or ''}"
    )
