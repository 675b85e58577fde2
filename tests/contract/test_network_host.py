# SPDX-License-Identifier: Apache-2.0
"""The host part of the network on a real kernel: reachability, isolation, DHCP and metadata."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from compute_api.metadata.proxy_headers import host_key, signature
from tests.contract.network_lab import (
    SECRET,
    Guest,
    Lab,
    await_true,
    capture,
    mac,
    pings,
    reaches,
    rule,
    run,
)
from tests.contract.network_listeners import find_answering

SEND = Path(__file__).with_name("network_frames.py")


def test_dhcp_gives_guest_its_address_and_options(lab: Lab) -> None:
    network = lab.network()
    guest = lab.guest(network, "10.0.0.5")
    offer = guest.dhcp()
    assert offer.startswith(
        "ip=10.0.0.5 mask=24 router=10.0.0.1 dns=10.0.0.2 1.1.1.1 mtu=1450 hostname=vm0"
    )
    assert "routes=169.254.169.254/32 10.0.0.2 0.0.0.0/0 10.0.0.1" in offer
    assert "10.0.0.5" in guest.run("busybox", "nslookup", "vm0.openstacklocal", "10.0.0.2").stdout
    assert lab.service.acknowledged["x1"]["failed"] == {}


def test_dns_resolves_guest_name_after_each_change(lab: Lab) -> None:
    network = lab.network()
    named, resolver = lab.guest(network, "10.0.0.5"), lab.guest(network, "10.0.0.6", hostname="")
    resolver.take_address()

    def resolve(name: str) -> str:
        return resolver.run(
            "busybox", "nslookup", "-type=a", name, "10.0.0.2", check=False
        ).stdout.partition("Name:")[2]

    await_true(
        lambda: "10.0.0.6" in resolve("host-10-0-0-6.openstacklocal"),
        "a guest without a name has none",
    )
    for name in ("web", "3600", "ignore"):
        lab.ports[named.port][1]["hostname"] = name
        lab.publish()
        await_true(
            lambda name=name: "10.0.0.5" in resolve(f"{name}.openstacklocal"),
            f"{name} does not resolve",
        )
    assert "10.0.0.5" not in resolve("web.openstacklocal")
    assert "10.0.0.5" not in resolve("example.org")


def test_dhcp_gives_reused_address_to_new_port_at_once(lab: Lab) -> None:
    network = lab.network()
    first = lab.guest(network, "10.0.0.5")
    assert "ip=10.0.0.5" in first.dhcp()
    del lab.ports[first.port]
    second = lab.guest(network, "10.0.0.5")
    assert "ip=10.0.0.5" in second.dhcp()
    assert first.dhcp(tries=2) == ""


def test_change_of_security_group_of_port_allows_and_then_blocks_pings(lab: Lab) -> None:
    network = lab.network()
    out, ssh = "g-egress-only", "g-pings-too"
    lab.groups[out] = {"rules": [rule("egress")], "members": []}
    lab.groups[ssh] = {
        "rules": [rule("egress"), rule("ingress", protocol="icmp", port_min=8, port_max=0)],
        "members": [],
    }
    closed = lab.guest(network, "10.0.0.5", groups=[out])
    opened = lab.guest(network, "10.0.0.6", groups=[ssh])
    for guest in (closed, opened):
        guest.take_address()
    assert closed.reaches("10.0.0.6")
    assert not opened.pings("10.0.0.5")
    lab.ports[closed.port][1]["groups"] = [ssh]
    lab.publish()
    assert opened.pings("10.0.0.5", wait="5")
    lab.ports[closed.port][1]["groups"] = [out]
    lab.publish()
    assert not opened.pings("10.0.0.5")


def test_security_group_rule_removal_stops_open_connection(lab: Lab) -> None:
    network = lab.network()
    web = "g-web-open"
    lab.groups[web] = {
        "rules": [
            rule("egress"),
            rule("ingress", protocol="tcp", port_min=80, port_max=90, remote_group=web),
        ],
        "members": [],
    }
    server, client = (
        lab.guest(network, address, groups=[web]) for address in ("10.0.0.5", "10.0.0.6")
    )
    for guest in (server, client):
        guest.take_address()
    with start_connection(lab.folder, server, client, 85) as count_lines:
        await_true(lambda: count_lines() > 3, "nothing arrives although the rule allows it")
        lab.groups[web]["rules"] = [rule("egress")]
        lab.publish()
        await_true(
            lambda: server.run("ss", "-Htn", "sport = :85").stdout.split()[1:2] == ["0"],
            "who listens does not read what had arrived before",
        )
        before = count_lines()
        run("sleep", "0.5")
        assert count_lines() <= before + 1
        lab.groups[web]["rules"].append(rule("ingress", protocol="tcp", port_min=85, port_max=85))
        lab.publish()
        await_true(
            lambda: count_lines() > before + 3, "the connection does not go on when it may again"
        )
    assert find_answering(client.space, 91, "10.0.0.5") == set()


def start_connection(folder: Path, server: Guest, client: Guest, port: int):  # type: ignore[no-untyped-def]
    """Return a context with a TCP connection that sends a line every 50 ms.

    The context yields a function that returns the number of received lines.
    """

    @contextlib.contextmanager
    def talk() -> Iterator[object]:
        received = folder / "heard"
        received.write_text("")
        words = [
            ["ip", "netns", "exec", guest.space, sys.executable, str(SEND), kind, str(port), *more]
            for guest, kind, more in (
                (server, "listen", [str(received)]),
                (client, "talk", [server.address]),
            )
        ]
        processes = []
        try:
            for command in words:
                processes.append(subprocess.Popen(command))
                await_true(
                    lambda: server.run("ss", "-Htln", f"sport = :{port}").stdout, "no listener"
                )
            yield lambda: len(received.read_text().splitlines())
        finally:
            for process in processes:
                process.kill()
                process.wait()

    return talk()


SLOW = """
import socket, sys
clients = [socket.create_connection(("169.254.169.254", 80), 5) for _ in range(60)]
for client in clients[::2]:
    client.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n")
