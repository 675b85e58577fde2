# SPDX-License-Identifier: Apache-2.0
"""Networks of guests, with the ``openstack`` command and ssh.

The tests cover connections on a host and between hosts, floating addresses, attached interfaces,
tenants with the same addresses, and actions of a guest.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.one_machine.connectivity import ADDRESSES, KEY, PUBLIC
from tests.e2e.conftest import Pair
from tests.e2e.guests import SOON, Guest, clear, kernel, probe_port
from tests.e2e.live import SETTLE, Live, Rest
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")

JSON = " -f json"
#: The same addresses for two tenants.
OVERLAPPING = "10.77.0.0/24"


def test_guest_has_address_mac_and_mtu_of_api(cloud: Live, pair: Pair) -> None:
    address = pair.near.fixed_address()
    assert pair.near_shown["addresses"] == {"private": [address]}
    assert address.startswith(ADDRESSES.rpartition(".")[0] + ".")
    shown = pair.near.rest.server(pair.near.server)["addresses"]["private"]
    assert {
        (address_record["addr"], address_record["version"], address_record["OS-EXT-IPS:type"])
        for address_record in shown
    } == {
        (address, 4, "fixed"),
        (pair.near.floating, 4, "floating"),
    }
    inside = pair.near.run(
        "ip -4 addr show dev eth0; cat /sys/class/net/eth0/address; cat /sys/class/net/eth0/mtu"
    )
    assert f"inet {address}/24" in inside
    assert {address_record["OS-EXT-IPS-MAC:mac_addr"] for address_record in shown} == {
        inside.split()[-2]
    }
    network = next(iter(cloud.seed.demo.network.networks(name="private")))
    assert int(inside.split()[-1]) == network.mtu
    assert pair.near.rest.call("GET", f"/servers/{pair.near.server}/ips").body["addresses"][
        "private"
    ][0].keys() == {"addr", "version"}


def test_tap_devices_exist_only_on_host_of_guest(cloud: Live, pair: Pair) -> None:
    for guest, number, other in ((pair.near, 1, 2), (pair.far, 2, 1)):
        [port] = guest.interfaces()
        device = f"tap{port[:11]}"
        assert device in kernel(cloud, number, "ip", "-o", "link")
        assert device not in kernel(cloud, other, "ip", "-o", "link")


def test_guests_of_one_network_reach_each_other_on_and_between_hosts(
    cloud: Live, pair: Pair
) -> None:
    [first] = [record for record in pair.near.rest.servers() if record["name"] == "first"]
    on_the_same_host = next(
        record["addr"]
        for record in first["addresses"]["private"]
        if record["OS-EXT-IPS:type"] == "fixed"
    )
    assert pair.near.reaches(on_the_same_host)
    assert pair.near.reaches(pair.far.fixed_address())
    assert pair.far.reaches(pair.near.fixed_address())
    full = int(pair.near.run("cat /sys/class/net/eth0/mtu")) - 28
    # Frames of full size fit into the tunnel.
    assert pair.near.reaches(pair.far.fixed_address(), "-s", str(full))


def test_dns_of_network_resolves_names_and_addresses_of_guests(pair: Pair) -> None:
    for guest in (pair.near, pair.far):
        [name] = re.findall(r"name = (\S+)", guest.run(f"nslookup {guest.fixed_address()}"))
        assert f"Address: {guest.fixed_address()}\n" in guest.run(f"nslookup {name}")


def address_types(guest: Guest) -> set[str]:
    """Return the types of the guest's addresses: fixed, floating."""
    addresses = guest.rest.server(guest.server)["addresses"]["private"]
    return {address["OS-EXT-IPS:type"] for address in addresses}


def test_floating_address_moves_between_guests(cloud: Live, pair: Pair) -> None:
    near, far = pair.near, pair.far
    cloud.openstack(
        f"server remove floating ip near {near.floating}",
        f"server remove floating ip far {far.floating}",
    )
    for detached_guest in (near, far):
        await_true(
            lambda target=detached_guest: target.ssh("true", 5).returncode == 255,
            SOON,
            lambda: "it still answers",
        )
        # The event of the network service may arrive after the end of the connection.
        await_true(lambda target=detached_guest: address_types(target) == {"fixed"}, SOON)
    cloud.openstack(f"server add floating ip far {near.floating}")
    Guest(cloud, far.server, "far", near.floating).await_ssh(SOON)
    cloud.openstack(
        f"server remove floating ip far {near.floating}",
        f"server add floating ip near {near.floating}",
        f"server add floating ip far {far.floating}",
    )
    for attached_guest in (near, far):
        attached_guest.await_ssh(SOON)


def test_guests_reach_external_network(cloud: Live, pair: Pair) -> None:
    for guest in (pair.near, pair.far):
        assert guest.reaches(str(cloud.cloud.underlay.external[1]))


@dataclass
class Tenant:
    """A project with a network of the overlapping addresses, and a router."""

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


def create_tenant(connection: Any, rest: Rest) -> Tenant:
    """Create a network with a subnet and a router to the external network, as a project member."""
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


def delete_tenant(tenant: Tenant) -> None:
    """Delete the resources of ``create_tenant``, and the floating addresses."""
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
    """Yield the project demo with another network."""
    new_tenant = create_tenant(cloud.seed.demo, cloud.rest())
    yield new_tenant
    delete_tenant(new_tenant)


