# SPDX-License-Identifier: Apache-2.0
"""The life of servers with volumes, with Cinder itself; also while its volume service falls silent
or dies in the middle."""

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
#: How often the API is not answered before its volume service is back.
FAILURES = 2
#: Seconds from a call until it is hit: before, about in, and after what it does.
MOMENTS = (0.0, 0.03, 0.1)
STARTING_SECONDS = 1.0


@pytest.fixture(scope="module")
def service(cinder: RunningCinder) -> Service:
    return Service(cinder.url, cinder.cloud, copies_images=False)


class Stumbling:
    """The service of volumes, whose process is hit in the middle of one call, and comes back after
    calls that failed."""

    def __init__(self, whole: VolumeApi, call: str, process: Process, hit: str, after: float):
        self._whole, self._call, self._process = whole, call, process
        self._hit: Callable[[], None] = getattr(process, hit)
        self._after = after
        self.failed, self.was_hit = 0, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._whole, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with self._about(name):
                return method(*arguments, **options)

        return call

    @contextmanager
    def _about(self, name: str) -> Iterator[None]:
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
                time.sleep(STARTING_SECONDS)  # it starts by the clock, not by the cloud's
            raise
        finally:
            if timer is not None:
                timer.join()


#: What is going on -> the call in which the process is hit.
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
def test_the_volume_process_is_hit_in_the_middle(
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
    whole = cloud.engine.volumes
    stumbling = Stumbling(whole, FLOWS[flow], cinder.volume, hit, after)
    cloud.engine.volumes = stumbling  # type: ignore[assignment]  # all calls of it go through
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
        cloud.engine.volumes = whole
    assert stumbling.was_hit
    await_true(lambda: _answers(service), 60, "Cinder's volume service does its work")
    if cloud.pending():
        cloud.clean_up()
    _is_whole(cloud, service, flow, server, volume)


def _answers(service: Service) -> bool:
    """Makes it a volume? What it was asked for before it had started is an error."""
    made = service.client.create(service.token, size_gb=1, name="of the test").id
    await_true(lambda: _status(service, made) != "creating", 60, "the volume is still being made")
    answers = _status(service, made) == "available"
    service.client.delete(service.token, made)
    return answers


def _status(service: Service, volume: str) -> str:
    return service.client.volume(service.token, volume).status


def _is_whole(cloud: Cloud, service: Service, flow: str, server: str, volume: str) -> None:
    """The server has the volume by one attachment or has none of it, as it says itself; the volume
    is lost to nobody."""
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
