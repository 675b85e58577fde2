# SPDX-License-Identifier: Apache-2.0
"""The problems that clients raise for the statuses of external services, in every call."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from keystoneauth1.session import TCPKeepAliveAdapter

from common.clients import http
from common.clients.image import ImageClient as Images
from common.clients.network import EXTENSIONS_KEPT_SECONDS
from common.clients.network_bindings import ALIAS, Bindings
from common.clients.network_records import Records
from common.clients.volumes import VolumeClient
from common.domain import errors

TRANSIENT = (408, 423, 425, 429, 500, 501, 502, 503, 504, 599)
#: Statuses that are in no table, and some that are.
DEFINITE = {
    402: errors.Conflict,
    405: errors.Conflict,
    409: errors.Conflict,
    418: errors.Conflict,
    422: errors.Conflict,
    451: errors.Conflict,
    401: errors.Unauthorized,
    413: errors.TooLarge,
}
IMAGES, NETWORKS = "http://images", "http://networks"


class Service:
    """An external service with one response for all requests except the list of extensions."""

    def __init__(self) -> None:
        self.status, self.body, self.headers = 200, b"<p>No.</p>", dict[str, str]()
        self.extensions = [ALIAS]
        self.methods: list[str] = []
        self.listings = 0
        self.is_lost = False

    def answer(self, request: requests.PreparedRequest) -> requests.Response:
        answer = requests.Response()
        answer.request, answer.url = request, str(request.url)
        if answer.url.endswith("/extensions"):
            self.listings += 1
            extensions = [{"alias": alias} for alias in self.extensions]
            answer.status_code, body = 200, json.dumps({"extensions": extensions}).encode()
        else:
            self.methods.append(str(request.method))
            if self.is_lost:
                raise requests.ConnectionError("the answer is lost")
            answer.status_code, body = self.status, self.body
            answer.headers.update(self.headers)
        answer.raw = io.BytesIO(body)
        return answer


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    """Return a service that answers at every address."""
    service = Service()
    monkeypatch.setattr(
        TCPKeepAliveAdapter, "send", lambda adapter, request, **options: service.answer(request)
    )
    return service


CALLS: dict[str, Callable[[], Any]] = {
    "image create": lambda: Images(IMAGES).create({"id": "i"}, "t"),
    "image delete": lambda: Images(IMAGES).delete("i", "t"),
    "image upload": lambda: Images(IMAGES).upload("i", "t", [b"x"]),
    "image download": lambda: list(Images(IMAGES).download("i", "t")),
    "image show": lambda: Images(IMAGES).show("i", "t"),
    "image look": lambda: Images(IMAGES).look("i", "t"),
    "image find": lambda: Images(IMAGES).find({}, "t"),
    "ports": lambda: Bindings(NETWORKS).ports("t", device_id="s"),
    "port": lambda: Bindings(NETWORKS).port("t", "p"),
    "create ports": lambda: Bindings(NETWORKS).create_ports("t", [{}]),
    "update port": lambda: Bindings(NETWORKS).update_port("t", "p", {}),
    "delete port": lambda: Bindings(NETWORKS).delete_port("t", "p"),
    "bindings": lambda: Bindings(NETWORKS).bindings("t", "p"),
    "bind also": lambda: Bindings(NETWORKS).bind_also("t", {"id": "p"}, "h"),
    "activate": lambda: Bindings(NETWORKS).activate("t", "p", "h"),
    "unbind at": lambda: Bindings(NETWORKS).unbind_at("t", "p", "h"),
    "record": lambda: Records(NETWORKS).update("t", "security-groups", "g", {}),
}

#: Calls that read the body of the answer.
READING = [
    *("image show", "image look", "image find", "ports", "port", "create ports", "update port"),
    *("bindings", "bind also", "unbind at", "record"),
]


def problem_of(call: Callable[[], Any]) -> errors.Problem | None:
    """Return the problem that a call raises."""
    try:
        call()
    except errors.Problem as problem:
        return problem
    return None


def test_external_service_call_raises_unavailable_for_transient_status(service: Service) -> None:
    wrong = []
    for name, call in CALLS.items():
        for service.status in TRANSIENT:
            problem = problem_of(call)
            if not isinstance(problem, errors.Unavailable) or str(service.status) not in str(
                problem
            ):
                wrong.append((name, service.status, problem))
    assert wrong == []


def test_external_service_status_401_is_unauthorized_413_too_large_409_conflict(
    service: Service,
) -> None:
    wrong = []
    for name, call in CALLS.items():
        for service.status, kind in DEFINITE.items():
            if type(problem := problem_of(call)) is not kind:
                wrong.append((name, service.status, problem))
    assert wrong == []


def test_external_service_call_with_unreadable_answer_raises_unavailable(service: Service) -> None:
    """For example, the answer broke off, or another program answers at the service's address."""
    wrong = []
    for name in READING:
        for service.body in (b"no JSON", b"[]", b"7", b"null", b"{}", b'{"other": 1}'):
            if not isinstance(problem := problem_of(CALLS[name]), errors.Unavailable):
                wrong.append((name, service.body, problem))
    assert wrong == []


