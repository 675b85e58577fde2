# SPDX-License-Identifier: Apache-2.0
"""The embedded network service as a real process behind keystonemiddleware.

python-openstackclient and openstacksdk use it unmodified. A thread plays a host over HTTP, and a
small server plays the compute service, which receives events.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openstack
import pytest
import requests

from compute_api.metadata.proxy_headers import host_key
from deploy.one_machine.services.network.host_keys import HEADER, wiring_key
from deploy.testing.servers import free_ports
from tests.standalone import Cloud, connect
from tests.waiting import await_true

PATIENT = ("--wait-seconds", "20")
"""The service waits this long for a host, because the machine may be busy."""


class Compute:
    """A fake compute service that records events and answers ``status``."""

    def __init__(self) -> None:
        self.events: list[dict[str, str]] = []
        self.status = 200
        compute = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if compute.status == 200 and self.path == "/os-server-external-events":
                    compute.events += body["events"]
                self.send_response(compute.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                """Suppress the log."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def events_of(self, server: str) -> list[str]:
        return [event["name"] for event in self.events if event["server_uuid"] == server]


class Host:
    """A host that polls and acknowledges descriptions until the end of the block."""

    def __init__(self, url: str, headers: dict[str, str], name: str, tunnel: str) -> None:
        self._url, self._headers = f"{url}/v2.0/kilonova/hosts/{name}", headers
        self.name, self._tunnel = name, tunnel
        self.description: dict[str, Any] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Host":
        self._thread.start()
        await_condition(lambda: bool(self.description))
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        revision = -1
        while not self._stopped.is_set():
            try:
                response = requests.get(
                    f"{self._url}/description?seen={revision}&wait=1",
                    headers=self._headers,
                    timeout=20,
                )
                if response.status_code == 200:
                    revision, self.description = response.json()["revision"], response.json()
                    requests.put(
                        self._url,
                        headers=self._headers,
                        timeout=20,
                        json={"revision": revision, "tunnel_address": self._tunnel, "failed": {}},
                    ).raise_for_status()
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                self._stopped.wait(0.1)  # The service is restarting.


class Rig:
    """A running cloud with a network service."""

    def __init__(self, cloud: Cloud, port: int, compute: Compute) -> None:
        self.cloud, self.port, self.compute, self.url = (
            cloud,
            port,
            compute,
            f"http://127.0.0.1:{port}",
        )
        self.admin = connect(cloud, "admin", cloud.admin_password, "admin")

    def host(self, tunnel: str = "192.0.2.1") -> Host:
        name = f"host-{uuid.uuid4().hex[:8]}"
        return Host(self.url, self.key(name), name, tunnel)

    def key(self, host: str) -> dict[str, str]:
        """Return the header that authenticates a host."""
        return {HEADER: wiring_key(host_key(self.cloud.metadata_secret, host))}

    def call(self, method: str, path: str, **options: Any) -> requests.Response:
        headers = {"X-Auth-Token": self.admin.session.get_token()}
        if path.startswith("/kilonova/hosts/"):
            headers = self.key(path.split("/")[3])
        return requests.request(
            method, f"{self.url}/v2.0{path}", headers=headers, timeout=30, **options
        )


@pytest.fixture(scope="module")
def rig(standalone_cloud: Cloud) -> Iterator[Rig]:
    compute, cloud = Compute(), standalone_cloud
    threading.Thread(target=compute.server.serve_forever, daemon=True).start()
    options = ("--compute-url", compute.url, "--dns", "192.0.2.53", *PATIENT)
    with cloud.network(cloud.network_port, *options):
        yield Rig(cloud, cloud.network_port, compute)
    log = (cloud.folder / "network.log").read_text()
    compute.server.shutdown()
    compute.server.server_close()
    assert "status=500" not in log
    assert cloud.service_password not in log


@pytest.fixture(scope="module")
def member(rig: Rig) -> Any:
    """Return a connection of a member of a new project."""
    name, identity = f"user-{uuid.uuid4().hex[:8]}", rig.admin.identity
    project = identity.create_project(name=name, domain_id="default")
    user = identity.create_user(name=name, password="correct horse", domain_id="default")
    identity.assign_project_role_to_user(project, user, identity.find_role("member"))
    return connect(rig.cloud, name, "correct horse", name)


