# SPDX-License-Identifier: Apache-2.0
"""Actions that need ports: a network service that refuses, is silent, wires late or cannot bind."""

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
    """A cloud whose hosts have registered."""
    register(cloud)
    return cloud


def test_a_silent_network_service_delays_only_what_needs_it(cloud: Cloud) -> None:
    waits = cloud.create()[0]
    cloud.networks.silent = 100_000
    cloud.round()
    other = cloud.create(networks=[])[0]
    for _ in range(3):
        cloud.round()
    assert cloud.show(other).vm_state == states.ACTIVE
    assert cloud.show(waits).task_state == states.NETWORKING
    ask(cloud, other, "delete")
    cloud.round()
    cloud.round()
    assert cloud.show(other).vm_state == states.DELETED
    cloud.networks.silent = 0
    cloud.settle()
    assert cloud.show(waits).vm_state == states.ACTIVE


def test_a_neighbour_that_says_when_is_not_asked_before(cloud: Cloud) -> None:
    create, asked = cloud.networks.create, []

    def busy(ports: Any) -> Any:
        asked.append(cloud.time.monotonic())
        cloud.networks.create = create  # type: ignore[method-assign]  # the double is the test's to bend
        raise errors.Unavailable("The network service answered 429; try again later.", wait=7)

    cloud.networks.create = busy  # type: ignore[method-assign]
    server = cloud.create()[0]
    for _ in range(6):
        cloud.round()
    assert (cloud.show(server).task_state, cloud.networks.held) == (states.NETWORKING, {})
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE
    assert len(asked) == 1


def test_a_refusal_ends_a_create_in_error_with_its_words_and_leaves_nothing(cloud: Cloud) -> None:
    cloud.networks.refuses = "IP address 10.0.0.9 is in use."
    server = cloud.create()[0]
    cloud.settle()
    shown = cloud.show(server)
    assert (shown.vm_state, shown.fault["message"]) == (
        states.ERROR,
        "IP address 10.0.0.9 is in use.",
    )
    assert (cloud.networks.held, cloud.domains(server), cloud.findings()) == ({}, [], [])


def test_create_goes_to_host_without_hybrid_plug_or_fails_by_name(cloud: Cloud) -> None:
    cloud.networks.hybrid = {"h1"}
    server = cloud.create()[0]
    cloud.settle()
    assert (cloud.show(server).host, cloud.show(server).vm_state) == ("h2", states.ACTIVE)
    cloud.networks.hybrid = set(cloud.hosts)
    server = cloud.create()[0]
    cloud.settle()
    shown = cloud.show(server)
    assert shown.vm_state == states.ERROR
    assert "ovs_hybrid_plug" in shown.fault["message"]
    assert cloud.domains(server) == []


def test_create_with_network_of_minimum_bandwidth_fails_by_name(cloud: Cloud) -> None:
    """The ports of a network inherit its QoS policy, so Kilonova's own ports may request, too."""
    cloud.networks.requests = {"request_groups": [{"resources": {"NET_BW_EGR_KILOBIT_PER_SEC": 1}}]}
    server = cloud.create()[0]
    cloud.settle()
    shown = cloud.show(server)
    assert shown.vm_state == states.ERROR
    assert "resource_request" in shown.fault["message"]
    assert (cloud.networks.held, cloud.domains(server), cloud.findings()) == ({}, [], [])


def test_attach_of_port_with_hybrid_plug_fails_by_name(cloud: Cloud) -> None:
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


def test_a_host_where_ports_cannot_be_bound_is_left_for_another(cloud: Cloud) -> None:
    cloud.networks.cannot_bind = {"h1"}
    server = cloud.create()[0]
    cloud.settle()
    assert (cloud.show(server).host, cloud.show(server).vm_state) == ("h2", states.ACTIVE)
    assert len(cloud.networks.held) == 1
    assert cloud.findings() == []


def test_a_guest_whose_ports_are_not_wired_yet_waits_paused(cloud: Cloud) -> None:
    cloud.networks.wires_after = 4
    server = cloud.create()[0]
    seen = set()
    for _ in range(30):
        cloud.round()
        seen |= {
            guest.power_state
            for host in cloud.hosts.values()
            for guest in host.driver.host.guests.values()
        }
    assert seen == {states.POWER_PAUSED, states.RUNNING}
    shown = cloud.show(server)
    assert (shown.vm_state, shown.power_state) == (states.ACTIVE, states.RUNNING)
    assert all(one["active"] for one in shown.interfaces)


