# SPDX-License-Identifier: Apache-2.0
"""A guest that moves to another host while it runs, as the network sees it: the real service, three
real host parts.

The guest is a namespace, so its connections live on: its device at the old host goes and one at the
new host comes, and what QEMU would say then is said.
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
    captured,
    demand_networks,
    mac,
    run,
)
from tests.contract.network_neighbours import Service

FRAMES = Path(__file__).with_name("network_frames.py")
WAIT_SECONDS = 20  # an answer has waited for its host, however busy this machine is
WHO = {"X-Identity-Status": "Confirmed", "X-Roles": "service", "X-Project-Id": "p" * 32}


class Whole(Service):
    """The standalone network service, and its neighbours played."""

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
        answer = self._app.simulate_request(method, f"/v2.0{path}", headers=WHO, json=body)
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
            headers=WHO
            | {"Content-Type": "application/json", HEADER: request.headers.get(HEADER, "")},
        )
        self._answer(request, answer.status_code, answer.content)


class Cloud:
    """Three hosts, and what a story needs of them."""

    def __init__(self, lab: Lab, service: Whole) -> None:
        self.lab, self.service = lab, service
        self.client = Bindings(service.url)
        self.running = contextlib.ExitStack()

    def network(self) -> str:
        made = str(
            self.service.ask("POST", "/networks", {"network": {"name": "n"}})["network"]["id"]
        )
        self.service.ask(
            "POST",
            "/subnets",
            {"subnet": {"network_id": made, "cidr": "10.0.0.0/24", "ip_version": 4}},
        )
        return made

    def guest(self, network: str, host: str, **more: Any) -> Guest:
        """A port of a server and a guest that has it, with its address."""
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
        """A security group that allows one direction and nothing of the other."""
        made = self.service.ask(
            "POST", "/security-groups", {"security_group": {"name": direction}}
        )["security_group"]
        for rule in made["security_group_rules"]:
            self.service.ask("DELETE", f"/security-group-rules/{rule['id']}")
        self.service.ask(
            "POST",
            "/security-group-rules",
            {
                "security_group_rule": {
                    "security_group_id": made["id"],
                    "direction": direction,
                    **(
                        {"protocol": "tcp", "port_range_min": 7000, "port_range_max": 7999}
                        if tcp
                        else {}
                    ),
                }
            },
        )
        return str(made["id"])

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
    service = Whole(database)
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
    """Its device at the new host, as of a QEMU that waits: it is there and says nothing."""
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
    """It goes on at the new host and has announced itself, which it will do again."""
    guest.run("ip", "link", "del", "eth0")
    guest.run("ip", "link", "set", "eth1", "down")
    guest.run("ip", "link", "set", "eth1", "name", "eth0", "arp", "on", "up")
    guest.take_address()
    guest.host = host
    announcing = cloud.running.enter_context(
        subprocess.Popen(
            ["ip", "netns", "exec", guest.space, sys.executable, FRAMES, "announce", guest.mac],
            stdout=subprocess.PIPE,
        )
    )
    assert announcing.stdout is not None
    assert announcing.stdout.readline() == b"announced\n"


def tries(guest: Guest, address: str) -> int:
    """How many pings of 0.2 s it takes until one is answered."""
    for number in range(1, 26):
        if guest.pings(address, wait="0.2"):
            return number
    raise AssertionError(f"{address} does not answer {guest.address}")


def test_frames_follow_the_guest_to_its_new_host(cloud: Cloud) -> None:
    network = cloud.network()
    m2 = cloud.lab.machines["m2"]
    guest = cloud.guest(network, "m1")
    near, far = cloud.guest(network, "m1"), cloud.guest(network, "m3")
    for other in (near, far):
        tries(other, guest.address)
    cloud.bind_also(guest, "m2")
    assert f"brq{network[:11]}" in run("ip", "-o", "link", space=m2.space).stdout
    assert guest.device in " ".join(m2.rules())
    prepare(guest, m2)
    with captured(guest, "icmp", cloud.lab.folder) as arrived:
        assert near.pings(guest.address, wait="5")
        assert far.pings(guest.address, wait="5")
        await_true(lambda: arrived().count("echo request") == 2, "the old place is reached no more")
    before = cloud.port(guest)
    assert (before["binding:host_id"], before["status"]) == ("m1", "ACTIVE")
    switch(cloud, guest, m2)
    cloud.client.activate("token", guest.port, "m2")
    # The far one first: its host would send to the old place for minutes, were the guest's arrival
    # not announced.
    took = {other.address: tries(other, guest.address) for other in (far, near)}
    assert max(took.values()) <= 4, took
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
def speaking(guest: Guest, *words: str, listens: bool = False) -> Iterator[None]:
    """A guest's end of a connection, until the end."""
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


