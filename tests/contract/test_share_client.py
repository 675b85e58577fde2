# SPDX-License-Identifier: Apache-2.0
"""The shared file system service as the API and the conductor use it.

One suite runs against the service in memory, which the workflow tests use, and over HTTP through
the client against a fake Manila. It can also run against a real Manila, with an admin's token and a
share of the token's project: KILONOVA_SHARE_URL=http://…/share/v2 KILONOVA_SHARE_TOKEN=…
KILONOVA_SHARE=ID pytest tests/contract/test_share_client.py
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest

from common.clients import shares as share_client
from common.clients.shares import ACTIVE, FAILED, ShareClient
from common.domain import errors, ids
from conductor.engine.external_services import ShareApi
from tests.contract.manila import Manila
from tests.waiting import await_true
from tests.workflows import shares as in_memory

MINE, OTHER = "m" * 32, "o" * 32
ADDRESS, ANOTHER = "192.0.2.11", "192.0.2.12"


class Rig(Protocol):
    """A service with one share, and the interface that the conductor uses."""

    share: str
    service: ShareApi


class Quiet(WSGIRequestHandler):
    """A request handler without a log."""

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        pass


class OverHttp:
    """The fake Manila behind the client, with an admin's token."""

    def __init__(self) -> None:
        self.manila = Manila({"mine": MINE, "other": OTHER, "admin": None})
        self.share = self.manila.add_share(MINE, "192.0.2.8:/shares/a", "192.0.2.9:/shares/a")
        self._server = make_server("127.0.0.1", 0, self.manila, handler_class=Quiet)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.client = ShareClient(f"{self.url}/v2")
        self.service: ShareApi = WithToken(self.client, "admin")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class WithToken:
    """The share client with a fixed token."""

    def __init__(self, client: ShareClient, token: str) -> None:
        self._client, self._token = client, token

    def allow(self, share_id: str, access_to: str) -> str:
        return self._client.allow(self._token, share_id, access_to)

    def deny(self, share_id: str, access_to: str) -> None:
        self._client.deny(self._token, share_id, access_to)


class InMemory:
    def __init__(self) -> None:
        self.share = ids.new()
        self.service: ShareApi = in_memory.Shares()


class Real:
    def __init__(self, url: str) -> None:
        self.share = os.environ["KILONOVA_SHARE"]
        self.service: ShareApi = WithToken(ShareClient(url), os.environ["KILONOVA_SHARE_TOKEN"])


@pytest.fixture
def http() -> Iterator[OverHttp]:
    over_http = OverHttp()
    yield over_http
    over_http.close()


@pytest.fixture(params=["memory", "http", "real"])
def rig(request: pytest.FixtureRequest) -> Rig:
    if request.param == "real":
        if "KILONOVA_SHARE_URL" not in os.environ:
            pytest.skip("KILONOVA_SHARE_URL names no Manila")
        return Real(os.environ["KILONOVA_SHARE_URL"])
    selected_rig: Rig = InMemory() if request.param == "memory" else request.getfixturevalue("http")
    return selected_rig


def test_share_access_rule_allow_and_deny_are_repeatable(rig: Rig) -> None:
    for _ in range(2):
        await_true(
            lambda: rig.service.allow(rig.share, ADDRESS) == ACTIVE,
            60,
            lambda: "the rule is not applied",
        )
    assert rig.service.allow(rig.share, ADDRESS) == ACTIVE
    for _ in range(2):
        rig.service.deny(rig.share, ADDRESS)


def test_share_deny_keeps_rule_of_other_address(rig: Rig) -> None:
    for address in (ADDRESS, ANOTHER):
        rig.service.allow(rig.share, address)
    rig.service.deny(rig.share, ADDRESS)
    await_true(
        lambda: rig.service.allow(rig.share, ANOTHER) == ACTIVE,
        60,
        lambda: "the other rule is gone too",
    )
    rig.service.deny(rig.share, ANOTHER)


def test_share_allow_on_missing_share_raises_not_found_and_deny_succeeds(http: OverHttp) -> None:
    with pytest.raises(errors.NotFound, match="could not be found"):
        http.service.allow(ids.new(), ADDRESS)
    http.service.deny(ids.new(), ADDRESS)


