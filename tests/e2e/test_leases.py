# SPDX-License-Identifier: Apache-2.0
"""A host that was frozen during a build, and continues after the server was built elsewhere."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from deploy.one_machine.cloud.process_control import find_process
from tests.e2e.lab import SILENCE, LiveLab
from tests.e2e.live import BOOT, SETTLE
from tests.e2e.mini_guest import find_image
from tests.e2e.storm import descendants, frozen
from tests.waiting import await_true, is_true_within

pytestmark = pytest.mark.slice("operations")
HOST = "lab2"


def list_pids(lab: LiveLab, program: str) -> list[int]:
    """Return the process ids of a program of the host and of its children."""
    pid = find_process(lab.cloud, f"{program}-{lab.lab.number(HOST)}")
    assert pid is not None
    return [pid, *descendants(pid)]


def test_frozen_host_starts_no_second_guest_after_lease_of_build_ended(lab: LiveLab) -> None:
    """The test freezes libvirtd first, so that the agent is frozen during the build."""
    rest, compute = lab.rest(), lab.seed.admin.compute
    agent = list_pids(lab, "agent")
    with ExitStack() as frozen_processes:
        with lab.only(2), frozen(list_pids(lab, "libvirtd")):
            server = rest.create(image=find_image(lab), flavor=lab.flavor(), name="late")
            await_true(lambda: lab.is_at_step(server, "build"), SETTLE, lambda: rest.server(server))
            # The agent does not report the start of the command.
            time.sleep(3)
            frozen_processes.enter_context(frozen(agent))
        lab.await_host(HOST, "down", SILENCE)
        compute.update_service_forced_down(lab.service(HOST), forced=True)
        rest.await_status(server, "ACTIVE", SETTLE + BOOT)
        new_host = lab.host_of(server)
        assert new_host != HOST
    assert not is_true_within(
        lambda: lab.find_domains(server).get(HOST) == "running", 20, pause=0.2
    )
    compute.update_service_forced_down(lab.service(HOST), forced=False)
    lab.await_host(HOST)
    await_true(
        lambda: lab.find_domains(server) == {new_host: "running"},
        SETTLE,
        lambda: lab.find_domains(server),
    )
    rest.insist("DELETE", f"/servers/{server}", expected=(204,))
    rest.await_gone(server)
