# SPDX-License-Identifier: Apache-2.0
"""Cinder migrates and retypes volumes that servers have: it asks our API for the swap, our
conductor carries it out, and Cinder gives the data the old id."""

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
from tests.contract.test_volume_flows import KnownToken, stands
from tests.surface.identity import bounded
from tests.waiting import await_true
from tests.workflows.moves import create_cloud
from tests.workflows.simulator import Cloud
from tests.workflows.test_volumes import last
from tests.workflows.volumes import WantedVolume

FIRST, SECOND = BACKENDS
#: How long Cinder takes from the wish to the swap at most, seconds.
ASKS_SECONDS = 60
UNTYPED = "__DEFAULT__"  #: what Cinder calls the type of a volume that was asked for without one


class Api:
    """Our API over the store of a cloud in this thread, where Cinder finds the compute service."""

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
        entry = authentication.authenticated(
            app.create(services, default_policy()),
            SimpleNamespace(identity=section),  # type: ignore[arg-type]  # all of it that is asked
            faults.body,
        )
        self._client = TestClient(entry)
        self._server = make_server(
            "127.0.0.1", cinder.compute_port, bounded(entry), handler_class=Handler
        )
        self._server.timeout = ASKS_SECONDS

    def swap(self) -> int:
        """Answers until Cinder has asked for a swap; the status of that answer."""
        while True:
            said = len(self.answers)
            self._server.handle_request()
            assert len(self.answers) > said, f"Cinder asked only {self.answers}"
            method, _, status = self.answers[-1]
            if method == "PUT":
                return int(status)

    def post(self, path: str, body: Any, token: str) -> Result:
        """What a user is answered."""
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
    cloud.engine.volumes = BlockStorageService(identity, 60)  # type: ignore[arg-type]  # all of it that is asked
    yield cloud
    cloud.store.close()


@pytest.fixture
def api(cinder: RunningCinder, cloud: Cloud) -> Iterator[Api]:
    made = Api(cinder, cloud)
    yield made
    made.close()


def ask(service: Service, method: str, path: str, body: Any = None) -> Any:
    """What Cinder answers who may do all."""
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
    """Place -> the type that its volumes have."""
    made = {}
    for place in BACKENDS:
        body = {"name": f"on {place}", "extra_specs": {CAPABILITY: place}}
        made[place] = ask(service, "POST", "/types", {"volume_type": body})["volume_type"]["id"]
    return made


def with_volume_of(cloud: Cloud, service: Service, volume_type: str | None) -> tuple[str, str]:
    """A server on the first host, with a volume that is there."""
    made = service.client.create(service.token, size_gb=1, volume_type=volume_type)
    service.until(made.id, "available")
    wish = WantedVolume(volume_id=made.id, size_gb=1, delete_on_termination=False)
    [server] = cloud.create(host="h1", volumes=[wish])
    cloud.settle()
    return server, made.id


def all_volumes(service: Service) -> set[str]:
    """Their ids."""
    return {one["id"] for one in ask(service, "GET", "/volumes")["volumes"]}


def record(service: Service, volume: str) -> dict[str, Any]:
    found: dict[str, Any] = ask(service, "GET", f"/volumes/{volume}")["volume"]
    return found


def place_of(service: Service, volume: str) -> str:
    """Where Cinder has it."""
    host = str(record(service, volume)["os-vol-host-attr:host"])
    return host.partition("@")[2].partition("#")[0]


