# SPDX-License-Identifier: Apache-2.0
"""The image service (Glance v2), over HTTP only: what an image is, and its bytes.

The API asks ``show`` with the user's token before it accepts a server. Nothing is remembered, but
concurrent requests share questions. The conductor makes, finds and removes images with Kilonova's
own token, the image gateway reads and stores them with it. Agents ``download`` and ``upload`` at
the gateway, with the ticket of their command. A service that does not answer is Unavailable, never
a missing image; what it refuses for good is another Problem.
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
ACTIVE = "active"  #: the status of an image whose bytes are stored
_LONGEST = 500  # characters of a refusal
_STORING = 600  # seconds that the service may take to answer after an image's last byte
#: Fields of an image's record; all other keys are properties.
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
    """What the image service said: the record that a server freezes, and what only its acceptance
    needs.

    min_ram in MiB, min_disk in GiB, virtual_size in bytes (0: unknown).
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
        return self.status == ACTIVE


def image_of(answer: JsonObject) -> Image:
    """The record of a Glance v2 body."""
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


class _Line:
    """Requests of one token for one image: one question at a time, and the next one."""

    def __init__(self) -> None:
        self.turn, self.leaders = threading.Lock(), 0
        self.next: Future[Image] | None = None  #: not sent yet


@dataclass
class ImageClient:
    """One process's way to the image service.

    Args:
        endpoint: its URL, with or without /v2.
        timeout: seconds for an answer to begin.
        verify: the file of the authority that signs its certificate; True: those that the system
        knows.
        require: asked of each image that ``show`` finds; raises what speaks against it.
    """

    endpoint: str | Callable[[], str]
    timeout: float = 10
    require: Callable[[Image], None] | None = None
    verify: bool | str = True
    _lines: dict[tuple[str, str], _Line] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._http = Http(NAME, self.endpoint, self.timeout, verify=self.verify)

    def show(self, image_id: str, token: str) -> Image:
        """Return the image as it is now, if the token may see it.

        Concurrent requests of one token for one image share a question. Invariant: the question is
        sent after each of these requests came, so that none gets an answer from before.

        Raises:
            BadRequest: it may not, or there is none. Unavailable: the service does not answer. What
            ``require`` raises.
        """
        key = (image_id, hashlib.sha256(token.encode()).hexdigest())
        with self._lock:
            line = self._lines.setdefault(key, _Line())
            leads = line.next is None
            question = line.next = line.next or Future()
            line.leaders += leads
        if leads:
            with line.turn:
                with self._lock:
                    line.next = None
                try:
                    question.set_result(self._show(image_id, token))
                except errors.Problem as problem:
                    question.set_exception(problem)
                finally:
                    if not question.done():
                        question.set_exception(errors.Unavailable(f"The {NAME} was not asked."))
            with self._lock:
                line.leaders -= 1
                if not line.leaders:
                    del self._lines[key]
        return question.result()

    def _show(self, image_id: str, token: str) -> Image:
        try:
            image = self.look(image_id, token)
        except (errors.BadRequest, errors.NotFound, errors.Forbidden) as problem:
            raise errors.BadRequest(f"Can not find requested image {image_id}.") from problem
        if self.require is not None:
            self.require(image)
        return image

    def look(self, image_id: str, token: str) -> Image:
        """The same for Kilonova's own user, who must tell an image that is gone from a role that it
        has not.

        Raises:
            NotFound: there is none. Forbidden: the user may not see it. Unavailable: the service
            does not answer.
        """
        return image_of(self.record(image_id, token))

    def record(self, image_id: str, token: str) -> JsonObject:
        """All that the service says of an image.

        Raises:
            NotFound: there is none. Forbidden: the token's user may not see it. Unavailable: no
            answer.
        """
        answer = self._get(f"/v2/images/{quote(image_id, safe='')}", token)
        if answer.status_code in (400, 404):
            raise errors.NotFound(f"Image {image_id[:80]} could not be found.")
        _check_seen(answer)
        return document(answer, NAME)

    def page(self, query: Mapping[str, str], token: str) -> list[JsonObject]:
        """The records of one page of images, by the service's own parameters.

        Raises:
            BadRequest: it does not accept them. Unavailable: no answer.
        """
        answer = self._get(f"/v2/images?{urlencode(query)}", token)
        _check(answer)
        return list(document(answer, NAME)["images"])

    def change(self, image_id: str, properties: Mapping[str, str | None], token: str) -> None:
        """Set these properties of an image; None takes one out.

        Raises:
            NotFound: the image is gone. Forbidden, BadRequest, TooLarge: the service refuses.
            Unavailable: no answer.
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
        """The image's bytes, in pieces of at most 1 MiB; not checked here.

        Raises:
            NotFound: it is not there any more, or has no data. Forbidden: the token's user may not
            read it.
            Unavailable: the service does not answer, or breaks off.
        """
        with closing(self.open(image_id, token)) as data:
            yield from data

    def open(self, image_id: str, token: str) -> Data:
        """The same, once the service has begun to answer; to be closed.

        Raises:
            NotFound, Forbidden, Unavailable: as above.
        """
        answer = self._get(f"/v2/images/{image_id}/file", token, stream=True)
        try:
            if answer.status_code in (204, 404):
                raise errors.NotFound(f"Image {image_id} could not be found, or has no data.")
            _check_seen(answer)
        except errors.Problem:
            answer.close()
            raise
        return Data(answer)

    def url(self, image_id: str) -> str:
        """Where an image is."""
        return f"{self._base()}/v2/images/{image_id}"

    def create(self, record: JsonMapping, token: str) -> None:
        """Make an image's record under the id that it names; the same one again is fine.

        Raises:
            Conflict: the id is another image's. Forbidden, TooLarge, BadRequest: the service
            refuses.
            Unavailable: the service does not answer.
        """
        answer = self._send("POST", "/v2/images", token, json=dict(record))
        if answer.status_code == 409:
            there = self._get(f"/v2/images/{record['id']}", token)
            if there.status_code == 200 and _is(document(there, NAME), record):
                return
        _check(answer)

    def delete(self, image_id: str, token: str) -> None:
        """Remove an image; one that is gone is fine.

        Raises:
            Forbidden, Conflict: it is protected, or in use. Unavailable: the service does not
            answer.
        """
        answer = self._send("DELETE", f"/v2/images/{image_id}", token)
        if answer.status_code not in (404, 410):
            _check(answer)

    def find(self, filters: Mapping[str, str], token: str) -> list[JsonObject]:
        """The records of the images with these fields and properties, newest first.

        Raises:
            Unavailable: the service does not answer.
        """
        query = urlencode({**filters, "sort_key": "created_at", "sort_dir": "desc"})
        path, found = f"/v2/images?{query}", []
        while path:
            answer = self._get(path, token)
            _check(answer)
            page = document(answer, NAME)
            found += page["images"]
            path = page.get("next") or ""
        return found

    def upload(self, image_id: str, token: str, chunks: Iterable[bytes]) -> None:
        """Give an image its bytes, and look whether the service has them all. ``chunks`` may raise
        to break it off: the image then stays without data.

        Raises:
            NotFound: its record is gone. Conflict: it has its bytes already, or not those that it
            was given. Forbidden, TooLarge: the service refuses. Unavailable: the service does not
            answer, or breaks off.
        """
        given = _Given(chunks)
        self.put(image_id, token, given)
        stored = self._get(f"/v2/images/{image_id}", token)
        _check(stored)
        given.compare(image_of(document(stored, NAME)))

    def leave_empty(self, image_id: str, token: str) -> None:
        """Make an image whole that has no bytes, only properties; one that is so already is fine.

        Raises:
            NotFound, Conflict, Forbidden, TooLarge, Unavailable: as above.
        """
        try:
            self.put(image_id, token, ())
        except errors.Conflict:
            there = image_of(self.record(image_id, token))
            if not there.is_active or there.ref.size:
                raise

    def put(self, image_id: str, token: str, chunks: Iterable[bytes]) -> None:
        """The same, by who leaves it to another to look.

        Raises:
            NotFound, Conflict, Forbidden, TooLarge, Unavailable: as above.
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
    """An image's bytes on their way from the service, in pieces of at most 1 MiB. ``size``: how
    many there will be; None where the service does not say. One that breaks off raises
    Unavailable."""

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
                "The image service broke off while an image was being read."
            ) from problem

    def close(self) -> None:
        """Read no more."""
        self._answer.close()


