# SPDX-License-Identifier: Apache-2.0
"""Tests of moves without a secret key, and of hosts that are down or removed from the records."""

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


def boot_server(cloud: Cloud) -> str:
    cloud.round()
    server = cloud.create()[0]
    cloud.settle()
    return server


@pytest.mark.parametrize("key", ["resize", "migrate", "os-migrateLive"])
def test_move_without_configured_secret_key_fails_and_leaves_server_active(
    cloud: Cloud, key: str
) -> None:
    server = boot_server(cloud)
    cloud.options["vault"] = Vault("")
    cloud.engine = cloud.conductor("c1/1")
    cloud.move(server, key, LARGER if key == "resize" else None)
    cloud.settle()
    [action, *_] = cloud.store.read(lambda tx: actions.list_for(tx, server))
    assert (action.state, "secret_key" in action.message) == ("failed", True)
    row = cloud.show(server)
    assert (row.vm_state, row.task_state, row.power_state) == (states.ACTIVE, None, states.RUNNING)
    assert cloud.findings() == []


def test_resize_confirm_window_waits_while_destination_is_forced_down(cloud: Cloud) -> None:
    """A confirm would delete the guest at the source, which may be the only usable copy."""
    server = boot_server(cloud)
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


def test_removed_host_shuts_down_guest_of_evacuated_server_on_return(cloud: Cloud) -> None:
    """The host was only unreachable, so its guest ran during the evacuation and the removal."""
    server = boot_server(cloud)
    old_host = cloud.show(server).host
    cloud.cut.add(old_host)
    for _ in range(40):
        cloud.round()
    cloud.force_down(old_host)
    cloud.move(server, "evacuate")
    for _ in range(20):
        cloud.round()
    new_host = cloud.show(server).host
    service = cloud.store.read(lambda tx: services.list_all(tx, old_host, Binary.COMPUTE))[0]
    cloud.store.write(lambda tx: host_removal.remove(tx, service, service.uuid))
    assert cloud.store.read(doctor.check) == []
    assert new_host != old_host and sorted(cloud.domains(server)) == sorted([new_host, old_host])
    cloud.cut.clear()
    for _ in range(3):
        cloud.round()
    domains = cloud.hosts[old_host].driver.domains()
    power_states = {domain.server: domain.power_state for domain in domains}
    assert power_states == {server: states.SHUTDOWN}, "the guest is kept for the operator"
    assert cloud.store.read(doctor.check) == []


def test_remove_of_silent_host_with_pending_removal_raises_conflict(cloud: Cloud) -> None:
    server = boot_server(cloud)
    old_host = cloud.show(server).host
    cloud.cut.add(old_host)
    for _ in range(40):
        cloud.round()
    cloud.ask(server, "delete")
    for _ in range(40):
        cloud.round()
    service = cloud.store.read(lambda tx: services.list_all(tx, old_host, Binary.COMPUTE))[0]
    with pytest.raises(errors.Conflict, match="force its service down first"):
        cloud.store.write(lambda tx: host_removal.remove(tx, service, service.uuid))
