# SPDX-License-Identifier: Apache-2.0
"""Handlers of /os-networks and /os-tenant-networks (until 2.35): networks by id and name."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from compute_api.compute.request.request import Request
from compute_api.compute.servers.networks import network_records
from compute_api.compute.servers.networks.network_records import NETWORKS
from compute_api.compute.views.proxies import networks as view


def index(request: Request) -> JsonObject:
    """Return all networks that the caller sees for GET /os-networks."""
    return {"networks": [view.network(network) for network in _list_networks(request)]}


def show(request: Request, network_id: str) -> JsonObject:
    """Return one network for GET /os-networks/{id}."""
    return {"network": view.network(network_records.one(request, NETWORKS, network_id))}


def tenant_index(request: Request) -> JsonObject:
    """Return all networks that the caller sees for GET /os-tenant-networks."""
    return {"networks": [view.tenant_network(network) for network in _list_networks(request)]}


def tenant_show(request: Request, network_id: str) -> JsonObject:
    """Return one network for GET /os-tenant-networks/{id}."""
    return {"network": view.tenant_network(network_records.one(request, NETWORKS, network_id))}


def _list_networks(request: Request) -> list[JsonObject]:
    """Return all networks that are visible to the caller, including external networks.

    Without a network service the list is empty.
    """
    networks = request.networks
    return [] if networks is None else networks.records(request.context.token, NETWORKS)
