# SPDX-License-Identifier: Apache-2.0
"""What each status of a neighbour means, in every call of every client: not now, or refused for
good."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from keystoneauth1 import session
from requests.adapters import HTTPAdapter

from common import errors
from common.clients import http
from common.clients.image import ImageClient as Images
from common.clients.network import EXTENSIONS_KEPT_SECONDS
from common.clients.network_bindings import ALIAS, Bindings
from common.clients.network_records import Records

NOT_NOW = (408, 423, 425, 429, 500, 501, 502, 503, 504, 599)
#: Statuses that are in no table, and some that are.
FOR_GOOD = {
    402: errors.Conflict,
    405: errors.Conflict,
    409: errors.Conflict,
    418: errors.Conflict,
    422: errors.Conflict,
    451: errors.Conflict,
    401: errors.Unauthorized,
    413: errors.TooLarge,
}


@dataclass
class Answer:
    """What a neighbour answers, whatever it was asked."""

    status_code: int
    headers: dict[str, str] = field(default_factory=dict)
    text: str = "<p>No.</p>"
    content: bytes = b"No."

    def json(self) -> Any:
        raise ValueError("no JSON")

    def close(self) -> None:
        """Nothing is open."""


class Session:
    """A way to a neighbour that always gives this answer."""

    def __init__(self, status: int, **headers: str) -> None:
        self.answer, self.asked = Answer(status, headers), 0

    def request(self, url: str, method: str, **more: Any) -> Answer:
        self.asked += 1
        return self.answer


def images(status: int) -> Images:
    client = Images("http://images")
    client._http._session = Session(status)
    return client


def networks(status: int, kind: type[Any] = Bindings) -> Any:
    client = kind("http://networks")
    client._http._session, client._extensions = Session(status), (math.inf, frozenset({ALIAS}))
    return client


CALLS: dict[str, Callable[[int], Any]] = {
    "image create": lambda status: images(status).create({"id": "i"}, "t"),
    "image delete": lambda status: images(status).delete("i", "t"),
    "image upload": lambda status: images(status).upload("i", "t", [b"x"]),
    "image download": lambda status: list(images(status).download("i", "t")),
    "image show": lambda status: images(status).show("i", "t"),
    "image look": lambda status: images(status).look("i", "t"),
    "image find": lambda status: images(status).find({}, "t"),
    "ports": lambda status: networks(status).ports("t", device_id="s"),
    "port": lambda status: networks(status).port("t", "p"),
    "create ports": lambda status: networks(status).create_ports("t", [{}]),
    "update port": lambda status: networks(status).update_port("t", "p", {}),
    "delete port": lambda status: networks(status).delete_port("t", "p"),
    "bindings": lambda status: networks(status).bindings("t", "p"),
    "bind also": lambda status: networks(status).bind_also("t", {"id": "p"}, "h"),
    "activate": lambda status: networks(status).activate("t", "p", "h"),
    "unbind at": lambda status: networks(status).unbind_at("t", "p", "h"),
    "record": lambda status: networks(status, Records).update("t", "security-groups", "g", {}),
}

#: Those that read what is answered.
READING = [
    *("image show", "image look", "image find", "ports", "port", "create ports", "update port"),
    *("bindings", "bind also", "unbind at", "record"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", NOT_NOW)
def test_not_now_is_tried_again_later(call: str, status: int) -> None:
    with pytest.raises(errors.Unavailable, match=str(status)):
        CALLS[call](status)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", FOR_GOOD)
def test_other_refusals_are_definite(call: str, status: int) -> None:
    with pytest.raises(errors.Problem) as raised:
        CALLS[call](status)
    assert type(raised.value) is FOR_GOOD[status]


@pytest.mark.parametrize("body", ["no JSON", [], 7, None, {}, {"other": 1}], ids=repr)
@pytest.mark.parametrize("call", READING)
def test_half_an_answer_is_none(call: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It broke off, or another program answers at the neighbour's address."""
    if body != "no JSON":
        monkeypatch.setattr(Answer, "json", lambda answer: body)
    with pytest.raises(errors.Unavailable, match="who answers at its address"):
        CALLS[call](200)


def test_an_answer_without_a_body_says_nothing() -> None:
    client = networks(200)
    client._http._session.answer.content = b""
    client.delete_port("t", "p")
    with pytest.raises(errors.Unavailable, match="without ports"):
        client.ports("t")


def test_an_image_that_is_gone_is_no_missing_role() -> None:
    for call in ("image look", "image download"):
        with pytest.raises(errors.NotFound, match="could not be found"):
            CALLS[call](404)
        with pytest.raises(errors.Forbidden, match="check its roles"):
            CALLS[call](403)


@pytest.mark.parametrize(
    ("told", "wait"),
    [
        ("3", 3.0),
        ("0", 0.0),
        ("86400", http.MAX_WAIT_SECONDS),
        ("", 0.0),
        ("-1", 0.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0),
        ("²", 0.0),
    ],
)
def test_a_neighbour_may_say_how_long_to_wait(told: str, wait: float) -> None:
    client = networks(429)
    client._http._session.answer.headers["Retry-After"] = told
    with pytest.raises(errors.Unavailable) as raised:
        client.ports("t")
    assert raised.value.wait == wait


def test_who_answers_too_many_requests_is_not_dead() -> None:
    busy, dead = networks(429), networks(503)
    for client in (busy, dead):
        for _ in range(http.FAILURES + 2):
            with pytest.raises(errors.Unavailable):
                client.ports("t")
    assert busy._http._session.asked == http.FAILURES + 2
    assert dead._http._session.asked == http.FAILURES


def test_what_a_service_can_do_after_its_upgrade_is_seen_in_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, known, asked = [0.0], ["agent"], []
    client = Bindings("http://networks", monotonic=lambda: clock[0])

    def listed(method: str, path: str, token: str) -> dict[str, Any]:
        asked.append(path)
        return {"extensions": [{"alias": alias} for alias in known]}

    monkeypatch.setattr(client, "_json", listed)
    assert [client.extensions("t") for _ in range(3)] == [{"agent"}] * 3
    known.append(ALIAS)
    clock[0] = EXTENSIONS_KEPT_SECONDS - 1
    assert client.extensions("t") == {"agent"}
    clock[0] = EXTENSIONS_KEPT_SECONDS
    assert client.extensions("t") == {"agent", ALIAS}
    assert asked == ["/extensions"] * 2


class Deaf(HTTPAdapter):
    """A neighbour that hears what it is asked, and whose answers are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def send(self, request: Any, *arguments: Any, **more: Any) -> Any:
        self.heard.append(request.method)
        raise requests.ConnectionError("the answer is lost")


@pytest.mark.parametrize(("method", "times"), [("POST", 1), ("GET", 2)])
def test_what_makes_a_thing_is_not_asked_for_twice(method, times) -> None:
    neighbour, deaf = http.Http("image service", "http://images"), Deaf()
    made = requests.Session()
    made.mount("http://", deaf)
    neighbour._session = session.Session(session=made)
    with pytest.raises(errors.Unavailable):
        neighbour.send(method, "http://images/v2", "t")
    assert deaf.heard == [method] * times
