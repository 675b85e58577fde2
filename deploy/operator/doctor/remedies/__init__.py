# SPDX-License-Identifier: Apache-2.0
"""The remedies of findings: one transaction that locks, looks again, and writes what the kind's row
says (``kinds.KINDS``).

What a host or a neighbour must do is left to conductors: as a guest to be removed, as a pending
cleanup, or as an action. Must stay true: nothing is written unless the finding is still there under
the server's lock, so that a remedy can be given twice, by two operators at once; and what is
written to a server is in its journal, with what stood there before.
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

#: What os-instance-actions calls it.
NAME = "repair"
Look = Callable[[Connection], Iterable[Finding]]
REMEDIES: dict[str, Callable[[Connection, Finding], None]] = {**SERVERS, **COUNTS, **HOSTS}


def mend(tx: Connection, finding: Finding, look: Look) -> bool:
    """Carry out the remedy of a finding that ``look`` still finds; returns whether it does.

    Raises:
        Conflict: only an operator can mend it, or the place that it needs is not there. Busy: an
        action has the server.
    """
    kind = KINDS[finding.kind]
    if finding.kind not in REMEDIES:
        raise errors.Conflict(f"{finding.id} is not mended by itself. {kind.remedy}.")
    known = _locked(tx, finding)
    found = list(look(tx))
    if not any(one.id == finding.id for one in found):
        return False
    for one in found:
        if one.kind in kind.first and one.subject in (finding.subject, *finding.facts):
            raise errors.Conflict(f"Mend this first: kilonova doctor --fix {one.id}")
    if kind.is_free and known is not None and known.action is not None:
        raise errors.Busy(known.id)
    REMEDIES[finding.kind](tx, finding)
    if known is not None and not known.deleted and kind.way is not Mender.ACTION:
        immediate_actions.note(
            tx,
            NAME,
            known.id,
            actions.take_lock(tx, known.id, None),
            RequestContext.of_ourselves(known.project_id),
            {
                "finding": finding.id,
                "said": finding.text,
                "was": {name: getattr(known, name) for name in WRITTEN},
            },
        )
    return True


def _locked(tx: Connection, finding: Finding) -> ServerRow | None:
    """The server that the finding is about, locked; None: it is about none, or that is gone."""
    names = sorted({finding.subject, *finding.facts})
    found = tx.scalars(
        sa.select(servers.c.id).where(servers.c.id.in_(names)).order_by(servers.c.id)
    )
    return next(iter(actions.lock_servers(tx, list(found)).values()), None)


def unknown_at(tx: Connection, finding: Finding) -> list[str]:
    """Of the finding's hosts those whose guest of the server has no record."""
    known = {row.host for row in guests.places(tx, finding.subject)}
    return [host for host in finding.facts if host not in known]


def is_spare(tx: Connection, finding: Finding, look: Look) -> bool:
    """Is a guest without a record wanted by nobody? Its server was deleted, or has the guest that
    its record names."""
    row = tx.execute(sa.select(servers).where(servers.c.id == finding.subject)).first()
    if row is None or row.deleted:
        return row is not None
    is_missing = any(
        one.kind == "guest-there" and one.subject == finding.subject for one in look(tx)
    )
    return not is_missing and any(
        one.host == row.host and one.wanted in guests.HERE
        for one in guests.places(tx, finding.subject)
    )
