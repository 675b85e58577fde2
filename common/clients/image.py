# SPDX-License-Identifier: Apache-2.0
"""The client of the image service (Glance v2): records of images, and their data.

The API calls ``show`` with the user's token before it accepts a server. Nothing is cached, but
concurrent requests share a query. The conductor creates, finds and deletes images with Kilonova's
own token, and the image gateway reads and stores them with that token. Agents ``download`` and
``upload`` at the gateway, with the ticket of their command. A service that does not answer is
Unavailable, never a missing image. A definite refusal is another Problem.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import Unpack
from urllib.parse import quote, urlencode

from common.clients.http import Http, HttpAnswer, RequestOptions, document, kind_of
from common.domain import errors, ids
from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import ImageRef

NAME = "image service"
CHUNK = 1024 * 1024
#: The status of an image with stored data.
ACTIVE = "active"
#: Maximum characters of a refusal's message.
_LONGEST = 500
#: Seconds that the service may take to answer after an image's last byte.
_STORING = 600
#: Fields of an image's record. All other keys are properties.
OWN_KEYS = frozenset(
    (
        "id",
        "name",
        "status",
        "visibility",
        "size",
        "virtual_size",
        "checksum",
        "os_hash_algo",
        "os_hash_value",
        "owner",
        "created_at",
        "updated_at",
        "protected",
        "min_disk",
        "min_ram",
        "disk_format",
        "container_format",
        "tags",
        "self",
        "file",
        "schema",
        "direct_url",
        "locations",
        "os_hidden",
        "stores",
        "members",
        "os_glance_importing_to_stores",
        "os_glance_failed_import",
    )
)


@dataclass(frozen=True, slots=True)
class Image:
    """An image's record: ``ref``, which servers store, and the fields that requests are checked by.

    Attributes:
        min_ram: MiB.
        min_disk: GiB.
        virtual_size: Bytes, 0 if unknown.
    """

    ref: ImageRef
    name: str = ""
    status: str = ACTIVE
    min_ram: int = 0
    min_disk: int = 0
    virtual_size: int = 0
    visibility: str = ""

    @property
    def is_active(self) -> bool:
        """True if the image's status is active: the data is stored and can be downloaded."""
        return self.status == ACTIVE


def image_of(answer: JsonObject) -> Image:
    """Return the image in a record of Glance v2. Keys outside ``OWN_KEYS`` are properties."""
    properties = {
        key: str(value)
        for key, value in answer.items()
        if key not in OWN_KEYS and value is not None
    }
    ref = ImageRef(
        id=str(answer["id"]),
        disk_format=answer.get("disk_format") or "",
        size=answer.get("size") or 0,
        hash_algo=answer.get("os_hash_algo") or "",
        hash_value=answer.get("os_hash_value") or "",
        properties=properties,
    )
    return Image(
        ref,
        answer.get("name") or "",
        answer.get("status") or "",
        answer.get("min_ram") or 0,
        answer.get("min_disk") or 0,
        answer.get("virtual_size") or 0,
        answer.get("visibility") or "",
    )


class _SharedQuery:
    """The running query and the next query of one token for one image.

    Attributes:
        turn: Held by the request whose query is running.
        leaders: Number of requests that run a query or wait for ``turn``.
        next: The result of the query that is not sent yet, or None.
    """

    def __init__(self) -> None:
        self.turn, self.leaders = threading.Lock(), 0
        self.next: Future[Image] | None = None


