# SPDX-License-Identifier: Apache-2.0
"""The remedies of findings.

A remedy is one transaction that locks, checks again, and writes the change described in
``kinds.KINDS``. Conductors do the work on hosts and in external services: a guest to be removed, a
pending cleanup, or an action.

Invariant: a remedy writes only if the finding still exists under the server's lock, so that two
operators may run the same remedy. Changes of a server are in its journal, with the old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors
from common.domain.context import RequestContext
from common.store.rows import ServerRow
from common.store.schema import servers
from common.store.servers import actions, guests, immediate_actions
from deploy.operator.doctor.finding import Finding
from deploy.operator.doctor.kinds import KINDS, Mender
from deploy.operator.doctor.remedies.of_counts import COUNTS
from deploy.operator.doctor.remedies.of_hosts import HOSTS
from deploy.operator.doctor.remedies.of_servers import SERVERS, WRITTEN

#: The name of the action in os-instance-actions.
NAME = "repair"
Look = Callable[[Connection], Iterable[Finding]]
REMEDIES: dict[str, Callable[[Connection, Finding], None]] = {**SERVERS, **COUNTS, **HOSTS}


def mend(tx: Connection, finding: Finding, look: Look) -> bool:
    """Run the remedy of a finding, note the repair in the server's journal, and return True.

    There is no note if the finding has no server, if the server is deleted, or if the remedy is an
    action. If the finding is gone, change nothing and return False.

    Args:
        tx: The transaction.
        finding: The finding, of a kind that is not ``Mender.GUEST``.
        look: Returns the findings of a new check. Called under the server's lock.

    Raises:
        Conflict: Only an operator can repair the finding, another finding comes first, or the
            remedy refuses, for example because an object does not exist any more.
        Busy: An action has the server, and the kind of finding has ``is_free``.
    """
    kind = KINDS[finding.kind]
    if finding.kind not in REMEDIES:
        raise errors.Conflict(f"{finding.id} has no automatic repair. Next step: {kind.remedy}.")
    server_row = _lock_server(tx, finding)
    current = list(look(tx))
    if not any(other.id == finding.id for other in current):
        return False
    for other in current:
        if other.kind in kind.first and other.subject in (finding.subject, *finding.facts):
            raise errors.Conflict(
                f"Another finding must be repaired first. Run: kilonova doctor --fix {other.id}"
            )
    if kind.is_free and server_row is not None and server_row.action is not None:
        raise errors.Busy(server_row.id)
    REMEDIES[finding.kind](tx, finding)
    if server_row is not None and not server_row.deleted and kind.way is not Mender.ACTION:
        immediate_actions.note(
            tx,
            NAME,
            server_row.id,
            actions.take_lock(tx, server_row.id, None),
            RequestContext.of_ourselves(server_row.project_id),
            {
                "finding": finding.id,
                "said": finding.text,
                "was": {name: getattr(server_row, name) for name in WRITTEN},
            },
        )
    return True


def _lock_server(tx: Connection, finding: Finding) -> ServerRow | None:
    """Lock the servers that the finding names by id.

    Return the server with the lowest id, or None if the finding has no id of a server.
    """
    names = sorted({finding.subject, *finding.facts})
    ids = tx.scalars(sa.select(servers.c.id).where(servers.c.id.in_(names)).order_by(servers.c.id))
    return next(iter(actions.lock_servers(tx, list(ids)).values()), None)


def unknown_at(tx: Connection, finding: Finding) -> list[str]:
    """Return the hosts among the finding's facts without a record of the server's guest."""
    recorded = {row.host for row in guests.places(tx, finding.subject)}
    return [host for host in finding.facts if host not in recorded]


def is_spare(tx: Connection, finding: Finding, look: Look) -> bool:
    """Return True if a guest without a record can be discarded.

    That is so if the server was deleted, or if the server's host has the record of a running or
    stopped guest and ``look`` has no finding that the guest there is missing. False if the server
    has no row.

    Args:
        tx: The transaction.
        finding: The finding about the guest without a record.
        look: Returns the findings of a new check.
    """
    row = tx.execute(sa.select(servers).where(servers.c.id == finding.subject)).first()
    if row is None or row.deleted:
        return row is not None
    is_missing = any(
        other.kind == "guest-there" and other.subject == finding.subject for other in look(tx)
    )
    return not is_missing and any(
        guest.host == row.host and guest.wanted in guests.HERE
        for guest in guests.places(tx, finding.subject)
    )
