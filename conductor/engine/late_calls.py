# SPDX-License-Identifier: Apache-2.0
"""Calls that were given up may still be carried out: what they make late is looked for by a pending
cleanup, which is due when they cannot make anything any more."""

from __future__ import annotations

from conductor.engine.run import AnyRun


def look_for(run: AnyRun, kind: str, place: str = "") -> None:
    """What is called now makes something of this kind, and may have been called before: each such
    call begins with this, since it may fail at once. Nothing is known to be left undone, so the
    action says nothing of it."""
    if run.is_repeated:
        run.add_cleanup(kind, run.server.id, "", place)
