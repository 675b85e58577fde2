# SPDX-License-Identifier: Apache-2.0
"""A catalogue that names no network service: what waits says why, nothing waits for ever, and who
registers the service has to start nothing anew."""

from __future__ import annotations

from typing import Any

import pytest

from common.clients import network
from common.domain import errors, states
from deploy.operator import doctor
from deploy.operator.store import stuck_actions
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud


def unregistered(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """A cloud whose network service is registered when ``well`` is called."""
    cloud.round()
    return cloud


def unregister(cloud: Cloud) -> None:
    """The catalogue names the network service no more."""
    with pytest.raises(errors.Unavailable) as raised:
        network.NetworkClient(lambda: None).ports("token")
    cloud.networks.missing = raised.value


def in_hand(cloud: Cloud) -> list[Any]:
    return cloud.store.read(stuck_actions.listed)


def test_a_server_without_ports_is_deleted_all_the_same(cloud: Cloud) -> None:
    register(cloud)
    unregister(cloud)
    server = cloud.create(networks=[])[0]
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE
    cloud.ask(server, "delete")
    cloud.settle()
    assert (cloud.show(server).deleted, cloud.pending(), cloud.networks.calls) == (1, [], 0)


def test_a_delete_with_ports_waits_a_while_and_says_for_what(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create()[0]
    cloud.settle()
    unregister(cloud)
    cloud.ask(server, "delete")
    cloud.round()
    cloud.advance()
    [action] = in_hand(cloud)
    assert (action.step, action.failures) == ("unplug", 0)
    assert "catalogue names no network service; register it or set [network]" in action.cause
    [(_, waits, _)] = cloud.store.read(doctor.ages)["actions"]
    assert waits == f"delete/unplug on no host: {action.cause}"
    cloud.settle()
    assert cloud.show(server).deleted == 1
    assert cloud.pending() == [("ports", server)]


def test_findings_tell_what_needs_the_service(cloud: Cloud) -> None:
    def missing() -> list[doctor.Finding]:
        return cloud.store.read(lambda tx: doctor.compare_catalogue({"network", "share"}, tx))

    cloud.round()
    assert missing() == []
    bare = cloud.create(networks=[])[0]
    cloud.settle()
    assert missing() == []
    server = cloud.create()[0]
    cloud.settle()
    unregister(cloud)
    [found] = missing()
    assert (found.invariant, found.subject) == ("service-registered", "network service")
    assert f"server {server} has ports" in found.text and "[network] endpoint" in found.text
    cloud.ask(server, "delete")
    cloud.ask(bare, "delete")
    cloud.settle()
    [found] = missing()
    assert f"still to remove ports {server}" in found.text
    cloud.networks.missing = None
    cloud.clean_up()
    assert missing() == []


def test_a_service_that_is_registered_later_is_used_at_once(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create()[0]
    other = cloud.create(networks=[{"network": "n1"}])[0]
    cloud.settle()
    unregister(cloud)
    cloud.ask(server, "delete")
    cloud.settle()
    assert len(cloud.networks.held) == 2
    late = cloud.create()[0]
    for _ in range(5):
        cloud.round()
    [action] = in_hand(cloud)
    assert (action.server_id, action.step) == (late, "networks") and action.cause
    cloud.networks.missing = None
    cloud.clean_up()
    assert (cloud.show(late).vm_state, in_hand(cloud)) == (states.ACTIVE, [])
    assert {port["device_id"] for port in cloud.networks.held.values()} == {late, other}
    assert cloud.findings() == []
