# SPDX-License-Identifier: Apache-2.0
"""What a token that was revoked at a real identity service is still good for: a minute at the API,
no console."""

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


def connected(cloud: Cloud, username: str, password: str, project: str) -> Any:
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
def mira(cloud: Cloud) -> tuple[Any, Any, str, str]:
    """An admin's client of the identity service, a user in a project, the project's id and a token
    of hers."""
    admin = connected(cloud, "admin", cloud.admin_password, "admin").identity
    name = f"mira-{uuid.uuid4().hex[:8]}"
    project = admin.create_project(name=name, domain_id="default")
    user = admin.create_user(name=name, password="password", domain_id="default")
    admin.assign_project_role_to_user(project, user, next(iter(admin.roles(name="member"))))
    return admin, user, project.id, connected(cloud, name, "password", name).session.get_token()


def configured(cloud: Cloud, folder: Path, password: str = "") -> Any:
    path = folder / "kilonova.conf"
    path.write_text(
        f"[identity]\nallow_plain_text = true\nauth_url = {cloud.auth_url}\n"
        f"password = {password or cloud.service_password}\n"
    )
    return config.load(str(path))


def callers(cloud: Cloud, folder: Path, password: str = "") -> TokenChecker:
    conf = configured(cloud, folder, password)
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
def test_a_token_that_ends_does_not_stand(
    cloud: Cloud, tmp_path: Path, mira: tuple[Any, Any, str, str], end: Callable[..., Any]
) -> None:
    asking, sealed = callers(cloud, tmp_path), Vault("key").seal({"token": mira[3]})
    assert asking.is_valid(sealed)
    end(*mira)
    assert not asking.is_valid(sealed)


def test_a_service_that_says_nothing_is_no_refusal(
    cloud: Cloud, tmp_path: Path, mira: tuple[Any, Any, str, str]
) -> None:
    with pytest.raises(errors.Unavailable):
        callers(cloud, tmp_path, password="wrong").is_valid(Vault("key").seal({"token": mira[3]}))


def test_a_revoked_token_is_good_for_a_minute_at_most(
    cloud: Cloud, tmp_path: Path, mira: tuple[Any, Any, str, str]
) -> None:
    def told(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [environ.get("HTTP_X_USER_ID", "nobody").encode()]

    clock = [0.0]
    kept = authentication.TokenCache(lambda: clock[0])
    asked = authentication.authenticated(told, configured(cloud, tmp_path), faults.body, cache=kept)

    def ask() -> bytes:
        return Request.blank("/", headers={"X-Auth-Token": mira[3]}).get_response(asked).body

    assert ask() == mira[1].id.encode() and len(kept) == 1
    mira[0].delete("/auth/tokens", headers={"X-Subject-Token": mira[3]})
    clock[0] = 59.0
    assert ask() == mira[1].id.encode()  # the identity service is not asked for each request
    clock[0] = 60.0
    assert ask() == b"nobody"
