# SPDX-License-Identifier: Apache-2.0
"""Pending cleanups for the results of calls that may still complete after their time-out.

A timed-out call may create an object later. The cleanup looks for the object once the call can no
longer complete.
"""

from __future__ import annotations

from conductor.engine.run import AnyRun


def expect_late_result(run: AnyRun, kind: str, place: str = "") -> None:
    """Add a pending cleanup for an object that an earlier try of this step may still create.

    Call this before the request that creates the object, because that request may fail at once. A
    first try adds no cleanup. The cleanup has no reason text, so that the message of the action
    does not mention the cleanup.

    Args:
        run: The run of the step. The target of the cleanup is the run's server.
        kind: A kind of ``common.store.cleanups``.
        place: The id of the volume for LATE_ATTACHMENTS, "" for LATE_PORTS.
    """
    if run.is_repeated:
        run.add_cleanup(kind, run.server.id, "", place)
