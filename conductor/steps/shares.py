# SPDX-License-Identifier: Apache-2.0
"""The shares of servers at the shared file system service: who may mount them. Attach, detach and
delete share these.

A rule lets one address mount one share: it belongs to all servers of that host that have the share.
Whether one needs it is read from the records before the service is asked, and again afterwards: a
server that got the share meanwhile has its rule back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.clients.shares import ACTIVE, FAILED, GOING
from common.domain import errors
from common.domain.clock import SECOND
from common.domain.statuses import ShareStatus
from common.store.cleanups import SHARE as CLEANUP
from common.store.engine import Connection
from common.store.servers import shares
from conductor.engine.action_args import ActionArgs, ShareActionArgs, ShareArgs
from conductor.engine.action_data import ActionData
from conductor.engine.engine import Engine
from conductor.engine.external_services import ShareApi
from conductor.engine.run import Run

FIRST_POLL_MICROS, MAX_POLL_MICROS = SECOND // 4, 4 * SECOND
MAX_ROUNDS = 5  #: of a rule whose use changes while the service is asked


@dataclass(kw_only=True)
class ShareData(ActionData):
    """What attaching or detaching a share leaves."""

    rule: str | None = None  #: state of the access rule
    since: int | None = None  #: when the action first looked at it, µs


@dataclass(kw_only=True)
class SharesData(ActionData):
    """What deleting a server with shares leaves."""

    shares: list[ShareArgs] = field(default_factory=list)  #: that the server had


ShareRun = Run[ShareActionArgs, ShareData]
SharesRun = Run[ActionArgs, SharesData]


def service(engine: Engine) -> ShareApi:
    """The shared file system service.

    Raises:
        Unavailable: this conductor knows of none.
    """
    if engine.shares is None:
        raise errors.Unavailable("This conductor has no shared file system service.")
    return engine.shares


def reconcile_rule(engine: Engine, share_id: str, access_to: str) -> None:
    """The rule is there if and only if a server needs it.

    Raises:
        Unavailable: the service does not answer, or its use changed all the time. Other Problems:
        it refuses.
    """
    for _ in range(MAX_ROUNDS):
        is_used = engine.store.read(lambda tx: shares.is_used(tx, share_id, access_to))
        if is_used:
            if service(engine).allow(share_id, access_to) in GOING:
                raise errors.Unavailable(
                    f"The rule for {access_to} is on its way out; it is asked for again then."
                )
        else:
            service(engine).deny(share_id, access_to)
        if engine.store.read(lambda tx: shares.is_used(tx, share_id, access_to)) == is_used:
            return
    raise errors.Unavailable(f"Servers come and go that use share {share_id} at {access_to}.")


# --- attach ---
def allow(engine: Engine, run: ShareRun) -> None:
    """Ask for the rule."""
    run.data.rule = service(engine).allow(run.args.share.share_id, run.args.share.access_to)


def await_access_rule(tx: Connection, engine: Engine, runs: Sequence[ShareRun]) -> None:
    """Go on when the host may mount the share; else look again, until it has taken too long."""
    for run in runs:
        if run.data.since is None:
            run.data.since = run.locked_at
        share_id = run.args.share.share_id
        if run.data.rule == ACTIVE:
            continue
        if run.data.rule == FAILED:
            run.fail(
                f"The shared file system service cannot let the server's host mount share {share_id}."
            )
        elif run.locked_at - run.data.since >= engine.share_timeout * SECOND:
            run.fail(
                f"The shared file system service has not let the server's host mount share {share_id} within "
                f"{engine.share_timeout} seconds; detach it and try again."
            )
        else:
            run.retry_in(min(FIRST_POLL_MICROS * 2 ** min(run.data.polls, 8), MAX_POLL_MICROS))
            run.data.polls += 1


def mark_error(tx: Connection, engine: Engine, run: ShareRun) -> None:
    """It cannot be attached: its user sees that, and nobody needs the rule for it."""
    shares.put(tx, [run.args.share.uuid], ShareStatus.ERROR)


def remove_rule(engine: Engine, run: ShareRun) -> None:
    """The rule goes, unless another server needs it."""
    _reconcile(engine, run, run.args.share)


def _reconcile(engine: Engine, run: Run[Any, Any], share: ShareArgs) -> None:
    with run.cleanup_on_failure(CLEANUP, share.share_id, share.access_to):
        reconcile_rule(engine, share.share_id, share.access_to)


def delete_mapping(tx: Connection, engine: Engine, runs: Sequence[ShareRun]) -> None:
    """A server does not have the share any more that it was to lose."""
    shares.remove(tx, [run.args.share.uuid for run in runs])
    for run in runs:
        run.set(shares=run.server.shares - 1)


# --- delete ---
def has_shares(run: SharesRun) -> bool:
    """Had the server that is deleted any?"""
    return bool(run.data.shares)


def remove_rules(engine: Engine, run: SharesRun) -> None:
    """The rules of all shares of a server that is deleted."""
    for share in run.data.shares:
        _reconcile(engine, run, share)


def delete_mappings(tx: Connection, engine: Engine, runs: Sequence[SharesRun]) -> None:
    """A server that is deleted has none."""
    shares.remove(tx, [share.uuid for run in runs for share in run.data.shares])
    for run in runs:
        run.set(shares=0)
