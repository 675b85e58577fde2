# SPDX-License-Identifier: Apache-2.0
"""Limits of clients: time, connections and memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The limits of one process. An IPv6 address counts as its /64 network."""

    #: From the connection or the first byte to the end of a request's head.
    head_seconds: float = 10
    #: For a body or a response, in addition to the time for its bytes.
    stall_timeout_seconds: float = 10
    #: Between two requests.
    idle_seconds: float = 75
    #: Lowest rate of a body or a response.
    bytes_per_second: int = 16 * 1024
    max_connections: int = 4000
    max_connections_per_address: int = 500
    #: Bodies that are streamed at the same time. 0 disables streaming.
    max_streams: int = 0
    #: 0 means ``max_streams``.
    max_streams_per_address: int = 0
    #: Largest body that is buffered before a thread begins.
    max_body_bytes: int = 1024 * 1024
    #: Buffered bytes of all clients together.
    max_held_bytes: int = 128 * 1024 * 1024
