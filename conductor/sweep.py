# SPDX-License-Identifier: Apache-2.0
"""The sweep: once a second, what nobody else would notice.

Writes down who was heard (one statement for all), judges who is silent, begins what time makes due,
and tells hosts which images to fetch ahead. Due actions are found by ``runner.advance``, lost
commands by the host's own sync. A plain function; the thread that calls it and the flags it is
given live in ``conductor.service``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from common import errors, states
from common.clock import SECOND
from common.context import RequestContext
from common.models import Result
from common.store.engine import Connection
from common.store.hosts import services
from common.store.rows import ActionRow, LostActionRow, ReadingActionRow, ServerKey
from common.store.servers import actions, migrations
from conductor import automatic_evacuation, flush, lanes, prefetch, reports, retries, runner
from conductor.heartbeats import COMPARE_SOON_SECONDS
from conductor.saga import Engine

log = logging.getLogger(__name__)
_RECLAIM = dataclasses.replace(
    states.row("delete"), vm=(states.SOFT_DELETED,), task=states.NONE, supersedes=False
)
_OFFLOAD, _CONFIRM = states.row("shelveOffload"), states.row("confirmResize")
#: by which the database's clock may run apart from ours between sweeps
MAX_CLOCK_DIFFERENCE_SECONDS = 5.0
#: Seconds in which nothing is begun because its time is over, after a jump: at least and at most.
MIN_DOUBT_SECONDS, MAX_DOUBT_SECONDS = 60.0, 3600.0


@dataclass
class Watch:
    """What the sweep remembers from one round to the next. ``beaten_at``: no later than the last
    sign of life that it wrote down, by the database's clock."""

    database_at: int | None = None
    beaten_at: int = 0
    monotonic_at: float = 0.0
    listening_since: float | None = None
    doubtful: bool = False
    doubted_until: float = 0.0
    prefetched_at: float | None = None
    evacuated_at: float | None = None


def sweep(engine: Engine, watch: Watch, heard: Collection[str], hears_itself: bool) -> list[str]:
    """One round. ``heard``: hosts that have synced since the last; ``hears_itself``: the
    conductor's own message came back through the broker. Returns the hosts that were found down in
    this round."""
    moment = engine.clock.monotonic()
    jumped = _look_at_clock(engine, watch, moment)
    if not hears_itself or jumped:
        watch.listening_since = None
    elif watch.listening_since is None:
        watch.listening_since = moment
    patient = (
        watch.listening_since is not None and moment - watch.listening_since > engine.host_silence
    )

    def work(tx: Connection) -> tuple[int | None, list[str], bool]:
        mine = engine.owner.split("/")[0]
        before = services.seen_at(tx, mine, services.CONDUCTOR)
        if heard:
            services.beat(tx, heard, services.COMPUTE)
        services.beat(tx, [mine], services.CONDUCTOR)
        return before, *(
            services.judge(tx, engine.host_silence) if patient else ([], watch.doubtful)
        )

    before, down, doubtful = engine.store.write(work)
    if (before or 0) < watch.beaten_at:
        log.warning(
            "the database has forgotten when this conductor was seen last: it was set back, by a fail-over "
            "or a restore; all hosts tell what they have within %.0f s",
            COMPARE_SOON_SECONDS,
        )
        engine.heartbeats.compare_all()
    watch.beaten_at = watch.database_at or 0
    if moment >= watch.doubted_until:
        begin_due(engine)
        if patient:
            _evacuate(engine, watch, moment)
    fail_where_nothing_comes(engine)
    if watch.prefetched_at is None or moment - watch.prefetched_at >= prefetch.PERIOD_SECONDS:
        watch.prefetched_at = moment
        prefetch.prefetch(engine)
    engine.fault_point("sweep", "judge", "committed")
    if doubtful and not watch.doubtful:
        log.warning("too few hosts are heard to judge by silence: the last known states stand")
    watch.doubtful = doubtful
    for host in down:
        log.warning(
            "host %s has been silent for %d s: it counts as down", host, engine.host_silence
        )
    return down


def _look_at_clock(engine: Engine, watch: Watch, moment: float) -> bool:
    """Has the database's clock jumped since the last round? What time makes due cannot be undone,
    so that for as long as it jumped, within bounds, nobody believes it: it may jump back."""
    database = engine.store.now()
    jump = (
        0.0
        if watch.database_at is None
        else (database - watch.database_at) / SECOND - (moment - watch.monotonic_at)
    )
    watch.database_at, watch.monotonic_at = database, moment
    if abs(jump) <= MAX_CLOCK_DIFFERENCE_SECONDS:
        return False
    doubt = min(max(abs(jump), MIN_DOUBT_SECONDS), MAX_DOUBT_SECONDS)
    watch.doubted_until = max(watch.doubted_until, moment + doubt)
    log.warning(
        "the database's clock jumped by %.0f s: for %.0f s no server is reclaimed, offloaded or confirmed by "
        "its age; see the time service of the database's machine",
        jump,
        doubt,
    )
    return True


