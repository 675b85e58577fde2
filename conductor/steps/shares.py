# SPDX-License-Identifier: Apache-2.0
"""Access rules for shares at the shared file system service, for attach, detach and delete.

A rule lets one address mount one share. It serves all servers on that host that have the share.
Whether a server needs the rule is read from the records before and after the call to the service,
so that a server which got the share meanwhile gets its rule back.
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
#: Repetitions while the use of a rule changes during the call.
MAX_ROUNDS = 5


@dataclass(kw_only=True)
class ShareData(ActionData):
    """Data that the attach or detach of a share leaves for later steps."""

    #: State of the access rule.
    rule: str | None = None
    #: Time of the first check of the rule, in microseconds.
    since: int | None = None


@dataclass(kw_only=True)
class SharesData(ActionData):
    """Data that the delete of a server with shares leaves for later steps."""

    #: The shares of the deleted server.
    shares: list[ShareArgs] = field(default_factory=list)


ShareRun = Run[ShareActionArgs, ShareData]
SharesRun = Run[ActionArgs, SharesData]


def service(engine: Engine) -> ShareApi:
    """Return the client of the shared file system service.

    Raises:
        Unavailable: This conductor has no client of the shared file system service.
    """
    if engine.shares is None:
        raise errors.Unavailable("This conductor has no shared file system service.")
    return engine.shares


def reconcile_rule(engine: Engine, share_id: str, access_to: str) -> None:
    """Create the rule if a server needs it, otherwise delete it.

    Args:
        engine: The conductor's engine.
        share_id: The id of the share.
        access_to: The address that the rule lets mount the share.

    Raises:
        Unavailable: The service does not answer, the rule is being deleted, or its use changed in
            each of ``MAX_ROUNDS`` rounds.
        Problem: The service refuses.
    """
    for _ in range(MAX_ROUNDS):
        is_used = engine.store.read(lambda tx: shares.is_used(tx, share_id, access_to))
        if is_used:
            if service(engine).allow(share_id, access_to) in GOING:
                raise errors.Unavailable(
                    f"The access rule of share {share_id} for {access_to} is being deleted. It is created again "
                    "afterwards."
                )
        else:
            service(engine).deny(share_id, access_to)
        if engine.store.read(lambda tx: shares.is_used(tx, share_id, access_to)) == is_used:
            return
    raise errors.Unavailable(
        f"The use of share {share_id} at {access_to} changed during each try. Its access rule is checked "
        "again later."
    )


# --- attach ---
def allow(engine: Engine, run: ShareRun) -> None:
    """Create the rule that lets the server's host mount the share, and record the rule's state.

    An existing rule is used.
    """
    run.data.rule = service(engine).allow(run.args.share.share_id, run.args.share.access_to)


def await_access_rule(tx: Connection, engine: Engine, runs: Sequence[ShareRun]) -> None:
    """Continue when the access rule is active. Until the time-out, poll with growing pauses.

    The run fails if the rule has the state error, or after ``share_timeout`` seconds.
    """
    for run in runs:
        if run.data.since is None:
            run.data.since = run.locked_at
        share_id = run.args.share.share_id
        if run.data.rule == ACTIVE:
            continue
        if run.data.rule == FAILED:
            run.fail(
                f"The shared file system service could not create the access rule with which the server's host "
                f"mounts share {share_id}. Detach the share and try again."
            )
        elif run.locked_at - run.data.since >= engine.share_timeout * SECOND:
            run.fail(
                f"The shared file system service has not created the access rule with which the server's host "
                f"mounts share {share_id} within {engine.share_timeout} seconds. Detach the share and try again."
            )
        else:
            run.retry_in(min(FIRST_POLL_MICROS * 2 ** min(run.data.polls, 8), MAX_POLL_MICROS))
            run.data.polls += 1


def mark_error(tx: Connection, engine: Engine, run: ShareRun) -> None:
    """Set the mapping between server and share to ERROR. Such a mapping needs no access rule."""
    shares.put(tx, [run.args.share.uuid], ShareStatus.ERROR)


def remove_rule(engine: Engine, run: ShareRun) -> None:
    """Delete the access rule, unless another server needs it.

    A refusal becomes a pending cleanup.
    """
    _reconcile(engine, run, run.args.share)


def _reconcile(engine: Engine, run: Run[Any, Any], share: ShareArgs) -> None:
    with run.cleanup_on_failure(CLEANUP, share.share_id, share.access_to):
        reconcile_rule(engine, share.share_id, share.access_to)


def delete_mapping(tx: Connection, engine: Engine, runs: Sequence[ShareRun]) -> None:
    """Delete the records of the detached shares, and reduce each server's number of shares."""
    shares.remove(tx, [run.args.share.uuid for run in runs])
    for run in runs:
        run.set(shares=run.server.shares - 1)


# --- delete ---
def has_shares(run: SharesRun) -> bool:
    """Return True if the deleted server had shares."""
    return bool(run.data.shares)


def remove_rules(engine: Engine, run: SharesRun) -> None:
    """Delete the rules of all shares of a deleted server, unless other servers need them.

    A refusal becomes a pending cleanup.
    """
    for share in run.data.shares:
        _reconcile(engine, run, share)


def delete_mappings(tx: Connection, engine: Engine, runs: Sequence[SharesRun]) -> None:
    """Delete the share records of deleted servers, and set their numbers of shares to 0."""
    shares.remove(tx, [share.uuid for run in runs for share in run.data.shares])
    for run in runs:
        run.set(shares=0)
