# SPDX-License-Identifier: Apache-2.0
"""A network service in memory.

For the errors that a test can cause see ``service_doubles``. Ports can become active late, too.
The active binding of a port is in ``binding:host_id`` and its other fields, as in Neutron. The
inactive bindings are in ``bindings``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.clients.network import interface_of
from common.domain import errors, ids
from common.domain.models import Interface
from conductor.engine.external_services import NetworkApi
from tests.workflows.service_doubles import ServiceDouble, join_ids

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


class Networks(ServiceDouble, interface=NetworkApi):
    """Implement ``conductor.engine.external_services.NetworkApi`` in memory."""

    def __init__(self) -> None:
        super().__init__("network service")
        self.held: dict[str, dict[str, Any]] = {}
        # Port -> fixed address -> floating addresses.
        self.floating: dict[str, dict[str, list[str]]] = {}
        # Text of the 409 for each new port, or None to accept new ports.
        self.refuses: str | None = None
        # The error of each call while the catalogue lacks the service.
        self.missing: errors.Unavailable | None = None
        # True if calls that create ports time out, and take effect in ``catch_up``.
        self.slow = False
        self.late_creates: list[Sequence[dict[str, Any]]] = []
        # Reads of a bound port before the port is active.
        self.wires_after = 0
        # Hosts on which the binding of ports fails.
        self.cannot_bind: set[str] = set()
        # Hosts with Neutron's hybrid iptables firewall.
        self.hybrid: set[str] = set()
        # True if the service supports only one binding for each port.
        self.has_single_bindings = False
        # The resource_request of new ports.
        self.requests: dict[str, Any] | None = None
        self.numbers = iter(range(10, 250))

    def _speak(self, method: str, about: str = "") -> None:
        super()._speak(method, about)
        if self.missing is not None:
            raise errors.Unavailable(self.missing.text)

    def ports(self, server: str) -> list[dict[str, Any]]:
        self._speak("ports", server)
        ports = [port for port in self.held.values() if port["device_id"] == server]
        for port in ports:
            self._wire(port)
        return self._answer([dict(port) for port in ports])

    def port(self, port_id: str) -> dict[str, Any]:
        self._speak("port", port_id)
        return self._answer(dict(self._read_port(port_id)))

    def create(self, ports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        self._speak("create", join_ids(port["network_id"] for port in ports))
        if self.refuses:
            raise errors.Conflict(self.refuses)
        if self.slow:
            self.late_creates.append(ports)
            raise errors.NoAnswer("the network service is slow")
        new_ports = []
        for values in ports:
            number = next(self.numbers)
            port = {
                "id": ids.new(),
                "mac_address": f"fa:16:3e:00:00:{number:02x}",
                "status": "DOWN",
                "looks": 0,
                "security_groups": ["default"],
                "fixed_ips": [
                    {"subnet_id": f"s-{values['network_id']}", "ip_address": f"10.0.0.{number}"}
                ],
                "bindings": [],
                "resource_request": self.requests,
                **values,
            }
            self._bind(port)
            self.held[port["id"]] = port
            new_ports.append(dict(port))
        return self._answer(new_ports)

    def update(self, port_id: str, values: dict[str, Any]) -> dict[str, Any]:
        self._speak("update", port_id)
        port = self._read_port(port_id)
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
        if self.has_single_bindings:
            return self._answer(None)
        held = self._read_port(port["id"])
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
        binding = next((entry for entry in held["bindings"] if entry["host"] == host), None)
        if binding is None:
            binding = {
                "host": host,
                **self._wiring(host),
                "status": "INACTIVE",
                "profile": port.get("binding:profile") or {},
            }
            held["bindings"] = [*held["bindings"], binding]
        return self._answer(dict(binding))

    def activate(self, port_id: str, host: str) -> None:
        self._speak("activate", port_id)
        port = self._read_port(port_id)
        if self.has_single_bindings and host != port["binding:host_id"]:
            port["binding:host_id"] = host
            self._bind(port)
        elif host != port["binding:host_id"]:
            binding = next((entry for entry in port["bindings"] if entry["host"] == host), None)
            if binding is None:
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
                    "binding:vif_type": binding["vif_type"],
                    "binding:vif_details": binding["vif_details"],
                    "binding:profile": binding["profile"],
                    "status": "ACTIVE",
                    "bindings": [
                        before,
                        *(entry for entry in port["bindings"] if entry is not binding),
                    ],
                }
            )
        self._answer(None)

    def unbind_at(self, port_id: str, host: str) -> None:
        self._speak("unbind_at", port_id)
        if port_id in self.held:
            port = self.held[port_id]
            port["bindings"] = [entry for entry in port["bindings"] if entry["host"] != host]
        self._answer(None)

    def names_guests(self) -> bool:
        self._speak("names_guests")
        return self._answer(True)

    def described(self, ports: Sequence[dict[str, Any]], floating: bool) -> list[Interface]:
        self._speak("described", join_ids(port["id"] for port in ports))
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
        """Carry out the calls of ``create`` that timed out, and be fast again."""
        self.slow, late_creates, self.late_creates = False, self.late_creates, []
        for ports in late_creates:
            self.create(ports)

    def create_user_port(self, network: str) -> str:
        """Create a port that no server has, as a user does, and return its id."""
        ports = self.create(
            [{"network_id": network, "device_id": "", "device_owner": "", "binding:host_id": ""}]
        )
        return str(ports[0]["id"])

    def _read_port(self, port_id: str) -> dict[str, Any]:
        if port_id not in self.held:
            raise errors.NotFound(f"Port {port_id} could not be found.")
        return self.held[port_id]

    def _bind(self, port: dict[str, Any]) -> None:
        host = port.get("binding:host_id")
        wiring = self._wiring(host) if host else {"vif_type": "unbound", "vif_details": {}}
        port.update({f"binding:{name}": value for name, value in wiring.items()})
        port.update(looks=0, status="DOWN")
        self._wire(port, reads=0)

    def _wiring(self, host: str) -> dict[str, Any]:
        """Return the vif_type and vif_details of a port on this host."""
        if host in self.cannot_bind:
            return {"vif_type": "binding_failed", "vif_details": {}}
        if host in self.hybrid:
            details = {"ovs_hybrid_plug": True, "bridge_name": "br-int"}
            return {"vif_type": "ovs", "vif_details": details}
        return {"vif_type": "bridge", "vif_details": {}}

    def _wire(self, port: dict[str, Any], reads: int = 1) -> None:
        port["looks"] += reads
        if port["binding:vif_type"] in ("bridge", "ovs") and port["looks"] >= self.wires_after:
            port["status"] = "ACTIVE"
