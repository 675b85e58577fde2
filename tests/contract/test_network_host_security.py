# SPDX-License-Identifier: Apache-2.0
"""The network's host part against guests that lie, flood or look for listeners of their host."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.contract.network_lab import Lab, await_true, captured, mac, run
from tests.contract.network_listeners import answering, listening

SEND = Path(__file__).with_name("network_frames.py")


def test_what_a_guest_forges_reaches_nobody(lab: Lab) -> None:
    network = lab.network()
    bad, good = lab.guest(network, "10.0.0.5"), lab.guest(network, "10.0.0.6")
    far = lab.guest(network, "10.0.0.7", host="x2")
    for guest in (bad, good, far):
        guest.take_address()
    assert bad.reaches("10.0.0.6")
    assert bad.reaches("10.0.0.7")
    with (
        captured(good, f"not ether host {good.mac} or ether src {bad.mac}", lab.folder) as near,
        captured(far, "ip or arp or rarp or ip6 or vlan", lab.folder) as away,
    ):
        for kind in (
            "mac",
            "ip",
            "arp",
            "arp-mac",
            "rarp",
            "dhcp",
            "ra",
            "vlan",
            "advert",
            "ip6",
            "dad",
            "rarp-sender",
            "rarp-target",
            "rarp-address",
        ):
            bad.run(sys.executable, SEND, "forge", kind, bad.mac, good.mac)
        # the last that are sent and arrive
        for address, seen in (
            ("10.0.0.6", near),
            ("10.0.0.7", away),
        ):
            assert bad.pings(address, wait="5")
            await_true(
                lambda seen=seen, words=f"10.0.0.5 > {address}": words in seen(),
                "no honest packet arrives",
            )
        for trace in (
            "10.0.0.99",
            "6e:6e:6e",
            "BOOTP",
            "router advertisement",
            "2001:db8:",
            "vlan",
            "Reverse",
        ):
            assert trace not in near() + away(), (trace, near(), away())


def test_a_guest_may_ask_whether_its_own_address_is_free(lab: Lab) -> None:
    network = lab.network()
    asking, near = lab.guest(network, "10.0.0.5"), lab.guest(network, "10.0.0.6")
    far = lab.guest(network, "10.0.0.7", host="x2")
    for guest in (asking, near, far):
        guest.take_address()
    assert asking.reaches("10.0.0.6")
    assert asking.reaches("10.0.0.7")
    with captured(near, "icmp6", lab.folder) as beside, captured(far, "icmp6", lab.folder) as away:
        asking.run(sys.executable, SEND, "forge", "dad-own", asking.mac, near.mac)
        for seen in (beside, away):
            await_true(
                lambda seen=seen: any(
                    asking.mac in line and "neighbor solicitation" in line
                    for line in seen().splitlines()
                ),
                "nobody is asked",
            )


def test_a_flood_of_multicast_reports_stays_with_its_guest(lab: Lab) -> None:
    network = lab.network()
    bad, good = lab.guest(network, "10.0.0.5"), lab.guest(network, "10.0.0.6")
    far = lab.guest(network, "10.0.0.7", host="x2")
    for guest in (bad, good, far):
        guest.take_address()
    assert bad.reaches("10.0.0.7")
    assert good.reaches("10.0.0.7")
    begun = time.monotonic()
    with captured(far, "ip6 and ip6[6] == 0 or icmp", lab.folder) as away:
        for kind in ("mld", "mld-early"):
            bad.run(sys.executable, SEND, "flood", "1000", kind, bad.mac)
        # the others' reports go on
        good.run(sys.executable, SEND, "forge", "mld", good.mac, far.mac)
        assert bad.pings("10.0.0.7", wait="5")
        await_true(
            lambda: good.mac in away() and "10.0.0.5 > 10.0.0.7" in away(),
            "not even honest packets arrive",
        )
        reports = [
            line for line in away().splitlines() if bad.mac in line and "multicast listener" in line
        ]
        # 50 reports at once, and 10 more for each second that the machine took for the test.
        limit = 51 + 10 * (time.monotonic() - begun)
        assert 0 < len(reports) <= limit < 1000, (len(reports), limit)


def test_guests_reach_no_listener_of_a_host_by_the_gateway(lab: Lab) -> None:
    inside, outside = lab.network(), lab.network("172.24.4.0/24", external=True)
    lab.networks[outside]["subnets"]["22222222-0000-0000-0000-000000000006"] = {
        "cidr": "2001:db8:4::/64",
        "version": 6,
        "gateway": "2001:db8:4::1",
        "dhcp": False,
        "dns": [],
        "routes": [],
        "ipv6_mode": None,
    }
    lab.routers["11111111-0000-0000-0000-000000000000"] = (
        "x1",
        {
            "external": {
                "network": outside,
                "mac": mac(),
                "addresses": ["172.24.4.5/24"],
                "gateway": "172.24.4.1",
                "snat": True,
            },
            "interfaces": [
                {"port": "r1", "network": inside, "mac": mac(), "address": "10.0.0.1/24"}
            ],
            "floating": [{"floating": "172.24.4.9", "fixed": "10.0.0.6"}],
            "routes": [],
        },
    )
    plain, floating = lab.guest(inside, "10.0.0.5"), lab.guest(inside, "10.0.0.6", host="x2")
    external = lab.guest(
        outside,
        "172.24.4.20",
        addresses=[{"address": "172.24.4.20"}, {"address": "2001:db8:4::20"}],
    )
    external.take_address("172.24.4.1")
    external.run("ip", "addr", "add", "2001:db8:4::20/64", "dev", "eth0", "nodad")
    floating.take_address("10.0.0.1")
    assert "ip=10.0.0.5" in plain.dhcp()
    host, peer, wire = lab.machines["x1"].space, lab.machines["x2"].space, lab.space("wire")
    run("ip", "addr", "replace", "10.99.0.1/32", "dev", "lo", space=host)
    run("ip", "route", "replace", "172.24.4.0/24", "via", "192.168.99.1", space=peer)
    hosts = ["172.24.4.1", "192.168.99.1", "10.99.0.1", "192.168.99.2"]
    with listening(host), listening(peer), listening(wire), listening(floating.space):
        for guest in (plain, floating, external):
            assert guest.reaches("172.24.4.1")  # who looks for a fault sees that the gateway lives
            assert answering(guest.space, 8774, *hosts, lab.elsewhere) == {lab.elsewhere}
        assert external.reaches("2001:db8:4::1")
        assert answering(external.space, 8774, "2001:db8:4::1") == set()
        for asking in (host, peer):  # hosts reach guests, and hear their answers
            assert answering(asking, 8774, "172.24.4.9") == {"172.24.4.9"}
    assert plain.run(
        "busybox", "wget", "-q", "-O", "-", "http://169.254.169.254/"
    ).stdout.startswith("metadata")
    assert (
        "10.0.0.5"
        in plain.run("busybox", "nslookup", "-type=a", "vm0.openstacklocal", "10.0.0.2").stdout
    )
