# SPDX-License-Identifier: Apache-2.0
"""Queries to a server's host that are answered at once; no action begins and nothing is written.

Used for rows of ``states.ACTIONS`` with ``query``, and for what hosts report of themselves. Only a
share of the threads may wait for hosts, so that silent hosts cannot stop the API. A host that is
known to be down is not asked."""

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

HOST_TIMEOUT_SECONDS = 2.0  #: seconds for the answer of one host of many
TOTAL_TIMEOUT_SECONDS = 8.0  #: seconds for the answers of all of them


def query_host(
    request: Request, server: ServerRecord, verb: str, arguments: JsonObject
) -> JsonObject:
    """Ask the server's host, and answer what it says.

    Raises:
        Conflict: the server is on no host, or its host is down or does not answer. Unavailable: too
        many wait.
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
    """Ask these hosts, which are up, about themselves, one after the other; what each answered, or
    why it did not. Who has not been asked when the time is over is left out.

    Raises:
        Unavailable: too many requests wait for hosts.
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
    """One of the few threads that may wait for hosts."""
    slots = request.services.query_slots
    seconds = min(SLOT_SECONDS, request.services.settings.answer_timeout_seconds)
    if not slots.acquire(timeout=seconds):
        raise errors.Unavailable("Too many requests are waiting for hosts to answer; try again.")
    try:
        yield
    finally:
        slots.release()
