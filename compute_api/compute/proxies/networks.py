# SPDX-License-Identifier: Apache-2.0
"""/os-networks and /os-tenant-networks, until 2.35: the networks that the caller may use, by id and
name."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from compute_api.compute.request.request import Request
from compute_api.compute.servers.networks import network_records
from compute_api.compute.servers.networks.network_records import NETWORKS
from compute_api.compute.views.proxies import networks as view


def index(request: Request) -> JsonObject:
    """GET /os-networks"""
    return {"networks": [view.network(one) for one in _usable(request)]}


def show(request: Request, network_id: str) -> JsonObject:
    """GET /os-networks/{id}"""
    return {"network": view.network(network_records.one(request, NETWORKS, network_id))}


def tenant_index(request: Request) -> JsonObject:
    """GET /os-tenant-networks"""
    return {"networks": [view.tenant_network(one) for one in _usable(request)]}


def tenant_show(request: Request, network_id: str) -> JsonObject:
    """GET /os-tenant-networks/{id}"""
    return {"network": view.tenant_network(network_records.one(request, NETWORKS, network_id))}


def _usable(request: Request) -> list[JsonObject]:
    """All that the caller's token sees in the network service, external ones too."""
    networks = request.networks
    return [] if networks is None else networks.records(request.context.token, NETWORKS)
