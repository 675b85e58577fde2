# SPDX-License-Identifier: Apache-2.0
"""What a token is worth as time goes by, and which roles it carries."""

from datetime import timedelta
from string import hexdigits
from typing import Any

import pytest

from deploy.one_machine.services.identity import passwords
from deploy.one_machine.services.identity.tokens import add_implied

PROJECT = {"project": {"name": "admin", "domain": {"id": "default"}}}


@pytest.mark.parametrize(
    ("held", "whole"),
    [
        (set(), set()),
        ({"reader"}, {"reader"}),
        ({"manager"}, {"manager", "member", "reader"}),
        ({"admin", "service"}, {"admin", "manager", "member", "reader", "service"}),
    ],
)
def test_a_role_brings_those_that_it_implies(held: set[str], whole: set[str]) -> None:
    assert add_implied(held) == whole


def test_a_token_expires_and_its_descendants_with_it(identity: Any) -> None:
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


def test_secrets_can_be_handed_to_a_command(identity: Any) -> None:
    """One of 64 urlsafe texts begins with "-", which every command line reads as an option."""
    first = identity.token()
    exchange = {"identity": {"methods": ["token"], "token": {"id": first}}, "scope": PROJECT}
    for secret in (
        first,
        *(identity.authenticate(exchange).headers["X-Subject-Token"] for _ in range(20)),
    ):
        assert len(secret) == 64 and set(secret) <= set(hexdigits)


def test_only_services_and_admins_validate_for_others(identity: Any) -> None:
    subject = identity.token()
    unscoped = identity.login("unscoped", name="kilonova").headers["X-Subject-Token"]
    service = identity.login(
        {"project": {"name": "service", "domain": {"name": "Default"}}}, name="kilonova"
    )
    asked = {"headers": {"X-Subject-Token": subject}}
    assert identity.request("GET", "/v3/auth/tokens", token=unscoped, **asked).status_code == 403
    seen = identity.request(
        "GET", "/v3/auth/tokens", token=service.headers["X-Subject-Token"], **asked
    )
    assert [service["type"] for service in seen.json["token"]["catalog"]] == ["image"]
    bare = identity.request(
        "GET", "/v3/auth/tokens?nocatalog", token=service.headers["X-Subject-Token"], **asked
    )
    assert "catalog" not in bare.json["token"]
    assert identity.request("GET", "/v3/auth/tokens").status_code == 400


def test_nobodys_password_matches_nothing() -> None:
    stored = passwords.digest("right")
    assert passwords.matches(stored, "right")
    assert not passwords.matches(stored, "wrong")
    assert not passwords.matches(None, "right")
    assert "right" not in stored


SYSTEM = {"system": {"all": True}}


def made(identity: Any, noun: str, **values: Any) -> str:
    return str(identity.request("POST", f"/v3/{noun}s", json={noun: values}).json[noun]["id"])


def test_roles_in_the_whole_cloud_open_it_and_no_project(identity: Any) -> None:
    user = made(identity, "user", name="everywhere", password="everywhere", domain_id="default")
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


def test_roles_in_the_whole_cloud_need_a_user_and_a_role(identity: Any) -> None:
    for path in ("none/roles", "none/roles/none"):
        method = "PUT" if path.endswith("/none") else "GET"
        assert identity.request(method, f"/v3/system/users/{path}").status_code == 404


def test_the_admin_may_ask_for_the_whole_cloud(identity: Any) -> None:
    scoped = identity.login(SYSTEM)
    assert {"admin", "manager", "member", "reader"} == {
        role["name"] for role in scoped.json["token"]["roles"]
    }
    secret = scoped.headers["X-Subject-Token"]
    users = identity.request("GET", "/v3/users", token=secret).json["users"]
    held = {}
    for user in users:
        path = f"/v3/system/users/{user['id']}/roles"
        roles = identity.request("GET", path, token=secret).json["roles"]
        held[user["name"]] = [role["name"] for role in roles]
    some = {name: roles for name, roles in held.items() if roles}
    assert some == {"admin": ["admin"], "kilonova": ["reader"]}
    exchanged = identity.authenticate(
        {"identity": {"methods": ["token"], "token": {"id": secret}}, "scope": PROJECT}
    )
    assert (
        exchanged.json["token"]["project"]["name"] == "admin"
        and "system" not in exchanged.json["token"]
    )
