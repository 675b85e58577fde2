# SPDX-License-Identifier: Apache-2.0
"""Process the reports of agents and answer them.

``handle`` takes the reports that arrived since the last round and writes their results and domain
states in one transaction. Each answer acknowledges the results and contains commands that the host
has lost, removals of leftover guests and, at registration, the guests that may exist on the host. A
late result with the key of the awaited command counts, whichever conductor sent the command. If a
part of a report cannot be processed, only that part is left out. Other hosts, and other servers of
the same host, are not delayed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from common.domain import errors, states
from common.domain.clock import SECOND
from common.domain.command_key import CommandKey, CommandKind
from common.domain.context import RequestContext
from common.domain.json_types import JsonObject
from common.domain.models import Command, DomainState, Result, Sync, SyncAnswer
from common.domain.statuses import ActionState, GuestState, ResultStatus
from common.service.log import get_logger
from common.store.engine import Connection
from common.store.hosts import host_images, hosts
from common.store.rows import ActionRow, PlacedServerRow, ServerKey
from common.store.servers import actions, block_devices, fences, guests, migrations, shares
from common.store.views import host_files
from conductor.engine import (
    flush,
    host_texts,
    lost_commands,
    progress,
    report_parts,
    retries,
    runner,
)
from conductor.engine.run import AnyRun, Run
from conductor.engine.workflow_engine import WorkflowEngine

log = get_logger(__name__)
#: A command younger than this may still be on its way to the host.
GRACE_MICROS = 2 * SECOND
#: Time limit for reports that are processed part by part.
MAX_APART_SECONDS = 10.0
#: Time during which the reports of a host with a faulty report are processed separately.
ODD_HOST_SECONDS = 60.0


def handle(engine: WorkflowEngine, syncs: Sequence[Sync]) -> list[SyncAnswer | Exception]:
    """Process reports and return an answer for each, in the same order.

    Returns:
        For each report its answer, or an exception: the error that the report caused, or
        Unavailable if the database does not answer or is busy.

    Raises:
        Unavailable: The database does not answer when locks are checked or failures are counted.
    """
    syncs = [host_texts.clean(sync) for sync in syncs]
    now = engine.clock.monotonic()
    separate = [sync for sync in syncs if engine.odd_hosts.get(sync.host, now) > now]
    common = [sync for sync in syncs if sync not in separate] if separate else syncs
    answers, separate_answers = (
        iter(_handle_together(engine, common)),
        iter(_handle_each(engine, separate)),
    )
    return [next(separate_answers if sync in separate else answers) for sync in syncs]


def _handle_together(engine: WorkflowEngine, syncs: Sequence[Sync]) -> list[SyncAnswer | Exception]:
    if not syncs:
        return []
    try:
        locked = retries.locked_servers(engine)
        answers, written, failed = engine.store.write(
            lambda tx: _take_in(tx, engine, syncs, locked), alone=False
        )
    except errors.TooBusy as problem:
        log.warning("reports of hosts wait", count=len(syncs), problem=problem)
        named = {
            server for sync in syncs for server in report_parts.servers_in(sync)
        } - engine.locked_servers.keys()
        return (
            _handle_together(engine, syncs)
            if retries.find_locked(engine, named)
            else _handle_each(engine, syncs)
        )
    except errors.NoStore as problem:
        log.warning("reports of hosts wait", count=len(syncs), problem=problem)
        return [problem] * len(syncs)
    except Exception:
        log.exception(
            "reports cannot be processed together; each is processed separately", count=len(syncs)
        )
        return _handle_each(engine, syncs)
    engine.fault_point("sync", "reports", "committed")
    flush.send(engine, written)
    _count(engine, failed)
    return list(answers)


def _handle_each(engine: WorkflowEngine, syncs: Sequence[Sync]) -> list[SyncAnswer | Exception]:
    until = engine.clock.monotonic() + MAX_APART_SECONDS
    return [_handle_separately(engine, sync, until) for sync in syncs]


def _handle_separately(engine: WorkflowEngine, sync: Sync, until: float) -> SyncAnswer | Exception:
    """Process as much of a report as possible, and return the answer, or the error without one.

    The processing ends at the time ``until`` of the monotonic clock. Of a report of an ended
    session nothing is processed.

    A result that cannot be processed is acknowledged too. Its action still waits, so the command is
    sent again, and the host repeats the result from the host's own journal.
    """
    try:
        session = _find_session(engine, sync)
        if sync.session in (0, session):
            reported = engine.store.write(lambda tx: _drop_old_state(tx, sync), alone=False)
            _process_part(engine, reported, until)
        return _answer_separately(engine, sync, session)
    except Exception as problem:
        log.exception(
            "the report of a host cannot be answered; the agent repeats it", host=sync.host
        )
        return problem


def _answer_separately(engine: WorkflowEngine, sync: Sync, session: int) -> SyncAnswer:
    """Return the answer to a report, without commands if the commands cannot be read.

    A failure is counted for each action whose command cannot be built.
    """
    try:
        answer, failed = engine.store.write(lambda tx: _answer(tx, engine, sync, session))
    except Exception:
        log.exception("the commands of a host cannot be read", host=sync.host)
        return engine.store.write(lambda tx: _answer(tx, engine, sync, session, sends=False))[0]
    _count(engine, failed)
    return answer


def _count(engine: WorkflowEngine, failed: lost_commands.Failed) -> None:
    for row, problem in failed:
        retries.count_exception(engine, row, problem)


def _find_session(engine: WorkflowEngine, sync: Sync) -> int:
    """Return the host's session, 0 without one. Open a session if the report is a registration.

    After a boot of the host, the servers that should run are first recorded as off. Then the start
    of each such server without an action begins in a transaction of its own. If that fails, a later
    full report of the host begins the start.
    """
    if sync.session != 0 or sync.inventory is None:
        return engine.store.read(lambda tx: hosts.sessions(tx, [sync.host])).get(sync.host, 0)
    session, to_start = engine.store.write(
        lambda tx: _open_session(tx, sync, idle_too=True), alone=False
    )
    for server in to_start:
        try:
            engine.store.write(partial(_start_again, server=server, host=sync.host))
        except Exception:
            log.exception(
                "a server cannot be started after the boot of its host",
                server=server.id,
                host=sync.host,
            )
    return session


def _process_part(engine: WorkflowEngine, reported: Sync, until: float) -> None:
    """Process a report. If that fails, split the report and process each part.

    ``_leave_out`` handles the failure of a part that cannot be split.

    Results and domains of servers whose work waits for a lock are left out. Parts that remain at
    the time ``until`` of the monotonic clock are ignored. The host repeats both.
    """
    if engine.clock.monotonic() > until:
        return
    try:
        unlocked = [report_parts.remove_servers(reported, retries.locked_servers(engine))]
        flush.send(
            engine,
            engine.store.write(
                lambda tx: _write_results(tx, engine, unlocked, advances=False), alone=False
            ),
        )
        engine.store.write(lambda tx: _describe(tx, reported))
    except Exception as problem:
        log.exception("a part of a host's report cannot be processed", host=reported.host)
        parts = report_parts.split(reported)
        for part in parts:
            _process_part(engine, part, until)
        if not parts:
            _leave_out(engine, reported, problem)


def _leave_out(engine: WorkflowEngine, reported: Sync, problem: Exception) -> None:
    """Handle the failure of a part that cannot be split further.

    If the database is busy or does not answer, the work on the part's servers is postponed.
    Otherwise the failure is counted for each action that waits for this host and that a result in
    the part names, and the host's reports are processed separately for ``ODD_HOST_SECONDS``.
    """
    log.error(
        "a part of a host's report cannot be processed and is left out",
        host=reported.host,
        report=str(reported)[:500],
    )
    if isinstance(problem, errors.Unavailable):
        retries.set_aside(engine, report_parts.servers_in(reported))
        return
    engine.odd_hosts[reported.host] = engine.clock.monotonic() + ODD_HOST_SECONDS
    keys = CommandKey.parse_each(result.key for result in reported.results)
    action_ids = [key.owner for key in keys.values()]
    for row in engine.store.read(lambda tx: actions.waiting(tx, action_ids)):
        if row.host == reported.host:
            retries.count_exception(engine, row, problem)


def _take_in(
    tx: Connection, engine: WorkflowEngine, syncs: Sequence[Sync], locked: Collection[str]
) -> tuple[list[SyncAnswer], flush.Written, lost_commands.Failed]:
    """Process a round of reports in one transaction, and return the answers.

    The order is registrations, results and domain states, host states, answers. Results and domain
    states of servers in ``locked``, which other transactions have locked, are left out. A report of
    an ended session is only answered.

    Returns:
        The answers in the order of ``syncs``, the work after the commit, and the actions whose
        command could not be built.
    """
    sessions = {
        sync.host: _register(tx, engine, sync)
        for sync in sorted(syncs, key=lambda sync: sync.host)
        if sync.session == 0 and sync.inventory
    }
    sessions |= hosts.sessions(tx, (sync.host for sync in syncs if sync.host not in sessions))
    accepted = [
        _drop_old_state(tx, sync)
        for sync in sorted(syncs, key=lambda sync: (sync.host, sync.number))
        if sync.session == 0 or sync.session == sessions.get(sync.host)
    ]
    written = _write_results(
        tx,
        engine,
        [report_parts.remove_servers(sync, locked) for sync in accepted] if locked else accepted,
    )
    for sync in accepted:
        _describe(tx, sync)
    answers = [_answer(tx, engine, sync, sessions.get(sync.host, 0)) for sync in syncs]
    engine.fault_point("sync", "reports", "written")
    return (
        [answer for answer, _ in answers],
        written,
        [failure for _, failed in answers for failure in failed],
    )


def _drop_old_state(tx: Connection, sync: Sync) -> Sync:
    """Return the report, without the host's state if this or a newer report was processed.

    Another conductor may have processed that report. If this report is the newest, its number is
    recorded. A registration, or a report without a number or state, is returned unchanged.
    """
    if sync.session == 0 or sync.number == 0 or not sync.tells_state:
        return sync
    return (
        sync
        if hosts.is_newest(tx, sync.host, sync.session, sync.number)
        else report_parts.remove_host_state(sync)
    )


def _register(tx: Connection, engine: WorkflowEngine, sync: Sync) -> int:
    """Open a session for a host that registers, and return the number of the session.

    After a boot of the host, a hard reboot, which tenants can see, begins for each server that
    should run and has no action. A server that should run but has an action, or gets one meanwhile,
    is recorded as off.
    """
    session, to_start = _open_session(tx, sync)
    for server in to_start:
        if not _start_again(tx, server, sync.host):
            guests.lost_power(tx, sync.host, server.id)
    return session


def _open_session(
    tx: Connection, sync: Sync, idle_too: bool = False
) -> tuple[int, list[ServerKey]]:
    """Open a session for a host that registers.

    After a boot of the host, servers that should run and have an action are recorded as off. With
    ``idle_too``, servers that should run and have no action are recorded as off too.

    Returns:
        The number of the session, and after a boot the idle servers that the caller must start.
    """
    assert sync.inventory is not None
    session, booted = hosts.open_session(tx, sync.host, sync.boot_id, sync.inventory)
    log.info("a host registers", host=sync.host, session=session, booted="yes" if booted else "")
    if not booted:
        return session, []
    guests.lost_power(tx, sync.host, idle_too=idle_too)
    return session, guests.wanted_running_on(tx, sync.host)


def _start_again(tx: Connection, server: ServerKey, host: str) -> bool:
    """Begin the hard reboot that starts a server's guest after a boot of its host.

    Returns:
        True if the action has begun. False if it cannot begin now, for example because another
        action has the server.
    """
    row = replace(states.row("reboot", "HARD"), vm=states.ANY)
    system = RequestContext.of_ourselves(server.project_id)
    try:
        actions.begin(tx, row, server.id, context=system)
    except errors.Problem as problem:
        log.info(
            "a server cannot be started yet after the boot of its host",
            server=server.id,
            host=host,
            problem=problem,
        )
        return False
    return True


def _describe(tx: Connection, sync: Sync) -> None:
    """Store the inventory, guests, files, cached images and metrics that a report contains.

    Call this after the transaction has locked servers, because this locks the host's resource
    providers.
    """
    if sync.inventory is not None:
        hosts.describe(tx, sync.host, sync.inventory)
        if sync.session != 0:
            log.info("a host reported its inventory", host=sync.host)
    if sync.domains is not None:
        _note_guests(tx, sync.host, [domain.server for domain in sync.domains])
    if sync.files is not None:
        _note_files(tx, sync.host, sync.files, sync.files_between)
    if sync.cached:
        host_images.record(tx, sync.host, sync.cached)
    if sync.metrics is not None:
        hosts.store_metrics(tx, sync.host, sync.metrics)


def _note_guests(tx: Connection, host: str, servers: Sequence[str]) -> None:
    """Store which servers with a domain have no guest record on this host, and log new entries.

    ``servers`` are the servers of all domains of the host.
    """
    if unknown := hosts.note_guests(tx, host, servers):
        log.warning(
            "a host has guests without a record; see: kilonova doctor, then kilonova host adopt or discard",
            host=host,
            count=len(unknown),
            servers=", ".join(unknown),
        )


def _note_files(
    tx: Connection, host: str, servers: Sequence[str], between: Sequence[str] | None
) -> None:
    """Store the servers that have files but no guest on this host, and log unexplained new entries.

    ``servers`` and ``between`` are ``files`` and ``files_between`` of ``Sync``.
    """
    if unknown := host_files.note(tx, host, servers, between):
        log.warning(
            "a host has files of servers without a guest; see: kilonova doctor",
            host=host,
            count=len(unknown),
            servers=", ".join(unknown),
        )


def _write_results(
    tx: Connection, engine: WorkflowEngine, syncs: Sequence[Sync], advances: bool = True
) -> flush.Written:
    """Write results, confirmed removals, progress and domain states of reports.

    If a host reports a higher fence than the database has, the database's fence is raised. With
    ``advances``, the actions that waited for a confirmed removal continue at once. Otherwise they
    continue with their next poll.

    Returns:
        The work for ``flush.send`` after the commit.
    """
    results = [(sync.host, result) for sync in syncs for result in sync.results]
    keys = CommandKey.parse_each(
        text
        for sync in syncs
        for text in (*(result.key for result in sync.results), *sync.phases, *sync.moved)
    )
    action_results = {
        keys[result.key]: (host, result)
        for host, result in results
        if result.key in keys and keys[result.key].is_of_action
    }
    removed_guests = [
        guests.RemovedGuest(result.server, host, result.fence)
        for host, result in results
        if result.key in keys
        and keys[result.key].kind is CommandKind.CLEANUP
        and result.status == ResultStatus.DONE
    ]
    news, differing = _compare_domains(tx, engine, syncs)
    higher_fences = fences.select_credible(tx, _add_refused_fences(results, differing))
    server_ids = (
        {result.server for _, result in results}
        | {server for _, server in news}
        | higher_fences.keys()
    )
    phases = {
        (sync.host, keys[text]): phase
        for sync in syncs
        for text, phase in sync.phases.items()
        if text in keys
    }
    if phases:
        progress.write(tx, phases)
    transferred = {
        (sync.host, keys[text].owner): numbers
        for sync in syncs
        for text, numbers in sync.moved.items()
        if text in keys
    }
    if transferred:
        migrations.store_progress(tx, transferred)
    if not server_ids:
        return flush.Written({})
    servers = actions.lock_servers(tx, server_ids)
    heads = actions.lock(
        tx,
        {
            *(key.owner for key in action_results),
            *(row.action for row in servers.values() if row.action and removed_guests),
        },
    )
    runs = [
        finish_step(tx, engine, servers, heads[key.owner], result, host)
        for key, (host, result) in action_results.items()
        if key.owner in heads
    ]
    if removed_guests:
        confirmed_servers = guests.confirm_removals(tx, removed_guests)
        left_servers = {
            server
            for server, host, _ in removed_guests
            if server in confirmed_servers and server in servers and servers[server].host != host
        }
        if left_servers:
            migrations.complete_evacuations(tx, left_servers)
        runs += (
            _advance_waiting_actions(tx, engine, servers, heads, confirmed_servers)
            if advances
            else []
        )
    _write_news(tx, servers, news)
    written = flush.write(tx, engine, [run for run in runs if run is not None])
    if higher_fences and fences.rise_above(tx, higher_fences):
        engine.heartbeats.compare_all()
    return written


def finish_step(
    tx: Connection,
    engine: WorkflowEngine,
    servers: dict[str, PlacedServerRow],
    head: ActionRow,
    result: Result,
    host: str | None,
) -> AnyRun | None:
    """Process a result, if an action waits for this result from this host.

    If the host has refused the command, a failure of the action is counted.

    Args:
        tx: The transaction.
        engine: The conductor's engine.
        servers: The locked servers by id.
        head: The locked action that the key of the result names.
        result: The result of a command.
        host: The host that sent the result.

    Returns:
        The run with the changes that the caller must write. None if the result is ignored, because
        no action waits for it, another host has the command, or this release does not have the
        workflow.

    Raises:
        LookupError, TypeError, ValueError: This release does not know the step or the result's
            status, or cannot read the action's arguments or data.
    """
    server = servers.get(head.server_id)
    if (
        server is None
        or head.state != ActionState.WAITING
        or result.key != str(runner.key_of(head))
        or not runner.is_held(server, head)
    ):
        return None
    if host != head.host:
        log.warning(
            "a result is ignored, because the command was sent to another host",
            host=host,
            command=result.key,
            other_host=head.host,
        )
        return None
    if result.status == ResultStatus.REFUSED:
        log.warning(
            "a host refused a command", host=head.host, command=result.key, problem=result.error
        )
        run: AnyRun = Run(head, server, None, None)  # Arguments and data are not needed.
        retries.count_failure(
            run,
            f"Host {head.host} refuses the command {head.verb}: {result.error}",
            result.details,
            retries.MAX_REFUSALS,
        )
        return run
    if not engine.workflows.knows(head):
        log.warning(
            "a result is ignored, because this conductor does not have the workflow",
            host=head.host,
            command=result.key,
            workflow=head.workflow,
        )
        return None
    run = _build_run(tx, engine, head, server)
    runner.take_result(tx, engine, run, result)
    return run


def _build_run(
    tx: Connection, engine: WorkflowEngine, head: ActionRow, server: PlacedServerRow
) -> AnyRun:
    volumes = block_devices.of_server(tx, server) if server.volumes else ()
    share_ids = shares.ids_of(tx, [server]).get(server.id, ())
    return engine.workflows[head.workflow].run(head, server, volumes, shares=share_ids)


def _advance_waiting_actions(
    tx: Connection,
    engine: WorkflowEngine,
    servers: dict[str, PlacedServerRow],
    heads: Mapping[str, ActionRow],
    server_ids: set[str],
) -> list[AnyRun]:
    """Advance the actions of servers of which a host has removed a guest.

    The actions may have waited for the removal. Only due actions at a step that works in the
    transaction, without a call or preparation, are advanced.

    Args:
        tx: The transaction.
        engine: The conductor's engine.
        servers: The locked servers by id.
        heads: The locked actions by id.
        server_ids: The servers of which a host has removed a guest.

    Returns:
        The runs with the changes that the caller must write.
    """
    runs = []
    for server_id in sorted(server_ids):
        server = servers.get(server_id)
        head = heads.get(server.action) if server is not None and server.action else None
        if (
            server is None
            or head is None
            or head.state != ActionState.DUE
            or head.step is None
            or not engine.workflows.knows(head)
        ):
            continue
        workflow = engine.workflows[head.workflow]
        index = workflow.index(head.step)
        step = workflow.steps[index]
        if step.apply and not step.prepare and not step.call and runner.is_held(server, head):
            run = _build_run(tx, engine, head, server)
            runner.proceed(tx, engine, workflow, index, [run])
            runs.append(run)
    return runs


def _add_refused_fences(results: Sequence[tuple[str, Result]], ahead: HigherFences) -> HigherFences:
    """Return ``ahead`` with the fences that hosts reported when they refused commands.

    For each server and host, the highest fence counts. The added fences need not be higher than the
    record, because in most cases only the refused command was late.
    """
    fences_by_place = dict(ahead)
    for host, result in results:
        if result.status == ResultStatus.REFUSED and result.known_fence is not None:
            place = result.server, host
            fences_by_place[place] = max(fences_by_place.get(place, 0), result.known_fence)
    return fences_by_place


#: (server, host) -> the highest fence of the server on the host, if higher than the record.
HigherFences = dict[tuple[str, str], int]
#: (host, server) -> a reported state of the domain, as ``_is_news`` selects it.
News = dict[tuple[str, str], DomainState]


def _compare_domains(
    tx: Connection, engine: WorkflowEngine, syncs: Sequence[Sync]
) -> tuple[News, HigherFences]:
    """Return the reported domains that count as news about their server (``_is_news``).

    Also returns the fences on hosts that are higher than the record. If a power state differs while
    an action has the server, the host must report all domains again soon.

    The comparison takes no locks. ``_write_news`` repeats the comparison of states under the lock.
    """
    reported = {
        (sync.host, domain.server): domain
        for sync in syncs
        for domain in [*(sync.domains or ()), *sync.changed]
    }
    if not reported:
        return {}, {}
    servers = actions.servers_of(tx, (server for _, server in reported))
    domains = [
        (servers[key[1]], key[0], domain) for key, domain in reported.items() if key[1] in servers
    ]
    higher_fences: HigherFences = {}
    for server, host, domain in domains:
        if server.action is not None and domain.power_state != server.power_state:
            engine.heartbeats.compare_soon(host)
        if domain.fence > server.fence:
            higher_fences[server.id, host] = domain.fence
    return {
        (host, server.id): domain
        for server, host, domain in domains
        if _is_news(server, host, domain)
    }, higher_fences


def _is_news(server: PlacedServerRow, host: str, domain: DomainState) -> bool:
    """Return True if the state counts, and the server's record or its guest must be changed.

    This is so if the state differs from the record, or if the server has lost its power
    (``_lost_power``). A state counts if the server is idle, is on this host, and has the domain's
    fence.
    """
    return bool(
        server.host == host
        and server.action is None
        and domain.fence == server.fence
        and (domain.power_state != server.power_state or _lost_power(server, domain))
    )


def _lost_power(server: PlacedServerRow, domain: DomainState) -> bool:
    """Return True if a server that should run is off at its host and in its record.

    A boot of the host leads to this state (``guests.lost_power``), and so does a reset of the state
    to active for a server that is off.
    """
    return server.vm_state in (states.ACTIVE, states.PAUSED, states.RESCUED) and (
        domain.power_state == server.power_state == states.SHUTDOWN
    )


#: Changes that a guest made by itself: vm_states before, reported power states, vm_state after, and
#: whether the guest may run.
_OUT_OF_BAND_CHANGES: tuple[tuple[tuple[str, ...], tuple[int, ...], str, bool], ...] = (
    (
        (states.ACTIVE, states.PAUSED, states.RESCUED),
        (states.SHUTDOWN, states.CRASHED),
        states.STOPPED,
        False,
    ),
    ((states.ACTIVE,), (states.POWER_PAUSED,), states.PAUSED, True),
    ((states.PAUSED, states.STOPPED), (states.RUNNING,), states.ACTIVE, True),
)


def _write_news(tx: Connection, servers: dict[str, PlacedServerRow], news: News) -> None:
    """Write the domain states that differ from the records of their servers.

    Each difference sets power_state. A change in ``_OUT_OF_BAND_CHANGES`` also sets vm_state and
    the wanted state of the guest. For a server that lost its power, a hard reboot begins instead.
    A state that is no news any more is ignored.
    """
    changes: dict[str, JsonObject] = {}
    for (host, server_id), domain in news.items():
        server = servers.get(server_id)
        if server is None or not _is_news(server, host, domain):
            continue
        if _lost_power(server, domain):
            _start_again(tx, server, host)
            continue
        changes[server_id] = {"power_state": domain.power_state}
        for old_states, power_states, new_state, may_run in _OUT_OF_BAND_CHANGES:
            if server.vm_state in old_states and domain.power_state in power_states:
                changes[server_id]["vm_state"] = new_state
                guests.want(
                    tx, [server_id], GuestState.RUNNING if may_run else GuestState.STOPPED, may_run
                )
                log.info(
                    "a server changed its state by itself",
                    server=server_id,
                    host=host,
                    before=server.vm_state,
                    state=new_state,
                )
    actions.update_servers(tx, changes)


def _find_unknown_fences(tx: Connection, sync: Sync) -> tuple[dict[str, int], list[str]]:
    """Return the fences unknown to the host, and its running servers with another recorded host.

    Returns:
        First, the fences of idle servers on this host, by server. The host has reported the
        server's domain under a lower fence, or still executes a command of an ended action. Until
        the host knows the fence, the reported state of the domain does not count. Second, the
        servers that run or are paused on this host, but whose record names another host or no host.
    """
    domains = [*(sync.domains or ()), *sync.changed]
    reported = {domain.server: domain.fence for domain in domains}
    if sync.ask and sync.working:
        keys = CommandKey.parse_each(sync.working).values()
        reported |= actions.ended_of(tx, (key.owner for key in keys))
    if not reported:
        return {}, []
    rows = actions.servers_of(tx, reported)
    running = {
        domain.server
        for domain in domains
        if domain.power_state in (states.RUNNING, states.POWER_PAUSED)
    }
    return (
        {
            row.id: row.fence
            for row in rows.values()
            if row.host == sync.host and row.action is None and reported[row.id] < row.fence
        },
        [row.id for row in rows.values() if row.host != sync.host and row.id in running],
    )


def _answer(
    tx: Connection, engine: WorkflowEngine, sync: Sync, session: int, sends: bool = True
) -> tuple[SyncAnswer, lost_commands.Failed]:
    """Build the answer to a report.

    With ``sends``, the answer to a registration or periodic report has the commands that the host
    has lost. The answer has session 0, which lets the host register, in three cases: the host has
    no session, the report is of an old session, or the report is no registration and the host runs
    a guest that must be stopped there (``guests.off_on``), because its server is elsewhere.

    Returns:
        The answer, and the actions whose command could not be built.
    """
    if sync.session not in (0, session) or session == 0:
        return SyncAnswer(session=0), []
    is_registration = sync.session == 0
    fences_here, elsewhere = _find_unknown_fences(tx, sync)
    if (
        elsewhere
        and not is_registration
        and set(elsewhere) & set(guests.off_on(tx, sync.host, elsewhere))
    ):
        log.warning(
            "a host runs guests of servers that are on other hosts by their records; the host "
            "must register and stop these guests",
            host=sync.host,
            servers=", ".join(elsewhere),
        )
        return SyncAnswer(session=0), []
    keys = {*sync.working, *(result.key for result in sync.results)}
    commands: list[Command] = []
    failed: lost_commands.Failed = []
    if sends and (is_registration or sync.ask):
        commands, failed = lost_commands.resend(
            tx, engine, sync.host, session, keys, 0 if is_registration else GRACE_MICROS
        )
    return SyncAnswer(
        session=session,
        acknowledged=[result.key for result in sync.results],
        commands=commands,
        guests=(guests.fences_on(tx, sync.host) if is_registration else {}) | fences_here or None,
        stop=guests.off_on(tx, sync.host, (domain.server for domain in sync.domains or ()))
        if is_registration
        else [],
    ), failed