def _evacuate(engine: Engine, watch: Watch, moment: float) -> None:
    """Empty hosts that went down, every few seconds, where the operator wants that; not before each
    host had the time to be heard by this conductor."""
    if engine.evacuation is None:
        return
    if (
        watch.evacuated_at is not None
        and moment - watch.evacuated_at < automatic_evacuation.PERIOD_SECONDS
    ):
        return
    watch.evacuated_at = moment
    automatic_evacuation.evacuate(engine.store, engine.evacuation)


def begin_due(engine: Engine) -> None:
    """Begin what time makes due: deletes of servers whose time to be restored is over, offloads of
    shelved ones."""
    for row, since, seconds in (
        (_RECLAIM, "soft_deleted_at", engine.reclaim_interval),
        (_OFFLOAD, "shelved_at", engine.shelved_offload_time),
    ):
        if seconds > 0:
            resting = functools.partial(
                actions.resting,
                vm_state=row.vm[0],
                since=since,
                longer_than=seconds * SECOND,
                limit=engine.batch,
            )
            for server in engine.store.read(resting):
                _begin(engine, row, server)
    if engine.resize_confirm_window > 0:
        late = functools.partial(
            migrations.unconfirmed,
            older_than=engine.resize_confirm_window * SECOND,
            limit=engine.batch,
        )
        for server in engine.store.read(late):
            _begin(engine, _CONFIRM, server, migrations.close)


def fail_where_nothing_comes(engine: Engine) -> None:
    """Commands at hosts whose guests are dead have failed; so have those that start nothing, at
    hosts that are down, and those that need the files of a host that was forced down."""

    def look(tx: Connection) -> tuple[list[LostActionRow], list[ReadingActionRow]]:
        return (
            actions.commands_on_dead_hosts(
                tx, lanes.FAILING_WITH_HOST, engine.host_silence, engine.batch
            ),
            migrations.reading_from_the_dead(tx, lanes.READING_SOURCE, engine.batch),
        )

    lost, readings = engine.store.read(look)
    for row in lost:
        message = (
            "Host {} was forced down before it had answered."
            if row.dead
            else "Host {} went down before it had answered."
        ).format(row.host)
        _give_up(engine, row, "dead" if row.dead else "failed", message, retryable=True)
    for reading in readings:
        _give_up(
            engine,
            reading,
            "failed",
            f"Host {reading.source}, which has the server's files, was forced down.",
            retryable=False,
        )


def _give_up(engine: Engine, row: ActionRow, status: str, message: str, retryable: bool) -> None:
    """Nobody waits any longer for what a host was to do."""
    result = Result(
        str(runner.key_of(row)),
        row.server_id,
        row.fence,
        status,
        error=message,
        retryable=retryable,
    )
    try:
        written = engine.store.write(lambda tx: _take_in(tx, engine, row.id, result))
    except errors.Unavailable:
        raise
    except Exception as problem:
        log.exception(
            "action %s waits in vain, and that cannot be written down; it is tried again", row.id
        )
        retries.count_exception(engine, row, problem)
        return
    log.warning("action %s does not wait any longer: %s", row.id, message)
    flush.send(engine, written)


def _take_in(tx: Connection, engine: Engine, action: str, result: Result) -> flush.Written:
    servers = actions.lock_servers(tx, [result.server])
    heads = actions.lock(tx, [action])
    runs = [
        reports.finish_step(tx, engine, servers, head, result, head.host) for head in heads.values()
    ]
    return flush.write(tx, [run for run in runs if run is not None])


Begin = Callable[..., str]


def _begin(
    engine: Engine, row: states.Action, server: ServerKey, begin: Begin = actions.begin
) -> None:
    """Compare-and-set like any request: who restored or unshelved it meanwhile was first."""
    system = RequestContext.of_ourselves(server.project_id)
    try:
        engine.store.write(lambda tx: begin(tx, row, server.id, context=system))
    except errors.Problem as problem:
        log.info("server %s is left alone: %s", server.id, problem)
        return
    log.info("server %s: %s, because its time is over", server.id, row.name)
    engine.wake(lanes.INSIDE)