print("open", flush=True)
sys.stdin.read()
"""


def test_guest_with_slow_metadata_request_does_not_delay_other_guests(lab: Lab) -> None:
    mine, theirs = lab.network(), lab.network(project="project-2")
    slow, beside, other = (
        lab.guest(mine, "10.0.0.5"),
        lab.guest(mine, "10.0.0.6"),
        lab.guest(theirs, "10.0.0.5"),
    )
    for guest in (slow, beside, other):
        guest.dhcp()
    with subprocess.Popen(
        ["ip", "netns", "exec", slow.space, sys.executable, "-c", SLOW],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        for guest in (beside, other, slow):
            response = guest.run(
                "busybox",
                "timeout",
                "1",
                "busybox",
                "wget",
                "-q",
                "-O",
                "-",
                "http://169.254.169.254/",
            )
            assert response.stdout == f"metadata of {lab.ports[guest.port][1]['server']}"
        process.kill()


def test_port_without_security_may_spoof_and_unknown_device_is_isolated(lab: Lab) -> None:
    network = lab.network()
    free, other = (
        lab.guest(network, "10.0.0.5", security=False, groups=[]),
        lab.guest(network, "10.0.0.6"),
    )
    free.run("ip", "addr", "add", "10.0.0.77/24", "dev", "eth0")
    other.take_address()
    assert free.reaches("10.0.0.6")
    assert other.reaches("10.0.0.77")
    free.run("ip", "addr", "replace", "10.0.0.5/24", "dev", "eth0")
    assert free.pings("10.0.0.2", "5", "-I", "10.0.0.5")  # Metadata identifies guests by source.
    assert not free.pings("10.0.0.2", "0.5", "-I", "10.0.0.77")
    strangers = [
        Guest(
            f"{number}eadbeef-0000",
            lab.space(f"g9{number}"),
            mac(),
            f"10.0.0.9{number}",
            other.host,
        )
        for number in (0, 1)
    ]
    lab.guests += strangers
    for stranger in strangers:
        lab.ports[stranger.port] = ("x1", {"network": network, "groups": [], "addresses": []})
        lab.plug(stranger)
        del lab.ports[stranger.port]
        stranger.take_address()
    assert not strangers[0].pings("10.0.0.6")
    assert not other.pings("10.0.0.90")
    assert not strangers[0].pings("10.0.0.91")


def test_allowed_address_pair_reaches_guest_and_not_host(lab: Lab) -> None:
    network = lab.network()
    guest = lab.guest(
        network, "10.0.0.5", allowed_pairs=[{"ip_address": "10.0.0.128/25", "mac_address": None}]
    )
    other = lab.guest(network, "10.0.0.6")
    other.take_address()
    for address, is_reachable in (("10.0.0.200/24", guest.reaches), ("10.0.0.7/24", guest.pings)):
        guest.run("ip", "addr", "flush", "dev", "eth0")
        guest.run("ip", "addr", "add", address, "dev", "eth0")
        assert is_reachable("10.0.0.6") == (address == "10.0.0.200/24")
    guest.run("ip", "addr", "add", "192.168.99.77/24", "dev", "eth0")
    assert not guest.pings(guest.host.address)


def test_networks_with_same_addresses_are_isolated(lab: Lab) -> None:
    mine, theirs = lab.network(), lab.network(project="project-2")
    a, b = lab.guest(mine, "10.0.0.5"), lab.guest(mine, "10.0.0.6")
    c, d = lab.guest(theirs, "10.0.0.5"), lab.guest(theirs, "10.0.0.7")
    for guest in (a, b, c, d):
        assert f"ip={guest.address}" in guest.dhcp()
    assert a.reaches("10.0.0.6")
    assert c.reaches("10.0.0.7")
    assert not a.pings("10.0.0.7")
    assert not c.pings("10.0.0.6")


def test_guests_on_two_hosts_reach_each_other_and_dhcp_stays_local(lab: Lab) -> None:
    network = lab.network()
    a, b = lab.guest(network, "10.0.0.5"), lab.guest(network, "10.0.0.6", host="x2")
    assert "ip=10.0.0.5" in a.dhcp()
    with capture(a, "udp port 67 or arp", lab.folder) as arrived:
        assert "ip=10.0.0.6" in b.dhcp()
        assert b.reaches("10.0.0.5")
        assert b.reaches("10.0.0.2")
        await_true(lambda: "10.0.0.5 tell 10.0.0.6" in arrived(), "no ARP over the tunnel")
        assert "10.0.0.2 tell" not in arrived().replace("who-has 10.0.0.2 tell", "")
        assert "BOOTP" not in arrived()
    assert a.reaches("10.0.0.2")


def test_guests_on_two_hosts_reach_each_other_over_ipv6(lab: Lab) -> None:
    network = lab.network()
    a, b = (
        lab.guest(network, address, host=host, addresses=[{"address": f"2001:db8::{address[-1]}"}])
        for address, host in (("10.0.0.5", "x1"), ("10.0.0.6", "x2"))
    )
    for guest in (a, b):
        guest.run("ip", "addr", "add", f"2001:db8::{guest.address[-1]}/64", "dev", "eth0", "nodad")
    assert a.reaches("2001:db8::6")
    a.run("ip", "addr", "add", "2001:db8::99/128", "dev", "eth0", "nodad")
    assert not a.pings("2001:db8::6", "0.5", "-I", "2001:db8::99")


def test_router_forwards_between_networks_floating_ips_and_outside(lab: Lab) -> None:
    inside, behind = lab.network(), lab.network("10.1.0.0/24")
    outside = lab.network("172.24.4.0/24", external=True)
    a, b = lab.guest(inside, "10.0.0.5"), lab.guest(behind, "10.1.0.6", host="x2")
    router = {
        "external": {
            "network": outside,
            "mac": mac(),
            "addresses": ["172.24.4.5/24"],
            "gateway": "172.24.4.1",
            "snat": True,
        },
        "interfaces": [
            {"port": "r1", "network": inside, "mac": mac(), "address": "10.0.0.1/24"},
            {"port": "r2", "network": behind, "mac": mac(), "address": "10.1.0.1/24"},
        ],
        "floating": [{"floating": "172.24.4.9", "fixed": "10.0.0.5"}],
        "routes": [],
    }
    lab.routers["11111111-0000-0000-0000-000000000000"] = ("x1", router)
    lab.publish()
    assert "ip=10.0.0.5" in a.dhcp()
    assert "ip=10.1.0.6" in b.dhcp()
    assert a.reaches("10.1.0.6")
    host = lab.machines["x1"].space
    assert reaches(host, "172.24.4.9")
    assert a.reaches(lab.elsewhere)
    assert b.reaches(lab.elsewhere)
    assert b.reaches("172.24.4.9")
    router["floating"] = [{"floating": "172.24.4.10", "fixed": "10.1.0.6"}]
    lab.publish()
    assert not pings(host, "172.24.4.9", "1")
    assert pings(host, "172.24.4.10", "5")


def test_metadata_proxy_signs_server_of_requesting_guest(lab: Lab) -> None:
    mine, theirs = lab.network(), lab.network(project="project-2")
    a, c = lab.guest(mine, "10.0.0.5"), lab.guest(theirs, "10.0.0.5")
    for guest in (a, c):
        guest.dhcp()
        lab.service.metadata_requests.clear()
        response = guest.run(
            "busybox",
            "wget",
            "-q",
            "-O",
            "-",
            "--header",
            "X-Instance-ID: forged",
            "--header",
            "X-Instance-ID-Signature: forged",
            "http://169.254.169.254/openstack?x=1",
        ).stdout
        server = lab.ports[guest.port][1]["server"]
        assert response == f"metadata of {server}"
        ((command, path, headers, _),) = lab.service.metadata_requests
        assert (command, path) == ("GET", "/openstack?x=1")
        assert headers["X-Instance-ID"] == server
        assert headers["X-Tenant-ID"] == "project-1"
        assert headers["X-Forwarded-For"] == "10.0.0.5"
        assert headers["X-Instance-ID-Signature"] == signature(
            host_key(SECRET, headers["X-Instance-Host"]), server
        )
