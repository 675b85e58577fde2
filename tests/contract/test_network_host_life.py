# SPDX-License-Identifier: Apache-2.0
"""The host part of the network: kills, absence of the network service, sabotage and cleanup."""

from __future__ import annotations

import signal
from ipaddress import ip_address
from pathlib import Path

import pytest

from deploy.one_machine.services.network.host.applier import FORWARDING
from deploy.one_machine.services.network.host.desired import HostPlace
from deploy.one_machine.services.network.host.host_part import LocalHostPart, clean
from deploy.one_machine.services.network.host.kernel import Kernel
from deploy.one_machine.services.network.host.names import Names
from deploy.one_machine.services.network.host.state import StateFolder
from tests.contract.network_lab import Lab, await_true, mac, run


def test_network_host_part_restores_rules_after_kill_at_any_time(lab: Lab) -> None:
    network, machine = lab.network(), lab.machines["x1"]
    guest, other = lab.guest(network, "10.0.0.5"), lab.guest(network, "10.0.0.6")
    for client in (guest, other):
        assert client.dhcp()
    rules = machine.rules()
    machine.stop(signal.SIGKILL)
    assert guest.reaches("10.0.0.6")
    assert other.dhcp()
    run("nft", "delete", "table", "bridge", f"kn_{machine.tag()}", space=machine.space)
    machine.start()
    await_true(lambda: machine.rules() == rules, "other rules after a kill")
    for pause in ("0.35", "0.45", "0.55"):
        machine.stop(signal.SIGKILL)
        second = lab.network()
        port = lab.ports[guest.port][1]
        lab.ports["22222222-0000-0000-0000-000000000000"] = ("x1", port | {"network": second})
        lab.publish(wait=False)
        machine.start()
        run("sleep", pause)
        del lab.ports["22222222-0000-0000-0000-000000000000"], lab.networks[second]
        machine.stop(signal.SIGKILL)
        lab.publish(wait=False)
    machine.start()
    lab.await_acknowledged()
    assert len(machine.rules()) == len(rules)
    assert [word for word in machine.rules() if "0x" not in word] == [
        word for word in rules if "0x" not in word
    ]
    assert guest.reaches("10.0.0.6")
    assert other.dhcp()


def test_network_host_part_removes_stale_leases_and_keeps_the_others(lab: Lab) -> None:
    network, machine = lab.network(), lab.machines["x1"]
    folder = Path(f"/run/kn-{machine.tag()}")
    stays, goes, moves, late = (lab.guest(network, f"10.0.0.{number}") for number in (5, 6, 7, 8))
    for guest in (stays, goes, moves, late):
        assert f"ip={guest.address}" in guest.dhcp()

    def leases() -> set[str]:
        lines = map(str.split, (folder / f"{network}.leases").read_text().splitlines())
        return {words[2] for words in lines if len(words) == 5}

    def await_leases(*addresses: str) -> None:  # dnsmasq truncates the file before each rewrite
        await_true(lambda: leases() == set(addresses), f"other leases than {addresses}")

    def pid() -> str:
        return (folder / f"{network}.pid").read_text()

    await_leases("10.0.0.5", "10.0.0.6", "10.0.0.7", "10.0.0.8")
    before = pid()
    del lab.ports[goes.port]
    lab.ports[moves.port][1]["addresses"] = [{"address": "10.0.0.17"}]
    lab.publish()
    await_leases("10.0.0.5", "10.0.0.8")
    assert goes.dhcp(tries=2) == ""
    assert "ip=10.0.0.17" in moves.dhcp()
    assert pid() == before  # dnsmasq keeps running, so other requests are answered.
    machine.stop(signal.SIGKILL)
    del lab.ports[late.port]
    lab.publish(wait=False)
    machine.start()
    lab.await_acknowledged()
    await_leases("10.0.0.5", "10.0.0.17")
    machine.stop(signal.SIGKILL)
    run("kill", pid().strip())  # No dnsmasq can drop the lease now.
    del lab.ports[moves.port]
    lab.publish(wait=False)
    machine.start()
    lab.await_acknowledged()
    await_leases("10.0.0.5")
    assert pid() != before
    assert "ip=10.0.0.5" in stays.dhcp()