def await_condition(condition: Callable[[], bool]) -> None:
    await_true(condition, 20, "the condition")


def create_bound_port(rig: Rig, network: str, host: str, **attributes: Any) -> Any:
    """Create a port of a new server, bound to ``host``."""
    answer = rig.call(
        "POST",
        "/ports",
        json={
            "ports": [
                {
                    "network_id": network,
                    "binding:host_id": host,
                    "device_id": str(uuid.uuid4()),
                    "device_owner": "compute:nova",
                }
                | attributes
            ]
        },
    )
    assert answer.status_code == 201, answer.text
    return answer.json()["ports"][0]


def create_network(connection: Any, cidr: str = "10.0.0.0/24") -> tuple[str, str]:
    network = connection.network.create_network(name=f"net-{uuid.uuid4().hex[:8]}")
    return network.id, connection.network.create_subnet(
        network_id=network.id, cidr=cidr, ip_version=4
    ).id


# Real clients


def test_openstackclient_runs_network_commands(rig: Rig) -> None:
    answers = rig.cloud.openstack(
        "network create --external --provider-network-type vxlan pub -f json",
        "subnet create --network pub --subnet-range 172.24.4.0/24 --no-dhcp pubsub -f json",
        "network create --share inside -f json",
        "subnet create --network inside --subnet-range 10.5.0.0/24 --dns-nameserver 192.0.2.9 insidesub -f json",
        "router create --external-gateway pub r1 -f json",
        "router add subnet r1 insidesub",
        "security group create sg1 -f json",
        "security group rule create --protocol tcp --dst-port 22 --remote-ip 0.0.0.0/0 sg1 -f json",
        "port create --network inside --fixed-ip ip-address=10.5.0.50 --security-group sg1 p1 -f json",
        "floating ip create --port p1 pub -f json",
        "port list --network inside --fixed-ip ip-address=10.5.0.50 -f json",
        "subnet show insidesub -f json",
        "router show r1 -f json",
        "security group rule list sg1 -f json",
        "quota show --network -f json",
        "quota show --network --usage -f json",
        "availability zone list --network -f json",
        "extension list --network -f json",
        "ip availability show inside -f json",
        "network agent list -f json",
    )
    public, _, inside, _, router, group, rule, port, floating, listed, *rest = answers
    subnet, router_record, rules, quota, usage, zones, extensions, availability, agents = rest
    assert (public["router:external"], inside["shared"], inside["mtu"]) == (True, True, 1450)
    assert router["status"] == "ACTIVE"
    assert (rule["port_range_min"], rule["remote_ip_prefix"]) == (22, "0.0.0.0/0")
    assert port["fixed_ips"][0]["ip_address"] == "10.5.0.50"
    assert port["security_group_ids"] == [group["id"]]
    assert (floating["status"], floating["fixed_ip_address"]) == ("ACTIVE", "10.5.0.50")
    assert [record["ID"] for record in listed] == [port["id"]]
    assert (subnet["gateway_ip"], subnet["dns_nameservers"]) == ("10.5.0.1", ["192.0.2.9"])
    assert [record["ip_address"] for record in router_record["interfaces_info"]] == ["10.5.0.1"]
    assert len(rules) == 3
    assert {row["Resource"]: row["Limit"] for row in quota}["ports"] == 500
    assert any(row["Resource"] == "ports" and row["In Use"] > 0 for row in usage)
    assert {row["Zone Name"] for row in zones} == {"nova"}
    assert {"security-group", "router", "external-net"} <= {row["Alias"] for row in extensions}
    assert availability["used_ips"] == 3
    assert isinstance(agents, list)
    rig.cloud.openstack(
        f"floating ip delete {floating['id']}",
        "port delete p1",
        "router remove subnet r1 insidesub",
        "router unset --external-gateway r1",
        "router delete r1",
        "security group delete sg1",
        "network delete inside",
        "network delete pub",
    )
    assert {network.name for network in rig.admin.network.networks()} & {"inside", "pub"} == set()


