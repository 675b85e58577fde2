# SPDX-License-Identifier: Apache-2.0
"""A network service in memory, with the methods of the network client that the API uses.

Like the real one it shows a token only what is its project's or shared, and admins everything. A
test puts networks, ports and groups into it with ``add_network`` and the like; ``down`` makes it
silent, ``asked`` counts questions, and ``limits`` says how many security groups, rules and floating
IPs there may be.
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
_OF_LISTS = {
    "fixed_ips": lambda port, text: (
        text.partition("=")[2] in [ip["ip_address"] for ip in port["fixed_ips"]]
    )
}


class Networks:
    """``projects``: token -> project, None for one that sees all."""

    def __init__(self, projects: dict[str, str | None]) -> None:
        self.projects = projects
        self.down, self.there, self.limit = False, True, -1
        self.asked: Counter[str] = Counter()
        self.networks_by_id: dict[str, JSON] = {}
        self.subnets_by_id: dict[str, JSON] = {}
        self.ports_by_id: dict[str, JSON] = {}
        self.qos_policies: dict[str, JSON] = {}
        self.groups: list[JSON] = []
        self.floating_ips: list[JSON] = []
        self.routed: set[tuple[str, str]] = set()
        self.limits: dict[str, int] = {}

    # --- what a test puts in ---
    def add_network(
        self,
        name: str,
        project_id: str,
        cidr: str | None = "10.0.0.0/24",
        *,
        shared: bool = False,
        external: bool = False,
    ) -> str:
        """A network with one subnet; without a cidr none."""
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
        self, network_id: str, project_id: str, address: str | None = None, **more: Any
    ) -> str:
        """A port with one address; with "" none."""
        [subnet] = [
            one for one in self.subnets_by_id.values() if one["network_id"] == network_id
        ] or [None]
        fixed = (
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
            "fixed_ips": fixed,
            "status": "DOWN",
            "security_groups": [],
            **more,
        }
        return port_id

    def add_group(self, name: str, project_id: str, *rules: JSON) -> str:
        """A security group."""
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
        """A QoS policy with these rules."""
        policy_id = ids.new()
        self.qos_policies[policy_id] = {
            "id": policy_id,
            "project_id": project_id,
            "rules": [{"id": ids.new(), **rule} for rule in rules],
        }
        return policy_id

    def add_router(self, external: str, inside: str) -> None:
        """A way from an external network into another one."""
        self.routed.add((external, inside))

    # --- what the API asks ---
    def has_service(self) -> bool:
        """As the client's."""
        return self.there

    def networks(self, token: str, project_id: str, ids: Sequence[str] = ()) -> list[JSON]:
        """As the client's."""
        seen = self._seen("networks", token, self.networks_by_id.values(), shared=True)
        if ids:
            return [one for one in seen if one["id"] in ids]
        return [one for one in seen if one["shared"] or one["project_id"] == project_id]

    def subnets(self, token: str, network_ids: Sequence[str]) -> list[JSON]:
        """As the client's."""
        visible = {
            one["id"]
            for one in self._seen("networks", token, self.networks_by_id.values(), shared=True)
        }
        return [
            one
            for one in self.subnets_by_id.values()
            if one["network_id"] in visible.intersection(network_ids)
        ]

    def ports(self, token: str, **filters: Any) -> list[JSON]:
        """As the client's."""
        return [
            port
            for port in self._seen("ports", token, self.ports_by_id.values())
            if all(
                self._fits(port, name, value) for name, value in filters.items() if name != "fields"
            )
        ]

    def _fits(self, port: JSON, name: str, value: Any) -> bool:
        if name in _OF_LISTS:
            return bool(_OF_LISTS[name](port, value))
        return port[name] in value if isinstance(value, list) else bool(port[name] == value)

    def port(self, token: str, port_id: str) -> JSON:
        """As the client's."""
        found = self.ports(token, id=[port_id])
        if not found:
            raise errors.NotFound(f"The network service says: Port {port_id} could not be found.")
        return found[0]

    def ports_left(self, token: str, project_id: str) -> int:
        """As the client's."""
        used = [
            port
            for port in self._seen("quotas", token, self.ports_by_id.values())
            if port["project_id"] == project_id
        ]
        return -1 if self.limit < 0 else max(0, self.limit - len(used))

    def security_groups(self, token: str, project_id: str, whole: bool = False) -> list[JSON]:
        """As the client's."""
        return [
            group if whole else {"id": group["id"], "name": group["name"]}
            for group in self._seen("groups", token, self.groups)
            if group["project_id"] == project_id
        ]

    def interfaces(self, token: str, server_id: str) -> list[Interface]:
        """As the client's."""
        floating: dict[str, dict[str, list[str]]] = {}
        for one in self.floating_ips:
            floating.setdefault(one["port_id"], {}).setdefault(one["fixed_ip_address"], []).append(
                one["floating_ip_address"]
            )
        groups = {group["id"]: group["name"] for group in self.groups}
        return [
            interface_of(
                port,
                self.networks_by_id,
                self.subnets_by_id,
                floating=floating.get(port["id"]),
                groups=groups,
            )
            for port in self.ports(token, device_id=server_id)
        ]

    # --- what users change through the API ---
    def records(self, token: str, noun: str, **filters: Any) -> list[JSON]:
        """As the client's."""
        return [
            row
            for row in self._of(noun, token)
            if all(self._fits(row, *one) for one in filters.items())
        ]

    def record(self, token: str, noun: str, record_id: str) -> JSON:
        """As the client's."""
        found = self.records(token, noun, id=record_id)
        if not found:
            raise errors.NotFound(
                f"The network service says: {noun} {record_id} could not be found."
            )
        return found[0]

    def create(self, token: str, noun: str, values: JSON) -> JSON:
        """As the client's."""
        made = {"id": ids.new(), "project_id": self.projects[token] or "admins", **values}
        if len(self._of(noun, token)) >= self.limits.get(noun, 99):
            raise errors.Forbidden("The network service says: Quota exceeded for resources.")
        if noun == "security-groups":
            self._check_name(made["name"])
            self.groups.append({**made, "security_group_rules": []})
        elif noun == "security-group-rules":
            made = {
                "protocol": None,
                "port_range_min": None,
                "port_range_max": None,
                "remote_ip_prefix": None,
                "remote_group_id": None,
                **made,
            }
            rules = self.record(token, "security-groups", made["security_group_id"])[
                "security_group_rules"
            ]
            if any({**made, "id": rule["id"]} == rule for rule in rules):
                raise errors.Conflict(
                    "The network service says: Security group rule already exists."
                )
            rules.append(made)
        else:
            assert noun == "floatingips"
            network = self.record(token, "networks", made["floating_network_id"])
            made |= {
                "floating_ip_address": self._free(network["subnets"][0]),
                "port_id": None,
                "fixed_ip_address": None,
            }
            self.floating_ips.append(made)
        return self.record(token, noun, made["id"])

    def update(self, token: str, noun: str, record_id: str, values: JSON) -> JSON:
        """As the client's."""
        row = self.record(token, noun, record_id)
        if noun == "security-groups":
            self._check_name(values["name"])
        elif noun == "floatingips":
            values = {"fixed_ip_address": None, **values}
            if values["port_id"]:
                self._check_way(
                    self.port(token, values["port_id"]), row, values["fixed_ip_address"]
                )
        else:
            assert noun == "ports"
            values = {
                "fixed_ips": [
                    {"ip_address": self._free(one["subnet_id"]), **one}
                    if "ip_address" not in one
                    else one
                    for one in values["fixed_ips"]
                ]
            }
        row.update(values)
        return row

    def delete(self, token: str, noun: str, record_id: str) -> None:
        """As the client's."""
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

    def _of(self, noun: str, token: str) -> list[JSON]:
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
        return self._seen(noun, token, rows[noun], shared=noun == "networks")

    def _check_name(self, name: str) -> None:
        if name == "default":
            raise errors.Conflict(
                "The network service says: Default security group already exists."
            )

    def _free(self, subnet_id: str) -> str:
        """An address of the subnet that nobody has."""
        subnet = self.subnets_by_id[subnet_id]
        taken = {subnet["gateway_ip"], *(one["floating_ip_address"] for one in self.floating_ips)}
        taken |= {
            fixed["ip_address"] for port in self.ports_by_id.values() for fixed in port["fixed_ips"]
        }
        found = next(
            (
                str(one)
                for one in ipaddress.ip_network(subnet["cidr"]).hosts()
                if str(one) not in taken
            ),
            None,
        )
        if found is None:
            raise errors.Conflict("The network service says: No more IP addresses available.")
        return found

    def _check_way(self, port: JSON, floating: JSON, fixed: str) -> None:
        """Can this floating address lead to the port's address?"""
        if fixed not in [one["ip_address"] for one in port["fixed_ips"]]:
            raise errors.BadRequest(
                f"The network service says: Port {port['id']} does not have fixed ip {fixed}."
            )
        if (floating["floating_network_id"], port["network_id"]) not in self.routed:
            raise errors.NotFound("The network service says: External network is not reachable.")
        if any(
            one["port_id"] == port["id"]
            and one["fixed_ip_address"] == fixed
            and one is not floating
            for one in self.floating_ips
        ):
            raise errors.Conflict(
                "The network service says: That fixed IP already has a floating IP."
            )

    def _seen(self, noun: str, token: str, rows: Any, shared: bool = False) -> list[JSON]:
        self.asked[noun] += 1
        if self.down:
            raise errors.Unavailable("The network service does not answer; try again later.")
        project = self.projects[token]
        return [
            row
            for row in rows
            if project in (None, row["project_id"])
            or (shared and (row["shared"] or row["router:external"]))
        ]
