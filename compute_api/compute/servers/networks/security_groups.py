# SPDX-License-Identifier: Apache-2.0
"""The security groups of a server: shown as the network service has them, added and removed by
actions.

A group applies to every port of the server. The conductor changes the ports."""

from __future__ import annotations

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.rows import ServerRecord
from compute_api.compute.request.request import Request
from compute_api.compute.servers.networks import networks as server_networks
from compute_api.compute.servers.prepared_action import PreparedAction
from compute_api.compute.views import security_groups as view


def of_server(request: Request, server: ServerRecord) -> JsonObject:
    """GET /servers/{id}/os-security-groups"""
    networks, token = request.networks, request.context.token
    if networks is None:
        return {"security_groups": []}
    used = {
        group
        for port in networks.ports(token, device_id=server.id)
        for group in port["security_groups"]
    }
    if not used:
        return {"security_groups": []}
    known = networks.security_groups(token, server.project_id, whole=True)
    return {"security_groups": [view.group(group, known) for group in known if group["id"] in used]}


def add(request: Request, server: ServerRecord, given: JsonObject) -> PreparedAction:
    """addSecurityGroup"""
    return PreparedAction(_named(request, server, given["name"]))


def remove(request: Request, server: ServerRecord, given: JsonObject) -> PreparedAction:
    """removeSecurityGroup"""
    args = _named(request, server, given["name"])
    networks = request.networks
    assert networks is not None
    ports = networks.ports(request.context.token, device_id=server.id)
    if not any(args["group"] in port["security_groups"] for port in ports):
        raise errors.NotFound(
            f"Security group {args['name']} is not associated with server {server.id}."
        )
    return PreparedAction(args)


def _named(request: Request, server: ServerRecord, name: str) -> JsonObject:
    """The group that the name or id means in the server's project."""
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
            f"Server {server.id} has no port that a security group could apply to; attach an "
            "interface first."
        )
    return {"group": group["id"], "name": group["name"]}
