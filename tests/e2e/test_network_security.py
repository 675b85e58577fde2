# SPDX-License-Identifier: Apache-2.0
"""Security groups of running guests, forged frames, and access to the metadata service.

The victim of forged frames is ``first``. The forgers are ``near`` and ``far``, one of which is on
the victim's host. The test observes frames at the device of the victim.
"""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator

import pytest

from deploy.one_machine.cloud import certificates
from tests.e2e.conftest import Pair
from tests.e2e.frames import (
    BROADCAST,
    arp_answer,
    mac_of,
    mark,
    router_advertisement,
    send,
    udp,
    watching,
)
from tests.e2e.guests import SOON, Guest, probe_port
from tests.e2e.live import Live
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")

METADATA = "http://169.254.169.254"


@pytest.fixture
def group(cloud: Live, pair: Pair) -> Iterator[str]:
    """Yield a security group of demo without ingress rules, with ``near`` as a member."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    cloud.openstack(
        f"security group create {name} -f json", f"server add security group near {name}"
    )
    yield name
    cloud.openstack(f"server remove security group near {name}", f"security group delete {name}")


def await_port(guest: Guest, port: int, expected: str) -> None:
    await_true(
        lambda: probe_port(guest.floating, port) == expected,
        SOON,
        lambda: f"{port}: {probe_port(guest.floating, port)}",
    )


def test_security_group_rule_change_affects_running_guest_at_once(
    cloud: Live, pair: Pair, group: str
) -> None:
    near = pair.near
    assert group in {
        group_record["name"]
        for group_record in near.rest.call(
            "GET", f"/servers/{near.server}/os-security-groups"
        ).body["security_groups"]
    }
    assert probe_port(near.floating, 8080) == "shut"
    [rule] = cloud.openstack(
        f"security group rule create --protocol tcp --dst-port 8080 {group} -f json"
    )
    await_port(near, 8080, "reached")
    assert probe_port(near.floating, 8081) == "shut"
    near.run("nc -ll -p 8080 -e cat > /dev/null 2>&1 < /dev/null &")
    await_port(near, 8080, "open")
    with socket.create_connection((near.floating, 8080), timeout=5) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        cloud.openstack(f"security group rule delete {rule['id']}")
        await_port(near, 8080, "shut")
        connection.settimeout(2)
        # The open connection is cut too.
        with pytest.raises(TimeoutError):
            connection.sendall(b"b")
            connection.recv(1)
    near.run("killall nc")


def test_security_group_rule_with_remote_group_follows_members(
    cloud: Live, pair: Pair, group: str
) -> None:
    near, far = pair.near, pair.far
    default = next(
        iter(
            cloud.seed.demo.network.security_groups(
                name="default", project_id=cloud.seed.demo.session.get_project_id()
            )
        )
    )
    ports = {guest.name: next(iter(guest.interfaces())) for guest in (near, far)}
    network = cloud.seed.demo.network
    own_group = next(iter(network.security_groups(name=group)))
    network.update_port(ports["near"], security_groups=[own_group.id])
    try:
        await_true(
            lambda: not far.reaches(near.fixed_address()), SOON, lambda: "near is still reached"
        )
        rule = network.create_security_group_rule(
            security_group_id=own_group.id,
            direction="ingress",
            ether_type="IPv4",
            protocol="icmp",
            remote_group_id=own_group.id,
        )
        network.update_port(ports["far"], security_groups=[default.id, own_group.id])
        await_true(lambda: far.reaches(near.fixed_address()), SOON, lambda: "near is not reached")
        network.update_port(ports["far"], security_groups=[default.id])
        await_true(
            lambda: not far.reaches(near.fixed_address()), SOON, lambda: "near is still reached"
        )
        network.delete_security_group_rule(rule)
    finally:
        network.update_port(ports["far"], security_groups=[default.id])
        network.update_port(ports["near"], security_groups=[default.id, own_group.id])
    near.await_ssh(SOON)


@pytest.fixture
def first(cloud: Live, pair: Pair) -> Guest:
    """Return the server ``first`` of the cloud, which up created."""
    [shown] = [server for server in pair.near.rest.servers() if server["name"] == "first"]
    floating = next(
        server["addr"]
        for server in shown["addresses"]["private"]
        if server["OS-EXT-IPS:type"] == "floating"
    )
    return Guest(cloud, shown["id"], "first", floating)


def make_forgeries(
    forger: tuple[bytes, str], victim: tuple[bytes, str], third: tuple[bytes, str], gateway: str
) -> dict[str, tuple[bytes, bytes]]:
    """Return forged frames by description, as (mark, frame), each with a single false field.

    Forger, victim and third guest are members of the same security group.
    """
    (own_mac, own_ip), (victim_mac, victim_ip), (third_mac, third_ip) = forger, victim, third
    other_mac = mac_of("fa:16:3e:00:00:01")
    to = (victim_mac, victim_ip, 9)
    makers: dict[str, Callable[[bytes], bytes]] = {
        "a MAC that nobody has": lambda mark: udp((other_mac, own_ip, 9), to, mark),
        "another guest's MAC": lambda mark: udp((third_mac, own_ip, 9), to, mark),
        "another guest's address": lambda mark: udp((own_mac, third_ip, 9), to, mark),
        "another guest's MAC and address": lambda mark: udp((third_mac, third_ip, 9), to, mark),
        "an address that nobody has": lambda mark: udp((own_mac, "10.20.0.250", 9), to, mark),
        "ARP: the gateway is here": lambda mark: arp_answer(
            own_mac, own_mac, gateway, victim, mark
        ),
        "ARP: another guest is here": lambda mark: arp_answer(
            own_mac, own_mac, third_ip, victim, mark
        ),
        "ARP: I am somewhere else": lambda mark: arp_answer(
            own_mac, other_mac, own_ip, victim, mark
        ),
        "an answer of DHCP": lambda mark: udp(
            (own_mac, own_ip, 67), (victim_mac, victim_ip, 68), mark
        ),
        "an answer of DHCP to all": lambda mark: udp(
            (own_mac, own_ip, 67), (BROADCAST, "255.255.255.255", 68), mark
        ),
        "a router of IPv6": lambda mark: router_advertisement(own_mac, mark),
    }
    return {name: (marked := mark(), make(marked)) for name, make in makers.items()}


@pytest.mark.parametrize("where", ["on the forger's own host", "on the other host"])
def test_forged_frames_reach_no_guest(pair: Pair, first: Guest, where: str) -> None:
    beside, apart = (
        (pair.near, pair.far) if first.host() == pair.near.host() else (pair.far, pair.near)
    )
    forger, third, victim = (
        (beside, apart, first) if where == "on the forger's own host" else (apart, beside, first)
    )
    gateway = forger.run("ip route | awk '/default/ { print $3; exit }'").strip()
    addresses = {
        guest.name: (mac_of(guest.mac()), guest.fixed_address())
        for guest in (forger, victim, third)
    }
    forgeries = make_forgeries(
        addresses[forger.name], addresses[victim.name], addresses[third.name], gateway
    )
    honest = mark()
    # This fills the ARP tables with correct entries.
    assert forger.reaches(victim.fixed_address()) and victim.reaches(gateway)
    with watching(victim) as watcher:
        send(
            forger,
            "eth0",
            [
                # The honest frame is the last.
                *(frame for _, frame in forgeries.values()),
                udp((*addresses[forger.name], 9), (*addresses[victim.name], 9), honest),
            ],
        )
        await_true(lambda: watcher.has(honest), SOON, lambda: "not even what is honest arrives")
        assert [name for name, (marked, _) in forgeries.items() if watcher.has(marked)] == []
    neighbours = victim.run(f"ip neigh show {gateway}")
    assert "lladdr" in neighbours and forger.mac() not in neighbours
    assert forger.reaches(victim.fixed_address()) and victim.reaches(gateway)


def read_metadata(
    guest: Guest, path: str = "/openstack/latest/meta_data.json", headers: str = ""
) -> dict[str, object]:
    """Return the metadata that the guest gets from the metadata service."""
    body = guest.run(f"wget -q -O - {headers} {METADATA}{path}")
    metadata: dict[str, object] = json.loads(body)
    return metadata


def test_metadata_is_of_requesting_guest_despite_forged_headers_or_address(pair: Pair) -> None:
    near, far = pair.near, pair.far
    assert (read_metadata(near)["uuid"], read_metadata(far)["uuid"]) == (near.server, far.server)
    headers = " ".join(
        f"--header '{name}: {value}'"
        for name, value in {
            "X-Instance-ID": far.server,
            "X-Tenant-ID": "x",
            "X-Instance-ID-Signature": "0" * 64,
            "X-Forwarded-For": far.fixed_address(),
        }.items()
    )
    assert read_metadata(near, headers=headers)["uuid"] == near.server
    way = near.run("ip route get 169.254.169.254 | grep -o 'via [0-9.]* dev eth0'").strip()
    near.run(
        f"ip addr add {far.fixed_address()}/32 dev lo; "
        f"ip route add 169.254.169.254/32 {way} src {far.fixed_address()} metric 1"
    )
    # The guest sends requests with the address of the other guest.
    try:
        assert f"src {far.fixed_address()}" in near.run("ip route get 169.254.169.254")
        assert (
            near.run(f"timeout 5 wget -q -O - {METADATA}/openstack/latest/meta_data.json || true")
            == ""
        )
    finally:
        near.run(
            f"ip route del 169.254.169.254/32 metric 1; ip addr del {far.fixed_address()}/32 dev lo"
        )
    assert read_metadata(near)["uuid"] == near.server


@pytest.mark.parametrize("signature", [None, "0" * 64, "not hexadecimal"])
def test_metadata_service_refuses_requests_without_valid_signature(
    cloud: Live, pair: Pair, signature: str | None
) -> None:
    headers = {
        "X-Instance-ID": pair.near.server,
        "X-Tenant-ID": cloud.seed.demo.session.get_project_id(),
        "X-Forwarded-For": pair.near.fixed_address(),
    }
    request = urllib.request.Request(
        f"{cloud.cloud.metadata_url}/openstack/latest/meta_data.json",
        headers={**headers, **({"X-Instance-ID-Signature": signature} if signature else {})},
    )
    proof = certificates.of(cloud.cloud, certificates.CONTROL)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=proof and proof.ca)),
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        opener.open(request, timeout=10)
    assert refused.value.code in (400, 401, 403)
    assert pair.near.server.encode() not in refused.value.read()
