# SPDX-License-Identifier: Apache-2.0
"""Guests with networks, by the real client and ssh: on one host and across two, floating addresses,
interfaces that come and go, tenants with the same addresses, and what survives a guest's
changes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.one_machine.connectivity import ADDRESSES, KEY, PUBLIC
from tests.e2e.conftest import Pair
from tests.e2e.guests import SOON, Guest, clear, door, kernel
from tests.e2e.live import SETTLE, Live, Rest
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")

JSON = " -f json"
#: The same addresses for two tenants.
OVERLAPPING = "10.77.0.0/24"


def test_guest_has_the_address_that_the_api_shows(cloud: Live, pair: Pair) -> None:
    address = pair.near.fixed()
    assert pair.told["addresses"] == {"private": [address]}
    assert address.startswith(ADDRESSES.rpartition(".")[0] + ".")
    shown = pair.near.rest.server(pair.near.server)["addresses"]["private"]
    assert {(one["addr"], one["version"], one["OS-EXT-IPS:type"]) for one in shown} == {
        (address, 4, "fixed"),
        (pair.near.floating, 4, "floating"),
    }
    inside = pair.near.run(
        "ip -4 addr show dev eth0; cat /sys/class/net/eth0/address; cat /sys/class/net/eth0/mtu"
    )
    assert f"inet {address}/24" in inside
    assert {one["OS-EXT-IPS-MAC:mac_addr"] for one in shown} == {inside.split()[-2]}
    network = next(iter(cloud.seed.demo.network.networks(name="private")))
    assert int(inside.split()[-1]) == network.mtu
    assert pair.near.rest.call("GET", f"/servers/{pair.near.server}/ips").body["addresses"][
        "private"
    ][0].keys() == {"addr", "version"}


def test_devices_exist_on_their_own_host_only(cloud: Live, pair: Pair) -> None:
    for guest, number, other in ((pair.near, 1, 2), (pair.far, 2, 1)):
        [port] = guest.interfaces()
        device = f"tap{port[:11]}"
        assert device in kernel(cloud, number, "ip", "-o", "link")
        assert device not in kernel(cloud, other, "ip", "-o", "link")


def test_guests_of_one_network_reach_each_other(cloud: Live, pair: Pair) -> None:
    [first] = [one for one in pair.near.rest.servers() if one["name"] == "first"]
    on_the_same_host = next(
        one["addr"] for one in first["addresses"]["private"] if one["OS-EXT-IPS:type"] == "fixed"
    )
    assert pair.near.reaches(on_the_same_host)
    assert pair.near.reaches(pair.far.fixed())
    assert pair.far.reaches(pair.near.fixed())
    full = int(pair.near.run("cat /sys/class/net/eth0/mtu")) - 28
    # frames of full size fit into the tunnel
    assert pair.near.reaches(pair.far.fixed(), "-s", str(full))


def test_names_and_addresses_are_found(pair: Pair) -> None:
    for guest in (pair.near, pair.far):
        [name] = re.findall(r"name = (\S+)", guest.run(f"nslookup {guest.fixed()}"))
        assert f"Address: {guest.fixed()}\n" in guest.run(f"nslookup {name}")


def test_floating_address_goes_from_one_guest_to_the_other(cloud: Live, pair: Pair) -> None:
    near, far = pair.near, pair.far
    cloud.openstack(
        f"server remove floating ip near {near.floating}",
        f"server remove floating ip far {far.floating}",
    )
    for gone in (near, far):
        await_true(
            lambda who=gone: who.ssh("true", 5).returncode == 255, SOON, lambda: "it still answers"
        )
        assert {
            one["OS-EXT-IPS:type"] for one in gone.rest.server(gone.server)["addresses"]["private"]
        } == {"fixed"}
    cloud.openstack(f"server add floating ip far {near.floating}")
    Guest(cloud, far.server, "far", near.floating).await_ssh(SOON)
    cloud.openstack(
        f"server remove floating ip far {near.floating}",
        f"server add floating ip near {near.floating}",
        f"server add floating ip far {far.floating}",
    )
    for back in (near, far):
        back.await_ssh(SOON)


def test_guests_reach_the_gateway_and_the_external_network(cloud: Live, pair: Pair) -> None:
    for guest in (pair.near, pair.far):
        assert guest.reaches(str(cloud.cloud.underlay.external[1]))


@dataclass
class Tenant:
    """A project with a network that has the overlapping addresses, a router and a floating address
    at hand."""

    connection: Any
    rest: Rest
    network: str

    def address(self, server: str) -> str:
        port = next(iter(self.connection.network.ports(device_id=server, network_id=self.network)))
        public = next(iter(self.connection.network.networks(name=PUBLIC)))
        return str(
            self.connection.network.create_ip(
                floating_network_id=public.id, port_id=port.id
            ).floating_ip_address
        )


def furnish(connection: Any, rest: Rest) -> Tenant:
    """Network, subnet and a router to the outside, as a member of the project."""
    network = connection.network.create_network(name="overlapping")
    subnet = connection.network.create_subnet(
        network_id=network.id, ip_version=4, cidr=OVERLAPPING, name="overlapping"
    )
    public = next(iter(connection.network.networks(name=PUBLIC)))
    router = connection.network.create_router(
        name="overlapping", external_gateway_info={"network_id": public.id}
    )
    connection.network.add_interface_to_router(router, subnet=subnet.id)
    return Tenant(connection, rest, network.id)


def unfurnish(tenant: Tenant) -> None:
    """All of ``furnish`` and what floats."""
    service = tenant.connection.network
    mine = tenant.connection.session.get_project_id()
    [router] = service.routers(name="overlapping", project_id=mine)
    [subnet] = service.subnets(network_id=tenant.network)
    for floating in service.ips(router_id=router.id):
        service.delete_ip(floating)
    service.remove_interface_from_router(router, subnet=subnet.id)
    service.delete_router(router)
    service.delete_network(tenant.network)


@pytest.fixture
def tenant(cloud: Live) -> Iterator[Tenant]:
    """demo with a network of its own."""
    made = furnish(cloud.seed.demo, cloud.rest())
    yield made
    unfurnish(made)


@pytest.fixture
def stranger(cloud: Live) -> Iterator[Tenant]:
    """Another project with a network of the same addresses, the same key and open doors."""
    identity, name, password = (
        cloud.seed.admin.identity,
        f"stranger-{uuid.uuid4().hex[:8]}",
        uuid.uuid4().hex,
    )
    project = identity.create_project(name=name, domain_id="default")
    user = identity.create_user(name=name, domain_id="default", password=password)
    identity.assign_project_role_to_user(project, user, identity.find_role("member"))
    connection = cloud.seed.demo.connect_as(username=name, password=password, project_id=project.id)
    public_key = (cloud.home / "ssh" / f"{KEY}.pub").read_text()
    connection.compute.create_keypair(name=KEY, public_key=public_key, key_type="ssh")
    made = furnish(connection, Rest(cloud.cloud.api_url, connection.session.get_token()))
    [group] = connection.network.security_groups(name="default", project_id=project.id)
    for rule in (
        {"protocol": "icmp"},
        {"protocol": "tcp", "port_range_min": 22, "port_range_max": 22},
    ):
        connection.network.create_security_group_rule(
            security_group_id=group.id, direction="ingress", ether_type="IPv4", **rule
        )
    yield made
    clear(made.rest)
    unfurnish(made)
    connection.compute.delete_keypair(KEY)
    identity.delete_user(user)
    identity.delete_project(project)


def attach(guest: Guest, network: str, address: str) -> str:
    """Give a running guest an interface there; returns what the guest calls it, once it has its
    address."""
    reply = guest.rest.call(
        "POST",
        f"/servers/{guest.server}/os-interface",
        {"interfaceAttachment": {"net_id": network, "fixed_ips": [{"ip_address": address}]}},
    )
    assert reply.status == 200, reply
    mac = reply.body["interfaceAttachment"]["mac_addr"]
    seen = f"grep -l {mac} /sys/class/net/eth*/address"
    await_true(
        lambda: (
            f"inet {address}/" in guest.ssh(f"ip -4 addr show dev $({seen} | cut -d/ -f5)").stdout
        ),
        SETTLE,
        lambda: guest.ssh("ip addr").stdout,
    )
    return guest.run(f"{seen} | cut -d/ -f5").strip()


def detach(guest: Guest, network: str) -> None:
    """Take a running guest's interface there away, until it has none."""
    [port] = [port for port, one in guest.interfaces().items() if one["net_id"] == network]
    assert guest.rest.call("DELETE", f"/servers/{guest.server}/os-interface/{port}").status == 202
    await_true(lambda: port not in guest.interfaces(), SETTLE, guest.interfaces)
    await_true(
        lambda: guest.run("ls /sys/class/net | grep -c eth").strip() == "1",
        SOON,
        lambda: guest.run("ls /sys/class/net"),
    )
    assert not list(guest.live.seed.admin.network.ports(id=port))


