# SPDX-License-Identifier: Apache-2.0
"""Questions that a server's host answers at once: nothing is begun, nothing is written down.

Called for rows of ``states.ACTIONS`` with ``query``. A bounded share of the threads may wait for hosts, so that
silent ones cannot stop the API; a host that is known to be down is not asked at all.
"""
from __future__ import annotations

from typing import Any

from common import errors
from common.store import services
from compute_api.request import Request


def ask(request: Request, server: Any, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Ask the server's host, and answer what it says.

    Raises:
        Conflict: the server is on no host, or its host is down or does not answer. Unavailable: too many wait.
    """
    if not server.host:
        raise errors.Conflict(f"Instance {server.id} is not ready")
    if not request.read(services.is_up, server.host):
        raise errors.HostDown(f"Instance {server.id} is on a host that is down; try again when it is up.")
    slots = request.services.query_slots
    if not slots.acquire(blocking=False):
        raise errors.Unavailable("Too many requests are waiting for hosts to answer; try again.")
    try:
        return request.services.agents.query(server.host, verb, arguments)
    except errors.NoAnswer as problem:
        raise errors.HostDown(f"The host of instance {server.id} does not answer; try again.") from problem
    finally:
        slots.release()