class _Given:
    """The bytes of an image on their way to the service, counted and hashed as it does by
    default."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._digest, self._size = chunks, hashlib.sha512(), 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._digest.update(chunk)
            self._size += len(chunk)
            yield chunk

    def compare(self, image: Image) -> None:
        """Conflict unless the image has these bytes. Of a checksum of another kind only the size is
        compared."""
        expected = {"status": ACTIVE, "size": self._size}
        found: JsonObject = {"status": image.status, "size": image.ref.size}
        if image.ref.hash_algo == self._digest.name:
            expected["checksum"], found["checksum"] = self._digest.hexdigest(), image.ref.hash_value
        if found != expected:
            raise errors.Conflict(
                f"The image service has image {image.ref.id} not as it was given: {found}, where "
                f"{expected} was sent."
            )


def _is(there: JsonMapping, record: JsonMapping) -> bool:
    """Is this the image that the record would make? The service writes values its own way, as text
    or number."""
    return all(str(there.get(key)) == str(value) for key, value in record.items())


def _check_seen(answer: HttpAnswer) -> None:
    """As ``_check``, for a request that only reads an image."""
    if answer.status_code == 403:
        raise errors.Forbidden(
            _sentence(
                "The image service does not let this user read the image; check its roles. "
                "It says: {}",
                _words(answer.text),
            )
        )
    _check(answer)


#: How each kind of refusal is told.
_WORDS: dict[type[errors.Problem], str] = {
    errors.BadRequest: "The image service does not accept the image: {}",
    errors.Unauthorized: "The image service does not accept the token.",
    errors.Forbidden: "The image service forbids it, or the quota is used up: {}",
    errors.NotFound: "The image service knows no such image: {}",
    errors.Conflict: "The image service refuses: {}",
    errors.TooLarge: "The image service has no room for the image: {}",
    errors.Unavailable: "The image service gave no answer that is known, try again later: {}",
}


def _check(answer: HttpAnswer) -> None:
    """Raises what a status other than success means, with the service's words."""
    if answer.status_code >= 300:
        kind = kind_of(answer.status_code)
        raise kind(
            _sentence(
                _WORDS[kind],
                f"{answer.status_code} {_words(answer.text)}"
                if kind is errors.Unavailable
                else _words(answer.text),
            )
        )


def _sentence(form: str, words: str) -> str:
    """What is told of a refusal; the image gateway's is such a sentence already."""
    return words if words.startswith("The image service ") else form.format(words)


def _words(page: str) -> str:
    """What a refusal says, without its markup, in bounds."""
    return (
        " ".join(re.sub(r"<[^>]*>", " ", page[:2000]).split())[:_LONGEST] or "no reason was given"
    )
