# SPDX-License-Identifier: Apache-2.0
"""Queries to hosts, whose answer is part of the response. They begin no action and write no row.

The callers are rows of ``states.ACTIONS`` with ``query``, and requests for facts of hosts. Only a
part of the threads may wait for hosts, so that silent hosts cannot block the API. Hosts that are
down get no query.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.hosts import services
from common.store.rows import ServerRecord
from compute_api.compute.request.action_waits import SLOT_SECONDS
from compute_api.compute.request.request import Request

#: Timeouts of ``query_hosts`` for one host, and for all hosts together.
HOST_TIMEOUT_SECONDS = 2.0
TOTAL_TIMEOUT_SECONDS = 8.0


def query_host(
    request: Request, server: ServerRecord, verb: str, arguments: JsonObject
) -> JsonObject:
    """Send a query to the server's host, and return the answer.

    Raises:
        Conflict: The server is on no host.
        HostDown: The host is down or does not answer.
        Unavailable: Too many requests are waiting for hosts, the host has no key, or the database
            does not answer.
        Problem: The host reports an error.
    """
    if not server.host:
        raise errors.Conflict(f"Instance {server.id} is not ready")
    if not request.read(services.is_up, server.host):
        raise errors.HostDown(
            f"Instance {server.id} is on a host that is down; try again when it is up."
        )
    with _slot(request):
        try:
            return request.services.agents.query(server.host, verb, arguments)
        except errors.NoAnswer as problem:
            raise errors.HostDown(
                f"The host of instance {server.id} does not answer; try again."
            ) from problem


def query_hosts(
    request: Request, hosts: Sequence[str], verb: str
) -> dict[str, JsonObject | errors.Problem]:
    """Send a query to each of these hosts, one after the other, and return host -> answer or error.

    A host that reports an error, has no key or does not answer within ``HOST_TIMEOUT_SECONDS`` has
    the error as value. After ``TOTAL_TIMEOUT_SECONDS``, which include the wait for a slot, the
    remaining hosts get no query and are left out.

    Args:
        request: The request that waits for the hosts.
        hosts: Names of hosts that are up.
        verb: Name of the query, which has no arguments.

    Raises:
        Unavailable: Too many requests are waiting for hosts.
    """
    answers: dict[str, JsonObject | errors.Problem] = {}
    until = time.monotonic() + TOTAL_TIMEOUT_SECONDS
    with _slot(request) if hosts else nullcontext():
        for host in hosts:
            left = until - time.monotonic()
            if left <= 0:
                break
            try:
                answers[host] = request.services.agents.query(
                    host, verb, {}, timeout=min(HOST_TIMEOUT_SECONDS, left)
                )
            except errors.Problem as problem:
                answers[host] = problem
    return answers


@contextmanager
def _slot(request: Request) -> Iterator[None]:
    """Wait for a slot, which permits this thread to wait for hosts, and hold it in the with block.

    Raises:
        Unavailable: No slot becomes free within ``SLOT_SECONDS``, or within
            ``answer_timeout_seconds`` if that is shorter.
    """
    slots = request.services.query_slots
    seconds = min(SLOT_SECONDS, request.services.settings.answer_timeout_seconds)
    if not slots.acquire(timeout=seconds):
        raise errors.Unavailable("Too many requests are waiting for hosts to answer; try again.")
    try:
        yield
    finally:
        slots.release()
