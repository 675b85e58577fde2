# SPDX-License-Identifier: Apache-2.0
"""``kilonova setup controller`` at the embedded identity service: user, roles and endpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import requests
from requests.adapters import BaseAdapter

from common.domain.errors import ConfigError
from deploy.operator.setup import plan
from deploy.operator.setup.keystone import Registration
from deploy.operator.setup.keystone_client import KeystoneClient
from tests.unit.standalone.conftest import PASSWORD

VALUES = {"service": "own password", "public": "https://cloud.example"}
ADMIN = {"OS_USERNAME": "admin", "OS_PASSWORD": PASSWORD, "OS_PROJECT_NAME": "admin"}


class InProcess(BaseAdapter):
    """Sends requests to the identity service of this process."""

    def __init__(self, identity: Any) -> None:
        super().__init__()
        self._client = identity.client

    def send(self, request: requests.PreparedRequest, *args: Any, **more: Any) -> requests.Response:
        path, _, query = request.path_url.partition("?")
        answer = self._client.simulate_request(
            request.method,
            path,
            query_string=query,
            headers=dict(request.headers),
            body=request.body,
        )
        response = requests.Response()
        response.status_code, response._content = answer.status_code, answer.content
        response.headers.update(answer.headers)
        response.request, response.url = request, str(request.url)
        return response

    def close(self) -> None:
        pass


def register(identity: Any, environment: dict[str, str] = ADMIN, **values: str) -> None:
    client = KeystoneClient("http://keystone.example/v3", environment, "RegionOne")
    client._session.session.mount("http://", InProcess(identity))
    registration = Registration(client, SimpleNamespace(**VALUES | values))  # type: ignore[arg-type]  # all it reads
    plan.carry_out(registration.steps(), yes=True)


@pytest.fixture(autouse=True)
def empty_identity(identity: Any) -> None:
    """Delete Kilonova's user, role and services, which the embedded services have at the start."""
    for path in ("users?name=kilonova", "roles?name=service", "services"):
        collection = path.partition("?")[0]
        for row in identity.request("GET", f"/v3/{path}").json[collection]:
            assert identity.request("DELETE", f"/v3/{collection}/{row['id']}").status_code == 204


def test_setup_registers_kilonova_and_repeats_without_admin(
    identity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    register(identity)
    urls = {row["url"] for row in identity.request("GET", "/v3/endpoints").json["endpoints"]}
    assert urls == {"https://cloud.example/v2.1", "https://cloud.example/placement"}
    capsys.readouterr()
    register(identity, {})
    assert "This command changed nothing" in capsys.readouterr().out


def test_setup_keeps_user_with_another_password_and_other_endpoints(identity: Any) -> None:
    register(identity)
    with pytest.raises(ConfigError, match="user kilonova with another password"):
        register(identity, service="another")
    with pytest.raises(ConfigError, match="openstack endpoint delete"):
        register(identity, public="https://other.example")
    register(identity, {})


def test_setup_names_admin_with_wrong_password(identity: Any) -> None:
    with pytest.raises(ConfigError, match="Keystone refuses GET /domains.* OS_USERNAME"):
        register(identity, {**ADMIN, "OS_PASSWORD": "wrong"})
