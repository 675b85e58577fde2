# SPDX-License-Identifier: Apache-2.0
"""How a person comes to a guest: a shared network, an external one, a router between, a key pair,
rules and a floating address; all through the public APIs.

Used by deploy/one_machine/up.py after ``Seed``. As there, every function looks first and adds only
what is missing. In a cloud without networks there is nothing to do, and each says so.
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
#: The shared network's addresses; they are seen by guests only.
ADDRESSES = "10.20.0.0/24"
#: What may come to demo's guests from everywhere.
OPEN: tuple[JsonObject, ...] = (
    {"protocol": "tcp", "port_range_min": 22, "port_range_max": 22},
    {"protocol": "icmp"},
)
#: A guest's own key is new at each boot of the tiny image, so there is nothing to remember.
SSH = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
QUICK = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=3", "-o", "LogLevel=ERROR")
WITHOUT = "this cloud has no networks"
PORTLESS = f"{SERVER} has no port, as when it was made without networks; delete it and run this again for one that has"


class Connectivity:
    """Of the users of one cloud; ``line`` is what the last step has to tell."""

    def __init__(self, seed: Seed) -> None:
        self._seed, self._cloud = seed, seed.cloud
        self.line = ""

    @property
    def key(self) -> Path:
        """The private key of the key pair; the public one is beside it."""
        return self._cloud.home / "ssh" / KEY

    @property
    def options(self) -> str:
        """How ``openstack server create`` asks for a server that can be reached."""
        return f"--network {PRIVATE} --key-name {KEY}" if self._cloud.has_networks else "--nic none"

    def wanted(self) -> JsonObject:
        """What the first server wants."""
        if not self._cloud.has_networks:
            return {"networks": "none", "config_drive": True}
        return {"networks": [{"uuid": self._network(PRIVATE, is_shared=True).id}], "key_name": KEY}

    # --- networks ---
    def networks(self) -> str:
        """The shared network, the external network and the router that joins them."""
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
            "A host's part of the network service does not count as alive",
            lambda: explain_failure(self._cloud, "network-host"),
        )

    def _network(self, name: str, **kind: bool) -> Any:  # noqa: ANN401 - openstacksdk's types depend on the service's version
        network = self._seed.admin.network
        return next(iter(network.networks(name=name, **kind)), None) or network.create_network(
            name=name, **kind
        )

    def _subnet(self, network: Any, **facts: object) -> Any:  # noqa: ANN401 - openstacksdk's types depend on the service's version
        service = self._seed.admin.network
        found = next(iter(service.subnets(network_id=network.id)), None)
        return found or service.create_subnet(
            name=network.name, network_id=network.id, ip_version=4, **facts
        )

    def _join(self, public: Any, private: Any, inside: Any) -> None:  # noqa: ANN401 - openstacksdk's types depend on the service's version
        service = self._seed.admin.network
        router = next(iter(service.routers(name=ROUTER)), None) or service.create_router(
            name=ROUTER, external_gateway_info={"network_id": public.id}
        )
        if not list(service.ports(device_id=router.id, network_id=private.id)):
            service.add_interface_to_router(router, subnet=inside.id)

    # --- who may come in ---
    def access(self) -> str:
        """demo's key pair, and the rules that let ssh and ping through to demo's guests."""
        if not self._cloud.has_networks:
            return WITHOUT
        self._key_pair()
        service = self._seed.demo.network
        mine = self._seed.demo.session.get_project_id()
        group = next(iter(service.security_groups(name="default", project_id=mine)))
        there = {
            (rule.protocol, rule.port_range_min)
            for rule in service.security_group_rules(
                security_group_id=group.id, direction="ingress", ether_type="IPv4"
            )
        }
        for rule in OPEN:
            if (rule["protocol"], rule.get("port_range_min")) not in there:
                service.create_security_group_rule(
                    security_group_id=group.id, direction="ingress", ether_type="IPv4", **rule
                )
        return f"{self.key}; ssh and ping may come in"

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
        found = compute.find_keypair(KEY, ignore_missing=True)
        if found is not None and found.public_key.strip() == text:
            return
        if found is not None:
            compute.delete_keypair(found)
        compute.create_keypair(name=KEY, public_key=text, key_type="ssh")

    # --- in ---
    def login(self) -> str:
        """A floating address for the first server; waits until ssh answers there, if there is a
        guest to answer."""
        if not self._cloud.has_networks:
            return WITHOUT
        ports = list(self._seed.demo.network.ports(device_id=self._seed.first().id))
        if not ports:
            return PORTLESS
        address = self._floating(ports[0].id)
        if not self._cloud.has_guests:
            return f"{address}, where nobody answers: {PAPER}"
        ssh = ["ssh", "-i", str(self.key), *SSH, f"root@{address}"]
        last: list[str] = []

        def answers() -> bool:
            done = subprocess.run(
                [*ssh[:-1], *QUICK, ssh[-1], "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            last[:] = [done.stderr.strip()[-300:]]
            return done.returncode == 0

        wait(
            answers,
            120,
            f"ssh to {address} does not answer",
            lambda: "\n".join(
                [
                    f"It said: {last}",
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
        for found in service.ips(port_id=port):
            return str(found.floating_ip_address)
        public = self._network(PUBLIC, is_router_external=True)
        return str(
            service.create_ip(floating_network_id=public.id, port_id=port).floating_ip_address
        )
