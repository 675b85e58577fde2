# SPDX-License-Identifier: Apache-2.0
"""Diagnostics of a running guest, and the password that a guest has published."""

from __future__ import annotations

from common.domain import errors, states
from common.domain.json_types import JsonObject
from common.store.rows import ServerRecord
from common.store.servers import servers
from compute_api.compute.request.host_queries import query_host
from compute_api.compute.request.request import Request
from compute_api.compute.views.servers import diagnostics as view

_DIAGNOSTICS = next(row for row in states.ACTIONS if row.query == "diagnostics")


def show(request: Request, server: ServerRecord) -> JsonObject:
    """GET …/diagnostics: only a guest that runs has any."""
    if server.power_state != states.RUNNING:
        raise errors.WrongState(
            "get_diagnostics", server.id, "power_state", str(server.power_state)
        )
    assert _DIAGNOSTICS.query is not None
    found = query_host(request, server, _DIAGNOSTICS.query, {"server": server.id})
    return view.diagnostics({**_known(server), **found}, request.version)


def _known(server: ServerRecord) -> JsonObject:
    """What is never null in the standard shape, for a host that leaves it out: the guest runs,
    there is one driver."""
    return {"state": "running", "driver": "libvirt", "config_drive": bool(server.config_drive)}


def password(request: Request, server: ServerRecord) -> JsonObject:
    """GET …/os-server-password: what the guest posted to the metadata service, encrypted by its
    owner's public key."""
    return {"password": server.password or ""}


def clear_password(request: Request, server: ServerRecord) -> None:
    """DELETE …/os-server-password: forgotten here, so that the guest can post another; the guest
    itself keeps it."""
    request.write(servers.update, server.id, {"password": None})
