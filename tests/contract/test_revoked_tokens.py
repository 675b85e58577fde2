# SPDX-License-Identifier: Apache-2.0
"""Tokens revoked at a real identity service: the API accepts them for a minute, consoles do not."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openstack
import pytest
from webob import Request

from common.clients.identity import IdentityClient
from common.domain import errors
from common.security.vault import Vault
from common.service import config
from compute_api.compute import faults
from compute_api.console.token_check import TokenChecker, keystone
from compute_api.http import authentication
from tests.standalone import Cloud

pytestmark = pytest.mark.slice("operations")


@pytest.fixture(scope="module")
def cloud(standalone_cloud: Cloud) -> Cloud:
    return standalone_cloud


def connect(cloud: Cloud, username: str, password: str, project: str) -> Any:
    return openstack.connect(
        load_yaml_config=False,
        load_envvars=False,
        auth={
            "auth_url": cloud.auth_url,
            "username": username,
            "password": password,
            "project_name": project,
            "user_domain_id": "default",
            "project_domain_id": "default",
        },
    )


@pytest.fixture
def token_user(cloud: Cloud) -> tuple[Any, Any, str, str]:
    """Return an admin's identity client, a user, the project's id, and the user's token."""
    admin = connect(cloud, "admin", cloud.admin_password, "admin").identity
    name = f"mira-{uuid.uuid4().hex[:8]}"
    project = admin.create_project(name=name, domain_id="default")
    user = admin.create_user(name=name, password="password", domain_id="default")
    admin.assign_project_role_to_user(project, user, next(iter(admin.roles(name="member"))))
    return admin, user, project.id, connect(cloud, name, "password", name).session.get_token()


def load_config(cloud: Cloud, folder: Path, password: str = "") -> Any:
    path = folder / "kilonova.conf"
    path.write_text(
        f"[identity]\nallow_plain_text = true\nauth_url = {cloud.auth_url}\n"
        f"password = {password or cloud.service_password}\n"
    )
    return config.load(str(path))


def new_token_checker(cloud: Cloud, folder: Path, password: str = "") -> TokenChecker:
    conf = load_config(cloud, folder, password)
    return TokenChecker(Vault("key"), keystone(IdentityClient(conf), conf.identity.auth_url))


@pytest.mark.parametrize(
    "end",
    [
        lambda admin, user, project, token: admin.delete(
            "/auth/tokens", headers={"X-Subject-Token": token}
        ),
        lambda admin, user, project, token: admin.update_user(user, is_enabled=False),
        lambda admin, user, project, token: admin.update_project(project, is_enabled=False),
    ],
    ids=["token revoked", "user disabled", "project disabled"],
)
def test_console_token_is_invalid_once_revoked_or_user_or_project_disabled(
    cloud: Cloud, tmp_path: Path, token_user: tuple[Any, Any, str, str], end: Callable[..., Any]
) -> None:
    checker, sealed = (
        new_token_checker(cloud, tmp_path),
        Vault("key").seal({"token": token_user[3]}),
    )
    assert checker.is_valid(sealed)
    end(*token_user)
    assert not checker.is_valid(sealed)


def test_console_token_check_raises_unavailable_on_wrong_service_password(
    cloud: Cloud, tmp_path: Path, token_user: tuple[Any, Any, str, str]
) -> None:
    with pytest.raises(errors.Unavailable):
        new_token_checker(cloud, tmp_path, password="wrong").is_valid(
            Vault("key").seal({"token": token_user[3]})
        )


def test_api_accepts_revoked_token_for_at_most_a_minute(
    cloud: Cloud, tmp_path: Path, token_user: tuple[Any, Any, str, str]
) -> None:
    def respond(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [environ.get("HTTP_X_USER_ID", "nobody").encode()]

    clock = [0.0]
    token_cache = authentication.TokenCache(lambda: clock[0])
    application = authentication.authenticate(
        respond, load_config(cloud, tmp_path), faults.body, cache=token_cache
    )

    def get_user() -> bytes:
        return (
            Request.blank("/", headers={"X-Auth-Token": token_user[3]})
            .get_response(application)
            .body
        )

    assert get_user() == token_user[1].id.encode() and len(token_cache) == 1
    token_user[0].delete("/auth/tokens", headers={"X-Subject-Token": token_user[3]})
    clock[0] = 59.0
    assert get_user() == token_user[1].id.encode()  # The token is still in the cache.
    clock[0] = 60.0
    assert get_user() == b"nobody"
