# SPDX-License-Identifier: Apache-2.0
"""Cinder migrates and retypes attached volumes.

Cinder requests the swap from Kilonova's API, the conductor executes it, and Cinder gives the new
data the old id.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
import requests
from falcon.testing import Result, TestClient

from common.clients.volumes import VolumeClient
from common.domain import states
from compute_agent.virt.memory.state.script import Fail
from compute_api.compute import app, faults
from compute_api.compute.request.dependencies import ApiSettings, Services
from compute_api.http import authentication
from conductor.steps.service_clients import BlockStorageService
from tests.api.conftest import Agents, ConductorWakeup, Images, default_policy
from tests.cinder.conftest import RunningCinder
from tests.cinder.processes import BACKENDS, CAPABILITY, HOST
from tests.contract.test_volume_client import CONNECTOR, Service, is_gone
from tests.contract.test_volume_flows import KnownToken, assert_settled_with_volume
from tests.surface.identity import bound_input
from tests.waiting import await_true
from tests.workflows.moves import create_cloud
from tests.workflows.simulator import Cloud
from tests.workflows.test_volumes import last
from tests.workflows.volumes import WantedVolume

FIRST, SECOND = BACKENDS
#: Limit in seconds from the request to Cinder until Cinder requests the swap.
SWAP_REQUEST_SECONDS = 60
#: The type that Cinder gives to volumes without a requested type.
UNTYPED = "__DEFAULT__"


class Api:
    """The compute API of a simulated cloud in this thread, at the port that Cinder uses."""

    def __init__(self, cinder: RunningCinder, cloud: Cloud) -> None:
        self.answers: list[tuple[str, str, str]] = []
        answers = self.answers

        class Handler(WSGIRequestHandler):
            def log_request(self, code: Any = "-", size: Any = "-") -> None:
                answers.append((self.command, self.path, str(code)))

        services = Services(
            cloud.store,
            ConductorWakeup(),
            Agents(),
            Images(),
            ApiSettings(answer_timeout_seconds=0),
            volumes=VolumeClient(cinder.url, 60),
        )
        section = SimpleNamespace(
            auth_url=cinder.cloud.auth_url,
            username="kilonova",
            password=cinder.cloud.service_password,
            domain="Default",
            project_name="service",
            region="RegionOne",
        )
        entry = authentication.authenticate(
            app.create(services, default_policy()),
            # Only this section is read.
            SimpleNamespace(identity=section),  # type: ignore[arg-type]
            faults.body,
        )
        self._client = TestClient(entry)
        self._server = make_server(
            "127.0.0.1", cinder.compute_port, bound_input(entry), handler_class=Handler
        )
        self._server.timeout = SWAP_REQUEST_SECONDS

    def serve_until_swap(self) -> int:
        """Serve requests until Cinder requests a swap, and return the status of that answer."""
        while True:
            count = len(self.answers)
            self._server.handle_request()
            assert len(self.answers) > count, f"Cinder sent only {self.answers}"
            method, _, status = self.answers[-1]
            if method == "PUT":
                return int(status)

    def post(self, path: str, body: Any, token: str) -> Result:
        """Send a request of a user."""
        return self._client.simulate_post(
            f"/v2.1{path}", json=body, headers={"X-Auth-Token": token}
        )

    def close(self) -> None:
        self._server.server_close()


@pytest.fixture(scope="module")
def service(cinder: RunningCinder) -> Service:
    return Service(cinder.url, cinder.cloud, copies_images=False)


@pytest.fixture
def cloud(service: Service) -> Iterator[Cloud]:
    cloud = create_cloud(hosts=2)
    cloud.watcher = lambda: None
    identity = KnownToken(service)
    # KnownToken has all methods that the service calls.
    cloud.engine.volumes = BlockStorageService(identity, 60)  # type: ignore[arg-type]
    yield cloud
    cloud.store.close()


@pytest.fixture
def api(cinder: RunningCinder, cloud: Cloud) -> Iterator[Api]:
    new_api = Api(cinder, cloud)
    yield new_api
    new_api.close()


def send_request(service: Service, method: str, path: str, body: Any = None) -> Any:
    """Send a request to Cinder as admin, and return the body of the response."""
    answer = requests.request(
        method,
        service.url + path,
        json=body,
        headers={"X-Auth-Token": service.token, "OpenStack-API-Version": "volume 3.60"},
        timeout=60,
    )
    assert answer.ok, answer.text
    return answer.json() if answer.text else None


@pytest.fixture(scope="module")
def types(service: Service) -> dict[str, str]:
    """Backend -> the id of the type of its volumes."""
    type_ids = {}
    for place in BACKENDS:
        body = {"name": f"on {place}", "extra_specs": {CAPABILITY: place}}
        type_ids[place] = send_request(service, "POST", "/types", {"volume_type": body})[
            "volume_type"
        ]["id"]
    return type_ids


def create_server_with_volume(
    cloud: Cloud, service: Service, volume_type: str | None
) -> tuple[str, str]:
    """Create a server on the first host with an existing volume, and return both ids."""
    new_volume = service.client.create(service.token, size_gb=1, volume_type=volume_type)
    service.until(new_volume.id, "available")
    wish = WantedVolume(volume_id=new_volume.id, size_gb=1, delete_on_termination=False)
    [server] = cloud.create(host="h1", volumes=[wish])
    cloud.settle()
    return server, new_volume.id


def list_volumes(service: Service) -> set[str]:
    """Return the ids of all volumes of Cinder."""
    return {volume["id"] for volume in send_request(service, "GET", "/volumes")["volumes"]}


def read_volume(service: Service, volume: str) -> dict[str, Any]:
    volume_record: dict[str, Any] = send_request(service, "GET", f"/volumes/{volume}")["volume"]
    return volume_record


def read_backend(service: Service, volume: str) -> str:
    """Return the name of the volume's backend."""
    host = str(read_volume(service, volume)["os-vol-host-attr:host"])
    return host.partition("@")[2].partition("#")[0]


