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
    """Return the diagnostics of a running guest for GET /servers/{id}/diagnostics.

    Raises:
        WrongState: The guest does not run.
        Problem: As in ``query_host``, for example HostDown.
    """
    if server.power_state != states.RUNNING:
        raise errors.WrongState(
            "get_diagnostics", server.id, "power_state", str(server.power_state)
        )
    assert _DIAGNOSTICS.query is not None
    fields = query_host(request, server, _DIAGNOSTICS.query, {"server": server.id})
    return view.diagnostics({**_list_defaults(server), **fields}, request.version)


def _list_defaults(server: ServerRecord) -> JsonObject:
    """Return values for fields that a host may leave out and that must not be null since 2.48."""
    return {"state": "running", "driver": "libvirt", "config_drive": bool(server.config_drive)}


def password(request: Request, server: ServerRecord) -> JsonObject:
    """Return the password that the guest published, for GET /servers/{id}/os-server-password.

    The guest encrypts the password with the owner's public key and posts it to the metadata
    service. Without a published password the text is empty.
    """
    return {"password": server.password or ""}


def clear_password(request: Request, server: ServerRecord) -> None:
    """Delete the published password for DELETE /servers/{id}/os-server-password.

    The password in the guest stays unchanged. The guest can publish a new password.
    """
    request.write(servers.update, server.id, {"password": None})
