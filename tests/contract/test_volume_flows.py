# SPDX-License-Identifier: Apache-2.0
"""Servers with volumes at a running block storage service.

The conductor's workflows and client are the real parts, and the guests are in memory. A call that
the service refuses fails the test. tests/cinder runs the same tests against Cinder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TypeVar

import pytest

from common.domain import states
from common.store import cleanups
from common.store.servers import actions
from common.store.servers.volumes import WantedVolume
from compute_agent.virt.memory.state.script import Fail
from conductor.steps.service_clients import BlockStorageService
from deploy.operator import doctor
from tests.contract.test_volume_client import Service, is_gone
from tests.contract.volume_rig import volume_rig
from tests.standalone import Cloud as StandaloneCloud
from tests.waiting import await_true
from tests.workflows import volumes as volume_service
from tests.workflows.moves import create_cloud
from tests.workflows.scenarios import bigger
from tests.workflows.simulator import Cloud

pytestmark = pytest.mark.slice("guests")
T = TypeVar("T")
IMAGE = {"image_id": "33333333-3333-4333-8333-333333333333"}


class KnownToken:
    """An identity service that always returns the same token."""

    def __init__(self, service: Service) -> None:
        self.volume_url, self._token = service.url, service.token

    def with_token(self, call: Callable[[str], T], service: str) -> T:
        return call(self._token)


@pytest.fixture(scope="module")
def service(
    standalone_cloud: StandaloneCloud, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("flows")
    with volume_rig(standalone_cloud, folder, "--export-address", "127.0.0.1") as rig:
        yield Service(rig.url, rig.cloud)


@pytest.fixture
def cloud(service: Service) -> Iterator[Cloud]:
    cloud = create_cloud(hosts=2)
    cloud.watcher = lambda: None
    identity = KnownToken(service)
    cloud.engine.volumes = BlockStorageService(identity, 60)  # type: ignore[arg-type]
    yield cloud
    cloud.store.close()


def create_server_with_volume(
    cloud: Cloud, service: Service, delete: bool = False
) -> tuple[str, str]:
    """Create a server with a volume on the first host."""
    volume = service.make().id
    wanted_volume = WantedVolume(volume_id=volume, size_gb=1, delete_on_termination=delete)
    [server] = cloud.create(host="h1", volumes=[wanted_volume])
    cloud.settle()
    return server, volume


def assert_settled_with_volume(
    cloud: Cloud, service: Service, server: str, volume: str, vm_state: str, host: str | None
) -> None:
    """Check the server's state and host, and that the volume has one attachment on this host."""
    shown = cloud.show(server)
    last = cloud.store.read(lambda tx: actions.list_for(tx, server))[0]
    assert (shown.vm_state, shown.host) == (vm_state, host), last.message
    assert [kind for kind, _ in cloud.pending() if kind not in cleanups.LATE] == []
    [attachment] = service.client.attachments(service.token, server)
    assert (attachment.volume_id, attachment.status) == (volume, "attached" if host else "reserved")
    assert bool(attachment.connection) == (host is not None)
    attachments = [asdict(row) for row in service.client.every_attachment(service.token)]
    assert cloud.store.read(lambda tx: doctor.compare_volumes(attachments, tx)) == []
    for name, simulated_host in cloud.hosts.items():
        guest = simulated_host.driver.host.guests.get(server)
        assert (guest.connected if guest is not None else []) == ([volume] if name == host else [])


def test_server_keeps_volume_through_moves_shelve_and_evacuation(
    cloud: Cloud, service: Service
) -> None:
    server, volume = create_server_with_volume(cloud, service)
    assert_settled_with_volume(cloud, service, server, volume, states.ACTIVE, "h1")
    cloud.move(server, "resize", bigger(cloud, server))
    cloud.settle()
    assert_settled_with_volume(cloud, service, server, volume, states.RESIZED, "h2")
    cloud.close(server, "revertResize")
    cloud.settle()
    assert_settled_with_volume(cloud, service, server, volume, states.ACTIVE, "h1")
    cloud.move(server, "migrate")
    cloud.settle()
    cloud.close(server, "confirmResize")
    cloud.settle()
    assert_settled_with_volume(cloud, service, server, volume, states.ACTIVE, "h2")
    cloud.move(server, "os-migrateLive")
    cloud.settle()
    assert_settled_with_volume(cloud, service, server, volume, states.ACTIVE, "h1")
    for action, vm_state, host in (
        ("shelve", states.SHELVED, "h1"),
        ("shelveOffload", states.SHELVED_OFFLOADED, None),
    ):
        cloud.ask(server, action, args=IMAGE)
        cloud.settle()
        assert_settled_with_volume(cloud, service, server, volume, vm_state, host)
    cloud.ask(server, "unshelve")
    cloud.settle()
    host = cloud.show(server).host
    assert_settled_with_volume(cloud, service, server, volume, states.ACTIVE, host)
    cloud.kill(host)
    cloud.move(server, "evacuate")
    cloud.settle()
    assert cloud.show(server).host != host
    [attachment] = service.client.attachments(service.token, server)
    assert attachment.status == "attached"
    cloud.ask(server, "delete")
    cloud.settle()
    assert service.client.attachments(service.token, server) == [] and cloud.pending() == []
    service.until(volume, "available")


def test_attach_and_detach_volume_of_running_server_can_be_repeated(
    cloud: Cloud, service: Service
) -> None:
    [server] = cloud.create(host="h1")
    cloud.settle()
    volume = service.make()
    cloud.volumes.state.volumes[volume.id] = volume
    for _ in range(2):
        volume_service.attach(cloud, server, volume.id)
        cloud.settle()
        assert_settled_with_volume(cloud, service, server, volume.id, states.ACTIVE, "h1")
        volume_service.detach(cloud, server, volume.id)
        cloud.settle()
        assert service.client.attachments(service.token, server) == []
        service.until(volume.id, "available")


@pytest.mark.parametrize(
    ("key", "verb"),
    [("resize", "install"), ("os-migrateLive", "prepare_arrival"), ("attach", "attach_volume")],
)
def test_failed_resize_live_migration_or_attach_restores_attachments(
    cloud: Cloud, service: Service, key: str, verb: str
) -> None:
    server, volume = create_server_with_volume(cloud, service)
    other = service.make()
    cloud.volumes.state.volumes[other.id] = other
    for name in ("h1", "h2") if key == "attach" else ("h2",):
        cloud.hosts[name].driver.host.script[verb] = [Fail("It broke.")]
    if key == "attach":
        volume_service.attach(cloud, server, other.id)
    else:
        cloud.move(server, key, bigger(cloud, server) if key == "resize" else None)
    cloud.settle()
    assert_settled_with_volume(cloud, service, server, volume, states.ACTIVE, "h1")
    service.until(other.id, "available")


def test_create_with_volume_succeeds_although_build_on_first_host_fails(
    cloud: Cloud, service: Service
) -> None:
    cloud.hosts["h1"].driver.host.script["ensure_guest"] = [Fail("Full.", retryable=True)]
    volume = service.make().id
    wanted_volume = WantedVolume(volume_id=volume, size_gb=1, delete_on_termination=True)
    [server] = cloud.create(volumes=[wanted_volume])
    cloud.settle()
    assert_settled_with_volume(
        cloud, service, server, volume, states.ACTIVE, cloud.show(server).host
    )
    cloud.ask(server, "delete")
    cloud.settle()
    cloud.clean_up()
    await_true(lambda: is_gone(service, volume), 60, "the volume is still there")
