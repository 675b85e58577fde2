# SPDX-License-Identifier: Apache-2.0
"""Tokens of the embedded identity service: expiry, exchange, validation, roles and system scope."""

from datetime import timedelta
from string import hexdigits
from typing import Any

import pytest

from deploy.one_machine.services.identity import passwords
from deploy.one_machine.services.identity.tokens import add_implied

PROJECT = {"project": {"name": "admin", "domain": {"id": "default"}}}


@pytest.mark.parametrize(
    ("assigned_roles", "effective_roles"),
    [
        (set(), set()),
        ({"reader"}, {"reader"}),
        ({"manager"}, {"manager", "member", "reader"}),
        ({"admin", "service"}, {"admin", "manager", "member", "reader", "service"}),
    ],
)
def test_implied_roles_are_added_to_roles(
    assigned_roles: set[str], effective_roles: set[str]
) -> None:
    assert add_implied(assigned_roles) == effective_roles


def test_token_from_token_expires_with_first_token(identity: Any) -> None:
    first = identity.login("unscoped")
    assert first.json["token"]["expires_at"] == (identity.clock() + timedelta(hours=12)).strftime(
        "%Y-%m-%dT%H:%M:%S.%fZ"
    )
    identity.clock.now += timedelta(hours=11, minutes=59)
    exchange = {
        "identity": {"methods": ["token"], "token": {"id": first.headers["X-Subject-Token"]}},
        "scope": PROJECT,
    }
    second = identity.authenticate(exchange)
    assert second.json["token"]["expires_at"] == first.json["token"]["expires_at"]
    assert second.json["token"]["methods"] == ["password", "token"]
    assert second.json["token"]["audit_ids"][1] == first.json["token"]["audit_ids"][0]
    secret = second.headers["X-Subject-Token"]
    assert identity.request("GET", "/v3/auth/projects", token=secret).status_code == 200
    identity.clock.now += timedelta(minutes=1)
    assert identity.request("GET", "/v3/auth/projects", token=secret).status_code == 401
    assert identity.authenticate(exchange).status_code == 401


def test_token_secret_is_hexadecimal_and_safe_on_command_line(identity: Any) -> None:
    """A URL-safe text may begin with "-", which command lines parse as an option."""
    first = identity.token()
    exchange = {"identity": {"methods": ["token"], "token": {"id": first}}, "scope": PROJECT}
    for secret in (
        first,
        *(identity.authenticate(exchange).headers["X-Subject-Token"] for _ in range(20)),
    ):
        assert len(secret) == 64 and set(secret) <= set(hexdigits)


def test_validation_of_token_of_another_returns_403_without_service_role(identity: Any) -> None:
    subject = identity.token()
    unscoped = identity.login("unscoped", name="kilonova").headers["X-Subject-Token"]
    service = identity.login(
        {"project": {"name": "service", "domain": {"name": "Default"}}}, name="kilonova"
    )
    options = {"headers": {"X-Subject-Token": subject}}
    assert identity.request("GET", "/v3/auth/tokens", token=unscoped, **options).status_code == 403
    validated = identity.request(
        "GET", "/v3/auth/tokens", token=service.headers["X-Subject-Token"], **options
    )
    assert [service["type"] for service in validated.json["token"]["catalog"]] == ["image"]
    bare = identity.request(
        "GET", "/v3/auth/tokens?nocatalog", token=service.headers["X-Subject-Token"], **options
    )
    assert "catalog" not in bare.json["token"]
    assert identity.request("GET", "/v3/auth/tokens").status_code == 400


def test_password_matches_only_its_digest_and_no_missing_digest() -> None:
    stored = passwords.digest("right")
    assert passwords.matches(stored, "right")
    assert not passwords.matches(stored, "wrong")
    assert not passwords.matches(None, "right")
    assert "right" not in stored


SYSTEM = {"system": {"all": True}}


def create(identity: Any, noun: str, **values: Any) -> str:
    return str(identity.request("POST", f"/v3/{noun}s", json={noun: values}).json[noun]["id"])


def test_system_role_grants_system_scope_and_no_project_scope(identity: Any) -> None:
    user = create(identity, "user", name="everywhere", password="everywhere", domain_id="default")
    reader = next(
        role["id"]
        for role in identity.request("GET", "/v3/roles").json["roles"]
        if role["name"] == "reader"
    )
    login, path = {"name": "everywhere", "password": "everywhere"}, f"/v3/system/users/{user}/roles"
    assert identity.login(SYSTEM, **login).status_code == 401
    assert identity.request("GET", path).json["roles"] == []
    for _ in range(2):
        assert identity.request("PUT", f"{path}/{reader}").status_code == 204
    assert [role["name"] for role in identity.request("GET", path).json["roles"]] == ["reader"]
    scoped = identity.login(SYSTEM, **login)
    token, secret = scoped.json["token"], scoped.headers["X-Subject-Token"]
    assert (token["system"], [role["name"] for role in token["roles"]]) == (
        {"all": True},
        ["reader"],
    )
    assert "catalog" in token and not {"project", "domain"} & set(token)
    assert identity.request("GET", "/v3/auth/system", token=secret).json["system"] == [
        {"all": True}
    ]
    assert identity.request("GET", "/v3/users", token=secret).status_code == 403
    assert identity.login(PROJECT, **login).status_code == 401
    assert identity.request("PUT", f"{path}/{reader}", token=secret).status_code == 403
    assert identity.request("DELETE", f"{path}/{reader}").status_code == 204
    assert identity.request("GET", "/v3/auth/system", token=secret).status_code == 401, (
        "it has no role left"
    )
    assert identity.request("DELETE", f"{path}/{reader}").status_code == 404


def test_system_role_request_with_unknown_user_or_role_returns_404(identity: Any) -> None:
    for path in ("none/roles", "none/roles/none"):
        method = "PUT" if path.endswith("/none") else "GET"
        assert identity.request(method, f"/v3/system/users/{path}").status_code == 404


def test_admin_may_log_in_with_system_scope(identity: Any) -> None:
    scoped = identity.login(SYSTEM)
    assert {"admin", "manager", "member", "reader"} == {
        role["name"] for role in scoped.json["token"]["roles"]
    }
    secret = scoped.headers["X-Subject-Token"]
    users = identity.request("GET", "/v3/users", token=secret).json["users"]
    roles_by_user = {}
    for user in users:
        path = f"/v3/system/users/{user['id']}/roles"
        roles = identity.request("GET", path, token=secret).json["roles"]
        roles_by_user[user["name"]] = [role["name"] for role in roles]
    users_with_roles = {name: roles for name, roles in roles_by_user.items() if roles}
    assert users_with_roles == {"admin": ["admin"], "kilonova": ["reader"]}
    exchanged = identity.authenticate(
        {"identity": {"methods": ["token"], "token": {"id": secret}}, "scope": PROJECT}
    )
    assert (
        exchanged.json["token"]["project"]["name"] == "admin"
        and "system" not in exchanged.json["token"]
    )
