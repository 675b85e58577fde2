# SPDX-License-Identifier: Apache-2.0
"""Limits of clients: time, connections, memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Of one process. An address of IPv6 stands for its /64."""

    head_seconds: float = 10  #: until a request's head is here, from its first byte or connecting
    #: for a body or an answer, beside the time that its bytes may take
    stall_timeout_seconds: float = 10
    idle_seconds: float = 75  #: between two requests
    bytes_per_second: int = 16 * 1024  #: the least that a body or an answer must move
    max_connections: int = 4000
    max_connections_per_address: int = 500
    max_streams: int = 0  #: bodies that stream at a time
    max_streams_per_address: int = 0  #: 0: as many
    max_body_bytes: int = 1024 * 1024  #: of a body that is waited for before a thread begins
    max_held_bytes: int = 128 * 1024 * 1024  #: that all clients together may make us keep