@pytest.mark.parametrize("story", ["asked", "asking", "told"])
def test_connections_live_on(cloud: Cloud, story: str) -> None:
    network, out, m2 = cloud.network(), cloud.group("egress"), cloud.lab.machines["m2"]
    inside, heard = cloud.group("ingress", tcp=True), cloud.lab.folder / f"heard-{story}"
    guest = cloud.guest(network, "m1", security_groups=[inside if story == "asked" else out])
    other = cloud.guest(network, "m3", security_groups=[out if story == "asked" else inside])
    server, said, client, asked = {
        "asked": (guest, ["listen", "7001", str(heard)], other, ["talk", "7001", guest.address]),
        "asking": (other, ["listen", "7002", str(heard)], guest, ["talk", "7002", other.address]),
        "told": (other, ["push", "7003"], guest, ["pull", "7003", other.address, str(heard)]),
    }[story]

    def still_heard(when: str) -> None:
        so_far = heard.stat().st_size if heard.exists() else 0
        await_true(
            lambda: heard.exists() and heard.stat().st_size > so_far + 20, f"nothing is said {when}"
        )

    with speaking(server, *said, listens=True), speaking(client, *asked):
        still_heard("before it moves")
        cloud.bind_also(guest, "m2")
        prepare(guest, m2)
        switch(cloud, guest, m2)
        cloud.client.activate("token", guest.port, "m2")
        still_heard("after it has moved")
        cloud.client.unbind_at("token", guest.port, "m1")
        still_heard("after its old place was forgotten")
        cloud.service.ask("PUT", f"/ports/{guest.port}", {"port": {"security_groups": []}})
        await_true(lambda: _is_silent(heard), "what its groups no longer allow goes on")


def _is_silent(heard: Path) -> bool:
    so_far = heard.stat().st_size
    time.sleep(0.3)  # silence is what is asked: six words would have come
    return heard.stat().st_size == so_far


@pytest.mark.slice("operations")
def test_nobody_gets_in_through_the_middle_of_a_connection(cloud: Cloud) -> None:
    network, m2 = cloud.network(), cloud.lab.machines["m2"]
    guest = cloud.guest(network, "m1", security_groups=[cloud.group("egress")])
    other = cloud.guest(network, "m3", security_groups=[cloud.group("egress")])
    cloud.bind_also(guest, "m2")
    prepare(guest, m2)
    switch(cloud, guest, m2)
    cloud.client.activate("token", guest.port, "m2")
    # A guest that answers nothing but what it wants: its kernel would end what was made up before
    # it is of use.
    guest.run(
        "nft",
        "add table inet t; add chain inet t c { type filter hook output priority 0; }; "
        "add rule inet t c tcp flags & rst == rst drop",
    )
    guest.run("ip", "neigh", "replace", other.address, "lladdr", other.mac, "dev", "eth0")
    other.run("ip", "neigh", "replace", guest.address, "lladdr", guest.mac, "dev", "eth0")
    with (
        captured(guest, "tcp", cloud.lab.folder) as arrived,
        speaking(guest, "push", "7004", listens=True),
    ):
        tried = other.run(
            sys.executable, FRAMES, "sneak", "7004", guest.address, other.address, check=False
        )
        assert "TimeoutError" in tried.stderr
        await_true(lambda: "Flags [.]" in arrived(), "the middle of a connection does not arrive")
        assert "Flags [S]" not in arrived()
