# SPDX-License-Identifier: Apache-2.0
"""GET /servers/{id}/ips: a server's addresses as they were last described, without a question to the network
service."""
from __future__ import annotations

from typing import Any

from common import errors
from compute_api.request import Request
from compute_api.views import addresses as view


def index(request: Request, server: Any) -> dict[str, Any]:
    """GET …/ips"""
    return {"addresses": view.grouped(server.interfaces)}


def show(request: Request, server: Any, network: str) -> dict[str, Any]:
    """GET …/ips/{network}"""
    found = view.grouped(server.interfaces)
    if network not in found:
        raise errors.NotFound(f"Network {network[:80]} is not one of the server's.")
    return {network: found[network]}
