# SPDX-License-Identifier: Apache-2.0
"""Live migration of a guest in the network: the real network service and three real host parts.

The guest is a namespace, so its connections survive. The test removes the guest's device at the old
host, adds a device at the new host, and sends the announcements of QEMU.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from falcon.testing import TestClient

from common.clients.network_bindings import Bindings
from deploy.one_machine.services.database import Database
from deploy.one_machine.services.network import app, schema
from deploy.one_machine.services.network.fabric import Fabric, NetworkSettings
from deploy.one_machine.services.network.host_keys import HEADER
from tests.contract.network_lab import (
    SECRET,
    Guest,
    Lab,
    Machine,
    await_true,
    capture,
    demand_networks,
    mac,
    run,
)
from tests.contract.network_neighbours import Service

FRAMES = Path(__file__).with_name("network_frames.py")
WAIT_SECONDS = 20  # The service waits this long for a host, because the machine may be busy.
HEADERS = {"X-Identity-Status": "Confirmed", "X-Roles": "service", "X-Project-Id": "p" * 32}


class WholeService(Service):
    """The embedded network service, together with the faked external services."""

    def __init__(self, database: Database) -> None:
        self.fabric = Fabric(
            database, NetworkSettings(wait_seconds=WAIT_SECONDS, host_secret=SECRET)
        )
        self._app = TestClient(app.build(self.fabric))
        super().__init__()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        self._relay(request) if request.path.startswith("/v2.0/") else super().get(request)

    def post(self, request: BaseHTTPRequestHandler) -> None:
        self._relay(request) if request.path.startswith("/v2.0/") else super().post(request)

    def put(self, request: BaseHTTPRequestHandler) -> None:
        self._relay(request)

    def delete(self, request: BaseHTTPRequestHandler) -> None:
        self._relay(request)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._app.simulate_request(method, f"/v2.0{path}", headers=HEADERS, json=body)
        assert answer.status_code < 300, answer.text
        return answer.json if answer.content else None

    def _relay(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path, _, query = request.path.partition("?")
        answer = self._app.simulate_request(
            request.command,
            path,
            query_string=query,
            body=body,
            headers=HEADERS
            | {"Content-Type": "application/json", HEADER: request.headers.get(HEADER, "")},
        )
        self._answer(request, answer.status_code, answer.content)


class Cloud:
    """Three hosts, and the operations that the tests need."""

    def __init__(self, lab: Lab, service: WholeService) -> None:
        self.lab, self.service = lab, service
        self.client = Bindings(service.url)
        self.running = contextlib.ExitStack()

    def network(self) -> str:
        network = str(
            self.service.ask("POST", "/networks", {"network": {"name": "n"}})["network"]["id"]
        )
        self.service.ask(
            "POST",
            "/subnets",
            {"subnet": {"network_id": network, "cidr": "10.0.0.0/24", "ip_version": 4}},
        )
        return network

    def guest(self, network: str, host: str, **more: Any) -> Guest:
        """Create a port of a server, and a guest with that address."""
        own = mac()
        port = self.service.ask(
            "POST",
            "/ports",
            {
                "port": {
                    "network_id": network,
                    "mac_address": own,
                    "device_id": str(uuid.uuid4()),
                    "device_owner": "compute:nova",
                    "binding:host_id": host,
                    **more,
                }
            },
        )["port"]
        assert (port["binding:vif_type"], port["status"]) == ("bridge", "ACTIVE"), (
            self.lab.machines[host].log()[-2000:]
        )
        guest = Guest(
            port["id"],
            self.lab.space(f"g{len(self.lab.guests)}"),
            own,
            port["fixed_ips"][0]["ip_address"],
            self.lab.machines[host],
        )
        self.lab.ports[port["id"]] = (host, {"network": network})
        self.lab.guests.append(guest)
        self.lab.plug(guest)
        guest.take_address()
        return guest

    def group(self, direction: str, tcp: bool = False) -> str:
        """Create a security group that allows one direction only."""
        group = self.service.ask(
            "POST", "/security-groups", {"security_group": {"name": direction}}
        )["security_group"]
        for rule in group["security_group_rules"]:
            self.service.ask("DELETE", f"/security-group-rules/{rule['id']}")
        self.service.ask(
            "POST",
            "/security-group-rules",
            {
                "security_group_rule": {
                    "security_group_id": group["id"],
                    "direction": direction,
                    **(
                        {"protocol": "tcp", "port_range_min": 7000, "port_range_max": 7999}
                        if tcp
                        else {}
                    ),
                }
            },
        )
        return str(group["id"])

    def port(self, guest: Guest) -> Any:
        return self.service.ask("GET", f"/ports/{guest.port}")["port"]

    def bind_also(self, guest: Guest, host: str) -> None:
        also = self.client.bind_also("token", self.port(guest), host)
        assert also is not None
        assert also["vif_type"] == "bridge"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    demand_networks()
    folder = tmp_path_factory.mktemp("moves")
    database = Database(folder / "network.db", schema.METADATA)
    service = WholeService(database)
    lab = Lab(service, folder, mark="nm")
    try:
        lab.build(["m1", "m2", "m3"])
        await_true(
            lambda: set(service.fabric.hosts.alive()) == set(lab.machines),
            "not all hosts have asked",
            20,
        )
        yield Cloud(lab, service)
    finally:
        service.fabric.hosts.end()
        lab.tear_down()
        database.close()


@pytest.fixture
def cloud(hosts: Cloud) -> Iterator[Cloud]:
    with hosts.running:
        yield hosts
    for guest in hosts.lab.guests:
        hosts.service.ask("DELETE", f"/ports/{guest.port}")
        run("ip", "netns", "del", guest.space, check=False)
    hosts.lab.guests.clear()
    hosts.lab.ports.clear()


def prepare(guest: Guest, host: Machine) -> None:
    """Add the guest's silent device at the new host, as a waiting QEMU does."""
    bridge = f"brq{guest.host.lab.ports[guest.port][1]['network'][:11]}"
    run(
        "ip",
        "link",
        "add",
        guest.device,
        "netns",
        host.space,
        "type",
        "veth",
        "peer",
        "name",
        "eth1",
        "address",
        guest.mac,
        "netns",
        guest.space,
    )
    guest.run("ip", "link", "set", "eth1", "arp", "off", "addrgenmode", "none", "up")
    run("ip", "link", "set", guest.device, "master", bridge, "up", space=host.space)


