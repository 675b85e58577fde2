# SPDX-License-Identifier: Apache-2.0
"""Handlers of /servers/{id}/shares: list, show, attach and detach shares.

A share is first read with the caller's token from the shared file system service. Attaching and
detaching are actions. A second action waits until the first has ended. The response does not wait
for the action.
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
    """Return the shares of a server for GET /servers/{id}/shares."""
    return {"shares": [view.of(row, server) for row in request.read(shares.list_of, server.id)]}


def show(request: Request, server: ServerRecord, share_id: str) -> JsonObject:
    """Return a share of a server for GET /servers/{id}/shares/{share_id}.

    Raises:
        NotFound: The server does not have the share.
    """
    return {
        "share": view.of(request.read(shares.show, server.id, share_id), server, request.is_admin)
    }


def attach(request: Request, server: ServerRecord) -> JsonObject:
    """Begin to attach a share for POST /servers/{id}/shares, and return the new attachment.

    Raises:
        NotFound: The share does not exist for the caller.
        Conflict: Hosts cannot mount the share, the server's host does not support shares, the
            server has the share or the tag already, or its state does not allow the action.
        NotImplementedHere: The cloud has no shared file system service.
        Unavailable: The service does not answer.
    """
    body = request.body["share"]
    request.check(ATTACH, server, waits=True)
    share = _read_usable_share(request, body["share_id"])
    new_share = {
        "share_id": share.id,
        "tag": body.get("tag", share.id),
        "protocol": share.protocol,
        "export_location": share.export_location,
    }
    _begin_in_turn(
        request, server, partial(request.begin, shares.attach, ATTACH, server.id, share=new_share)
    )
    return {
        "share": view.of(request.read(shares.show, server.id, share.id), server, request.is_admin)
    }


def _read_usable_share(request: Request, share_id: str) -> Share:
    """Return a share of the shared file system service that hosts can mount.

    Raises:
        NotFound: The share does not exist for the caller.
        Conflict: The share is not available, has no export location, or its protocol is not NFS.
        NotImplementedHere: The cloud has no shared file system service.
        Unavailable: The service does not answer.
    """
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
    """Begin to detach a share for DELETE /servers/{id}/shares/{share_id}.

    Raises:
        NotFound: The server does not have the share.
        Conflict: The server's state does not allow the action.
    """
    request.check(DETACH, server, waits=True)
    _begin_in_turn(
        request,
        server,
        partial(request.begin, shares.detach, DETACH, server.id, share_id=share_id),
    )


def _begin_in_turn(request: Request, server: ServerRecord, begin: Callable[[], str]) -> None:
    """Begin an action at once, or when the server's running action has ended, and wake a conductor.

    Raises:
        Busy: The running action has not ended in time.
    """
    action_waits.begin_in_turn(request.services, server.id, begin)
    request.services.wakeup.wake()
