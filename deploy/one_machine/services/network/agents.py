# SPDX-License-Identifier: Apache-2.0
"""/v2.0/agents for admins, and /v2.0/network-ip-availabilities/{key}."""

import json
import uuid
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import falcon
from sqlalchemy import func, select

from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.listing import values_of
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.fabric import Fabric
from deploy.one_machine.services.network.faults import fault
from deploy.one_machine.services.network.resource import NOT_FILTERS
from deploy.one_machine.services.resource import Body, Handler
from deploy.one_machine.services.schemas import TRUTHS
from deploy.one_machine.services.web import answer

AGENT_TYPE, BINARY = "Linux bridge agent", "kilonova-network-host"
#: The namespace that makes a constant id of an agent from the host's name.
AGENT_NAMESPACE = uuid.UUID("8c1d6a0e-6f0f-4f5e-9a3e-3f0b6b0f6b55")


class NetworkAgents(Handler[Fabric]):
    """GET /v2.0/agents: the network agents of all hosts, for admins."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        req.context.caller.require_admin("(rule:get_agent)")
        rows = self._service.database.rows(select(schema.hosts).order_by(schema.hosts.c.name))
        agents = [self._show(row) for row in rows]
        for name in req.params.keys() - set(NOT_FILTERS):
            wanted = [TRUTHS.get(value.lower(), value) for value in values_of(req.params, name)]
            agents = [agent for agent in agents if agent.get(name) in wanted]
        answer(resp, {"agents": agents})

    def _show(self, row: DbRow) -> Body:
        silence = self._service.hosts.silence(row.name)
        last_contact = datetime.now(UTC) - timedelta(seconds=silence or 0)
        created = row.created_at.replace("T", " ").rstrip("Z")
        return {
            "id": str(uuid.uuid5(AGENT_NAMESPACE, row.name)),
            "agent_type": AGENT_TYPE,
            "binary": BINARY,
            "host": row.name,
            "topic": "N/A",
            "availability_zone": "nova",
            "alive": self._service.hosts.is_alive(row.name),
            "admin_state_up": True,
            "created_at": created,
            "started_at": created,
            "description": None,
            "heartbeat_timestamp": last_contact.strftime("%Y-%m-%d %H:%M:%S"),
            "resources_synced": None,
            "configurations": {
                "tunneling_ip": row.tunnel_address,
                "external_gateway": row.external_gateway,
            },
        }


class IpAvailability(Handler[Fabric]):
    """GET /v2.0/network-ip-availabilities/{key}: numbers of all and of used addresses."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        req.context.caller.require_admin("(rule:get_network_ip_availability)")
        networks, subnets, addresses = schema.networks, schema.subnets, schema.addresses
        used = select(func.count()).where(addresses.c.subnet_id == subnets.c.id).scalar_subquery()
        query = select(subnets, used.label("used")).where(subnets.c.network_id == key)
        with self._service.database.read() as connection:
            row = connection.execute(select(networks).where(networks.c.id == key)).first()
            if row is None:
                raise fault("NetworkNotFound", id=key)
            parts = [
                _availability(subnet) for subnet in connection.execute(query.order_by(subnets.c.id))
            ]
        body = {
            "network_id": row.id,
            "network_name": row.name,
            "project_id": row.project_id,
            "tenant_id": row.project_id,
            "subnet_ip_availability": parts,
            "used_ips": sum(part["used_ips"] for part in parts),
            "total_ips": sum(part["total_ips"] for part in parts),
        }
        # An IPv6 subnet can have more addresses than the largest integer of orjson.
        resp.text = json.dumps({"network_ip_availability": body})


def _availability(subnet: DbRow) -> Body:
    return {
        "subnet_id": subnet.id,
        "subnet_name": subnet.name,
        "cidr": subnet.cidr,
        "ip_version": subnet.ip_version,
        "used_ips": subnet.used,
        "total_ips": _size(subnet),
    }


def _size(subnet: DbRow) -> int:
    return sum(
        int(ip_address(pool["end"])) - int(ip_address(pool["start"])) + 1
        for pool in subnet.allocation_pools
    )
