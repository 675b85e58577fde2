# SPDX-License-Identifier: Apache-2.0
"""Snapshots of volumes that an image of a server names."""

from __future__ import annotations

from collections.abc import Sequence

from common.store.neighbours.cleanups import SNAPSHOT
from conductor import volumes
from conductor.saga import AnyRun, Engine


def delete(engine: Engine, run: AnyRun, snapshots: Sequence[str]) -> None:
    """Those of an image that there is not. What the service keeps is a pending cleanup."""
    for snapshot in snapshots:
        with run.cleanup_on_failure(SNAPSHOT, snapshot):
            volumes.service(engine).delete_snapshot(snapshot)
