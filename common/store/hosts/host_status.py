# SPDX-License-Identifier: Apache-2.0
"""The status of hosts: reports of compute services, and declarations of operators."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.engine import Connection

from common.domain import errors
from common.domain.service_binaries import Binary
from common.store.hosts import services


@dataclass(frozen=True, slots=True)
class HostState:
    """The compute service of a host."""

    name: str
    #: UUID of the service.
    service: str
    #: True if the conductors count the agent as up, also while the host is forced down.
    up: bool
    forced_down: bool = False
    #: True if the fencing hook proved that the host is off.
    fenced: bool = False
    disabled: bool = False
    reason: str = ""
    #: Time of the last heartbeat in microseconds. None if the host never sent one.
    seen_at: int | None = None

    @property
    def answers(self) -> bool:
        """True if the agent is up and the host is not forced down, so that commands reach it."""
        return self.up and not self.forced_down


def host_states(tx: Connection, name: str | None = None) -> dict[str, HostState]:
    """Return the status of all hosts with a compute service by name, or only of the host ``name``.

    The result is empty if that host does not exist.
    """
    rows = services.list_all(tx, host=name, binary=Binary.COMPUTE)
    return {
        row.host: HostState(
            row.host,
            row.uuid,
            bool(row.up),
            bool(row.forced_down),
            row.fenced_at is not None,
            bool(row.disabled),
            row.disabled_reason or "",
            row.seen_at,
        )
        for row in rows
    }


def host_state(tx: Connection, name: str, *, locked: bool = False) -> HostState:
    """Return the status of one host.

    Args:
        tx: The transaction.
        name: The host's name.
        locked: Lock the declared status (disabled, forced down) until the transaction ends.

    Raises:
        NotFound: No host has this name.
    """
    if locked:
        services.lock(tx, name)
    state = host_states(tx, name).get(name)
    if state is None:
        raise errors.NotFound(f"There is no host {name}. To list the hosts, run: kilonova hosts")
    return state
