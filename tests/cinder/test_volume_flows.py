# SPDX-License-Identifier: Apache-2.0
"""Servers with volumes of a real Cinder, also while cinder-volume is stopped or killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from common.domain import states
from common.store.servers.volumes import WantedVolume
from conductor.engine.external_services import VolumeApi
from deploy.operator import doctor
from tests.cinder.conftest import RunningCinder
from tests.cinder.processes import Process
from tests.contract.test_volume_client import Service
from tests.contract.test_volume_flows import *  # noqa: F403 - each of its tests runs here too
from tests.contract.test_volume_flows import (
    assert_settled_with_volume,
    cloud,
    create_server_with_volume,
)
from tests.waiting import await_true
from tests.workflows import volumes as volume_service
from tests.workflows.simulator import Cloud

__all__ = ["cloud"]
#: Number of failed calls after which the volume service is restored.
FAILURES = 2
#: Seconds from the begin of a call to the failure: before, during, or after the work.
MOMENTS = (0.0, 0.03, 0.1)
STARTING_SECONDS = 1.0


@pytest.fixture(scope="module")
def service(cinder: RunningCinder) -> Service:
    return Service(cinder.url, cinder.cloud, copies_images=False)


class FailingVolumeApi:
    """A volume API with a process that fails during a call and returns after failed calls."""

    def __init__(self, real_api: VolumeApi, call: str, process: Process, hit: str, after: float):
        self._real_api, self._call, self._process = real_api, call, process
        self._hit: Callable[[], None] = getattr(process, hit)
        self._after = after
        self.failed, self.was_hit = 0, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real_api, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with self._fail_process_during(name):
                return method(*arguments, **options)

        return call

    @contextmanager
    def _fail_process_during(self, name: str) -> Iterator[None]:
        timer = None
        if name == self._call and not self.was_hit:
            self.was_hit = True
            if self._after:
                timer = threading.Timer(self._after, self._hit)
                timer.start()
            else:
                self._hit()
        try:
            yield
        except Exception:
            self.failed += 1
            if self.failed == FAILURES:
                self._process.restore()
            elif self.failed > FAILURES:
                # The process starts by the real clock, not by the clock of the simulated cloud.
                time.sleep(STARTING_SECONDS)
            raise
        finally:
            if timer is not None:
                timer.join()


#: Action -> the call during which the process fails.
FLOWS = {
    "create": "connect",
    "attach": "connect",
    "detach": "detach",
    "delete": "detach",
    "os-migrateLive": "attach",
}


@pytest.mark.parametrize("after", MOMENTS)
@pytest.mark.parametrize("hit", ["silence", "kill"])
@pytest.mark.parametrize("flow", FLOWS)
def test_volume_action_recovers_when_cinder_volume_fails_during_call(
    cloud: Cloud, service: Service, cinder: RunningCinder, flow: str, hit: str, after: float
) -> None:
    if flow in ("create", "attach"):
        volume, server = service.make().id, ""
        cloud.volumes.state.volumes[volume] = service.client.volume(service.token, volume)
        if flow == "attach":
            [server] = cloud.create(host="h1")
            cloud.settle()
    else:
        server, volume = create_server_with_volume(cloud, service)
    real_api = cloud.engine.volumes
    failing_api = FailingVolumeApi(real_api, FLOWS[flow], cinder.volume, hit, after)
    # The replacement forwards all calls.
    cloud.engine.volumes = failing_api  # type: ignore[assignment]
    try:
        if flow == "create":
            wish = WantedVolume(volume_id=volume, size_gb=1, delete_on_termination=False)
            [server] = cloud.create(host="h1", volumes=[wish])
        elif flow == "attach":
            volume_service.attach(cloud, server, volume)
        elif flow == "detach":
            volume_service.detach(cloud, server, volume)
        elif flow == "delete":
            cloud.ask(server, "delete")
        else:
            cloud.move(server, flow)
        cloud.settle()
    finally:
        cinder.volume.restore()
        cloud.engine.volumes = real_api
    assert failing_api.was_hit
    await_true(lambda: _is_serving(service), 60, "Cinder's volume service works again")
    if cloud.pending():
        cloud.clean_up()
    _check_volume_is_consistent(cloud, service, flow, server, volume)


def _is_serving(service: Service) -> bool:
    """Return True if the service can create a volume. Before its start, creation fails."""
    new_volume = service.client.create(service.token, size_gb=1, name="of the test").id
    await_true(
        lambda: _read_status(service, new_volume) != "creating",
        60,
        "the volume is still being created",
    )
    is_available = _read_status(service, new_volume) == "available"
    service.client.delete(service.token, new_volume)
    return is_available


def _read_status(service: Service, volume: str) -> str:
    return service.client.volume(service.token, volume).status


def _check_volume_is_consistent(
    cloud: Cloud, service: Service, flow: str, server: str, volume: str
) -> None:
    """Check that server and Cinder agree about the attachment, and that the volume is usable."""
    if flow == "delete":
        assert service.client.attachments(service.token, server) == []
    elif volume_service.of(cloud, server):
        assert_settled_with_volume(
            cloud, service, server, volume, states.ACTIVE, cloud.show(server).host
        )
        service.until(volume, "in-use")
        volume_service.detach(cloud, server, volume)
        cloud.settle()
    assert cloud.store.read(lambda tx: doctor.compare_volumes([], tx)) == []
    assert service.client.attachments(service.token, server) == []
    service.until(volume, "available")
    service.client.delete(service.token, volume)