@pytest.fixture
def stranger(cloud: Live) -> Iterator[Tenant]:
    """Another project with a network of the same addresses, the same key, and open ports."""
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
    new_tenant = create_tenant(
        connection, Rest(cloud.cloud.api_url, connection.session.get_token())
    )
    [group] = connection.network.security_groups(name="default", project_id=project.id)
    for rule in (
        {"protocol": "icmp"},
        {"protocol": "tcp", "port_range_min": 22, "port_range_max": 22},
    ):
        connection.network.create_security_group_rule(
            security_group_id=group.id, direction="ingress", ether_type="IPv4", **rule
        )
    yield new_tenant
    clear(new_tenant.rest)
    delete_tenant(new_tenant)
    connection.compute.delete_keypair(KEY)
    identity.delete_user(user)
    identity.delete_project(project)


def attach(guest: Guest, network: str, address: str) -> str:
    """Attach an interface to a running guest, wait for the address, and return the device name."""
    reply = guest.rest.call(
        "POST",
        f"/servers/{guest.server}/os-interface",
        {"interfaceAttachment": {"net_id": network, "fixed_ips": [{"ip_address": address}]}},
    )
    assert reply.status == 200, reply
    mac = reply.body["interfaceAttachment"]["mac_addr"]
    find_device = f"grep -l {mac} /sys/class/net/eth*/address"
    await_true(
        lambda: (
            f"inet {address}/"
            in guest.ssh(f"ip -4 addr show dev $({find_device} | cut -d/ -f5)").stdout
        ),
        SETTLE,
        lambda: guest.ssh("ip addr").stdout,
    )
    return guest.run(f"{find_device} | cut -d/ -f5").strip()


def detach(guest: Guest, network: str) -> None:
    """Detach a running guest's interface of the network, and wait until the device is gone."""
    [port] = [
        port for port, interface in guest.interfaces().items() if interface["net_id"] == network
    ]
    assert guest.rest.call("DELETE", f"/servers/{guest.server}/os-interface/{port}").status == 202
    await_true(lambda: port not in guest.interfaces(), SETTLE, guest.interfaces)
    await_true(
        lambda: guest.run("ls /sys/class/net | grep -c eth").strip() == "1",
        SOON,
        lambda: guest.run("ls /sys/class/net"),
    )
    assert not list(guest.live.seed.admin.network.ports(id=port))


def test_interfaces_attach_live_and_tenants_with_same_addresses_stay_apart(
    cloud: Live, tenant: Tenant, stranger: Tenant, pair: Pair
) -> None:
    """This is a single test because three guests are needed.

    Two guests of demo have a second interface, the third is the stranger's. The interfaces are
    detached first, because a network in use cannot be deleted.
    """
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
    addresses = cloud.openstack(f"server show {pair.near.name}" + JSON)[0]["addresses"]
    assert set(addresses) == {"private", "overlapping"}
    for guest in (pair.near, pair.far):
        detach(guest, tenant.network)
    # The stranger's address is free in this network.
    device = attach(pair.near, tenant.network, "10.77.0.11")
    assert not third.reaches("10.77.0.10") and not pair.near.reaches("10.77.0.12", "-I", device)
    detach(pair.near, tenant.network)
    stranger.rest.insist("DELETE", f"/servers/{server}", expected=(204,))
    stranger.rest.await_gone(server)


def reboot(guest: Guest) -> None:
    before = guest.run("cat /proc/sys/kernel/random/boot_id")
    assert guest.rest.act(guest.server, "reboot", {"type": "HARD"}).status == 202
    await_true(
        lambda: guest.ssh("cat /proc/sys/kernel/random/boot_id", 10).stdout not in ("", before),
        SETTLE,
        lambda: guest.ssh("true"),
        pause=0.3,
    )
    guest.rest.await_status(guest.server, "ACTIVE")


def suspend(guest: Guest) -> None:
    guest.rest.act(guest.server, "suspend")
    guest.rest.await_status(guest.server, "SUSPENDED")
    assert guest.ssh("true", 5).returncode == 255
    guest.rest.act(guest.server, "resume")
    guest.rest.await_status(guest.server, "ACTIVE")


def rebuild(guest: Guest) -> None:
    assert guest.rest.act(guest.server, "rebuild", {"imageRef": guest.live.image()}).status == 202
    guest.rest.await_status(guest.server, "ACTIVE")


def shelve(guest: Guest) -> None:
    guest.rest.act(guest.server, "shelve")
    guest.rest.await_status(guest.server, "SHELVED_OFFLOADED")
    [port] = guest.live.seed.admin.network.ports(device_id=guest.server)
    # The server keeps the address, and no host is bound.
    assert not port.binding_host_id
    guest.rest.act(guest.server, "unshelve")
    guest.rest.await_status(guest.server, "ACTIVE")


@pytest.mark.parametrize("change", [suspend, reboot, rebuild, shelve])
def test_guest_keeps_network_after_suspend_reboot_rebuild_and_shelve(
    pair: Pair, change: Callable[[Guest], None]
) -> None:
    guest = pair.near
    before = (guest.fixed_address(), guest.interfaces().keys())
    change(guest)
    guest.await_ssh()
    assert (guest.fixed_address(), guest.interfaces().keys()) == before
    assert f"inet {before[0]}/" in guest.run("ip -4 addr show dev eth0")
    assert guest.reaches(pair.far.fixed_address()) and pair.far.reaches(guest.fixed_address())
    assert (probe_port(guest.floating, 22), probe_port(guest.floating, 8080)) == ("open", "shut")
    assert re.fullmatch(r"[0-9a-f:]{17}", guest.run("cat /sys/class/net/eth0/address").strip())
