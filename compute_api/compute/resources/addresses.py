# SPDX-License-Identifier: Apache-2.0
"""GET /servers/{id}/ips: a server's addresses from its record; the network service is not asked."""

from __future__ import annotations

from common import errors
from common.json_types import JsonObject
from common.store.rows import ServerRecord
from compute_api.compute.request import Request
from compute_api.compute.views import addresses as view


def index(request: Request, server: ServerRecord) -> JsonObject:
    """GET …/ips"""
    return {"addresses": view.grouped(server.interfaces)}


def show(request: Request, server: ServerRecord, network: str) -> JsonObject:
    """GET …/ips/{network}"""
    found = view.grouped(server.interfaces)
    if network not in found:
        raise errors.NotFound(f"Network {network[:80]} is not one of the server's.")
    return {network: found[network]}
