# SPDX-License-Identifier: Apache-2.0
"""Moves in places where they could have lost a server, a host or the sweep: what fresh eyes have
found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.domain import errors, states
from common.domain.service_binaries import Binary
from common.security.vault import Vault
from common.store.hosts import services
from common.store.servers import actions
from common.store.views import host_removal
from deploy.operator import doctor
from tests.workflows.simulator import FLAVOR, Cloud

LARGER = replace(FLAVOR, id="2", name="larger", vcpus=2, memory_mb=256, root_gb=2)


def made(cloud: Cloud) -> str:
    cloud.round()
    server = cloud.create()[0]
    cloud.settle()
    return server


@pytest.mark.parametrize("key", ["resize", "migrate", "os-migrateLive"])
def test_a_cloud_without_a_key_moves_nothing_and_touches_nothing(cloud: Cloud, key: str) -> None:
    server = made(cloud)
    cloud.options["vault"] = Vault("")
    cloud.engine = cloud.conductor("c1/1")
    cloud.move(server, key, LARGER if key == "resize" else None)
    cloud.settle()
    [move, *_] = cloud.store.read(lambda tx: actions.list_for(tx, server))
    assert (move.state, "secret_key" in move.message) == ("failed", True)
    found = cloud.show(server)
    assert (found.vm_state, found.task_state, found.power_state) == (
        states.ACTIVE,
        None,
        states.RUNNING,
    )
    assert cloud.findings() == []


def test_a_resize_is_not_confirmed_by_time_while_its_host_is_dead(cloud: Cloud) -> None:
    """What is kept at the source may be all that there is."""
    server = made(cloud)
    cloud.options["resize_confirm_window"] = 5
    cloud.engine = cloud.conductor("c1/1")
    source = cloud.show(server).host
    cloud.move(server, "resize", LARGER)
    cloud.settle()
    dest = cloud.show(server).host
    cloud.force_down(dest)
    for _ in range(10):
        cloud.round()
    assert cloud.show(server).vm_state == states.RESIZED
    assert source in cloud.domains(server)
    cloud.force_down(dest, False)
    for _ in range(10):
        cloud.round()
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.domains(server)) == (states.ACTIVE, [dest])
    assert cloud.findings() == []


def test_a_host_that_was_forgotten_with_its_debts_runs_nothing_that_is_elsewhere_when_it_returns(
    cloud: Cloud,
) -> None:
    """It was cut off, not off: its guests ran on."""
    server = made(cloud)
    gone = cloud.show(server).host
    cloud.cut.add(gone)
    for _ in range(40):
        cloud.round()
    cloud.force_down(gone)
    cloud.move(server, "evacuate")
    for _ in range(20):
        cloud.round()
    here = cloud.show(server).host
    service = cloud.store.read(lambda tx: services.list_all(tx, gone, Binary.COMPUTE))[0]
    cloud.store.write(lambda tx: host_removal.remove(tx, service, service.uuid))
    assert cloud.store.read(doctor.check) == []
    assert here != gone and sorted(cloud.domains(server)) == sorted([here, gone])
    cloud.cut.clear()
    for _ in range(3):
        cloud.round()
    states_there = {one.server: one.power_state for one in cloud.hosts[gone].driver.domains()}
    assert states_there == {server: states.SHUTDOWN}, "off, and left for somebody to look at"
    assert cloud.store.read(doctor.check) == []


def test_a_host_that_may_return_keeps_its_debts(cloud: Cloud) -> None:
    server = made(cloud)
    gone = cloud.show(server).host
    cloud.cut.add(gone)
    for _ in range(40):
        cloud.round()
    cloud.ask(server, "delete")
    for _ in range(40):
        cloud.round()
    service = cloud.store.read(lambda tx: services.list_all(tx, gone, Binary.COMPUTE))[0]
    with pytest.raises(errors.Conflict, match="force it down first"):
        cloud.store.write(lambda tx: host_removal.remove(tx, service, service.uuid))
