# SPDX-License-Identifier: Apache-2.0
"""The user's access to a guest, created through the public APIs.

The parts are a shared network, an external one, a router between them, a key pair, rules and a
floating address. deploy/one_machine/up.py calls these functions after ``Seed``. Each looks first
and adds only the missing objects. In a cloud without networks each only returns a note.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from common.domain.json_types import JsonObject
from deploy.one_machine.cloud.process_control import explain_failure
from deploy.one_machine.seed import PAPER, SERVER, Seed
from deploy.progress import run, wait

PRIVATE, PUBLIC, ROUTER, KEY = "private", "public", "router", "kilonova"
#: The addresses of the shared network. Only guests see them.
ADDRESSES = "10.20.0.0/24"
#: Traffic from everywhere that may reach demo's guests.
OPEN: tuple[JsonObject, ...] = (
    {"protocol": "tcp", "port_range_min": 22, "port_range_max": 22},
    {"protocol": "icmp"},
)
#: The tiny image makes a new host key at each boot, so the client must not check the key.
SSH = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
QUICK = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=3", "-o", "LogLevel=ERROR")
WITHOUT = "this cloud has no networks"
PORTLESS = (
    f"server {SERVER} has no port, as after its creation without networks; to get one with a port, delete the "
    "server and run ./deploy/up again"
)


class Connectivity:
    """Access to the guests of one cloud.

    Attributes:
        line: The ssh command to the first server for the final message, or "".
    """

    def __init__(self, seed: Seed) -> None:
        self._seed, self._cloud = seed, seed.cloud
        self.line = ""

    @property
    def key(self) -> Path:
        """The path of the private key. The public key is in the same folder."""
        return self._cloud.home / "ssh" / KEY

    @property
    def options(self) -> str:
        """The options of ``openstack server create`` for a reachable server.

        In a cloud without networks they are ``--nic none``.
        """
        return f"--network {PRIVATE} --key-name {KEY}" if self._cloud.has_networks else "--nic none"

    def wanted(self) -> JsonObject:
        """Return the keyword arguments of ``Seed.server`` for the networks and the key pair.

        The shared network is created if it is missing. In a cloud without networks the arguments
        are a config drive, no networks and no key pair.
        """
        if not self._cloud.has_networks:
            return {"networks": "none", "config_drive": True}
        return {"networks": [{"uuid": self._network(PRIVATE, is_shared=True).id}], "key_name": KEY}

    # --- networks ---
    def networks(self) -> str:
        """Create the shared network, the external network and the router between them.

        Existing objects stay. In a cloud without networks create nothing. Return a note for the
        output.

        Raises:
            Failure: The network agents of the hosts are not all alive within 60 s.
        """
        if not self._cloud.has_networks:
            return WITHOUT
        self._await_hosts()
        external = self._cloud.underlay.external
        private = self._network(PRIVATE, is_shared=True)
        public = self._network(PUBLIC, is_router_external=True)
        inside = self._subnet(private, cidr=ADDRESSES)
        self._subnet(public, cidr=str(external), gateway_ip=str(external[1]), is_dhcp_enabled=False)
        self._join(public, private, inside)
        return (
            f"{PRIVATE} {ADDRESSES} for every project; {PUBLIC} {external} for floating addresses"
        )

    def _await_hosts(self) -> None:
        hosts = self._cloud.hosts if self._cloud.has_guests else ()

        def alive() -> bool:
            return set(hosts) <= {
                agent.host for agent in self._seed.admin.network.agents() if agent.is_alive
            }

        wait(
            self._seed.tolerate_errors(alive),
            60,
            f"The network service does not count all network agents as alive (hosts: {', '.join(hosts)})",
            lambda: explain_failure(self._cloud, "network-host"),
        )

    def _network(self, name: str, **kind: bool) -> Any:
        network = self._seed.admin.network
        return next(iter(network.networks(name=name, **kind)), None) or network.create_network(
            name=name, **kind
        )

    def _subnet(self, network: Any, **fields: object) -> Any:
        service = self._seed.admin.network
        subnet = next(iter(service.subnets(network_id=network.id)), None)
        return subnet or service.create_subnet(
            name=network.name, network_id=network.id, ip_version=4, **fields
        )

    def _join(self, public: Any, private: Any, inside: Any) -> None:
        service = self._seed.admin.network
        router = next(iter(service.routers(name=ROUTER)), None) or service.create_router(
            name=ROUTER, external_gateway_info={"network_id": public.id}
        )
        if not list(service.ports(device_id=router.id, network_id=private.id)):
            service.add_interface_to_router(router, subnet=inside.id)

    # --- access ---
    def access(self) -> str:
        """Create demo's key pair, and the rules that let ssh and ping reach demo's guests.

        Existing objects stay, but a key pair with another public key is replaced. A rule for the
        same protocol and first port counts as existing, even if it is limited to some addresses. In
        a cloud without networks create nothing. Return a note for the output.

        Raises:
            Failure: ssh-keygen is missing or fails.
        """
        if not self._cloud.has_networks:
            return WITHOUT
        self._key_pair()
        service = self._seed.demo.network
        project_id = self._seed.demo.session.get_project_id()
        group = next(iter(service.security_groups(name="default", project_id=project_id)))
        present = {
            (rule.protocol, rule.port_range_min)
            for rule in service.security_group_rules(
                security_group_id=group.id, direction="ingress", ether_type="IPv4"
            )
        }
        for rule in OPEN:
            if (rule["protocol"], rule.get("port_range_min")) not in present:
                service.create_security_group_rule(
                    security_group_id=group.id, direction="ingress", ether_type="IPv4", **rule
                )
        return f"private key {self.key}; ssh and ping reach the guests from everywhere"

    def _key_pair(self) -> None:
        public = self.key.with_suffix(".pub")
        self.key.parent.mkdir(mode=0o700, exist_ok=True)
        if not public.exists():
            self.key.unlink(missing_ok=True)
            run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", KEY, "-f", self.key],
                "Install the Debian package openssh-client.",
            )
        compute, text = self._seed.demo.compute, public.read_text().strip()
        key_pair = compute.find_keypair(KEY, ignore_missing=True)
        if key_pair is not None and key_pair.public_key.strip() == text:
            return
        if key_pair is not None:
            compute.delete_keypair(key_pair)
        compute.create_keypair(name=KEY, public_key=text, key_type="ssh")

    # --- login ---
    def login(self) -> str:
        """Give the first server a floating address, wait until ssh answers there, return a note.

        Then ``line`` has the ssh command. Without guests there is no wait. A server without a port
        gets no address. In these two cases, and in a cloud without networks, ``line`` stays empty.

        Raises:
            Failure: ssh does not answer within 120 s.
            TimeoutExpired: One attempt of ssh takes more than 30 s.
        """
        if not self._cloud.has_networks:
            return WITHOUT
        ports = list(self._seed.demo.network.ports(device_id=self._seed.first().id))
        if not ports:
            return PORTLESS
        address = self._floating(ports[0].id)
        if not self._cloud.has_guests:
            return f"{address} does not answer: {PAPER}"
        ssh = ["ssh", "-i", str(self.key), *SSH, f"root@{address}"]
        last_error: list[str] = []

        def answers() -> bool:
            done = subprocess.run(
                [*ssh[:-1], *QUICK, ssh[-1], "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            last_error[:] = [done.stderr.strip()[-300:]]
            return done.returncode == 0

        wait(
            answers,
            120,
            f"ssh to {address} does not answer",
            lambda: "\n".join(
                [
                    f"The last error of ssh: {''.join(last_error)}",
                    explain_failure(self._cloud, "network-host"),
                    explain_failure(self._cloud, "metadata"),
                ]
            ),
            pause=0.5,
        )
        self.line = "\n  " + " ".join(ssh)
        return f"{address} answers"

    def _floating(self, port: str) -> str:
        service = self._seed.demo.network
        for address in service.ips(port_id=port):
            return str(address.floating_ip_address)
        public = self._network(PUBLIC, is_router_external=True)
        return str(
            service.create_ip(floating_network_id=public.id, port_id=port).floating_ip_address
        )