def test_openstacksdk_lists_ports_in_pages_and_gets_conflicts(rig: Rig, member: Any) -> None:
    network, subnet = create_network(member)
    ports = [
        member.network.create_port(network_id=network, name=f"p{number}") for number in range(5)
    ]
    assert {port.id for port in member.network.ports(network_id=network, limit=2)} >= {
        port.id for port in ports
    }
    assert member.network.find_port("p3", network_id=network).id == ports[3].id
    with pytest.raises(
        openstack.exceptions.ConflictException, match="IP address 10.0.0.3 is in use"
    ):
        member.network.create_port(network_id=network, fixed_ips=[{"ip_address": "10.0.0.3"}])
    with pytest.raises(openstack.exceptions.ConflictException, match="still in use"):
        member.network.delete_network(network)
    with pytest.raises(openstack.exceptions.ForbiddenException, match="disallowed by policy"):
        member.network.create_network(name="x", is_shared=True)
    default = member.network.find_security_group("default")
    assert len(default.security_group_rules) == 4
    assert member.network.find_extension("quota_details").id == "quota_details"
    assert rig.admin.network.get_subnet(subnet).project_id == member.current_project_id


def test_network_request_without_token_returns_401_except_versions(rig: Rig) -> None:
    forged = {"X-Identity-Status": "Confirmed", "X-Roles": "admin", "X-Project-Id": "x"}
    assert requests.get(rig.url, headers=forged, timeout=20).status_code == 200
    for path in (
        "/v2.0/networks",
        "/v2.0/extensions",
        "/v2.0//networks",
        "/v2.0/kilonova/hosts/h/description",
    ):
        assert requests.get(rig.url + path, headers=forged, timeout=20).status_code == 401


def test_network_host_description_requires_key_of_same_host(rig: Rig, member: Any) -> None:
    path = f"{rig.url}/v2.0/kilonova/hosts/h/description"
    forged = {"X-Identity-Status": "Confirmed", "X-Roles": "admin", "X-Project-Id": "x"}
    for headers in (
        {"X-Auth-Token": member.session.get_token()},
        {"X-Auth-Token": rig.admin.session.get_token()},
        forged,
        rig.key("g"),
        {HEADER: ""},
    ):
        assert requests.get(path, headers=headers, timeout=20).status_code == 401
    assert requests.get(path, headers=rig.key("h") | forged, timeout=20).status_code == 200
    # A host's key opens no path that requires a token.
    assert (
        requests.get(f"{rig.url}/v2.0/ports", headers=rig.key("h") | forged, timeout=20).status_code
        == 401
    )


def test_network_host_key_command_prints_key(rig: Rig) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "deploy.one_machine.services.network", "host-key", "h"],
        capture_output=True,
        env=rig.cloud.passwords(),
        text=True,
        timeout=60,
        check=True,
    )
    assert {HEADER: wiring_key(result.stdout.strip())} == rig.key("h")


# Hosts and events


def test_port_is_active_after_host_acknowledges_binding(rig: Rig, member: Any) -> None:
    network, _ = create_network(member)
    with rig.host() as host:
        port = create_bound_port(rig, network, host.name)
        assert (port["status"], port["binding:vif_type"]) == ("ACTIVE", "bridge")
        assert host.description["ports"][port["id"]]["device"] == f"tap{port['id'][:11]}"
        assert host.description["networks"][network]["dhcp"]["addresses"] == ["10.0.0.2/24"]
        assert host.description["dns"] == ["192.0.2.53"]
        await_condition(lambda: rig.compute.events_of(port["device_id"]) == ["network-vif-plugged"])
        rig.call("PUT", f"/ports/{port['id']}", json={"port": {"binding:host_id": ""}})
        await_condition(
            lambda: (
                rig.compute.events_of(port["device_id"])
                == ["network-vif-plugged", "network-vif-unplugged"]
            )
        )
        await_condition(lambda: port["id"] not in host.description["ports"])


