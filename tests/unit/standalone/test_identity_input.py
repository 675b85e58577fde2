# SPDX-License-Identifier: Apache-2.0
"""Invalid input to the embedded identity service: the status, and the field named in the error."""

import uuid
from typing import Any

import pytest

ADMIN_USER = {"name": "admin", "domain": {"id": "default"}, "password": "x"}


@pytest.mark.parametrize(
    ("auth", "status", "message"),
    [
        (None, 400, "'auth'"),
        ([], 400, "'auth'"),
        ({}, 400, "auth.identity"),
        ({"identity": 1}, 400, "auth.identity"),
        ({"identity": {"methods": "password"}}, 400, "auth.identity.methods"),
        ({"identity": {"methods": []}}, 400, "auth.identity.methods"),
        ({"identity": {"methods": [{}]}}, 401, "methods"),
        ({"identity": {"methods": ["totp"]}}, 401, "methods"),
        ({"identity": {"methods": ["password"]}}, 400, "auth.identity.password"),
        ({"identity": {"methods": ["password"], "password": {"user": []}}}, 400, "password.user"),
        (
            {"identity": {"methods": ["password"], "password": {"user": {"name": "admin"}}}},
            400,
            "user.password",
        ),
        (
            {
                "identity": {
                    "methods": ["password"],
                    "password": {"user": {"name": "admin", "password": "x"}},
                }
            },
            400,
            "user.domain",
        ),
        (
            {
                "identity": {
                    "methods": ["password"],
                    "password": {"user": ADMIN_USER | {"password": 7}},
                }
            },
            400,
            "user.password",
        ),
        (
            {
                "identity": {
                    "methods": ["password"],
                    "password": {"user": ADMIN_USER | {"domain": 1}},
                }
            },
            400,
            "user.domain",
        ),
        (
            {"identity": {"methods": ["password"], "password": {"user": ADMIN_USER}}},
            401,
            "authentication",
        ),
        (
            {
                "identity": {
                    "methods": ["password"],
                    "password": {"user": ADMIN_USER | {"name": "nobody"}},
                }
            },
            401,
            "authentication",
        ),
        ({"identity": {"methods": ["token"], "token": {"id": "\x00"}}}, 401, "authentication"),
    ],
)
def test_login_returns_400_with_field_if_malformed_401_if_unauthenticated(
    identity: Any, auth: Any, status: int, message: str
) -> None:
    answer = identity.authenticate(auth)
    error = answer.json["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert message in error["message"]
    assert error["title"]
    assert "X-Subject-Token" not in answer.headers


@pytest.mark.parametrize(
    ("scope", "status"),
    [
        ({"project": {"id": "nowhere"}}, 401),
        ({"project": {"name": "admin"}}, 400),
        ({"project": {}}, 400),
        ({"project": {"name": "admin", "domain": {"name": "none"}}}, 401),
        ({"domain": {"id": "default"}}, 401),
        ({"galaxy": {}}, 400),
        ({}, 400),
        (5, 400),
        ("everything", 400),
        ({"system": {"all": False}}, 400),
        ({"system": 5}, 400),
        ({"project": {"id": "a"}, "domain": {"id": "b"}}, 400),
        ({"project": []}, 400),
    ],
)
def test_login_returns_401_for_unavailable_scope_400_for_malformed_scope(
    identity: Any, scope: Any, status: int
) -> None:
    assert identity.login(scope).status_code == status


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/projects", {"project": {}}, "project.name"),
        ("/projects", {"project": {"name": 5}}, "project.name"),
        ("/projects", {"project": {"name": "x" * 256}}, "project.name"),
        ("/projects", {"project": "x"}, "'project'"),
        ("/projects", {"project": {"name": " "}}, "project.name"),
        ("/projects", {"user": {}}, "'project'"),
        ("/projects", {"project": {"name": "x", "enabled": "yes"}}, "project.enabled"),
        ("/projects", {"project": {"name": "x", "tags": [1]}}, "project.tags"),
        ("/projects", {"project": {"name": "x", "domain_id": "none"}}, "project.domain_id"),
        ("/projects", {"project": {"name": "x", "parent_id": "y"}}, "project.parent_id"),
        ("/users", {"user": {"name": "x", "password": 1}}, "user.password"),
        ("/regions", {"region": {"id": "../x"}}, "region.id"),
        (
            "/endpoints",
            {"endpoint": {"service_id": "x", "interface": "odd", "url": "u"}},
            "endpoint.interface",
        ),
        (
            "/endpoints",
            {"endpoint": {"service_id": "none", "interface": "public", "url": "u"}},
            "endpoint.service_id",
        ),
    ],
)
def test_create_identity_resource_returns_400_and_names_invalid_field(
    identity: Any, path: str, body: Any, message: str
) -> None:
    answer = identity.request("POST", f"/v3{path}", json=body)
    assert answer.status_code == 400
    assert message in answer.json["error"]["message"]


def test_create_user_returns_409_for_taken_name_and_ignores_internal_fields(identity: Any) -> None:
    name = f"user-{uuid.uuid4().hex[:8]}"
    body = {"user": {"name": name, "password_hash": ["x"], "id": "chosen", "extra": 1, "links": 2}}
    answer = identity.request("POST", "/v3/users", json=body)
    assert answer.json["user"]["id"] != "chosen"
    assert identity.request("POST", "/v3/users", json=body).status_code == 409
    assert identity.login(name=name, password="x").status_code == 401
