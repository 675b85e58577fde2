# SPDX-License-Identifier: Apache-2.0
"""/servers/{id}/shares: shares of the shared file system service that a server has, one more or
less of them.

A share is looked at with the caller's token before anything is accepted. Attaching and detaching
are actions; a second one waits until the first has ended, and both are answered at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.clients.shares import Share
from common.domain import errors, states
from common.domain.json_types import JsonObject
from common.store.rows import ServerRecord
from common.store.servers import shares
from compute_api.compute.request import action_waits
from compute_api.compute.request.request import Request
from compute_api.compute.views.servers import shares as view

ATTACH, DETACH = states.row("attach_share"), states.row("detach_share")
PROTOCOLS = ("NFS",)
AVAILABLE = "available"


def index(request: Request, server: ServerRecord) -> JsonObject:
    """GET …/shares"""
    return {"shares": [view.of(one, server) for one in request.read(shares.list_of, server.id)]}


def show(request: Request, server: ServerRecord, share_id: str) -> JsonObject:
    """GET …/shares/{share_id}"""
    return {
        "share": view.of(request.read(shares.show, server.id, share_id), server, request.is_admin)
    }


def attach(request: Request, server: ServerRecord) -> JsonObject:
    """POST …/shares"""
    given = request.body["share"]
    request.check(ATTACH, server, waits=True)
    share = _usable(request, given["share_id"])
    wanted = {
        "share_id": share.id,
        "tag": given.get("tag", share.id),
        "protocol": share.protocol,
        "export_location": share.export_location,
    }
    _in_turn(
        request, server, partial(request.begin, shares.attach, ATTACH, server.id, share=wanted)
    )
    return {
        "share": view.of(request.read(shares.show, server.id, share.id), server, request.is_admin)
    }


def _usable(request: Request, share_id: str) -> Share:
    """The share, if a host could mount it."""
    service = request.services.shares
    if service is None or not service.has_service():
        raise errors.NotImplementedHere(
            "This cloud has no shared file system service, so servers cannot have shares."
        )
    try:
        share = service.share(request.context.token, share_id)
    except (errors.NotFound, errors.BadRequest) as problem:
        raise errors.NotFound(f"Share {share_id} could not be found.") from problem
    if share.status != AVAILABLE:
        raise errors.Conflict(
            f"Share {share.id} is in '{share.status}' instead of '{AVAILABLE}' status."
        )
    if not share.export_location:
        raise errors.Conflict(f"Share {share.id} export location is missing.")
    if share.protocol.upper() not in PROTOCOLS:
        raise errors.Conflict(f"Share protocol {share.protocol} is not supported.")
    return share


def detach(request: Request, server: ServerRecord, share_id: str) -> None:
    """DELETE …/shares/{share_id}"""
    request.check(DETACH, server, waits=True)
    _in_turn(
        request,
        server,
        partial(request.begin, shares.detach, DETACH, server.id, share_id=share_id),
    )


def _in_turn(request: Request, server: ServerRecord, begin: Callable[[], str]) -> None:
    """Begin when the action before has ended, if that is soon."""
    action_waits.begin_in_turn(request.services, server.id, begin)
    request.services.wakeup.wake()