def test_openstacksdk_moves_port_binding_between_hosts(rig: Rig, member: Any) -> None:
    network, _ = create_network(member)
    with rig.host() as first, rig.host("192.0.2.2") as second:
        port, admin = create_bound_port(rig, network, first.name)["id"], rig.admin.network
        binding = admin.create_port_binding(port, host=second.name)
        assert (binding.status, binding.vif_type, binding.vnic_type) == (
            "INACTIVE",
            "bridge",
            "normal",
        )
        assert binding.vif_details["bridge_name"] == f"brq{network[:11]}"
        assert port in second.description["ports"]  # The request waited for the host.
        await_condition(lambda: first.description["networks"][network]["peers"] == ["192.0.2.2"])
        with pytest.raises(openstack.exceptions.ConflictException, match="already exists"):
            admin.create_port_binding(port, host=second.name)
        assert admin.activate_port_binding(port, second.name) is not None
        with pytest.raises(openstack.exceptions.ConflictException, match="already active"):
            admin.activate_port_binding(port, second.name)
        assert {
            port_binding.host: port_binding.status for port_binding in admin.port_bindings(port)
        } == {
            first.name: "INACTIVE",
            second.name: "ACTIVE",
        }
        port_record = admin.get_port(port)
        assert (port_record.binding_host_id, port_record.status) == (second.name, "ACTIVE")
        with pytest.raises(openstack.exceptions.ConflictException, match="is active. Activate"):
            admin.delete_port_binding(port, second.name)
        admin.delete_port_binding(port, first.name)
        assert [port_binding.host for port_binding in admin.port_bindings(port)] == [second.name]
        await_condition(lambda: port not in first.description["ports"])
        assert admin.find_extension("binding-extended").name == "Port Bindings Extended"
        with pytest.raises(openstack.exceptions.ForbiddenException, match="create_port_binding"):
            member.network.create_port_binding(port, host=first.name)


def test_create_port_on_unknown_host_returns_binding_failed_at_once(rig: Rig, member: Any) -> None:
    network, _ = create_network(member)
    before = time.monotonic()
    assert create_bound_port(rig, network, "nobody")["binding:vif_type"] == "binding_failed"
    assert time.monotonic() - before < 10  # half of the time that the service waits for a host


def test_create_port_on_slow_host_returns_down_until_host_acknowledges(
    rig: Rig, tmp_path: Path
) -> None:
    """A separate service with the default waiting time."""
    path, place = "/kilonova/hosts/slow", free_ports(1)
    with rig.cloud.network(
        place, "--db", str(tmp_path / "network.db"), "--compute-url", rig.compute.url
    ):
        own = Rig(rig.cloud, place, rig.compute)
        network = own.call("POST", "/networks", json={"network": {}}).json()["network"]["id"]
        revision = own.call("GET", f"{path}/description").json()["revision"]
        port = create_bound_port(own, network, "slow")
        assert (port["status"], port["binding:vif_type"]) == ("DOWN", "bridge")
        description = own.call("GET", f"{path}/description?seen={revision}&wait=5").json()
        assert own.call("PUT", path, json={"revision": revision}).status_code == 204
        assert own.call("GET", f"/ports/{port['id']}").json()["port"]["status"] == "DOWN"
        own.call(
            "PUT",
            path,
            json={"revision": description["revision"], "failed": {port["id"]: "no such device"}},
        )
        assert own.call("GET", f"/ports/{port['id']}").json()["port"]["status"] == "DOWN"
        own.call("PUT", path, json={"revision": description["revision"], "failed": {}})
        assert own.call("GET", f"/ports/{port['id']}").json()["port"]["status"] == "ACTIVE"
        await_condition(lambda: rig.compute.events_of(port["device_id"]) == ["network-vif-plugged"])


