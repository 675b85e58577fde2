# SPDX-License-Identifier: Apache-2.0
"""List the security groups of a server, and prepare the actions that add and remove groups.

The list comes from the network service. A group applies to every port of the server. The conductor
changes the ports.
"""

from __future__ import annotations

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.rows import ServerRecord
from compute_api.compute.request.request import Request
from compute_api.compute.servers.networks import networks as server_networks
from compute_api.compute.servers.prepared_action import PreparedAction
from compute_api.compute.views import security_groups as view


def of_server(request: Request, server: ServerRecord) -> JsonObject:
    """Return the response to GET /servers/{id}/os-security-groups.

    The response contains the security groups of the server's ports, with their ingress rules.
    Groups of other projects are left out. Without a network service the list is empty.
    """
    networks, token = request.networks, request.context.token
    if networks is None:
        return {"security_groups": []}
    used_ids = {
        group
        for port in networks.ports(token, device_id=server.id)
        for group in port["security_groups"]
    }
    if not used_ids:
        return {"security_groups": []}
    groups = networks.security_groups(token, server.project_id, whole=True)
    return {
        "security_groups": [
            view.group(group, groups) for group in groups if group["id"] in used_ids
        ]
    }


def add(request: Request, server: ServerRecord, body: JsonObject) -> PreparedAction:
    """Prepare the action addSecurityGroup, with the id and name of the group.

    Raises:
        NotFound: The group does not exist, the server has no port, or the cloud has no network
            service.
        Conflict: Several groups have the name.
    """
    return PreparedAction(_find_group(request, server, body["name"]))


def remove(request: Request, server: ServerRecord, body: JsonObject) -> PreparedAction:
    """Prepare the action removeSecurityGroup, with the id and name of the group.

    Raises:
        NotFound: The group does not exist, no port of the server has the group, or the cloud has no
            network service.
        Conflict: Several groups have the name.
    """
    args = _find_group(request, server, body["name"])
    networks = request.networks
    assert networks is not None
    ports = networks.ports(request.context.token, device_id=server.id)
    if not any(args["group"] in port["security_groups"] for port in ports):
        raise errors.NotFound(
            f"Security group {args['name']} is not associated with server {server.id}."
        )
    return PreparedAction(args)


def _find_group(request: Request, server: ServerRecord, name: str) -> JsonObject:
    """Find a group of the server's project by id or name, and return the action's arguments.

    Raises:
        NotFound: The group does not exist, the server has no port, or the cloud has no network
            service.
        Conflict: Several groups have the name.
    """
    networks = request.networks
    if networks is None:
        raise errors.NotFound(
            f"Security group {name} not found: this cloud has no network service."
        )
    group = server_networks.find_group(
        networks.security_groups(request.context.token, server.project_id), name, errors.NotFound
    )
    if server.interfaces in (None, "[]"):
        raise errors.NotFound(
            f"Server {server.id} has no port for a security group; attach an interface first."
        )
    return {"group": group["id"], "name": group["name"]}
