# SPDX-License-Identifier: Apache-2.0
"""A network service in memory, as the conductor uses it; see ``neighbours`` for what can go wrong,
and it can wire late. A port's active binding is the port's own binding:host_id, as everywhere; what
it is bound to besides stands in its "bindings"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.clients.network import interface_of
from common.domain import errors, ids
from common.domain.models import Interface
from conductor.engine.external_services import NetworkApi
from tests.workflows.neighbours import Neighbour, one

NETWORKS = {name: {"id": name, "name": f"net-{name}", "mtu": 1450} for name in ("n1", "n2")}
SUBNETS = {
    f"s-{name}": {
        "id": f"s-{name}",
        "cidr": "10.0.0.0/24",
        "gateway_ip": "10.0.0.1",
        "enable_dhcp": True,
        "dns_nameservers": [],
        "host_routes": [],
    }
    for name in NETWORKS
}


class Networks(Neighbour, interface=NetworkApi):
    """Implements ``conductor.engine.external_services.NetworkApi``."""

    def __init__(self) -> None:
        super().__init__("network service")
        self.held: dict[str, dict[str, Any]] = {}
        self.floating: dict[str, dict[str, list[str]]] = {}  # by port and fixed address
        self.refuses: str | None = None
        self.missing: errors.Unavailable | None = None  # what is said where no catalogue names it
        # calls that make ports are given up, and carried out when ``catch_up`` is called
        self.slow = False
        self.put_off: list[Sequence[dict[str, Any]]] = []
        self.wires_after = 0  # looks at a bound port before it is active
        self.cannot_bind: set[str] = set()
        self.hybrid: set[str] = set()  # hosts with Neutron's hybrid iptables firewall
        self.one_host_a_port = False  # it knows no second binding
        self.requests: dict[str, Any] | None = None  # the resource_request of new ports
        self.numbers = iter(range(10, 250))

    def _speak(self, method: str, about: str = "") -> None:
        super()._speak(method, about)
        if self.missing is not None:
            raise errors.Unavailable(self.missing.text)

    def ports(self, server: str) -> list[dict[str, Any]]:
        self._speak("ports", server)
        found = [port for port in self.held.values() if port["device_id"] == server]
        for port in found:
            self._wire(port)
        return self._answer([dict(port) for port in found])

    def port(self, port_id: str) -> dict[str, Any]:
        self._speak("port", port_id)
        return self._answer(dict(self._held(port_id)))

    def create(self, ports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        self._speak("create", one(port["network_id"] for port in ports))
        if self.refuses:
            raise errors.Conflict(self.refuses)
        if self.slow:
            self.put_off.append(ports)
            raise errors.NoAnswer("the network service is slow")
        made = []
        for wanted in ports:
            number = next(self.numbers)
            port = {
                "id": ids.new(),
                "mac_address": f"fa:16:3e:00:00:{number:02x}",
                "status": "DOWN",
                "looks": 0,
                "security_groups": ["default"],
                "fixed_ips": [
                    {"subnet_id": f"s-{wanted['network_id']}", "ip_address": f"10.0.0.{number}"}
                ],
                "bindings": [],
                "resource_request": self.requests,
                **wanted,
            }
            self._bind(port)
            self.held[port["id"]] = port
            made.append(dict(port))
        return self._answer(made)

    def update(self, port_id: str, values: dict[str, Any]) -> dict[str, Any]:
        self._speak("update", port_id)
        port = self._held(port_id)
        if values.get("binding:host_id", port.get("binding:host_id")) != port.get(
            "binding:host_id"
        ):
            port["bindings"] = []
        port.update(values)
        if "binding:host_id" in values:
            self._bind(port)
        return self._answer(dict(port))

    def delete(self, port_id: str) -> None:
        self._speak("delete", port_id)
        self.held.pop(port_id, None)
        self._answer(None)

    def bind_also(self, port: dict[str, Any], host: str) -> dict[str, Any] | None:
        self._speak("bind_also", port["id"])
        if self.one_host_a_port:
            return self._answer(None)
        held = self._held(port["id"])
        if host == held["binding:host_id"]:
            return self._answer(
                {
                    "host": host,
                    "vif_type": held["binding:vif_type"],
                    "vif_details": held["binding:vif_details"],
                    "status": "ACTIVE",
                }
            )
        if host in self.cannot_bind:
            return self._answer({"host": host, "vif_type": "binding_failed"})
        found = next((one for one in held["bindings"] if one["host"] == host), None)
        if found is None:
            found = {
                "host": host,
                **self._wiring(host),
                "status": "INACTIVE",
                "profile": port.get("binding:profile") or {},
            }
            held["bindings"] = [*held["bindings"], found]
        return self._answer(dict(found))

    def activate(self, port_id: str, host: str) -> None:
        self._speak("activate", port_id)
        port = self._held(port_id)
        if self.one_host_a_port and host != port["binding:host_id"]:
            port["binding:host_id"] = host
            self._bind(port)
        elif host != port["binding:host_id"]:
            found = next((one for one in port["bindings"] if one["host"] == host), None)
            if found is None:
                raise errors.NotFound(
                    f"Binding for port {port_id} for host {host} could not be found."
                )
            before = {
                "host": port["binding:host_id"],
                "vif_type": port["binding:vif_type"],
                "vif_details": port["binding:vif_details"],
                "status": "INACTIVE",
                "profile": port.get("binding:profile") or {},
            }
            port.update(
                {
                    "binding:host_id": host,
                    "binding:vif_type": found["vif_type"],
                    "binding:vif_details": found["vif_details"],
                    "binding:profile": found["profile"],
                    "status": "ACTIVE",
                    "bindings": [before, *(one for one in port["bindings"] if one is not found)],
                }
            )
        self._answer(None)

    def unbind_at(self, port_id: str, host: str) -> None:
        self._speak("unbind_at", port_id)
        if port_id in self.held:
            port = self.held[port_id]
            port["bindings"] = [one for one in port["bindings"] if one["host"] != host]
        self._answer(None)

    def names_guests(self) -> bool:
        self._speak("names_guests")
        return self._answer(True)

    def described(self, ports: Sequence[dict[str, Any]], floating: bool) -> list[Interface]:
        self._speak("described", one(port["id"] for port in ports))
        return self._answer(
            [
                interface_of(
                    port,
                    NETWORKS,
                    SUBNETS,
                    floating=self.floating.get(port["id"]) if floating else None,
                )
                for port in ports
            ]
        )

    def catch_up(self) -> None:
        """Carry out what was put off."""
        self.slow, late, self.put_off = False, self.put_off, []
        for ports in late:
            self.create(ports)

    def user_makes(self, network: str) -> str:
        """A port that belongs to a user."""
        made = self.create(
            [{"network_id": network, "device_id": "", "device_owner": "", "binding:host_id": ""}]
        )
        return str(made[0]["id"])

    def _held(self, port_id: str) -> dict[str, Any]:
        if port_id not in self.held:
            raise errors.NotFound(f"Port {port_id} could not be found.")
        return self.held[port_id]

    def _bind(self, port: dict[str, Any]) -> None:
        host = port.get("binding:host_id")
        wiring = self._wiring(host) if host else {"vif_type": "unbound", "vif_details": {}}
        port.update({f"binding:{name}": value for name, value in wiring.items()})
        port.update(looks=0, status="DOWN")
        self._wire(port, looked=0)

    def _wiring(self, host: str) -> dict[str, Any]:
        """The vif_type and vif_details of a port on this host."""
        if host in self.cannot_bind:
            return {"vif_type": "binding_failed", "vif_details": {}}
        if host in self.hybrid:
            details = {"ovs_hybrid_plug": True, "bridge_name": "br-int"}
            return {"vif_type": "ovs", "vif_details": details}
        return {"vif_type": "bridge", "vif_details": {}}

    def _wire(self, port: dict[str, Any], looked: int = 1) -> None:
        port["looks"] += looked
        if port["binding:vif_type"] in ("bridge", "ovs") and port["looks"] >= self.wires_after:
            port["status"] = "ACTIVE"
