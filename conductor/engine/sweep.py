# SPDX-License-Identifier: Apache-2.0
"""The sweep: the periodic work that no message triggers, once a second.

The sweep records the hosts with a sign of life (one statement for all), marks silent hosts as down,
begins actions that are due by time, and runs the chores of the engine. ``runner.advance`` finds due
actions, and the report of a host finds lost commands. A thread of ``conductor.service`` calls the
sweep.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from common.domain import errors, states
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.domain.models import Result
from common.domain.service_binaries import Binary
from common.domain.statuses import ResultStatus
from common.service.log import get_logger
from common.store.engine import Connection
from common.store.hosts import services
from common.store.rows import ActionRow, LostActionRow, ReadingActionRow, ServerKey
from common.store.servers import actions, migrations
from conductor.engine import flush, reports, retries, runner
from conductor.engine.engine import Chore, Lane
from conductor.engine.heartbeats import COMPARE_SOON_SECONDS
from conductor.engine.workflow_engine import WorkflowEngine

log = get_logger(__name__)
_RECLAIM = dataclasses.replace(
    states.row("delete"), vm=(states.SOFT_DELETED,), task=states.NONE, supersedes=False
)
_OFFLOAD, _CONFIRM = states.row("shelveOffload"), states.row("confirmResize")
#: Tolerated difference between the clocks of the database and of this machine per round.
MAX_CLOCK_DIFFERENCE_SECONDS = 5.0
#: After a jump of the clock, the bounds of the time in which no action is begun by time.
MIN_DOUBT_SECONDS, MAX_DOUBT_SECONDS = 60.0, 3600.0


@dataclass
class Watch:
    """The state that the sweep keeps between rounds.

    Times are seconds of the monotonic clock, unless the field's comment names another clock.
    """

    #: The time of the last round by the database's clock, in microseconds.
    database_at: int | None = None
    #: A time before the last sign of life that the sweep has recorded, by the database's clock.
    beaten_at: int = 0
    #: The time of the last round.
    monotonic_at: float = 0.0
    #: The time since which the conductor receives its own messages. None: it receives none.
    listening_since: float | None = None
    #: True if too few hosts have a recent sign of life to judge the others.
    doubtful: bool = False
    #: Until when the database's clock is not trusted, after a jump.
    doubted_until: float = 0.0
    #: When each chore was done last.
    chores_at: dict[Chore, float] = field(default_factory=dict)


def sweep(
    engine: WorkflowEngine, watch: Watch, heard: Collection[str], hears_itself: bool
) -> list[str]:
    """Record signs of life, mark hosts as down, begin due actions, end lost waits, do chores.

    Hosts are marked as down only if the conductor has received its own messages for as long as a
    host may be silent, and the database's clock has not jumped in this time.

    Args:
        engine: The conductor's engine.
        watch: The state from earlier rounds, which the round updates.
        heard: Hosts with a report or heartbeat since the last round.
        hears_itself: True if the conductor's own message came back through the broker.

    Returns:
        The hosts that this round has marked as down.

    Raises:
        Unavailable: The database does not answer.
    """
    moment = engine.clock.monotonic()
    jumped = _look_at_clock(engine, watch, moment)
    if not hears_itself or jumped:
        watch.listening_since = None
    elif watch.listening_since is None:
        watch.listening_since = moment
    is_patient = (
        watch.listening_since is not None and moment - watch.listening_since > engine.host_silence
    )

    def work(tx: Connection) -> tuple[int | None, list[str], bool]:
        own_host = engine.owner.split("/")[0]
        recorded_at = services.seen_at(tx, own_host, Binary.CONDUCTOR)
        if heard:
            services.beat(tx, heard, Binary.COMPUTE)
        services.beat(tx, [own_host], Binary.CONDUCTOR)
        return recorded_at, *(
            services.judge(tx, engine.host_silence) if is_patient else ([], watch.doubtful)
        )

    recorded_at, down, doubtful = engine.store.write(work)
    if (recorded_at or 0) < watch.beaten_at:
        log.warning(
            "the database was set back, by a fail-over or a restore: all hosts report their guests",
            seconds=COMPARE_SOON_SECONDS,
        )
        engine.heartbeats.compare_all()
    watch.beaten_at = watch.database_at or 0
    if moment >= watch.doubted_until:
        begin_due(engine)
    fail_lost_commands(engine)
    _do_chores(engine, watch, moment, is_certain=is_patient and moment >= watch.doubted_until)
    engine.fault_point("sweep", "judge", "committed")
    if doubtful and not watch.doubtful:
        log.warning(
            "too few hosts have a recent sign of life, so no silent host is marked as down; "
            "check the network of the hosts and the broker"
        )
    watch.doubtful = doubtful
    for host in down:
        log.warning(
            "a host is down, because it gave no sign of life",
            host=host,
            seconds=engine.host_silence,
        )
    return down


def _look_at_clock(engine: WorkflowEngine, watch: Watch, moment: float) -> bool:
    """Return True if the database's clock has jumped since the last round, and record the clock.

    Actions that are due by time cannot be undone, and the clock may jump back. So after a jump the
    clock is not trusted for as long as the jump was, within bounds (``Watch.doubted_until``).
    """
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
        "the database's clock jumped, so for some time no server is reclaimed, offloaded or "
        "confirmed by its age; check the time service of the database's machine",
        jump_seconds=jump,
        seconds=doubt,
    )
    return True


def _do_chores(engine: WorkflowEngine, watch: Watch, moment: float, is_certain: bool) -> None:
    """Do the chores that are due.

    ``is_certain`` is True if this conductor has received its own messages for long enough, and
    trusts the clock of the database. Without certainty, chores with ``needs_certainty`` wait.
    ``moment`` is the time of the monotonic clock.
    """
    for chore in engine.chores:
        last = watch.chores_at.get(chore)
        if (last is None or moment - last >= chore.period) and (
            is_certain or not chore.needs_certainty
        ):
            watch.chores_at[chore] = moment
            chore.run(engine)


def begin_due(engine: WorkflowEngine) -> None:
    """Begin the actions that are due by time.

    These are deletes of soft-deleted servers, offloads of shelved servers, and confirms of resizes.
    At most ``engine.batch`` actions of each kind begin. With an interval of 0 or less, this
    function begins no action of the kind.

    Raises:
        Unavailable: The database does not answer.
    """
    for row, since, seconds in (
        (_RECLAIM, "soft_deleted_at", engine.reclaim_interval),
        (_OFFLOAD, "shelved_at", engine.shelved_offload_time),
    ):
        if seconds > 0:
            find_resting = functools.partial(
                actions.resting,
                vm_state=row.vm[0],
                since=since,
                longer_than=seconds * SECOND,
                limit=engine.batch,
            )
            for server in engine.store.read(find_resting):
                _begin(engine, row, server)
    if engine.resize_confirm_window > 0:
        find_unconfirmed = functools.partial(
            migrations.find_unconfirmed,
            older_than=engine.resize_confirm_window * SECOND,
            limit=engine.batch,
        )
        for server in engine.store.read(find_unconfirmed):
            _begin(engine, _CONFIRM, server, migrations.close)


def fail_lost_commands(engine: WorkflowEngine) -> None:
    """End the wait of actions for commands that cannot complete any more.

    These are commands at hosts that are forced down (an undo only if the host is silent), commands
    that start no guest at hosts that are down, and commands that need files of a host that is
    forced down. The action then fails, is undone or continues, as its step declares. The next
    round handles actions beyond ``engine.batch``.
    """

    def read(tx: Connection) -> tuple[list[LostActionRow], list[ReadingActionRow]]:
        return (
            actions.commands_on_dead_hosts(
                tx, engine.workflows.failing_with_host, engine.host_silence, engine.batch
            ),
            migrations.reading_from_the_dead(tx, engine.workflows.reading_source, engine.batch),
        )

    lost_actions, readings = engine.store.read(read)
    for row in lost_actions:
        message = (
            "Host {} was forced down before it had answered."
            if row.dead
            else "Host {} went down before it had answered."
        ).format(row.host)
        _give_up(
            engine,
            row,
            ResultStatus.DEAD if row.dead else ResultStatus.FAILED,
            message,
            retryable=True,
        )
    for reading in readings:
        _give_up(
            engine,
            reading,
            ResultStatus.FAILED,
            f"Host {reading.source} has the files of server {reading.server_id} and was forced down.",
            retryable=False,
        )


def _give_up(
    engine: WorkflowEngine, row: ActionRow, status: ResultStatus, message: str, retryable: bool
) -> None:
    """Process a failure in place of the result that an action waits for.

    An unexpected error is counted for the action, and the next sweep tries again.

    Raises:
        Unavailable: The database does not answer.
    """
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
            "the failure of an action cannot be recorded; the next sweep tries again", action=row.id
        )
        retries.count_exception(engine, row, problem)
        return
    log.warning("an action no longer waits for its command", action=row.id, problem=message)
    flush.send(engine, written)


def _take_in(tx: Connection, engine: WorkflowEngine, action: str, result: Result) -> flush.Written:
    servers = actions.lock_servers(tx, [result.server])
    heads = actions.lock(tx, [action])
    runs = [
        reports.finish_step(tx, engine, servers, head, result, head.host) for head in heads.values()
    ]
    return flush.write(tx, engine, [run for run in runs if run is not None])


Begin = Callable[..., str]


def _begin(
    engine: WorkflowEngine, row: states.Action, server: ServerKey, begin: Begin = actions.begin
) -> None:
    """Begin an action of a server, or log why not.

    For example, the server's state no longer permits the action, or the server's row is locked.

    Raises:
        NoStore: The database does not answer.
    """
    system = RequestContext.of_ourselves(server.project_id)
    try:
        engine.store.write(lambda tx: begin(tx, row, server.id, context=system))
    except errors.NoStore:
        raise
    except errors.Problem as problem:
        log.info(
            "an action of a server that is due by time is not begun",
            server=server.id,
            action_name=row.name,
            problem=problem,
        )
        return
    log.info(
        "an action of a server is begun, because it is due by time",
        server=server.id,
        action_name=row.name,
    )
    engine.wake(Lane.INSIDE)