def test_network_host_description_lists_other_hosts_and_group_addresses(
    rig: Rig, member: Any
) -> None:
    network, _ = create_network(member)
    group = member.network.create_security_group(name="together").id
    member.network.create_security_group_rule(
        security_group_id=group, direction="ingress", remote_group_id=group
    )
    mine = {"project_id": member.current_project_id, "security_groups": [group]}
    with rig.host("192.0.2.1") as first_host, rig.host("192.0.2.2") as second_host:
        first, second = (
            create_bound_port(rig, network, first_host.name, **mine),
            create_bound_port(rig, network, second_host.name, **mine),
        )
        await_condition(
            lambda: first_host.description["networks"][network]["peers"] == ["192.0.2.2"]
        )
        await_condition(
            lambda: second_host.description["networks"][network]["peers"] == ["192.0.2.1"]
        )
        members = sorted(
            fixed["ip_address"] for port in (first, second) for fixed in port["fixed_ips"]
        )
        await_condition(lambda: first_host.description["groups"][group]["members"] == members)
        member.network.create_security_group_rule(
            security_group_id=group,
            direction="ingress",
            protocol="tcp",
            port_range_min=22,
            port_range_max=22,
        )
        await_condition(
            lambda: any(
                rule["port_min"] == 22 for rule in second_host.description["groups"][group]["rules"]
            )
        )
        member.network.delete_port(second["id"])
        await_condition(lambda: first_host.description["networks"][network]["peers"] == [])
        await_condition(lambda: first_host.description["groups"][group]["members"] == members[:1])
        await_condition(
            lambda: (
                rig.compute.events_of(second["device_id"])
                == ["network-vif-plugged", "network-vif-deleted"]
            )
        )


def test_network_events_are_queued_in_order_while_compute_is_down(rig: Rig, member: Any) -> None:
    network, _ = create_network(member)
    rig.compute.status = 503
    try:
        with rig.host() as host:
            port = create_bound_port(rig, network, host.name, project_id=member.current_project_id)
            member.network.update_port(port["id"], fixed_ips=[{"ip_address": "10.0.0.99"}])
            member.network.delete_port(port["id"])
            assert rig.compute.events_of(port["device_id"]) == []
    finally:
        rig.compute.status = 200
    await_condition(
        lambda: (
            rig.compute.events_of(port["device_id"])
            == ["network-vif-plugged", "network-changed", "network-vif-deleted"]
        )
    )


def test_network_service_after_kill_sends_host_ports_with_higher_revision(
    rig: Rig, member: Any, tmp_path: Path
) -> None:
    """A separate service is killed while a host waits.

    Revisions continue to rise, and the host keeps the port.
    """
    port = free_ports(1)
    rows = ("--db", str(tmp_path / "network.db"), "--compute-url", rig.compute.url, *PATIENT)
    token = {"X-Auth-Token": rig.admin.session.get_token()}
    url = f"http://127.0.0.1:{port}"
    with (
        rig.cloud.network(port, *rows) as process,
        Host(url, rig.key("h"), "h", "192.0.2.1") as host,
    ):
        network = requests.post(
            f"{url}/v2.0/networks", headers=token, json={"network": {}}, timeout=20
        ).json()["network"]
        port_request = {"network_id": network["id"], "binding:host_id": "h"}
        requests.post(
            f"{url}/v2.0/ports", headers=token, json={"port": port_request}, timeout=20
        ).raise_for_status()
        before = host.description
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, check=True
        )
        for pid in [process.pid, *map(int, children.stdout.split())]:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        with rig.cloud.network(port, *rows):
            again = requests.post(
                f"{url}/v2.0/ports", headers=token, json={"port": port_request}, timeout=20
            ).json()["port"]
            assert again["status"] == "ACTIVE"
            await_condition(lambda: again["id"] in host.description["ports"])
            assert set(before["ports"]) < set(host.description["ports"])
            assert host.description["revision"] > before["revision"]


def test_network_service_stops_at_once_while_host_polls(rig: Rig, tmp_path: Path) -> None:
    port = free_ports(1)
    token = rig.admin.session.get_token()
    poll = threading.Thread(
        target=requests.get,
        kwargs={  # The request waits longer than the service may take to stop.
            "url": f"http://127.0.0.1:{port}/v2.0/kilonova/hosts/h/description?seen=1&wait=30",
            "headers": rig.key("h"),
            "timeout": 60,
        },
    )
    with rig.cloud.network(
        port, "--db", str(tmp_path / "network.db"), "--compute-url", rig.compute.url
    ):
        poll.start()
        await_condition(
            lambda: (
                requests.get(
                    f"http://127.0.0.1:{port}/v2.0/agents",
                    headers={"X-Auth-Token": token},
                    timeout=20,
                ).json()["agents"]
                != []
            )
        )
        before = time.monotonic()
    poll.join()
    assert time.monotonic() - before < 10