def test_network_host_part_starts_without_service_and_repairs_damage(lab: Lab) -> None:
    network, machine = lab.network(), lab.machines["x1"]
    guest, other = lab.guest(network, "10.0.0.5"), lab.guest(network, "10.0.0.6")
    guest.dhcp()
    other.take_address()
    rules, tag = machine.rules(), machine.tag()
    machine.stop()
    assert guest.reaches("10.0.0.6")  # SIGTERM does not affect guests.
    run("nft", "flush", "ruleset", space=machine.space)
    run("ip", "netns", "del", f"kn-{tag}-net-{network}")
    Path(f"/run/kn-{tag}/{network}.pid").unlink()
    machine.start(url="http://127.0.0.1:9")
    await_true(lambda: machine.rules() == rules, "no rules without the service")
    await_true(lambda: "ip=10.0.0.5" in guest.dhcp(), "no DHCP without the service")
    machine.stop()
    machine.start()
    lab.publish()
    pid = int(Path(f"/run/kn-{tag}/{network}.pid").read_text())
    run("kill", str(pid))
    run(
        "nft",
        "delete",
        "rule",
        "bridge",
        f"kn_{tag}",
        "guest_ip4",
        "handle",
        handle(machine.space, f"kn_{tag}"),
        space=machine.space,
    )
    run("ip", "link", "set", f"brq{network[:11]}", "down", space=machine.space)
    await_true(
        lambda: machine.rules() == rules and guest.pings("10.0.0.6") and guest.dhcp(), "no repair"
    )


def test_network_host_part_reports_and_retries_failed_ports_and_wires_others(lab: Lab) -> None:
    good, bad = lab.network(), lab.network("10.1.0.0/24")
    guest = lab.guest(good, "10.0.0.5")
    host = lab.machines["x1"]
    # A device of another cloud has this VXLAN number already.
    run(
        "ip",
        "link",
        "add",
        "theirs",
        "type",
        "vxlan",
        "id",
        str(lab.networks[bad]["vni"]),
        "local",
        host.address,
        "dstport",
        "4789",
        space=host.space,
    )
    port = lab.ports[guest.port][1] | {"network": bad, "addresses": [{"address": "10.1.0.5"}]}
    for number, name in enumerate(lab.machines):
        lab.ports[f"a-bad-port-{number}"] = (name, port | {"mac": mac()})
    lab.ports["a-worse-port"] = ("x1", port | {"mac": "no mac"})
    lab.guest(good, "10.0.0.6").take_address()
    failed = lab.service.acknowledged["x1"]["failed"]
    assert set(failed) == {"a-bad-port-0", "a-worse-port"}
    assert "already exists" in failed["a-bad-port-0"]
    assert "no mac" in failed["a-worse-port"]
    assert guest.dhcp()
    assert guest.reaches("10.0.0.6")
    run("ip", "link", "del", "theirs", space=host.space)
    await_true(
        lambda: set(lab.service.acknowledged["x1"]["failed"]) == {"a-worse-port"}, "not tried again"
    )


def handle(space: str, table: str) -> str:
    """Return the handle of the rule that checks the IPv4 addresses of guests."""
    output = run("nft", "-a", "list", "chain", "bridge", table, "guest_ip4", space=space).stdout
    return next(line for line in output.splitlines() if "@own4" in line).split("handle ")[1]


def test_network_host_part_clean_keeps_settings_of_other_cloud(lab: Lab, tmp_path: Path) -> None:
    space = lab.space("two")
    run("ip", "netns", "add", space)
    try:
        kernel = Kernel(Path("/run/netns") / space)
        kernel.sysctl(FORWARDING, "0")
        places = {
            folder: HostPlace(Names.of(folder), ip_address("192.168.99.9"), external_gateway=True)
            for folder in (tmp_path / "one", tmp_path / "other")
        }
        (first, second) = (
            LocalHostPart(place, kernel, StateFolder(folder), None)
            for folder, place in places.items()
        )
        for host in (first, second):
            host.applier.prepare(True)
            assert host.apply(full=True) == {}
        assert clean(first.place.names, kernel, first.state.folder) == []
        assert run("nft", "list", "tables", space=space).stdout.count(first.place.names.table) == 0
        assert kernel.sysctl(FORWARDING) == "1"  # The second cloud still needs forwarding.
        kernel.sysctl(
            FORWARDING, "0"
        )  # The state if the cleanup came just before the second start.
        assert second.apply(full=True) == {}
        assert kernel.sysctl(FORWARDING) == "1"
        assert clean(second.place.names, kernel, second.state.folder) == []
        assert kernel.sysctl(FORWARDING) == "0"
    finally:
        run("ip", "netns", "del", space)


