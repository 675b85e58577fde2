# SPDX-License-Identifier: Apache-2.0
"""The sweep: once a second, what nobody else would notice.

Writes down who was heard (one statement for all), judges who is silent, and lets nothing else happen: due
actions are found by ``runner.advance``, lost commands by the host's own sync. A plain function; the thread
that calls it and the flags it is given live in ``conductor.service``.
"""
from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from common.clock import SECOND
from common.store import services
from common.store.engine import Connection
from conductor.saga import Engine

log = logging.getLogger(__name__)
JUMP = 5.0                   #: seconds by which the database's clock may run apart from ours between sweeps


@dataclass
class Watch:
    """What the sweep remembers from one round to the next."""

    database_at: int | None = None
    monotonic_at: float = 0.0
    listening_since: float | None = None
    doubtful: bool = False


def sweep(engine: Engine, watch: Watch, heard: Collection[str], hears_itself: bool) -> list[str]:
    """One round. ``heard``: hosts that have synced since the last; ``hears_itself``: the conductor's own
    message came back through the broker. Returns the hosts that were found down in this round."""
    moment = engine.clock.monotonic()
    database = engine.store.now()
    jumped = watch.database_at is not None and abs(
        (database - watch.database_at) / SECOND - (moment - watch.monotonic_at)) > JUMP
    watch.database_at, watch.monotonic_at = database, moment
    if not hears_itself or jumped:
        watch.listening_since = None
    elif watch.listening_since is None:
        watch.listening_since = moment
    patient = watch.listening_since is not None and moment - watch.listening_since > engine.host_silence

    def work(tx: Connection) -> tuple[list[str], bool]:
        if heard:
            services.beat(tx, heard, services.COMPUTE)
        services.beat(tx, [engine.owner.split("/")[0]], services.CONDUCTOR)
        return services.judge(tx, engine.host_silence) if patient else ([], watch.doubtful)

    down, doubtful = engine.store.write(work)
    engine.fault_point("sweep", "judge", "committed")
    if doubtful and not watch.doubtful:
        log.warning("too few hosts are heard to judge by silence: the last known states stand")
    watch.doubtful = doubtful
    for host in down:
        log.warning("host %s has been silent for %d s: it counts as down", host, engine.host_silence)
    return down
