# SPDX-License-Identifier: Apache-2.0
"""/v2.0/agents: the hosts' parts as agents, for admins to see which are alive;
/v2.0/network-ip-availabilities."""

import uuid
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import falcon
from sqlalchemy import func, select

from deploy.standalone.database import DbRow
from deploy.standalone.listing import values_of
from deploy.standalone.network import schema
from deploy.standalone.network.fabric import Fabric
from deploy.standalone.network.faults import fault
from deploy.standalone.network.resource import NOT_FILTERS
from deploy.standalone.resource import Body
from deploy.standalone.schemas import TRUTHS
from deploy.standalone.web import answer

AGENT_TYPE, BINARY = "Linux bridge agent", "kilonova-network-host"
#: Makes the id of an agent from its host's name, for ever the same.
AGENT_NAMESPACE = uuid.UUID("8c1d6a0e-6f0f-4f5e-9a3e-3f0b6b0f6b55")


class NetworkAgents:
    """GET /v2.0/agents and GET /v2.0/agents/{key}."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        found = self._all(req)
        for name in req.params.keys() - set(NOT_FILTERS):
            wanted = [TRUTHS.get(value.lower(), value) for value in values_of(req.params, name)]
            found = [agent for agent in found if agent.get(name) in wanted]
        answer(resp, {"agents": found})

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        found = next((agent for agent in self._all(req) if agent["id"] == key), None)
        if found is None:
            raise fault("AgentNotFound", id=key)
        answer(resp, {"agent": found})

    def _all(self, req: falcon.Request) -> list[Body]:
        req.context.caller.require_admin("(rule:get_agent)")
        with self._fabric.database.read() as connection:
            rows = connection.execute(select(schema.hosts).order_by(schema.hosts.c.name)).all()
        return [self._show(row) for row in rows]

    def _show(self, row: DbRow) -> Body:
        silence = self._fabric.hosts.silence(row.name)
        heard = datetime.now(UTC) - timedelta(seconds=silence or 0)
        created = row.created_at.replace("T", " ").rstrip("Z")
        return {
            "id": str(uuid.uuid5(AGENT_NAMESPACE, row.name)),
            "agent_type": AGENT_TYPE,
            "binary": BINARY,
            "host": row.name,
            "topic": "N/A",
            "availability_zone": "nova",
            "alive": self._fabric.hosts.is_alive(row.name),
            "admin_state_up": True,
            "created_at": created,
            "started_at": created,
            "description": None,
            "heartbeat_timestamp": heard.strftime("%Y-%m-%d %H:%M:%S"),
            "resources_synced": None,
            "configurations": {
                "tunneling_ip": row.tunnel_address,
                "external_gateway": row.external_gateway,
            },
        }


class IpAvailabilities:
    """GET /v2.0/network-ip-availabilities and .../{key}: how many addresses there are, and how many
    are held."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(resp, {"network_ip_availabilities": self._all(req)})

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        found = next((one for one in self._all(req) if one["network_id"] == key), None)
        if found is None:
            raise fault("NetworkNotFound", id=key)
        answer(resp, {"network_ip_availability": found})

    def _all(self, req: falcon.Request) -> list[Body]:
        req.context.caller.require_admin("(rule:get_network_ip_availability)")
        held = schema.addresses.c
        with self._fabric.database.read() as connection:
            networks = connection.execute(
                select(schema.networks).order_by(schema.networks.c.id)
            ).all()
            subnets = connection.execute(select(schema.subnets).order_by(schema.subnets.c.id)).all()
            used: dict[str, int] = dict(
                connection.execute(
                    select(held.subnet_id, func.count()).group_by(held.subnet_id)
                ).all()
            )
        found = []
        for network in networks:
            inside = [
                {
                    "subnet_id": one.id,
                    "subnet_name": one.name,
                    "cidr": one.cidr,
                    "ip_version": one.ip_version,
                    "used_ips": used.get(one.id, 0),
                    "total_ips": _size(one),
                }
                for one in subnets
                if one.network_id == network.id
            ]
            found.append(
                {
                    "network_id": network.id,
                    "network_name": network.name,
                    "project_id": network.project_id,
                    "tenant_id": network.project_id,
                    "subnet_ip_availability": inside,
                    "used_ips": sum(one["used_ips"] for one in inside),
                    "total_ips": sum(one["total_ips"] for one in inside),
                }
            )
        return found


def _size(subnet: DbRow) -> int:
    return sum(
        int(ip_address(pool["end"])) - int(ip_address(pool["start"])) + 1
        for pool in subnet.allocation_pools
    )