@pytest.mark.parametrize("wish", ["os-retype", "os-migrate_volume"])
def test_cinder_migrate_and_retype_swap_attached_volume(
    cloud: Cloud, service: Service, api: Api, types: dict[str, str], wish: str
) -> None:
    """A typed volume is retyped to the other backend, an untyped volume is migrated there."""
    retypes = wish == "os-retype"
    server, volume = create_server_with_volume(cloud, service, types[FIRST] if retypes else None)
    here, earlier_volumes = read_backend(service, volume), list_volumes(service)
    there = SECOND if here == FIRST else FIRST
    [before] = service.client.attachments(service.token, server)
    body = (
        {"new_type": types[there], "migration_policy": "on-demand"}
        if retypes
        else {"host": f"{HOST}@{there}#fake", "force_host_copy": True}
    )
    send_request(service, "POST", f"/volumes/{volume}/action", {wish: body})
    assert api.serve_until_swap() == 202
    [new] = list_volumes(service) - earlier_volumes
    cloud.settle()
    assert last(cloud, server)[:2] == ("swap_volume", "done")
    assert_settled_with_volume(cloud, service, server, volume, states.ACTIVE, "h1")
    volume_record = read_volume(service, volume)
    assert (volume_record["status"], volume_record["os-vol-mig-status-attr:migstat"]) == (
        "in-use",
        "success",
    )
    assert (read_backend(service, volume), volume_record["os-vol-mig-status-attr:name_id"]) == (
        there,
        new,
    )
    assert volume_record["volume_type"] == (f"on {there}" if retypes else UNTYPED)
    [now] = service.client.attachments(service.token, server)
    assert now.id != before.id
    [guest] = cloud.hosts["h1"].driver.host.guests[server].volumes
    assert (guest.volume_id, guest.stored_id) == (volume, new)
    await_true(lambda: is_gone(service, new), 60, "the second record is still there")
    cloud.ask(server, "delete")
    cloud.settle()
    service.until(volume, "available")


def test_cinder_retype_with_failed_copy_keeps_old_volume(
    cloud: Cloud, service: Service, api: Api, types: dict[str, str]
) -> None:
    server, volume = create_server_with_volume(cloud, service, types[FIRST])
    [before], earlier_volumes = (
        service.client.attachments(service.token, server),
        list_volumes(service),
    )
    cloud.hosts["h1"].driver.host.script["copy_volume"] = [Fail("The disk is full.")]
    body = {"new_type": types[SECOND], "migration_policy": "on-demand"}
    send_request(service, "POST", f"/volumes/{volume}/action", {"os-retype": body})
    assert api.serve_until_swap() == 202
    [new] = list_volumes(service) - earlier_volumes
    cloud.settle()
    assert last(cloud, server) == ("swap_volume", "failed", "The disk is full.")
    _check_volume_did_not_move(cloud, service, server, volume, before.id)
    await_true(lambda: is_gone(service, new), 60, "the new volume is still there")


def _check_volume_did_not_move(
    cloud: Cloud, service: Service, server: str, volume: str, attachment: str
) -> None:
    """Check that the server has the volume with the old attachment, and Cinder reports an error."""
    await_true(
        lambda: read_volume(service, volume)["status"] == "in-use", 60, "the volume is still moving"
    )
    assert_settled_with_volume(cloud, service, server, volume, states.ACTIVE, "h1")
    volume_record = read_volume(service, volume)
    assert volume_record["os-vol-mig-status-attr:migstat"] == "error"
    assert (read_backend(service, volume), volume_record["volume_type"]) == (FIRST, f"on {FIRST}")
    assert [entry.id for entry in service.client.attachments(service.token, server)] == [attachment]


def test_attach_encrypted_volume_and_swap_for_encrypted_retype_return_400(
    cloud: Cloud, service: Service, api: Api, types: dict[str, str]
) -> None:
    type_id = send_request(service, "POST", "/types", {"volume_type": {"name": "secret"}})[
        "volume_type"
    ]["id"]
    encryption = {"provider": "luks", "cipher": "aes-xts-plain64", "key_size": 256}
    send_request(
        service,
        "POST",
        f"/types/{type_id}/encryption",
        {"encryption": encryption | {"control_location": "front-end"}},
    )
    secret = service.client.create(service.token, size_gb=1, volume_type=type_id)
    assert secret.encrypted, "a new volume is marked as encrypted at once"
    service.until(secret.id, "available")
    server, volume = create_server_with_volume(cloud, service, types[FIRST])
    [before], earlier_volumes = (
        service.client.attachments(service.token, server),
        list_volumes(service),
    )
    request = {"volumeAttachment": {"volumeId": secret.id}}
    refused = api.post(f"/servers/{server}/os-volume_attachments", request, service.token)
    assert refused.status_code == 400
    assert f"'{secret.id}' is encrypted" in refused.json["badRequest"]["message"]
    body = {"new_type": type_id, "migration_policy": "on-demand"}
    send_request(service, "POST", f"/volumes/{volume}/action", {"os-retype": body})
    assert api.serve_until_swap() == 400
    _check_volume_did_not_move(cloud, service, server, volume, before.id)
    await_true(
        lambda: list_volumes(service) == earlier_volumes, 60, "the new volume is still there"
    )
    connected = service.client.attach(
        service.token, secret.id, server, CONNECTOR, "/dev/vdc"
    ).connection
    assert connected["encrypted"], "the host reads this field"