@pytest.mark.parametrize("wish", ["os-retype", "os-migrate_volume"])
def test_a_volume_moves_under_its_server(
    cloud: Cloud, service: Service, api: Api, types: dict[str, str], wish: str
) -> None:
    """A type is of one place; what has none may be anywhere."""
    retypes = wish == "os-retype"
    server, volume = with_volume_of(cloud, service, types[FIRST] if retypes else None)
    here, known = place_of(service, volume), all_volumes(service)
    there = SECOND if here == FIRST else FIRST
    [before] = service.client.attachments(service.token, server)
    body = (
        {"new_type": types[there], "migration_policy": "on-demand"}
        if retypes
        else {"host": f"{HOST}@{there}#fake", "force_host_copy": True}
    )
    ask(service, "POST", f"/volumes/{volume}/action", {wish: body})
    assert api.swap() == 202
    [new] = all_volumes(service) - known
    cloud.settle()
    assert last(cloud, server)[:2] == ("swap_volume", "done")
    stands(cloud, service, server, volume, states.ACTIVE, "h1")
    found = record(service, volume)
    assert (found["status"], found["os-vol-mig-status-attr:migstat"]) == ("in-use", "success")
    assert (place_of(service, volume), found["os-vol-mig-status-attr:name_id"]) == (there, new)
    assert found["volume_type"] == (f"on {there}" if retypes else UNTYPED)
    [now] = service.client.attachments(service.token, server)
    assert now.id != before.id
    [guest] = cloud.hosts["h1"].driver.host.guests[server].volumes
    assert (guest.volume_id, guest.stored_id) == (volume, new)
    await_true(lambda: is_gone(service, new), 60, "the second record is still there")
    cloud.ask(server, "delete")
    cloud.settle()
    service.until(volume, "available")


def test_a_copy_that_fails_leaves_the_volume(
    cloud: Cloud, service: Service, api: Api, types: dict[str, str]
) -> None:
    server, volume = with_volume_of(cloud, service, types[FIRST])
    [before], known = service.client.attachments(service.token, server), all_volumes(service)
    cloud.hosts["h1"].driver.host.script["copy_volume"] = [Fail("The disk is full.")]
    body = {"new_type": types[SECOND], "migration_policy": "on-demand"}
    ask(service, "POST", f"/volumes/{volume}/action", {"os-retype": body})
    assert api.swap() == 202
    [new] = all_volumes(service) - known
    cloud.settle()
    assert last(cloud, server) == ("swap_volume", "failed", "The disk is full.")
    _is_as_before(cloud, service, server, volume, before.id)
    await_true(lambda: is_gone(service, new), 60, "the new volume is still there")


def _is_as_before(
    cloud: Cloud, service: Service, server: str, volume: str, attachment: str
) -> None:
    """The server has the volume where it was, and Cinder says that it did not move."""
    await_true(lambda: record(service, volume)["status"] == "in-use", 60, "it moves still")
    stands(cloud, service, server, volume, states.ACTIVE, "h1")
    found = record(service, volume)
    assert found["os-vol-mig-status-attr:migstat"] == "error"
    assert (place_of(service, volume), found["volume_type"]) == (FIRST, f"on {FIRST}")
    assert [one.id for one in service.client.attachments(service.token, server)] == [attachment]


def test_encrypted_volumes_are_refused_by_name(
    cloud: Cloud, service: Service, api: Api, types: dict[str, str]
) -> None:
    """In a new server, at one that is there, and as what a volume is retyped to."""
    made = ask(service, "POST", "/types", {"volume_type": {"name": "secret"}})["volume_type"]["id"]
    how = {"provider": "luks", "cipher": "aes-xts-plain64", "key_size": 256}
    ask(
        service,
        "POST",
        f"/types/{made}/encryption",
        {"encryption": how | {"control_location": "front-end"}},
    )
    secret = service.client.create(service.token, size_gb=1, volume_type=made)
    assert secret.encrypted, "its record says so as soon as it is made"
    service.until(secret.id, "available")
    server, volume = with_volume_of(cloud, service, types[FIRST])
    [before], known = service.client.attachments(service.token, server), all_volumes(service)
    asked = {"volumeAttachment": {"volumeId": secret.id}}
    refused = api.post(f"/servers/{server}/os-volume_attachments", asked, service.token)
    assert refused.status_code == 400
    assert f"'{secret.id}' is encrypted" in refused.json["badRequest"]["message"]
    body = {"new_type": made, "migration_policy": "on-demand"}
    ask(service, "POST", f"/volumes/{volume}/action", {"os-retype": body})
    assert api.swap() == 400
    _is_as_before(cloud, service, server, volume, before.id)
    await_true(lambda: all_volumes(service) == known, 60, "the new volume is still there")
    connected = service.client.attach(
        service.token, secret.id, server, CONNECTOR, "/dev/vdc"
    ).connection
    assert connected["encrypted"], "the host looks at this"