@dataclass
class ImageClient:
    """The client of the image service. Thread-safe.

    Args:
        endpoint: The URL, with or without /v2, or a function that returns the URL.
        timeout: Seconds until the first byte of a response.
        require: Called with each image that ``show`` finds. Raises an error to refuse the image.
        verify: The file of the authority that signs the service's certificate. True: the
            authorities of the system.
    """

    endpoint: str | Callable[[], str]
    timeout: float = 10
    require: Callable[[Image], None] | None = None
    verify: bool | str = True
    _queries: dict[tuple[str, str], _SharedQuery] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._http = Http(NAME, self.endpoint, self.timeout, verify=self.verify)

    def show(self, image_id: str, token: str) -> Image:
        """Return the image as it is now, if the token may see it.

        Raises:
            BadRequest: The image does not exist, or the token may not see it.
            Unavailable: The service does not answer.
            Problem: The service refuses for another reason, or ``require`` refuses the image.
        """
        try:
            image = self.look(image_id, token)
        except (errors.BadRequest, errors.NotFound, errors.Forbidden) as problem:
            raise errors.BadRequest(f"Can not find requested image {image_id}.") from problem
        if self.require is not None:
            self.require(image)
        return image

    def look(self, image_id: str, token: str) -> Image:
        """Return the image as it is now, without ``require``.

        Unlike ``show``, this raises different errors for a missing image and for missing roles.

        Concurrent calls with one token for one image share a query. Invariant: the query is sent
        after each of these calls began, so no call gets an older answer.

        Raises:
            NotFound: The image does not exist, or the id is not valid.
            Forbidden: The token's user may not see the image.
            Unavailable: The service does not answer.
            Problem: The service refuses for another reason.
        """
        key = (image_id, hashlib.sha256(token.encode()).hexdigest())
        with self._lock:
            query = self._queries.setdefault(key, _SharedQuery())
            leads = query.next is None
            future = query.next = query.next or Future()
            query.leaders += leads
        if leads:
            with query.turn:
                with self._lock:
                    query.next = None
                try:
                    future.set_result(image_of(self.record(image_id, token)))
                except errors.Problem as problem:
                    future.set_exception(problem)
                finally:
                    if not future.done():
                        future.set_exception(
                            errors.Unavailable(
                                f"The query for image {image_id} failed; try again later."
                            )
                        )
            with self._lock:
                query.leaders -= 1
                if not query.leaders:
                    del self._queries[key]
        return future.result()

    def record(self, image_id: str, token: str) -> JsonObject:
        """Return the whole record of an image in Glance's format.

        Raises:
            NotFound: The image does not exist, or the id is not valid.
            Forbidden: The token's user may not see the image.
            Unavailable: The service does not answer.
            Problem: The service refuses for another reason.
        """
        answer = self._get(f"/v2/images/{quote(image_id, safe='')}", token)
        if answer.status_code in (400, 404):
            raise errors.NotFound(f"Image {image_id[:80]} could not be found.")
        _check_read(answer)
        return document(answer, NAME)

    def page(self, query: Mapping[str, str], token: str) -> list[JsonObject]:
        """Return the records of one page of images.

        Args:
            query: Query parameters of the image service.
            token: The token of the user for whom the images are listed.

        Raises:
            BadRequest: The service does not accept the parameters.
            Unavailable: The service does not answer.
            Problem: The service refuses for another reason.
        """
        answer = self._get(f"/v2/images?{urlencode(query)}", token)
        _check(answer)
        return list(document(answer, NAME)["images"])

    def change(self, image_id: str, properties: Mapping[str, str | None], token: str) -> None:
        """Set properties of an image. A property with the value None is removed.

        Without properties, no request is sent.

        Raises:
            NotFound: The image does not exist any more.
            Unauthorized, Forbidden, BadRequest, Conflict, TooLarge: The service refuses.
            Unavailable: The service does not answer.
        """

        def step(key: str, value: str | None) -> dict[str, str]:
            path = "/" + key.replace("~", "~0").replace("/", "~1")
            return (
                {"op": "remove", "path": path}
                if value is None
                else {"op": "add", "path": path, "value": value}
            )

        if properties:
            patch = json.dumps([step(key, value) for key, value in properties.items()])
            _check(
                self._send(
                    "PATCH",
                    f"/v2/images/{image_id}",
                    token,
                    data=patch,
                    headers={"Content-Type": "application/openstack-images-v2.1-json-patch"},
                )
            )

    def download(self, image_id: str, token: str) -> Iterator[bytes]:
        """Yield the image's data in chunks of at most 1 MiB, without verifying a checksum.

        The request is sent when iteration starts, so all errors occur during iteration.

        Raises:
            NotFound: The image does not exist any more, or has no data.
            Unauthorized: The service does not accept the token.
            Forbidden: The token's user may not read the image.
            BadRequest, Conflict, TooLarge: The service refuses for another reason.
            Unavailable: The service does not answer, or the transfer breaks off.
        """
        with closing(self.open(image_id, token)) as data:
            yield from data

    def open(self, image_id: str, token: str) -> Data:
        """Request the image's data, and return once the service has begun to answer.

        The caller iterates over the result, and must close it.

        Raises:
            NotFound, Unauthorized, Forbidden, BadRequest, Conflict, TooLarge, Unavailable: As for
                ``download``.
        """
        answer = self._get(f"/v2/images/{image_id}/file", token, stream=True)
        try:
            if answer.status_code in (204, 404):
                raise errors.NotFound(f"Image {image_id} could not be found, or has no data.")
            _check_read(answer)
        except errors.Problem:
            answer.close()
            raise
        return Data(answer)

    def url(self, image_id: str) -> str:
        """Return the URL of an image's record at the service."""
        return f"{self._base()}/v2/images/{image_id}"

    def create(self, record: JsonMapping, token: str) -> None:
        """Create an image's record, without data, under the id in ``record``.

        An existing image with the same values is no error.

        Raises:
            Conflict: The id is in use by an image that has other values or that the token may not
                see.
            Unauthorized, Forbidden, TooLarge, BadRequest: The service refuses.
            Unavailable: The service does not answer.
        """
        answer = self._send("POST", "/v2/images", token, json=dict(record))
        if answer.status_code == 409:
            existing = self._get(f"/v2/images/{record['id']}", token)
            if existing.status_code == 200 and _matches(document(existing, NAME), record):
                return
        _check(answer)

    def delete(self, image_id: str, token: str) -> None:
        """Delete an image. A missing image is no error.

        Raises:
            Forbidden, Conflict: The image is protected or in use.
            Unavailable: The service does not answer.
            Problem: The service refuses for another reason.
        """
        answer = self._send("DELETE", f"/v2/images/{image_id}", token)
        if answer.status_code not in (404, 410):
            _check(answer)

    def find(self, filters: Mapping[str, str], token: str) -> list[JsonObject]:
        """Return the records of all images that match and that the token may see, newest first.

        All pages are read. ``filters`` are query parameters of the image service.

        Raises:
            Unavailable: The service does not answer.
            Problem: The service refuses the request.
        """
        query = urlencode({**filters, "sort_key": "created_at", "sort_dir": "desc"})
        path, images = f"/v2/images?{query}", []
        while path:
            answer = self._get(path, token)
            _check(answer)
            page = document(answer, NAME)
            images += page["images"]
            path = page.get("next") or ""
        return images

    def upload(self, image_id: str, token: str, chunks: Iterable[bytes]) -> None:
        """Store an image's data, and verify that the service has all data.

        Args:
            image_id: The image's id. The record exists.
            token: The token of a user that may change the image.
            chunks: The data. An exception of this iterator ends the upload, and the image stays
                without data. The exception is passed on, but an OSError as Unavailable.

        Raises:
            NotFound: The image's record does not exist any more.
            Conflict: The image has data already, is not active after the upload, or the stored data
                differs from the sent data.
            Unauthorized, Forbidden, BadRequest, TooLarge: The service refuses.
            Unavailable: The service does not answer, or the transfer breaks off.
        """
        data = _HashedData(chunks)
        self.put(image_id, token, data)
        stored = self._get(f"/v2/images/{image_id}", token)
        _check(stored)
        data.compare(image_of(document(stored, NAME)))

    def leave_empty(self, image_id: str, token: str) -> None:
        """Store empty data, so that an image that has only properties becomes active.

        An image that is already active and empty is no error.

        Raises:
            Conflict: The image has data already, or is not active.
            Problem: As for ``put``.
        """
        try:
            self.put(image_id, token, ())
        except errors.Conflict:
            existing = image_of(self.record(image_id, token))
            if not existing.is_active or existing.ref.size:
                raise

    def put(self, image_id: str, token: str, chunks: Iterable[bytes]) -> None:
        """Store an image's data without verifying the stored data.

        The arguments are those of ``upload``.

        Raises:
            Conflict: The image has data already.
            NotFound: The image's record does not exist any more.
            Problem: The service refuses for another reason or does not answer, or the transfer
                breaks off.
        """
        answer = self._send(
            "PUT",
            f"/v2/images/{image_id}/file",
            token,
            data=iter(chunks),
            timeout=_STORING,
            headers={"Content-Type": "application/octet-stream"},
            connect_retries=0,
        )
        if answer.status_code in (404, 410):
            raise errors.NotFound(f"Image {image_id} could not be found.")
        _check(answer)

    def _base(self) -> str:
        return self._http.base().removesuffix("/v2")

    def _get(self, path: str, token: str, stream: bool = False) -> HttpAnswer:
        return self._send("GET", path, token, stream=stream)

    def _send(
        self, method: str, path: str, token: str, **more: Unpack[RequestOptions]
    ) -> HttpAnswer:
        return self._http.send(method, self._base() + path, token, **more)