def switch(cloud: Cloud, guest: Guest, host: Machine) -> None:
    """Continue the guest at the new host, with several announcements."""
    guest.run("ip", "link", "del", "eth0")
    guest.run("ip", "link", "set", "eth1", "down")
    guest.run("ip", "link", "set", "eth1", "name", "eth0", "arp", "on", "up")
    guest.take_address()
    guest.host = host
    announcer = cloud.running.enter_context(
        subprocess.Popen(
            ["ip", "netns", "exec", guest.space, sys.executable, FRAMES, "announce", guest.mac],
            stdout=subprocess.PIPE,
        )
    )
    assert announcer.stdout is not None
    assert announcer.stdout.readline() == b"announced\n"


def count_pings(guest: Guest, address: str) -> int:
    """Return the number of pings of 0.2 s until the first answer."""
    for number in range(1, 26):
        if guest.pings(address, wait="0.2"):
            return number
    raise AssertionError(f"{address} does not answer {guest.address}")


def test_frames_reach_live_migrated_guest_on_new_host(cloud: Cloud) -> None:
    network = cloud.network()
    m2 = cloud.lab.machines["m2"]
    guest = cloud.guest(network, "m1")
    near, far = cloud.guest(network, "m1"), cloud.guest(network, "m3")
    for other in (near, far):
        count_pings(other, guest.address)
    cloud.bind_also(guest, "m2")
    assert f"brq{network[:11]}" in run("ip", "-o", "link", space=m2.space).stdout
    assert guest.device in " ".join(m2.rules())
    prepare(guest, m2)
    with capture(guest, "icmp", cloud.lab.folder) as arrived:
        assert near.pings(guest.address, wait="5")
        assert far.pings(guest.address, wait="5")
        await_true(lambda: arrived().count("echo request") == 2, "the old place is reached no more")
    before = cloud.port(guest)
    assert (before["binding:host_id"], before["status"]) == ("m1", "ACTIVE")
    switch(cloud, guest, m2)
    cloud.client.activate("token", guest.port, "m2")
    # The far guest first: without the announcement, its host would send to the old host for
    # minutes.
    pings_by_address = {other.address: count_pings(other, guest.address) for other in (far, near)}
    assert max(pings_by_address.values()) <= 4, pings_by_address
    after = cloud.port(guest)
    assert (after["binding:host_id"], after["status"]) == ("m2", "ACTIVE")
    cloud.client.unbind_at("token", guest.port, "m1")
    await_true(
        lambda: guest.device not in " ".join(cloud.lab.machines["m1"].rules()), "m1 still knows it"
    )
    for other in (near, far):
        assert other.pings(guest.address, wait="5")
        assert guest.pings(other.address, wait="5")
    assert "ip=" in guest.dhcp()
    assert cloud.port(guest)["status"] == "ACTIVE"


