# SPDX-License-Identifier: Apache-2.0
"""/os-floating-ips and /os-floating-ip-pools (until 2.35): proxies to the network service."""

from __future__ import annotations

from collections.abc import Sequence

from common.domain import errors
from common.domain.json_types import JsonObject
from compute_api.compute.request.dependencies import TenantNetworks
from compute_api.compute.request.request import Request
from compute_api.compute.servers.networks import network_records
from compute_api.compute.servers.networks.network_records import (
    FLOATING_IPS,
    NETWORKS,
    conflicts_as,
    list_floating_ips,
)
from compute_api.compute.views.proxies import floating_ips as view

#: Name of the pool for requests without a pool, if this pool exists.
DEFAULT_POOL = "nova"


def index(request: Request) -> JsonObject:
    """Return the project's floating IPs for GET /os-floating-ips.

    The list is empty without a network service, or if this service has no routers.
    """
    networks, token = request.networks, request.context.token
    if networks is None:
        return {"floating_ips": []}
    rows = list_floating_ips(networks, token, project_id=request.context.project_id)
    return {"floating_ips": _show_floating_ips(networks, token, rows)}


def show(request: Request, floating_ip_id: str) -> JsonObject:
    """Return one floating IP for GET /os-floating-ips/{id}.

    Raises:
        NotFound: The floating IP does not exist, or the cloud has no network service.
    """
    row = network_records.one(request, FLOATING_IPS, floating_ip_id)
    return {
        "floating_ip": _show_floating_ips(
            network_records.required(request), request.context.token, [row]
        )[0]
    }


def create(request: Request) -> JsonObject:
    """Allocate a floating IP for POST /os-floating-ips.

    Raises:
        NotFound: The pool does not exist, or has no free address.
        BadRequest: Several pools have the requested name, or the request names no pool and several
            pools can be the default.
        Forbidden: The network service does not allow this, for example because of its quota.
        NotImplementedHere: The cloud has no network service.
    """
    networks, token = network_records.required_to_make(request), request.context.token
    pool = _choose_pool(_list_pools(networks, token), (request.body or {}).get("pool"))
    # A conflict means that the pool has no free address.
    with conflicts_as(errors.NotFound):
        row = networks.create(token, FLOATING_IPS, {"floating_network_id": pool["id"]})
    return {"floating_ip": _show_floating_ips(networks, token, [row])[0]}


def delete(request: Request, floating_ip_id: str) -> None:
    """Release a floating IP for DELETE /os-floating-ips/{id}.

    Raises:
        NotFound: The floating IP does not exist, or the cloud has no network service.
    """
    row = network_records.one(request, FLOATING_IPS, floating_ip_id)
    network_records.required(request).delete(request.context.token, FLOATING_IPS, row["id"])


def pools(request: Request) -> JsonObject:
    """Return the names of all pools, which are the external networks (GET /os-floating-ip-pools).

    The list is empty without a network service.
    """
    networks = request.networks
    pool_networks = [] if networks is None else _list_pools(networks, request.context.token)
    return {"floating_ip_pools": [{"name": view.pool(network)} for network in pool_networks]}


def _list_pools(networks: TenantNetworks, token: str) -> list[JsonObject]:
    return networks.records(token, NETWORKS, **{"router:external": True})


def _choose_pool(pool_networks: Sequence[JsonObject], name: str | None) -> JsonObject:
    """Return the network of ``pool_networks`` with this id, or else with this name.

    Without a name this is the pool "nova", or else the network service's default, or else the only
    pool.

    Raises:
        NotFound: No pool matches.
        BadRequest: Several pools match.
    """
    matches = [network for network in pool_networks if name == network["id"]] or [
        network for network in pool_networks if network["name"] == (name or DEFAULT_POOL)
    ]
    if name is None and not matches:
        matches = [network for network in pool_networks if network.get("is_default")] or list(
            pool_networks
        )
    if not matches:
        raise errors.NotFound(
            "Floating IP pool not found."
            if name is None
            else f"Floating IP pool {name[:80]} not found; GET /os-floating-ip-pools lists all pools."
        )
    if len(matches) > 1:
        raise errors.BadRequest(
            f"There are several floating IP pools: {', '.join(network['id'] for network in matches)[:400]}; "
            "give the id of one as pool."
        )
    return matches[0]


def _show_floating_ips(
    networks: TenantNetworks, token: str, rows: Sequence[JsonObject]
) -> list[JsonObject]:
    """Return the bodies of the floating IPs in ``rows``, with names of pools and ids of servers."""
    pool_ids = sorted({row["floating_network_id"] for row in rows})
    port_ids = sorted({row["port_id"] for row in rows if row["port_id"]})
    names = (
        {network["id"]: view.pool(network) for network in networks.networks(token, "", pool_ids)}
        if pool_ids
        else {}
    )
    servers = (
        {port["id"]: port["device_id"] for port in networks.ports(token, id=port_ids)}
        if port_ids
        else {}
    )
    return [view.floating_ip(row, names, servers) for row in rows]