def test_interfaces_are_plugged_live_and_tenants_stay_apart(
    cloud: Live, tenant: Tenant, stranger: Tenant, pair: Pair
) -> None:
    """One story, for it takes three guests: two of demo with a second interface each, and the
    stranger's. The pair is put right first, for the networks go only when nobody is there."""
    server = stranger.rest.create(
        image=cloud.image(),
        flavor=cloud.flavor(),
        name="stranger",
        key_name=KEY,
        networks=[{"uuid": stranger.network, "fixed_ip": "10.77.0.11"}],
    )
    devices = [
        attach(guest, tenant.network, address)
        for guest, address in ((pair.near, "10.77.0.10"), (pair.far, "10.77.0.12"))
    ]
    assert pair.near.reaches("10.77.0.12", "-I", devices[0])
    assert pair.far.reaches("10.77.0.10", "-I", devices[1])
    stranger.rest.await_status(server, "ACTIVE")
    third = Guest(cloud, server, "stranger", stranger.address(server)).await_ssh()
    assert third.reaches("10.77.0.1")
    for address in ("10.77.0.10", "10.77.0.12"):
        assert not third.reaches(address)
    assert not pair.near.reaches("10.77.0.11", "-I", devices[0])
    seen = cloud.openstack(f"server show {pair.near.name}" + JSON)[0]["addresses"]
    assert set(seen) == {"private", "overlapping"}
    for guest in (pair.near, pair.far):
        detach(guest, tenant.network)
    # now with the stranger's address, which is free here
    device = attach(pair.near, tenant.network, "10.77.0.11")
    assert not third.reaches("10.77.0.10") and not pair.near.reaches("10.77.0.12", "-I", device)
    detach(pair.near, tenant.network)
    stranger.rest.insist("DELETE", f"/servers/{server}", fine=(204,))
    stranger.rest.await_gone(server)


