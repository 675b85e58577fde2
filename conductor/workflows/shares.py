# SPDX-License-Identifier: Apache-2.0
"""Shares of a server that is off: attach, detach.

The host may mount the share before its guest is described with it, and may no more after it has let
go of it. The host mounts it when the guest starts. An attach that fails leaves the mapping in
error: its user detaches it.
"""

from __future__ import annotations

from common.domain.models import AttachedShare, Result
from common.domain.statuses import ShareStatus
from common.domain.verbs import AttachShare, DetachShare
from common.store.engine import Connection
from common.store.servers import shares as mappings
from conductor.engine.action_args import ShareActionArgs
from conductor.engine.action_data import StepFailed
from conductor.engine.engine import Engine, Lane
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.steps import shares
from conductor.steps.shares import ShareData, ShareRun


def _attach(engine: Engine, run: ShareRun) -> AttachShare:
    return AttachShare(share=_attached_share(run))


def _detach(engine: Engine, run: ShareRun) -> DetachShare:
    return DetachShare(share=_attached_share(run))


def _attached_share(run: ShareRun) -> AttachedShare:
    """Return the share as its host needs to know it."""
    share = run.args.share
    return AttachedShare(share.share_id, share.tag, share.protocol, share.export_location)


def _attached(tx: Connection, run: ShareRun, result: Result) -> None:
    mappings.put(tx, [run.args.share.uuid], ShareStatus.INACTIVE)


def _detach_failed(tx: Connection, engine: Engine, run: ShareRun, problem: StepFailed) -> None:
    """The host did not let go of it: the server has it as before."""
    share = run.args.share
    mappings.put(
        tx,
        [share.uuid],
        ShareStatus.INACTIVE if share.was == ShareStatus.INACTIVE else ShareStatus.ERROR,
    )


ATTACH_SHARE = Workflow(
    "attach_share",
    args=ShareActionArgs,
    data=ShareData,
    steps=(
        Step(
            "allow",
            "before the host is told, so that a guest that starts finds it",
            call=shares.allow,
            apply=shares.await_access_rule,
            undo=shares.mark_error,
            undo_call=shares.remove_rule,
            lane=Lane.SHARE,
        ),
        Step("attach", "the guest gets it when it starts", command=_attach, on_result=_attached),
    ),
)

DETACH_SHARE = Workflow(
    "detach_share",
    args=ShareActionArgs,
    data=ShareData,
    failed=_detach_failed,
    steps=(
        Step(
            "detach",
            "first: what is still mounted may still be used",
            command=_detach,
            pivot=True,
            done_when_host_dead=True,
        ),
        Step(
            "deny",
            "after the host has let go of it",
            call=shares.remove_rule,
            apply=shares.delete_mapping,
            lane=Lane.SHARE,
        ),
    ),
)