@pytest.mark.parametrize("ends", [("192.168.99.9", "192.168.99.8"), ("2001:db8::9", "2001:db8::8")])
def test_network_host_part_full_apply_changes_no_device_route_or_rule(
    lab: Lab, tmp_path: Path, ends: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement of equal rules would reset the rate limits of guests."""
    space, names = lab.space("same"), Names.of(tmp_path)
    mac_address, network, router = mac(), "network-1", "router-number-1"
    run("ip", "netns", "add", space)
    try:
        kernel = Kernel(Path("/run/netns") / space)
        host = LocalHostPart(
            HostPlace(names, ip_address(ends[0])), kernel, StateFolder(tmp_path), None
        )
        networks = {network: {"vni": 7, "mtu": 1400, "peers": [ends[1]]}}
        assert host.accept(
            {
                "revision": 1,
                "networks": networks,
                "routers": {
                    router: {
                        "interfaces": [
                            {"network": network, "mac": mac_address, "address": "10.0.0.1/24"}
                        ],
                        "routes": [
                            {"destination": "10.5.0.0/16", "nexthop": "10.0.0.5"},
                            {"destination": "10.6.0.1/32", "nexthop": "10.0.0.5"},
                        ],
                    }
                },
            }
        )

        def state() -> str:
            inside = names.router_namespace(router)
            return "".join(
                run(*words, space=namespace).stdout
                for namespace, words in (
                    (space, ("ip", "-o", "link")),
                    (space, ("bridge", "fdb")),
                    (inside, ("ip", "-o", "addr")),
                    (inside, ("ip", "route")),
                )
            )

        replacements: list[str | None] = []
        replace_rules = kernel.nft

        def record_replacement(document: str, namespace: str | None = None) -> None:
            replacements.append(namespace)
            replace_rules(document, namespace)

        monkeypatch.setattr(kernel, "nft", record_replacement)
        assert host.apply() == {}
        assert host.apply(full=True) == {}
        # The kernel first checks that no neighbour has the router's addresses.
        await_true(lambda: "tentative" not in state(), "the addresses are usable")
        before = state()
        assert ends[1] in before and "10.6.0.1 via 10.0.0.5" in before
        assert host.apply(full=True) == {}
        assert state() == before
        assert replacements.count(None) == 1, "the host's rules are replaced only when they change"
    finally:
        clean(names, kernel, tmp_path)
        run("ip", "netns", "del", space)


def test_network_host_part_clean_removes_all_devices_rules_and_processes(lab: Lab) -> None:
    network, machine = lab.network(), lab.machines["x2"]
    outside = lab.network("172.24.4.0/24", external=True)
    lab.guest(network, "10.0.0.5", host="x2")
    lab.routers["11111111-0000-0000-0000-000000000000"] = (
        "x2",
        {
            "external": {
                "network": outside,
                "mac": mac(),
                "addresses": ["172.24.4.5/24"],
                "gateway": "172.24.4.1",
            },
            "interfaces": [
                {"port": "r1", "network": network, "mac": mac(), "address": "10.0.0.1/24"}
            ],
        },
    )
    lab.publish()
    assert f"kn-{machine.tag()}-router" in run("ip", "netns").stdout
    with pytest.raises(AssertionError, match="stop it first"):
        machine.clean()
    machine.stop()
    machine.clean()
    machine.clean()
    links = run("ip", "-o", "link", space=machine.space).stdout
    assert [
        line.split(": ")[1].split("@")[0] for line in links.splitlines() if ": tap" not in line
    ] == ["lo", "eth0"]
    assert machine.rules() == []
    assert f"kn-{machine.tag()}" not in run("ip", "netns").stdout
    assert not Path(f"/run/kn-{machine.tag()}").exists()
    assert run("busybox", "pgrep", "-f", f"kn-{machine.tag()}", check=False).stdout == ""
    assert [path.name for path in (machine.folder / "state").iterdir()] == ["lock"]
    machine.start()
    lab.publish()
