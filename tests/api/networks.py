# SPDX-License-Identifier: Apache-2.0
"""A network service in memory, with the methods of the network client that the API uses.

Like the real service it shows records of the token's project and shared records, and all records to
admins. A test adds networks, ports and groups with ``add_network`` and similar methods. ``down``
makes the service silent, ``queries`` counts the requests, ``limit`` is the port quota, and
``limits`` has the quotas of security groups, rules and floating IPs.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Any

from common.clients.network import interface_of
from common.domain import errors, ids
from common.domain.models import Interface

JSON = dict[str, Any]
_LIST_FILTERS = {
    "fixed_ips": lambda port, text: (
        text.partition("=")[2] in [ip["ip_address"] for ip in port["fixed_ips"]]
    )
}


class Networks:
    """A network service. ``projects`` maps a token to its project, or to None for all projects."""

    def __init__(self, projects: dict[str, str | None]) -> None:
        self.projects = projects
        self.down, self.has_endpoint, self.limit = False, True, -1
        self.queries: Counter[str] = Counter()
        self.networks_by_id: dict[str, JSON] = {}
        self.subnets_by_id: dict[str, JSON] = {}
        self.ports_by_id: dict[str, JSON] = {}
        self.qos_policies: dict[str, JSON] = {}
        self.groups: list[JSON] = []
        self.floating_ips: list[JSON] = []
        self.routes: set[tuple[str, str]] = set()
        self.limits: dict[str, int] = {}

    # --- records of a test ---
    def add_network(
        self,
        name: str,
        project_id: str,
        cidr: str | None = "10.0.0.0/24",
        *,
        shared: bool = False,
        external: bool = False,
    ) -> str:
        """Add a network with one subnet, or without a subnet if ``cidr`` is None. Return its id."""
        network_id, subnet_id = ids.new(), ids.new()
        self.networks_by_id[network_id] = {
            "id": network_id,
            "name": name,
            "project_id": project_id,
            "tenant_id": project_id,
            "shared": shared,
            "router:external": external,
            "subnets": [subnet_id] if cidr else [],
            "mtu": 1450,
            "admin_state_up": True,
            "port_security_enabled": True,
        }
        if cidr:
            self.subnets_by_id[subnet_id] = {
                "id": subnet_id,
                "network_id": network_id,
                "project_id": project_id,
                "cidr": cidr,
                "enable_dhcp": True,
                "gateway_ip": str(next(ipaddress.ip_network(cidr).hosts())),
                "dns_nameservers": [],
                "host_routes": [],
            }
        return network_id

    def add_port(
        self, network_id: str, project_id: str, address: str | None = None, **fields: Any
    ) -> str:
        """Add a port with one address, or without one if ``address`` is "". Return its id."""
        [subnet] = [
            subnet for subnet in self.subnets_by_id.values() if subnet["network_id"] == network_id
        ] or [None]
        fixed_ips = (
            []
            if subnet is None or address == ""
            else [
                {
                    "subnet_id": subnet["id"],
                    "ip_address": address
                    or str(ipaddress.ip_network(subnet["cidr"])[len(self.ports_by_id) + 10]),
                }
            ]
        )
        port_id = ids.new()
        self.ports_by_id[port_id] = {
            "id": port_id,
            "network_id": network_id,
            "project_id": project_id,
            "tenant_id": project_id,
            "device_id": "",
            "device_owner": "",
            "mac_address": f"fa:16:3e:00:00:{len(self.ports_by_id):02x}",
            "fixed_ips": fixed_ips,
            "status": "DOWN",
            "security_groups": [],
            **fields,
        }
        return port_id

    def add_group(self, name: str, project_id: str, *rules: JSON) -> str:
        """Add a security group with these rules, and return its id."""
        self.groups.append(
            {
                "id": ids.new(),
                "name": name,
                "project_id": project_id,
                "tenant_id": project_id,
                "description": f"the group {name}",
                "security_group_rules": list(rules),
            }
        )
        return str(self.groups[-1]["id"])

    def add_qos_policy(self, project_id: str, *rules: JSON) -> str:
        """Add a QoS policy with these rules, and return its id."""
        policy_id = ids.new()
        self.qos_policies[policy_id] = {
            "id": policy_id,
            "project_id": project_id,
            "rules": [{"id": ids.new(), **rule} for rule in rules],
        }
        return policy_id

    def add_router(self, external: str, inside: str) -> None:
        """Add a router between an external and an inner network."""
        self.routes.add((external, inside))

    # --- methods of the client: reads ---
    def has_service(self) -> bool:
        return self.has_endpoint

    def networks(self, token: str, project_id: str, ids: Sequence[str] = ()) -> list[JSON]:
        networks = self._list_visible("networks", token, self.networks_by_id.values(), shared=True)
        if ids:
            return [network for network in networks if network["id"] in ids]
        return [
            network
            for network in networks
            if network["shared"] or network["project_id"] == project_id
        ]

    def subnets(self, token: str, network_ids: Sequence[str]) -> list[JSON]:
        visible = {
            network["id"]
            for network in self._list_visible(
                "networks", token, self.networks_by_id.values(), shared=True
            )
        }
        return [
            network
            for network in self.subnets_by_id.values()
            if network["network_id"] in visible.intersection(network_ids)
        ]

    def ports(self, token: str, **filters: Any) -> list[JSON]:
        return [
            port
            for port in self._list_visible("ports", token, self.ports_by_id.values())
            if all(
                self._matches(port, name, value)
                for name, value in filters.items()
                if name != "fields"
            )
        ]

    def _matches(self, port: JSON, name: str, value: Any) -> bool:
        if name in _LIST_FILTERS:
            return bool(_LIST_FILTERS[name](port, value))
        return port[name] in value if isinstance(value, list) else bool(port[name] == value)

    def port(self, token: str, port_id: str) -> JSON:
        ports = self.ports(token, id=[port_id])
        if not ports:
            raise errors.NotFound(f"The network service says: Port {port_id} could not be found.")
        return ports[0]

    def ports_left(self, token: str, project_id: str) -> int:
        used = [
            port
            for port in self._list_visible("quotas", token, self.ports_by_id.values())
            if port["project_id"] == project_id
        ]
        return -1 if self.limit < 0 else max(0, self.limit - len(used))

    def security_groups(self, token: str, project_id: str, whole: bool = False) -> list[JSON]:
        return [
            group if whole else {"id": group["id"], "name": group["name"]}
            for group in self._list_visible("groups", token, self.groups)
            if group["project_id"] == project_id
        ]

    def interfaces(self, token: str, server_id: str) -> list[Interface]:
        addresses: dict[str, dict[str, list[str]]] = {}
        for floating_ip in self.floating_ips:
            addresses.setdefault(floating_ip["port_id"], {}).setdefault(
                floating_ip["fixed_ip_address"], []
            ).append(floating_ip["floating_ip_address"])
        groups = {group["id"]: group["name"] for group in self.groups}
        return [
            interface_of(
                port,
                self.networks_by_id,
                self.subnets_by_id,
                floating=addresses.get(port["id"]),
                groups=groups,
            )
            for port in self.ports(token, device_id=server_id)
        ]

    # --- methods of the client: changes by users ---
    def records(self, token: str, noun: str, **filters: Any) -> list[JSON]:
        return [
            row
            for row in self._rows_of(noun, token)
            if all(self._matches(row, *condition) for condition in filters.items())
        ]

    def record(self, token: str, noun: str, record_id: str) -> JSON:
        records = self.records(token, noun, id=record_id)
        if not records:
            raise errors.NotFound(
                f"The network service says: {noun} {record_id} could not be found."
            )
        return records[0]

    def create(self, token: str, noun: str, values: JSON) -> JSON:
        record = {"id": ids.new(), "project_id": self.projects[token] or "admins", **values}
        if len(self._rows_of(noun, token)) >= self.limits.get(noun, 99):
            raise errors.Forbidden("The network service says: Quota exceeded for resources.")
        if noun == "security-groups":
            self._check_name(record["name"])
            self.groups.append({**record, "security_group_rules": []})
        elif noun == "security-group-rules":
            record = {
                "protocol": None,
                "port_range_min": None,
                "port_range_max": None,
                "remote_ip_prefix": None,
                "remote_group_id": None,
                **record,
            }
            rules = self.record(token, "security-groups", record["security_group_id"])[
                "security_group_rules"
            ]
            if any({**record, "id": rule["id"]} == rule for rule in rules):
                raise errors.Conflict(
                    "The network service says: Security group rule already exists."
                )
            rules.append(record)
        else:
            assert noun == "floatingips"
            network = self.record(token, "networks", record["floating_network_id"])
            record |= {
                "floating_ip_address": self._find_free_address(network["subnets"][0]),
                "port_id": None,
                "fixed_ip_address": None,
            }
            self.floating_ips.append(record)
        return self.record(token, noun, record["id"])

    def update(self, token: str, noun: str, record_id: str, values: JSON) -> JSON:
        row = self.record(token, noun, record_id)
        if noun == "security-groups":
            self._check_name(values["name"])
        elif noun == "floatingips":
            values = {"fixed_ip_address": None, **values}
            if values["port_id"]:
                self._check_route(
                    self.port(token, values["port_id"]), row, values["fixed_ip_address"]
                )
        else:
            assert noun == "ports"
            values = {
                "fixed_ips": [
                    {"ip_address": self._find_free_address(fixed_ip["subnet_id"]), **fixed_ip}
                    if "ip_address" not in fixed_ip
                    else fixed_ip
                    for fixed_ip in values["fixed_ips"]
                ]
            }
        row.update(values)
        return row

    def delete(self, token: str, noun: str, record_id: str) -> None:
        row = self.record(token, noun, record_id)
        if any(record_id in port["security_groups"] for port in self.ports_by_id.values()):
            raise errors.Conflict(f"The network service says: Security Group {record_id} in use.")
        holder = {"security-groups": self.groups, "floatingips": self.floating_ips}.get(noun)
        if holder is None:
            [holder] = [
                group["security_group_rules"]
                for group in self.groups
                if row in group["security_group_rules"]
            ]
        holder.remove(row)

    def _rows_of(self, noun: str, token: str) -> list[JSON]:
        rows = {
            "networks": self.networks_by_id.values(),
            "ports": self.ports_by_id.values(),
            "qos/policies": self.qos_policies.values(),
            "security-groups": self.groups,
            "floatingips": self.floating_ips,
            "security-group-rules": [
                rule for group in self.groups for rule in group["security_group_rules"]
            ],
        }
        return self._list_visible(noun, token, rows[noun], shared=noun == "networks")

    def _check_name(self, name: str) -> None:
        if name == "default":
            raise errors.Conflict(
                "The network service says: Default security group already exists."
            )

    def _find_free_address(self, subnet_id: str) -> str:
        """Return a free address of the subnet."""
        subnet = self.subnets_by_id[subnet_id]
        used = {
            subnet["gateway_ip"],
            *(candidate["floating_ip_address"] for candidate in self.floating_ips),
        }
        used |= {
            fixed["ip_address"] for port in self.ports_by_id.values() for fixed in port["fixed_ips"]
        }
        address = next(
            (
                str(candidate)
                for candidate in ipaddress.ip_network(subnet["cidr"]).hosts()
                if str(candidate) not in used
            ),
            None,
        )
        if address is None:
            raise errors.Conflict("The network service says: No more IP addresses available.")
        return address

    def _check_route(self, port: JSON, floating_ip: JSON, address: str) -> None:
        """Check that the floating IP can be associated with this address of the port."""
        if address not in [other["ip_address"] for other in port["fixed_ips"]]:
            raise errors.BadRequest(
                f"The network service says: Port {port['id']} does not have fixed ip {address}."
            )
        if (floating_ip["floating_network_id"], port["network_id"]) not in self.routes:
            raise errors.NotFound("The network service says: External network is not reachable.")
        if any(
            other["port_id"] == port["id"]
            and other["fixed_ip_address"] == address
            and other is not floating_ip
            for other in self.floating_ips
        ):
            raise errors.Conflict(
                "The network service says: That fixed IP already has a floating IP."
            )

    def _list_visible(self, kind: str, token: str, rows: Any, shared: bool = False) -> list[JSON]:
        self.queries[kind] += 1
        if self.down:
            raise errors.Unavailable("The network service does not answer; try again later.")
        project = self.projects[token]
        return [
            row
            for row in rows
            if project in (None, row["project_id"])
            or (shared and (row["shared"] or row["router:external"]))
        ]
