# SPDX-License-Identifier: Apache-2.0
"""The host part of the network against guests that forge or flood frames, or scan their host."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.contract.network_lab import Lab, await_true, capture, mac, run
from tests.contract.network_listeners import find_answering, listen_in

SEND = Path(__file__).with_name("network_frames.py")


def test_forged_frames_of_guest_reach_no_other_guest(lab: Lab) -> None:
    network = lab.network()
    bad, good = lab.guest(network, "10.0.0.5"), lab.guest(network, "10.0.0.6")
    far = lab.guest(network, "10.0.0.7", host="x2")
    for guest in (bad, good, far):
        guest.take_address()
    assert bad.reaches("10.0.0.6")
    assert bad.reaches("10.0.0.7")
    with (
        capture(good, f"not ether host {good.mac} or ether src {bad.mac}", lab.folder) as near,
        capture(far, "ip or arp or rarp or ip6 or vlan", lab.folder) as away,
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
        # The last frames are honest and arrive.
        for address, arrived in (
            ("10.0.0.6", near),
            ("10.0.0.7", away),
        ):
            assert bad.pings(address, wait="5")
            await_true(
                lambda arrived=arrived, words=f"10.0.0.5 > {address}": words in arrived(),
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


def test_duplicate_address_detection_of_own_address_reaches_guests(lab: Lab) -> None:
    network = lab.network()
    prober, near = lab.guest(network, "10.0.0.5"), lab.guest(network, "10.0.0.6")
    far = lab.guest(network, "10.0.0.7", host="x2")
    for guest in (prober, near, far):
        guest.take_address()
    assert prober.reaches("10.0.0.6")
    assert prober.reaches("10.0.0.7")
    with capture(near, "icmp6", lab.folder) as beside, capture(far, "icmp6", lab.folder) as away:
        prober.run(sys.executable, SEND, "forge", "dad-own", prober.mac, near.mac)
        for arrived in (beside, away):
            await_true(
                lambda arrived=arrived: any(
                    prober.mac in line and "neighbor solicitation" in line
                    for line in arrived().splitlines()
                ),
                "nobody is asked",
            )


def test_multicast_report_flood_of_guest_is_rate_limited_and_others_pass(lab: Lab) -> None:
    network = lab.network()
    bad, good = lab.guest(network, "10.0.0.5"), lab.guest(network, "10.0.0.6")
    far = lab.guest(network, "10.0.0.7", host="x2")
    for guest in (bad, good, far):
        guest.take_address()
    assert bad.reaches("10.0.0.7")
    assert good.reaches("10.0.0.7")
    started_at = time.monotonic()
    with capture(far, "ip6 and ip6[6] == 0 or icmp", lab.folder) as away:
        for kind in ("mld", "mld-early"):
            bad.run(sys.executable, SEND, "flood", "1000", kind, bad.mac)
        # Reports of other guests still pass.
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
        limit = 51 + 10 * (time.monotonic() - started_at)
        assert 0 < len(reports) <= limit < 1000, (len(reports), limit)


def test_guest_reaches_no_listener_of_host_through_gateway(lab: Lab) -> None:
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
    with listen_in(host), listen_in(peer), listen_in(wire), listen_in(floating.space):
        for guest in (plain, floating, external):
            assert guest.reaches("172.24.4.1")  # The gateway answers pings, to help with diagnosis.
            assert find_answering(guest.space, 8774, *hosts, lab.elsewhere) == {lab.elsewhere}
        assert external.reaches("2001:db8:4::1")
        assert find_answering(external.space, 8774, "2001:db8:4::1") == set()
        for scanner in (host, peer):  # Hosts reach guests and receive their answers.
            assert find_answering(scanner, 8774, "172.24.4.9") == {"172.24.4.9"}
    assert plain.run(
        "busybox", "wget", "-q", "-O", "-", "http://169.254.169.254/"
    ).stdout.startswith("metadata")
    assert (
        "10.0.0.5"
        in plain.run("busybox", "nslookup", "-type=a", "vm0.openstacklocal", "10.0.0.2").stdout
    )