class Data:
    """An image's data on its way from the service, in chunks of at most 1 MiB.

    Iteration raises Unavailable if the transfer breaks off.

    Attributes:
        size: The number of bytes, or None if the service does not report the number or compresses
            the data.
    """

    def __init__(self, answer: HttpAnswer) -> None:
        self._answer = answer
        length = answer.headers.get("Content-Length", "")
        self.size = (
            int(length)
            if ids.number(length) is not None and "Content-Encoding" not in answer.headers
            else None
        )

    def __iter__(self) -> Iterator[bytes]:
        import requests

        try:
            yield from self._answer.iter_content(CHUNK)
        except requests.RequestException as problem:
            raise errors.Unavailable(
                "The image service broke off the transfer of an image's data; try again later."
            ) from problem

    def close(self) -> None:
        """End the transfer, complete or not, and close the response."""
        self._answer.close()


class _HashedData:
    """An image's data on its way to the service, counted and hashed like the service does."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._digest, self._size = chunks, hashlib.sha512(), 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._digest.update(chunk)
            self._size += len(chunk)
            yield chunk

    def compare(self, image: Image) -> None:
        """Compare the stored image's status, size and hash with those of the data sent.

        The hash is compared only if the service reports a SHA-512 hash.

        Raises:
            Conflict: The image is not active, or size or hash differ.
        """
        expected = {"status": ACTIVE, "size": self._size}
        stored: JsonObject = {"status": image.status, "size": image.ref.size}
        if image.ref.hash_algo == self._digest.name:
            expected["checksum"], stored["checksum"] = (
                self._digest.hexdigest(),
                image.ref.hash_value,
            )
        if stored != expected:
            raise errors.Conflict(
                f"The image service stored image {image.ref.id} with {stored}, but {expected} was sent; "
                "try again."
            )


def _matches(image: JsonMapping, record: JsonMapping) -> bool:
    """Return True if the image has all values of the record. Values are compared as texts."""
    return all(str(image.get(key)) == str(value) for key, value in record.items())


def _check_read(answer: HttpAnswer) -> None:
    """Check the response to a request that only reads an image, as ``_check`` does.

    The text for status 403 names missing roles as the cause, because reads have no quota.
    """
    if answer.status_code == 403:
        raise errors.Forbidden(
            _sentence(
                "The image service does not let this user read the image; check the user's roles. "
                "The service's message: {}",
                _read_message(answer.text),
            )
        )
    _check(answer)


#: Error -> the sentence for a refusal.
_WORDS: dict[type[errors.Problem], str] = {
    errors.BadRequest: "The image service does not accept the image: {}",
    errors.Unauthorized: "The image service does not accept the token.",
    errors.Forbidden: "The image service forbids the request, or a quota is exceeded: {}",
    errors.NotFound: "The image service does not have the image: {}",
    errors.Conflict: "The image service refuses the request: {}",
    errors.TooLarge: "The image service has no room for the image: {}",
    errors.Unavailable: "The image service redirected the request; check its URL. The answer: {}",
}


def _check(answer: HttpAnswer) -> None:
    """Check the status of a response.

    Raises:
        Problem: The status is 300 or more. ``kind_of`` returns the class. The text contains the
            service's message, except for Unauthorized.
    """
    if answer.status_code >= 300:
        kind = kind_of(answer.status_code)
        raise kind(
            _sentence(
                _WORDS[kind],
                f"{answer.status_code} {_read_message(answer.text)}"
                if kind is errors.Unavailable
                else _read_message(answer.text),
            )
        )


def _sentence(form: str, message: str) -> str:
    """Return the text of a refusal: ``form`` with the service's message.

    A message from the image gateway is such a text already, and is returned unchanged.
    """
    return message if message.startswith("The image service ") else form.format(message)


def _read_message(page: str) -> str:
    """Return the message in the body of a refusal, without markup and shortened.

    For a body without text the message is "no reason was given".
    """
    return (
        " ".join(re.sub(r"<[^>]*>", " ", page[:2000]).split())[:_LONGEST] or "no reason was given"
    )