def test_share_access_rule_is_locked_and_hides_address(http: OverHttp) -> None:
    http.service.allow(http.share, ADDRESS)
    [rule] = http.manila.rules.values()
    assert (rule["locked"], rule["hidden"], rule["access_level"], rule["access_type"]) == (
        True,
        True,
        "rw",
        "ip",
    )
    assert http.client.rules("mine", http.share, ADDRESS) == [], "a tenant does not see it"


def test_share_allow_returns_applying_until_rule_is_applied_then_active(http: OverHttp) -> None:
    http.manila.applies_after = 2
    states = [http.service.allow(http.share, ADDRESS) for _ in range(4)]
    assert states == ["applying", "applying", "applying", ACTIVE] and len(http.manila.rules) == 1


def test_share_allow_returns_failed_when_rule_cannot_be_applied(http: OverHttp) -> None:
    http.manila.fails = True
    http.service.allow(http.share, ADDRESS)
    assert http.service.allow(http.share, ADDRESS) == FAILED


def test_share_allow_succeeds_when_other_conductor_created_rule(http: OverHttp) -> None:
    """Another conductor creates the rule between the check and the call."""
    http.manila.meanwhile = lambda: http.manila.add_rule(http.share, ADDRESS)
    assert http.service.allow(http.share, ADDRESS) == ACTIVE
    assert len(http.manila.rules) == 1


def test_share_allow_returns_state_of_new_rule_while_older_rule_is_deleted(
    http: OverHttp,
) -> None:
    http.service.allow(http.share, ADDRESS)
    [old] = http.manila.rules.values()
    old["state"] = "denying"
    http.manila.rules["new"] = {**old, "id": "new", "state": "active"}
    assert http.service.allow(http.share, ADDRESS) == ACTIVE


def test_show_share_returns_preferred_export_location(http: OverHttp) -> None:
    for token in ("mine", "admin"):
        share = http.client.share(token, http.share)
        assert (share.id, share.status, share.protocol, share.export_location) == (
            http.share,
            "available",
            "NFS",
            "192.0.2.9:/shares/a",
        )
    bare = http.manila.add_share(MINE)
    assert http.client.share("mine", bare).export_location is None


@pytest.mark.parametrize(
    ("token", "kind"), [("other", errors.NotFound), ("nobody", errors.Unauthorized)]
)
def test_show_share_raises_not_found_for_foreign_and_unauthorized_for_invalid_token(
    http: OverHttp, token: str, kind: type[errors.Problem]
) -> None:
    with pytest.raises(kind):
        http.client.share(token, http.share)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_share_allow_raises_unavailable_on_status_500_503_and_429(
    http: OverHttp, status: int
) -> None:
    http.manila.statuses = [status]
    with pytest.raises(errors.Unavailable):
        http.service.allow(http.share, ADDRESS)


def test_share_allow_on_old_manila_raises_conflict_with_missing_version(http: OverHttp) -> None:
    http.manila.latest = (2, 81)
    with pytest.raises(errors.Conflict, match=r"does not know version 2\.82"):
        http.service.allow(http.share, ADDRESS)


@pytest.mark.parametrize("end", ["", "/", "/v2", "/v2/", f"/v2/{MINE}"])
def test_share_client_accepts_endpoint_forms_of_catalogues(http: OverHttp, end: str) -> None:
    assert ShareClient(http.url + end).share("mine", http.share).id == http.share


def test_share_client_without_service_raises_unavailable() -> None:
    assert (
        not ShareClient(lambda: None).has_service()
        and ShareClient("http://127.0.0.1:1").has_service()
    )
    with pytest.raises(errors.Unavailable, match="names no shared file system service"):
        ShareClient(lambda: None).share("mine", ids.new())


def test_own_share_access_rules_are_listed_once_across_pages(
    http: OverHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rule is listed once, without rules of other users, and across pages.

    The service returns smaller pages than requested.
    """
    monkeypatch.setattr(share_client, "PAGE", 3)
    http.manila.page_size = 1
    client, token = http.client, "admin"
    assert client.own_rules(token) == []
    for address in (ADDRESS, ANOTHER):
        http.service.allow(http.share, address)
    http.manila.add_rule(http.share, "203.0.113.9")
    rules = client.own_rules(token)
    assert sorted((rule["share_id"], rule["access_to"]) for rule in rules) == sorted(
        (http.share, address) for address in (ADDRESS, ANOTHER)
    )
    assert {rule["state"] for rule in rules} <= {"applying", "active"}
    assert client.own_rules("mine") == [], "only an admin is told the locks of all projects"