def reboots(guest: Guest) -> None:
    before = guest.run("cat /proc/sys/kernel/random/boot_id")
    assert guest.rest.act(guest.server, "reboot", {"type": "HARD"}).status == 202
    await_true(
        lambda: guest.ssh("cat /proc/sys/kernel/random/boot_id", 10).stdout not in ("", before),
        SETTLE,
        lambda: guest.ssh("true"),
        pause=0.3,
    )
    guest.rest.await_status(guest.server, "ACTIVE")


def suspends(guest: Guest) -> None:
    guest.rest.act(guest.server, "suspend")
    guest.rest.await_status(guest.server, "SUSPENDED")
    assert guest.ssh("true", 5).returncode == 255
    guest.rest.act(guest.server, "resume")
    guest.rest.await_status(guest.server, "ACTIVE")


def is_rebuilt(guest: Guest) -> None:
    assert guest.rest.act(guest.server, "rebuild", {"imageRef": guest.live.image()}).status == 202
    guest.rest.await_status(guest.server, "ACTIVE")


def is_shelved(guest: Guest) -> None:
    guest.rest.act(guest.server, "shelve")
    guest.rest.await_status(guest.server, "SHELVED_OFFLOADED")
    [port] = guest.live.seed.admin.network.ports(device_id=guest.server)
    assert not port.binding_host_id  # it keeps its address, and no host has it
    guest.rest.act(guest.server, "unshelve")
    guest.rest.await_status(guest.server, "ACTIVE")


@pytest.mark.parametrize("change", [suspends, reboots, is_rebuilt, is_shelved])
def test_address_and_rules_survive(pair: Pair, change: Callable[[Guest], None]) -> None:
    guest = pair.near
    before = (guest.fixed(), guest.interfaces().keys())
    change(guest)
    guest.await_ssh()
    assert (guest.fixed(), guest.interfaces().keys()) == before
    assert f"inet {before[0]}/" in guest.run("ip -4 addr show dev eth0")
    assert guest.reaches(pair.far.fixed()) and pair.far.reaches(guest.fixed())
    assert (door(guest.floating, 22), door(guest.floating, 8080)) == ("open", "shut")
    assert re.fullmatch(r"[0-9a-f:]{17}", guest.run("cat /sys/class/net/eth0/address").strip())
