# SPDX-License-Identifier: Apache-2.0
"""Attach and detach shares of a stopped server.

The share service permits the host to mount the share before the guest is defined with the share,
and withdraws that after the host has released the share. The host mounts the share when the guest
starts. A failed attach leaves the mapping in the state ERROR. The user must detach such a mapping.
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


def _attach_command(engine: Engine, run: ShareRun) -> AttachShare:
    return AttachShare(share=_attached_share(run))


def _detach_command(engine: Engine, run: ShareRun) -> DetachShare:
    return DetachShare(share=_attached_share(run))


def _attached_share(run: ShareRun) -> AttachedShare:
    share = run.args.share
    return AttachedShare(share.share_id, share.tag, share.protocol, share.export_location)


def _record_attached(tx: Connection, run: ShareRun, result: Result) -> None:
    mappings.put(tx, [run.args.share.uuid], ShareStatus.INACTIVE)


def _fail_detach(tx: Connection, engine: Engine, run: ShareRun, problem: StepFailed) -> None:
    """Set the mapping to INACTIVE if it was INACTIVE before the detach, otherwise to ERROR.

    The host has not released the share.
    """
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
            "Before the host, so that a guest that starts can mount the share.",
            call=shares.allow,
            apply=shares.await_access_rule,
            undo=shares.mark_error,
            undo_call=shares.remove_rule,
            lane=Lane.SHARE,
        ),
        Step(
            "attach",
            "The guest has the share from its next start on.",
            command=_attach_command,
            on_result=_record_attached,
        ),
    ),
)

DETACH_SHARE = Workflow(
    "detach_share",
    args=ShareActionArgs,
    data=ShareData,
    failed=_fail_detach,
    steps=(
        Step(
            "detach",
            "Before the access rule, because a mounted share may be in use.",
            command=_detach_command,
            pivot=True,
            done_when_host_dead=True,
        ),
        Step(
            "deny",
            "After the host has released the share.",
            call=shares.remove_rule,
            apply=shares.delete_mapping,
            lane=Lane.SHARE,
        ),
    ),
)