def test_an_event_makes_the_question_come_at_once(cloud: Cloud) -> None:
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
def test_ports_that_are_never_wired(cloud: Cloud, fatal: bool) -> None:
    cloud.options |= {"vif_plugging_timeout": 10, "vif_plugging_is_fatal": fatal}
    cloud.restart_conductor()
    cloud.networks.wires_after = 1000
    server = cloud.create()[0]
    cloud.settle()
    shown = cloud.show(server)
    assert shown.vm_state == (states.ERROR if fatal else states.ACTIVE)
    if fatal:
        assert "within 10 seconds" in shown.fault["message"]
        assert (cloud.networks.held, cloud.domains(server)) == ({}, [])


def test_a_port_of_the_user_is_bound_and_unbound_never_removed(cloud: Cloud) -> None:
    port = cloud.networks.user_makes("n1")
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
def test_a_port_is_named_as_network_services_take_it(hostname: str, name: str) -> None:
    assert networks.dns_name(hostname) == name


def test_the_groups_of_its_ports_are_the_servers(cloud: Cloud) -> None:
    port = cloud.networks.user_makes("n1")
    cloud.networks.held[port]["security_groups"] = []
    server = cloud.create(networks=[{"port": port}, {"network": "n2"}])[0]
    cloud.settle()
    for change, groups in (
        ("addSecurityGroup", [["g1"], ["default", "g1"]]),
        ("removeSecurityGroup", [[], ["default"]]),
    ):
        ask(cloud, server, change)
        cloud.settle()
        assert [one["groups"] for one in cloud.show(server).interfaces] == groups
    assert [one["tag"] for one in cloud.show(server).interfaces] == ["", ""]


def test_of_two_servers_that_want_one_port_one_gets_it(cloud: Cloud) -> None:
    port = cloud.networks.user_makes("n1")
    servers = cloud.create(2, networks=[{"port": port}])
    cloud.settle()
    found = {cloud.show(server).vm_state: server for server in servers}
    assert set(found) == {states.ACTIVE, states.ERROR}
    assert cloud.networks.held[port]["device_id"] == found[states.ACTIVE]
    assert cloud.show(found[states.ERROR]).fault["message"] == f"Port {port} is still in use."
    assert cloud.findings() == []


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_delete_in_the_middle_of_an_attach_leaves_the_users_port_alone(
    cloud: Cloud, rounds: int
) -> None:
    port = cloud.networks.user_makes("n2")
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


def test_a_port_of_the_user_brings_its_floating_address(cloud: Cloud) -> None:
    port = cloud.networks.user_makes("n1")
    cloud.networks.floating = {
        port: {cloud.networks.held[port]["fixed_ips"][0]["ip_address"]: ["172.24.4.9"]}
    }
    server = cloud.create(networks=[{"port": port}])[0]
    cloud.settle()
    assert cloud.show(server).interfaces[0]["addresses"][0]["floating"] == ["172.24.4.9"]


def test_the_guest_is_made_with_its_interfaces(cloud: Cloud) -> None:
    server = cloud.create()[0]
    cloud.settle()
    shown = cloud.show(server)
    guest = cloud.hosts[shown.host].driver.host.guests[server]
    assert shown.availability_zone == "nova"
    assert {port["device_owner"] for port in cloud.networks.held.values()} == {"compute:nova"}
    assert [one.port for one in guest.interfaces] == [shown.interfaces[0]["port"]]
    assert shown.interfaces[0]["label"] == "net-n1"


def test_a_conductor_without_network_service_waits(cloud: Cloud) -> None:
    cloud.engine.networks = None
    with pytest.raises(errors.Unavailable):
        networks.service(cloud.engine)


def test_a_binding_that_nobody_took_away_is_found(cloud: Cloud) -> None:
    server = cloud.create()[0]
    cloud.settle()
    [port] = cloud.networks.ports(server)
    assert cloud.findings() == []
    other = next(host for host in cloud.hosts if host != port["binding:host_id"])
    cloud.networks.bind_also(port, other)
    assert [(found.invariant, found.subject) for found in cloud.findings()] == [
        ("port-of-server", port["id"])
    ]
    cloud.networks.unbind_at(port["id"], other)
    assert cloud.findings() == []
