# SPDX-License-Identifier: Apache-2.0
"""Tests of actions and the doctor while the catalogue of the cloud lacks the network service."""

from __future__ import annotations

from typing import Any

import pytest

from common.clients import network
from common.domain import errors, states
from deploy.operator import doctor
from deploy.operator.store import stuck_actions
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud


def unregister(cloud: Cloud) -> None:
    """Remove the network service from the catalogue."""
    with pytest.raises(errors.Unavailable) as raised:
        network.NetworkClient(lambda: None).ports("token")
    cloud.networks.missing = raised.value


def read_open_actions(cloud: Cloud) -> list[Any]:
    return cloud.store.read(stuck_actions.listed)


def test_delete_of_server_without_ports_does_not_call_network_service(cloud: Cloud) -> None:
    register(cloud)
    unregister(cloud)
    server = cloud.create(networks=[])[0]
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE
    cloud.ask(server, "delete")
    cloud.settle()
    assert (cloud.show(server).deleted, cloud.pending(), cloud.networks.calls) == (1, [], 0)


def test_delete_of_server_with_ports_waits_then_leaves_pending_cleanup(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create()[0]
    cloud.settle()
    unregister(cloud)
    cloud.ask(server, "delete")
    cloud.round()
    cloud.advance()
    [action] = read_open_actions(cloud)
    assert (action.step, action.failures) == ("unplug", 0)
    assert "catalogue names no network service; register it or set [network]" in action.cause
    [(_, waits, _)] = cloud.store.read(doctor.ages)["actions"]
    assert waits == f"delete/unplug on no host: {action.cause}"
    cloud.settle()
    assert cloud.show(server).deleted == 1
    assert cloud.pending() == [("ports", server)]


def test_doctor_reports_missing_service_with_servers_and_cleanups(cloud: Cloud) -> None:
    def find_missing() -> list[doctor.Finding]:
        return cloud.store.read(lambda tx: doctor.compare_catalogue({"network", "share"}, tx))

    cloud.round()
    assert find_missing() == []
    bare = cloud.create(networks=[])[0]
    cloud.settle()
    assert find_missing() == []
    server = cloud.create()[0]
    cloud.settle()
    unregister(cloud)
    [finding] = find_missing()
    assert (finding.invariant, finding.subject) == ("service-registered", "network service")
    assert f"server {server} has ports" in finding.text and "[network] endpoint" in finding.text
    cloud.ask(server, "delete")
    cloud.ask(bare, "delete")
    cloud.settle()
    [finding] = find_missing()
    assert f"still to remove ports {server}" in finding.text
    cloud.networks.missing = None
    cloud.clean_up()
    assert find_missing() == []


def test_create_continues_when_network_service_is_registered(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create()[0]
    other = cloud.create(networks=[{"network": "n1"}])[0]
    cloud.settle()
    unregister(cloud)
    cloud.ask(server, "delete")
    cloud.settle()
    assert len(cloud.networks.held) == 2
    waiting_server = cloud.create()[0]
    for _ in range(5):
        cloud.round()
    [action] = read_open_actions(cloud)
    assert (action.server_id, action.step) == (waiting_server, "networks") and action.cause
    cloud.networks.missing = None
    cloud.clean_up()
    assert (cloud.show(waiting_server).vm_state, read_open_actions(cloud)) == (states.ACTIVE, [])
    assert {port["device_id"] for port in cloud.networks.held.values()} == {waiting_server, other}
    assert cloud.findings() == []