def test_external_service_list_of_pairs_is_no_json_object(service: Service) -> None:
    service.body = b'[["ports", []]]'
    with pytest.raises(errors.Unavailable, match="no JSON object"):
        CALLS["ports"]()


def test_service_call_with_empty_answer_raises_unavailable_if_body_is_read(
    service: Service,
) -> None:
    service.body = b""
    CALLS["delete port"]()
    with pytest.raises(errors.Unavailable):
        CALLS["ports"]()


def test_image_service_call_raises_not_found_for_404_and_forbidden_for_403(
    service: Service,
) -> None:
    for call in ("image look", "image download"):
        for service.status, kind in ((404, errors.NotFound), (403, errors.Forbidden)):
            with pytest.raises(kind):
                CALLS[call]()


@pytest.mark.parametrize(
    ("retry_after", "wait"),
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
def test_retry_after_sets_wait_up_to_maximum_and_zero_for_malformed_value(
    service: Service, retry_after: str, wait: float
) -> None:
    service.status, service.headers = 429, {"Retry-After": retry_after}
    with pytest.raises(errors.Unavailable) as raised:
        CALLS["ports"]()
    assert raised.value.wait == wait


@pytest.mark.parametrize(("status", "requests"), [(429, http.FAILURES + 2), (503, http.FAILURES)])
def test_circuit_breaker_opens_for_status_503_but_not_429(
    service: Service, status: int, requests: int
) -> None:
    service.status = status
    client = Bindings(NETWORKS)
    for _ in range(http.FAILURES + 2):
        with pytest.raises(errors.Unavailable):
            client.ports("t")
    assert len(service.methods) == requests


@pytest.mark.parametrize(
    ("resource", "name"),
    [
        ("qos/policies", "policy"),
        ("security-groups", "security_group"),
        ("floatingips", "floatingip"),
    ],
)
def test_network_record_is_read_from_the_singular_key_of_its_resource(
    service: Service, resource: str, name: str
) -> None:
    service.body = json.dumps({name: {"id": "1"}}).encode()
    assert Records(NETWORKS).record("t", resource, "1") == {"id": "1"}


def test_network_extensions_are_cached_for_five_minutes(service: Service) -> None:
    clock = [0.0]
    client = Bindings(NETWORKS, monotonic=lambda: clock[0])
    service.extensions = ["agent"]
    assert [client.extensions("t") for _ in range(3)] == [{"agent"}] * 3
    service.extensions = ["agent", ALIAS]
    clock[0] = EXTENSIONS_KEPT_SECONDS - 1
    assert client.extensions("t") == {"agent"}
    clock[0] = EXTENSIONS_KEPT_SECONDS
    assert client.extensions("t") == {"agent", ALIAS}
    assert service.listings == 2


@pytest.mark.parametrize(("method", "times"), [("POST", 1), ("GET", 2)])
def test_http_send_repeats_get_but_not_post_when_the_answer_is_lost(
    service: Service, method: str, times: int
) -> None:
    service.is_lost = True
    with pytest.raises(errors.Unavailable):
        http.Http("image service", IMAGES).send(method, f"{IMAGES}/v2", "t")
    assert service.methods == [method] * times


@pytest.mark.parametrize("ignores_marker", [False, True])
def test_volume_client_reads_all_pages_of_attachments(
    monkeypatch: pytest.MonkeyPatch, ignores_marker: bool
) -> None:
    ids = ["a1", "a2", "a3", "a4"]

    def send(
        adapter: object, request: requests.PreparedRequest, **options: Any
    ) -> requests.Response:
        query = parse_qs(urlsplit(str(request.url)).query)
        marker = "" if ignores_marker else query.get("marker", [""])[0]
        start = ids.index(marker) + 1 if marker else 0
        attachments = [
            {"id": key, "volume_id": "v", "instance": "s", "status": "attached"}
            for key in ids[start : start + 2]
        ]
        answer = requests.Response()
        answer.status_code, answer.request, answer.url = 200, request, str(request.url)
        answer.raw = io.BytesIO(json.dumps({"attachments": attachments}).encode())
        return answer

    monkeypatch.setattr(TCPKeepAliveAdapter, "send", send)
    attachments = VolumeClient("http://volumes").every_attachment("t")
    assert [attachment.id for attachment in attachments] == (ids[:2] if ignores_marker else ids)
