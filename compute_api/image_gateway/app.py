# SPDX-License-Identifier: Apache-2.0
"""The WSGI application of the image gateway: the part of the image API that hosts use.

``service.application`` calls ``create`` once per process, and tests call it too. A request passes
these steps in order: the operation exists, the ticket permits the operation on the image,
and the image service answers. Requests to the image service have Kilonova's own token (``images``).
Data is passed on in chunks of a MiB.

Invariant: if one side breaks off, the other side sees an incomplete transfer, never a complete one.
No response shows where the image service stores an image. Every refusal is logged, without tickets.
"""

from __future__ import annotations

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
from common.service.log import get_logger
from compute_api.http import access_log, request_data
from compute_api.http.faults import TextFaults

logger = get_logger(__name__)
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
    """Build the WSGI application of the image gateway.

    Args:
        images: The image service.
        tickets: Validates tickets.
    """
    app: Any = falcon.App(media_type=falcon.MEDIA_TEXT)
    app.add_sink(ImageGateway(images, tickets).serve, "/")
    TextFaults(logger, _describe_refusal).install(app)
    application: WSGIApplication = app
    return application


class ImageGateway:
    """Answers requests of hosts for all paths and methods."""

    def __init__(self, images: OwnImages, tickets: Tickets) -> None:
        self._images, self._tickets = images, tickets

    def serve(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Answer a request. Falcon calls this.

        Raises:
            NotFound: The gateway has no such path or method, or the image does not exist.
            Unauthorized: The ticket is not valid, or does not permit the operation.
            BadRequest: The uploaded data is incomplete.
            Problem: The image service refuses, or does not answer.
        """
        match = PATH.fullmatch(req.path)
        operation = (req.method, bool(match and match[2]))
        if match is None or operation not in (("GET", False), ("GET", True), ("PUT", True)):
            raise errors.NotFound(
                "The image gateway has no such path, or the path has no such method."
            )
        ticket = self._tickets.check(req.headers.get(TOKEN, ""))
        req.context.host = ticket.host
        access_log.note(req.env, host=ticket.host)
        _check_ticket(ticket, match[1], *operation)
        match operation:
            case "GET", False:
                resp.data, resp.content_type = (
                    orjson.dumps(self._read_record(match[1])),
                    falcon.MEDIA_JSON,
                )
            case "GET", True:
                data = self._images.ask(lambda client, token: client.open(match[1], token))
                resp.content_type, resp.content_length, resp.stream = (
                    "application/octet-stream",
                    data.size,
                    data,
                )
            case _:
                self._images.ask(lambda client, token: client.put(match[1], token, _read_body(req)))
                resp.status = falcon.HTTP_204

    def _read_record(self, image: str) -> JsonObject:
        record = self._images.ask(lambda client, token: client.record(image, token))
        return {key: record[key] for key in SHOWN_KEYS if key in record}


def _check_ticket(ticket: Ticket, image: str, method: str, is_data: bool) -> None:
    """Check that the ticket permits the operation on the image.

    Either permission, to read or to write the data, includes reading the record.

    Args:
        ticket: The ticket.
        image: Id of the image.
        method: The HTTP method.
        is_data: The operation reads or writes the data, and not the record.

    Raises:
        Unauthorized: The ticket does not permit the operation.
    """
    permitted_images = (
        ticket.writes
        if method == "PUT"
        else ticket.reads
        if is_data
        else ticket.reads | ticket.writes
    )
    if image not in permitted_images:
        raise errors.Unauthorized("The ticket does not permit this operation on the image.")


def _read_body(req: falcon.Request) -> Iterator[bytes]:
    """Yield the data that a host sends.

    Raises:
        BadRequest: The data is incomplete. The upload to the image service then fails too.
    """
    stream, size = request_data.stream_of(req), 0
    try:
        while chunk := stream.read(CHUNK):
            size += len(chunk)
            yield chunk
    except (OSError, ParseException) as problem:
        raise errors.BadRequest(
            "The transfer of the image's data broke off, or the data is badly chunked."
        ) from problem
    if size < (req.content_length or 0):
        raise errors.BadRequest(
            f"The transfer of the image's data broke off: {size} of {req.content_length} bytes arrived."
        )


def _describe_refusal(req: falcon.Request, problem: errors.Problem) -> JsonObject:
    # Other paths are not logged, because they may contain secrets.
    match = PATH.fullmatch(req.path)
    return {
        "method": req.method,
        "image": match[1] if match else None,
        "host": str(getattr(req.context, "host", ""))[:64],
        "problem": problem.text,
        "cause": str(problem.__cause__ or ""),
    }
