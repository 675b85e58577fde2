# SPDX-License-Identifier: Apache-2.0
"""A host that stood still in the middle of a build wakes up when its server lives elsewhere: it
starts nothing."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from deploy.one_machine.cloud.process_control import find_process
from tests.e2e.lab import SILENCE, LiveLab
from tests.e2e.live import BOOT, SETTLE
from tests.e2e.storm import descendants, frozen
from tests.waiting import await_true, is_true_within

pytestmark = pytest.mark.slice("operations")
HOST = "lab2"


def pids(lab: LiveLab, program: str) -> list[int]:
    """Of a program of that host, with its children."""
    pid = find_process(lab.cloud, f"{program}-{lab.lab.number(HOST)}")
    assert pid is not None
    return [pid, *descendants(pid)]


def test_a_build_that_outlived_its_lease_starts_no_second_guest(lab: LiveLab) -> None:
    """libvirt stands still first, so that the agent is in the middle of the build when it stands
    still too."""
    rest, compute = lab.rest(), lab.seed.admin.compute
    agent = pids(lab, "agent")
    with ExitStack() as still:
        with lab.only(2), frozen(pids(lab, "libvirtd")):
            server = rest.create(image=lab.image(), flavor=lab.flavor(), name="late")
            await_true(lambda: lab.doing(server, "build"), SETTLE, lambda: rest.server(server))
            time.sleep(3)  # the agent does not say that it has taken the command in hand
            still.enter_context(frozen(agent))
        lab.await_host(HOST, "down", SILENCE)
        compute.update_service_forced_down(lab.service(HOST), forced=True)
        rest.await_status(server, "ACTIVE", SETTLE + BOOT)
        there = lab.place(server)
        assert there != HOST
    assert not is_true_within(lambda: lab.where(server).get(HOST) == "running", 20, pause=0.2)
    compute.update_service_forced_down(lab.service(HOST), forced=False)
    lab.await_host(HOST)
    await_true(lambda: lab.where(server) == {there: "running"}, SETTLE, lambda: lab.where(server))
    rest.insist("DELETE", f"/servers/{server}", fine=(204,))
    rest.await_gone(server)
