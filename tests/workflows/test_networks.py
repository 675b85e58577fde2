# SPDX-License-Identifier: Apache-2.0
"""Tests of actions that need ports, when the network service refuses, is silent or wires late."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import errors, states
from common.store.servers import actions
from compute_agent.virt.memory.state.script import Fail
from conductor.steps import networks
from tests.workflows.frozen import register
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud(cloud: Cloud) -> Cloud:
    """Return a cloud with registered hosts and without servers."""
    register(cloud)
    return cloud


def test_silent_network_service_delays_only_servers_with_ports(cloud: Cloud) -> None:
    waiting_server = cloud.create()[0]
    cloud.networks.silent = 100_000
    cloud.round()
    other = cloud.create(networks=[])[0]
    for _ in range(3):
        cloud.round()
    assert cloud.show(other).vm_state == states.ACTIVE
    assert cloud.show(waiting_server).task_state == states.NETWORKING
    ask(cloud, other, "delete")
    cloud.round()
    cloud.round()
    assert cloud.show(other).vm_state == states.DELETED
    cloud.networks.silent = 0
    cloud.settle()
    assert cloud.show(waiting_server).vm_state == states.ACTIVE


def test_create_retries_after_wait_time_of_busy_network_service(cloud: Cloud) -> None:
    create, times = cloud.networks.create, []

    def refuse_once(ports: Any) -> Any:
        times.append(cloud.time.monotonic())
        cloud.networks.create = create  # type: ignore[method-assign]
        raise errors.Unavailable("The network service answered 429; try again later.", wait=7)

    cloud.networks.create = refuse_once  # type: ignore[method-assign]
    server = cloud.create()[0]
    for _ in range(6):
        cloud.round()
    assert (cloud.show(server).task_state, cloud.networks.held) == (states.NETWORKING, {})
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE
    assert len(times) == 1


def test_create_refused_by_network_service_sets_error_with_its_message(cloud: Cloud) -> None:
    cloud.networks.refuses = "IP address 10.0.0.9 is in use."
    server = cloud.create()[0]
    cloud.settle()
    row = cloud.show(server)
    assert (row.vm_state, row.fault["message"]) == (
        states.ERROR,
        "IP address 10.0.0.9 is in use.",
    )
    assert (cloud.networks.held, cloud.domains(server), cloud.findings()) == ({}, [], [])


def test_create_avoids_hybrid_plug_host_and_fails_if_all_hosts_require_it(cloud: Cloud) -> None:
    cloud.networks.hybrid = {"h1"}
    server = cloud.create()[0]
    cloud.settle()
    assert (cloud.show(server).host, cloud.show(server).vm_state) == ("h2", states.ACTIVE)
    cloud.networks.hybrid = set(cloud.hosts)
    server = cloud.create()[0]
    cloud.settle()
    row = cloud.show(server)
    assert row.vm_state == states.ERROR
    assert "ovs_hybrid_plug" in row.fault["message"]
    assert cloud.domains(server) == []


def test_create_on_network_with_minimum_bandwidth_fails_with_reason(cloud: Cloud) -> None:
    """Ports inherit the QoS policy of their network, so new ports can request bandwidth."""
    cloud.networks.requests = {"request_groups": [{"resources": {"NET_BW_EGR_KILOBIT_PER_SEC": 1}}]}
    server = cloud.create()[0]
    cloud.settle()
    row = cloud.show(server)
    assert row.vm_state == states.ERROR
    assert "resource_request" in row.fault["message"]
    assert (cloud.networks.held, cloud.domains(server), cloud.findings()) == ({}, [], [])


def test_attach_interface_with_hybrid_plug_fails_with_reason(cloud: Cloud) -> None:
    server = cloud.create(networks=[])[0]
    cloud.settle()
    cloud.networks.hybrid = set(cloud.hosts)
    ask(cloud, server, "attach_interface")
    cloud.settle()
    action = cloud.store.read(lambda tx: actions.list_for(tx, server))[0]
    assert (action.name, action.state) == ("attach_interface", "failed")
    assert "ovs_hybrid_plug" in str(action.message)
    assert cloud.show(server).vm_state == states.ACTIVE
    assert not cloud.show(server).interfaces
    assert cloud.networks.held == {}


def test_create_retries_on_other_host_when_port_cannot_be_bound(cloud: Cloud) -> None:
    cloud.networks.cannot_bind = {"h1"}
    server = cloud.create()[0]
    cloud.settle()
    assert (cloud.show(server).host, cloud.show(server).vm_state) == ("h2", states.ACTIVE)
    assert len(cloud.networks.held) == 1
    assert cloud.findings() == []


def test_create_keeps_guest_paused_until_ports_are_wired(cloud: Cloud) -> None:
    cloud.networks.wires_after = 4
    server = cloud.create()[0]
    power_states = set()
    for _ in range(30):
        cloud.round()
        power_states |= {
            guest.power_state
            for host in cloud.hosts.values()
            for guest in host.driver.host.guests.values()
        }
    assert power_states == {states.POWER_PAUSED, states.RUNNING}
    row = cloud.show(server)
    assert (row.vm_state, row.power_state) == (states.ACTIVE, states.RUNNING)
    assert all(interface["active"] for interface in row.interfaces)


def test_create_checks_ports_at_once_after_vif_plugged_event(cloud: Cloud) -> None:
    cloud.networks.wires_after = 1000
    server = cloud.create()[0]
    for _ in range(8):
        cloud.round()
    for port in cloud.networks.held.values():
        port["looks"] = 1000
    before = cloud.time.micros
    cloud.store.write(lambda tx: actions.wake(tx, [server], "plug"))
    cloud.advance()
    assert cloud.time.micros - before < 1_000_000
    cloud.round()
    assert cloud.show(server).vm_state == states.ACTIVE


@pytest.mark.parametrize("fatal", [True, False])
def test_create_with_unwired_ports_fails_only_if_plugging_is_fatal(
    cloud: Cloud, fatal: bool
) -> None:
    cloud.options |= {"vif_plugging_timeout": 10, "vif_plugging_is_fatal": fatal}
    cloud.restart_conductor()
    cloud.networks.wires_after = 1000
    server = cloud.create()[0]
    cloud.settle()
    row = cloud.show(server)
    assert row.vm_state == (states.ERROR if fatal else states.ACTIVE)
    if fatal:
        assert "within 10 seconds" in row.fault["message"]
        assert (cloud.networks.held, cloud.domains(server)) == ({}, [])


def test_delete_unbinds_port_of_user_and_keeps_port(cloud: Cloud) -> None:
    port = cloud.networks.create_user_port("n1")
    server = cloud.create(networks=[{"port": port}, {"network": "n2"}])[0]
    cloud.settle()
    first, second = cloud.show(server).interfaces
    assert {held["dns_name"] for held in cloud.networks.held.values()} == {
        cloud.show(server).hostname
    }
    assert (first["port"], first["own"], second["own"], len(cloud.networks.held)) == (
        port,
        False,
        True,
        2,
    )
    ask(cloud, server, "delete")
    cloud.settle()
    assert list(cloud.networks.held) == [port]
    held = cloud.networks.held[port]
    assert [
        held[name] for name in ("device_id", "device_owner", "binding:host_id", "dns_name")
    ] == [""] * 4


@pytest.mark.parametrize(
    ("hostname", "name"),
    [
        ("web", "web"),
        ("Web.example.com", "Web.example.com"),
        ("a_b.c", "a-b.c"),
        ("-a-.b..c.", "a.b.c"),
        ("10.0.0.1", "10-0-0-1"),
        ("x" * 70 + ".com", "x" * 63 + ".com"),
        ("x" * 62 + "-y.com", "x" * 62 + ".com"),
        ("...", ""),
        ("7", "7"),
    ],
)
def test_dns_name_of_port_has_valid_labels(hostname: str, name: str) -> None:
    assert networks.dns_name(hostname) == name


def test_security_group_actions_change_groups_of_all_ports(cloud: Cloud) -> None:
    port = cloud.networks.create_user_port("n1")
    cloud.networks.held[port]["security_groups"] = []
    server = cloud.create(networks=[{"port": port}, {"network": "n2"}])[0]
    cloud.settle()
    for change, groups in (
        ("addSecurityGroup", [["g1"], ["default", "g1"]]),
        ("removeSecurityGroup", [[], ["default"]]),
    ):
        ask(cloud, server, change)
        cloud.settle()
        assert [interface["groups"] for interface in cloud.show(server).interfaces] == groups
    assert [interface["tag"] for interface in cloud.show(server).interfaces] == ["", ""]


def test_create_of_two_servers_with_same_port_fails_for_one(cloud: Cloud) -> None:
    port = cloud.networks.create_user_port("n1")
    servers = cloud.create(2, networks=[{"port": port}])
    cloud.settle()
    servers_by_state = {cloud.show(server).vm_state: server for server in servers}
    assert set(servers_by_state) == {states.ACTIVE, states.ERROR}
    assert cloud.networks.held[port]["device_id"] == servers_by_state[states.ACTIVE]
    assert (
        cloud.show(servers_by_state[states.ERROR]).fault["message"]
        == f"Port {port} is still in use."
    )
    assert cloud.findings() == []


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_delete_during_attach_interface_keeps_port_of_user(cloud: Cloud, rounds: int) -> None:
    port = cloud.networks.create_user_port("n2")
    server = cloud.create()[0]
    cloud.settle()
    for host in cloud.hosts.values():
        host.driver.host.script["attach_interface"] = [Fail("never reached")] * 9
    cloud.lose = lambda kind: kind == "do"
    cloud.ask(server, "attach_interface", args={"networks": [{"port": port}]})
    for _ in range(rounds):
        cloud.advance()
    cloud.lose = lambda kind: False
    ask(cloud, server, "delete")
    cloud.settle()
    assert list(cloud.networks.held) == [port]
    assert cloud.networks.held[port]["device_id"] == ""


def test_create_with_port_of_user_shows_floating_address(cloud: Cloud) -> None:
    port = cloud.networks.create_user_port("n1")
    cloud.networks.floating = {
        port: {cloud.networks.held[port]["fixed_ips"][0]["ip_address"]: ["172.24.4.9"]}
    }
    server = cloud.create(networks=[{"port": port}])[0]
    cloud.settle()
    assert cloud.show(server).interfaces[0]["addresses"][0]["floating"] == ["172.24.4.9"]


def test_create_gives_guest_an_interface_per_port(cloud: Cloud) -> None:
    server = cloud.create()[0]
    cloud.settle()
    row = cloud.show(server)
    guest = cloud.hosts[row.host].driver.host.guests[server]
    assert row.availability_zone == "nova"
    assert {port["device_owner"] for port in cloud.networks.held.values()} == {"compute:nova"}
    assert [interface.port for interface in guest.interfaces] == [row.interfaces[0]["port"]]
    assert row.interfaces[0]["label"] == "net-n1"


def test_networks_service_raises_unavailable_without_network_client(cloud: Cloud) -> None:
    cloud.engine.networks = None
    with pytest.raises(errors.Unavailable):
        networks.service(cloud.engine)


def test_doctor_reports_extra_binding_of_port(cloud: Cloud) -> None:
    server = cloud.create()[0]
    cloud.settle()
    [port] = cloud.networks.ports(server)
    assert cloud.findings() == []
    other = next(host for host in cloud.hosts if host != port["binding:host_id"])
    cloud.networks.bind_also(port, other)
    assert [(finding.invariant, finding.subject) for finding in cloud.findings()] == [
        ("port-of-server", port["id"])
    ]
    cloud.networks.unbind_at(port["id"], other)
    assert cloud.findings() == []