@contextlib.contextmanager
def run_connection_end(guest: Guest, *words: str, listens: bool = False) -> Iterator[None]:
    """Run a guest's end of a connection until the block ends."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", guest.space, sys.executable, str(FRAMES), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        if listens:
            await_true(lambda: f":{words[1]}" in guest.run("ss", "-tln").stdout, "nobody listens")
        yield
    finally:
        process.kill()
        process.wait(5)


@pytest.mark.parametrize("role", ["server", "client", "reader"])
def test_tcp_connection_survives_migration_until_security_groups_removed(
    cloud: Cloud, role: str
) -> None:
    network, out, m2 = cloud.network(), cloud.group("egress"), cloud.lab.machines["m2"]
    inside, received = cloud.group("ingress", tcp=True), cloud.lab.folder / f"received-{role}"
    guest = cloud.guest(network, "m1", security_groups=[inside if role == "server" else out])
    other = cloud.guest(network, "m3", security_groups=[out if role == "server" else inside])
    server, server_words, client, client_words = {
        "server": (
            guest,
            ["listen", "7001", str(received)],
            other,
            ["talk", "7001", guest.address],
        ),
        "client": (
            other,
            ["listen", "7002", str(received)],
            guest,
            ["talk", "7002", other.address],
        ),
        "reader": (other, ["push", "7003"], guest, ["pull", "7003", other.address, str(received)]),
    }[role]

    def await_more(when: str) -> None:
        so_far = received.stat().st_size if received.exists() else 0
        await_true(
            lambda: received.exists() and received.stat().st_size > so_far + 20,
            f"nothing is said {when}",
        )

    with (
        run_connection_end(server, *server_words, listens=True),
        run_connection_end(client, *client_words),
    ):
        await_more("before it moves")
        cloud.bind_also(guest, "m2")
        prepare(guest, m2)
        switch(cloud, guest, m2)
        cloud.client.activate("token", guest.port, "m2")
        await_more("after it has moved")
        cloud.client.unbind_at("token", guest.port, "m1")
        await_more("after its old place was forgotten")
        cloud.service.ask("PUT", f"/ports/{guest.port}", {"port": {"security_groups": []}})
        await_true(lambda: _is_silent(received), "what its groups no longer allow goes on")


def _is_silent(received: Path) -> bool:
    size = received.stat().st_size
    time.sleep(0.3)  # Silence under test: six lines would have arrived.
    return received.stat().st_size == size


@pytest.mark.slice("operations")
def test_forged_connection_segment_opens_no_connection_after_migration(cloud: Cloud) -> None:
    network, m2 = cloud.network(), cloud.lab.machines["m2"]
    guest = cloud.guest(network, "m1", security_groups=[cloud.group("egress")])
    other = cloud.guest(network, "m3", security_groups=[cloud.group("egress")])
    cloud.bind_also(guest, "m2")
    prepare(guest, m2)
    switch(cloud, guest, m2)
    cloud.client.activate("token", guest.port, "m2")
    # The guest drops outgoing resets. Otherwise the kernel would end the forged connection at once.
    guest.run(
        "nft",
        "add table inet t; add chain inet t c { type filter hook output priority 0; }; "
        "add rule inet t c tcp flags & rst == rst drop",
    )
    guest.run("ip", "neigh", "replace", other.address, "lladdr", other.mac, "dev", "eth0")
    other.run("ip", "neigh", "replace", guest.address, "lladdr", guest.mac, "dev", "eth0")
    with (
        capture(guest, "tcp", cloud.lab.folder) as arrived,
        run_connection_end(guest, "push", "7004", listens=True),
    ):
        result = other.run(
            sys.executable, FRAMES, "sneak", "7004", guest.address, other.address, check=False
        )
        assert "TimeoutError" in result.stderr
        await_true(lambda: "Flags [.]" in arrived(), "the middle of a connection does not arrive")
        assert "Flags [S]" not in arrived()
