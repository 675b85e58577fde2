# SPDX-License-Identifier: Apache-2.0
"""What agents say: the conductor's half of the one exchange.

``handle`` takes the syncs that have piled up, writes all their results and news in one transaction,
and answers each with what it may forget (acknowledged), what it should be doing (commands, debts)
and, at registration, what may exist on it. A late result whose key matches is a fact, whoever sent
the command. What cannot be taken in holds up nothing else: neither another host nor another server
of the same host.
"""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)
GRACE_MICROS = 2 * SECOND  #: a command younger than this may still be on its way
MAX_APART_SECONDS = 10.0  #: for reports that are taken in part by part
#: in which the reports of a host with one that cannot be taken in are taken in alone
ODD_HOST_SECONDS = 60.0


def handle(engine: WorkflowEngine, syncs: Sequence[Sync]) -> list[SyncAnswer | Exception]:
    """Answer each sync; the exception in place of an answer is that of the one sync that caused it,
    or of the database that does not answer."""
    syncs = [host_texts.clean(sync) for sync in syncs]
    moment = engine.clock.monotonic()
    odd = [sync for sync in syncs if engine.odd_hosts.get(sync.host, moment) > moment]
    together = [sync for sync in syncs if sync not in odd] if odd else syncs
    answers, others = iter(_handle_together(engine, together)), iter(_each_apart(engine, odd))
    return [next(others if sync in odd else answers) for sync in syncs]


def _handle_together(engine: WorkflowEngine, syncs: Sequence[Sync]) -> list[SyncAnswer | Exception]:
    if not syncs:
        return []
    try:
        locked = retries.locked_servers(engine)
        answers, written, failed = engine.store.write(
            lambda tx: _take_in(tx, engine, syncs, locked), alone=False
        )
    except errors.TooBusy as problem:
        log.warning("%d reports wait: %s", len(syncs), problem)
        named = {
            server for sync in syncs for server in report_parts.servers_in(sync)
        } - engine.locked_servers.keys()
        return (
            _handle_together(engine, syncs)
            if retries.find_locked(engine, named)
            else _each_apart(engine, syncs)
        )
    except errors.NoStore as problem:
        log.warning("the reports of %d hosts wait: %s", len(syncs), problem)
        return [problem] * len(syncs)
    except Exception:
        log.exception("%d reports cannot be taken in together", len(syncs))
        return _each_apart(engine, syncs)
    engine.fault_point("sync", "reports", "committed")
    flush.send(engine, written)
    _count(engine, failed)
    return list(answers)


def _each_apart(engine: WorkflowEngine, syncs: Sequence[Sync]) -> list[SyncAnswer | Exception]:
    until = engine.clock.monotonic() + MAX_APART_SECONDS
    return [_handle_apart(engine, sync, until) for sync in syncs]


def _handle_apart(engine: WorkflowEngine, sync: Sync, until: float) -> SyncAnswer | Exception:
    """Take in what can be taken in of a report, and answer it. A result that cannot be is
    acknowledged like the others: its command is sent again, and the host answers again from its
    journal."""
    try:
        session = _session_apart(engine, sync)
        if sync.session in (0, session):
            reported = engine.store.write(lambda tx: _in_order(tx, sync), alone=False)
            _absorb(engine, reported, until)
        return _answer_apart(engine, sync, session)
    except Exception as problem:
        log.exception(
            "the report of host %s could not be answered; the agent repeats it", sync.host
        )
        return problem


def _answer_apart(engine: WorkflowEngine, sync: Sync, session: int) -> SyncAnswer:
    """The answer; without commands when they are what cannot be told."""
    try:
        answer, failed = engine.store.write(lambda tx: _answer(tx, engine, sync, session))
    except Exception:
        log.exception("what host %s should be doing cannot be told", sync.host)
        return engine.store.write(lambda tx: _answer(tx, engine, sync, session, sends=False))[0]
    _count(engine, failed)
    return answer


def _count(engine: WorkflowEngine, failed: lost_commands.Failed) -> None:
    """Commands that could not be made again."""
    for row, problem in failed:
        retries.count_exception(engine, row, problem)


def _session_apart(engine: WorkflowEngine, sync: Sync) -> int:
    """The host's session, a new one at registration. After a boot each server is started in a
    transaction of its own; one that cannot be is known to be off, and is tried again whenever its
    host tells so."""
    if sync.session != 0 or sync.inventory is None:
        return engine.store.read(lambda tx: hosts.sessions(tx, [sync.host])).get(sync.host, 0)
    session, to_start = engine.store.write(
        lambda tx: _open_session(tx, sync, idle_too=True), alone=False
    )
    for server in to_start:
        try:
            engine.store.write(partial(_start_again, server=server, host=sync.host))
        except Exception:
            log.exception("server %s cannot be started after the boot of %s", server.id, sync.host)
    return session


def _absorb(engine: WorkflowEngine, reported: Sync, until: float) -> None:
    """Take a part of a report in, divided further where that fails. What is left when the time is
    over comes again."""
    if engine.clock.monotonic() > until:
        return
    try:
        heard = [report_parts.without(reported, retries.locked_servers(engine))]
        flush.send(
            engine,
            engine.store.write(lambda tx: _settle(tx, engine, heard, goes_on=False), alone=False),
        )
        engine.store.write(lambda tx: _describe(tx, reported))
    except Exception as problem:
        log.exception("what host %s tells cannot be taken in", reported.host)
        parts = report_parts.divided(reported)
        for part in parts:
            _absorb(engine, part, until)
        if not parts:
            _leave(engine, reported, problem)


def _leave(engine: WorkflowEngine, reported: Sync, problem: Exception) -> None:
    """A thing that cannot be taken in is left out; an action that waits for it comes nearer to
    being stuck."""
    log.error("host %s told this, which is left out: %.500s", reported.host, reported)
    if isinstance(problem, errors.Unavailable):
        retries.set_aside(engine, report_parts.servers_in(reported))
        return
    engine.odd_hosts[reported.host] = engine.clock.monotonic() + ODD_HOST_SECONDS
    keys = CommandKey.parse_each(result.key for result in reported.results)
    named = [key.owner for key in keys.values()]
    for row in engine.store.read(lambda tx: actions.waiting(tx, named)):
        if row.host == reported.host:
            retries.count_exception(engine, row, problem)


def _take_in(
    tx: Connection, engine: WorkflowEngine, syncs: Sequence[Sync], locked: Collection[str]
) -> tuple[list[SyncAnswer], flush.Written, lost_commands.Failed]:
    """The transaction: registrations, then results, debts and news under the servers' locks, but
    for those that somebody else has ``locked``, then the answers."""
    sessions = {
        sync.host: _registration(tx, engine, sync)
        for sync in sorted(syncs, key=lambda sync: sync.host)
        if sync.session == 0 and sync.inventory
    }
    sessions |= hosts.sessions(tx, (sync.host for sync in syncs if sync.host not in sessions))
    heard = [
        _in_order(tx, sync)
        for sync in sorted(syncs, key=lambda sync: (sync.host, sync.number))
        if sync.session == 0 or sync.session == sessions.get(sync.host)
    ]
    written = _settle(
        tx, engine, [report_parts.without(sync, locked) for sync in heard] if locked else heard
    )
    for sync in heard:
        _describe(tx, sync)
    answers = [_answer(tx, engine, sync, sessions.get(sync.host, 0)) for sync in syncs]
    engine.fault_point("sync", "reports", "written")
    return (
        [answer for answer, _ in answers],
        written,
        [one for _, failed in answers for one in failed],
    )


def _in_order(tx: Connection, sync: Sync) -> Sync:
    """The report, without the host's state when a later one has told that already, which another
    conductor took in."""
    if sync.session == 0 or sync.number == 0 or not sync.tells_state:
        return sync
    return (
        sync
        if hosts.is_newest(tx, sync.host, sync.session, sync.number)
        else report_parts.stateless(sync)
    )


def _registration(tx: Connection, engine: WorkflowEngine, sync: Sync) -> int:
    """A new session; after a boot of the host what should run is started again, as actions tenants
    can see."""
    session, to_start = _open_session(tx, sync)
    for server in to_start:
        if not _start_again(tx, server, sync.host):
            guests.lost_power(tx, sync.host, server.id)
    return session


def _open_session(
    tx: Connection, sync: Sync, idle_too: bool = False
) -> tuple[int, list[ServerKey]]:
    """A new session, and the idle servers to start after a boot. Those with an action, and with
    ``idle_too`` all that should run, are known to be off from then on."""
    assert sync.inventory is not None
    session, booted = hosts.open_session(tx, sync.host, sync.boot_id, sync.inventory)
    log.info(
        "host %s registers: session %d%s",
        sync.host,
        session,
        ", it was booted anew" if booted else "",
    )
    if not booted:
        return session, []
    guests.lost_power(tx, sync.host, idle_too=idle_too)
    return session, guests.wanted_running_on(tx, sync.host)


def _start_again(tx: Connection, server: ServerKey, host: str) -> bool:
    """Begin what starts the guest of a server whose host was booted; False: somebody has begun
    another action."""
    row = replace(states.row("reboot", "HARD"), vm=states.ANY)
    system = RequestContext.of_ourselves(server.project_id)
    try:
        actions.begin(tx, row, server.id, context=system)
    except errors.Problem as problem:
        log.info("server %s is not started by the boot of %s yet: %s", server.id, host, problem)
        return False
    return True


def _describe(tx: Connection, sync: Sync) -> None:
    """What the host has, at registration or where that changed, and what it has measured; last,
    because providers are locked."""
    if sync.inventory is not None:
        hosts.describe(tx, sync.host, sync.inventory)
        if sync.session != 0:
            log.info("host %s tells what it has now", sync.host)
    if sync.domains is not None:
        _note_guests(tx, sync.host, [domain.server for domain in sync.domains])
    if sync.files is not None:
        _note_files(tx, sync.host, sync.files, sync.files_between)
    if sync.cached:
        host_images.record(tx, sync.host, sync.cached)
    if sync.metrics is not None:
        hosts.store_metrics(tx, sync.host, sync.metrics)


def _note_guests(tx: Connection, host: str, servers: Sequence[str]) -> None:
    """Guests without a record are logged as soon as their host reports them."""
    if unknown := hosts.note_guests(tx, host, servers):
        log.warning(
            "host %s has %d guests without a record, as of %.400s; see: kilonova doctor, "
            "then kilonova host adopt or discard",
            host,
            len(unknown),
            ", ".join(unknown),
        )


def _note_files(
    tx: Connection, host: str, servers: Sequence[str], between: Sequence[str] | None
) -> None:
    """So are files without a guest that nothing explains."""
    if unknown := host_files.note(tx, host, servers, between):
        log.warning(
            "host %s has files of %d servers and no guest, as of %.400s; see: kilonova doctor",
            host,
            len(unknown),
            ", ".join(unknown),
        )


def _settle(
    tx: Connection, engine: WorkflowEngine, syncs: Sequence[Sync], goes_on: bool = True
) -> flush.Written:
    """Write results, paid debts and news of domains. ``goes_on``: actions that waited for a debt
    look again now."""
    results = [(sync.host, result) for sync in syncs for result in sync.results]
    keys = CommandKey.parse_each(
        text
        for sync in syncs
        for text in (*(result.key for result in sync.results), *sync.phases, *sync.moved)
    )
    mine = {
        keys[result.key]: (host, result)
        for host, result in results
        if result.key in keys and keys[result.key].is_of_action
    }
    paid = [
        guests.RemovedGuest(result.server, host, result.fence)
        for host, result in results
        if result.key in keys
        and keys[result.key].kind is CommandKind.CLEANUP
        and result.status == ResultStatus.DONE
    ]
    news, differing = _differing(tx, engine, syncs)
    ahead = fences.select_credible(tx, _refused(results, differing))
    touched = (
        {result.server for _, result in results} | {server for _, server in news} | ahead.keys()
    )
    phases = {
        (sync.host, keys[text]): phase
        for sync in syncs
        for text, phase in sync.phases.items()
        if text in keys
    }
    if phases:
        progress.write(tx, phases)
    measured = {
        (sync.host, keys[text].owner): numbers
        for sync in syncs
        for text, numbers in sync.moved.items()
        if text in keys
    }
    if measured:
        migrations.store_progress(tx, measured)
    if not touched:
        return flush.Written({})
    servers = actions.lock_servers(tx, touched)
    heads = actions.lock(
        tx,
        {
            *(key.owner for key in mine),
            *(row.action for row in servers.values() if row.action and paid),
        },
    )
    runs = [
        finish_step(tx, engine, servers, heads[key.owner], result, host)
        for key, (host, result) in mine.items()
        if key.owner in heads
    ]
    if paid:
        struck = guests.confirm_debts(tx, paid)
        moved = {
            server
            for server, host, _ in paid
            if server in struck and server in servers and servers[server].host != host
        }
        if moved:
            migrations.complete_evacuations(tx, moved)
        runs += _go_on(tx, engine, servers, heads, struck) if goes_on else []
    _write_news(tx, servers, news)
    written = flush.write(tx, engine, [run for run in runs if run is not None])
    if ahead and fences.rise_above(tx, ahead):
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
    """Take a result in, if it is the one that its action waits for, of the host that it waits
    for."""
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
            "host %s is not believed what became of %s: host %s was asked",
            host,
            result.key,
            head.host,
        )
        return None
    if result.status == ResultStatus.REFUSED:
        log.warning("host %s refused %s: %s", head.host, result.key, result.error)
        run: AnyRun = Run(head, server, None, None)  # they are not needed
        retries.count_failure(
            run,
            f"Host {head.host} refuses it: {result.error}",
            result.details,
            retries.MAX_REFUSALS,
        )
        return run
    if not engine.workflows.knows(head):
        log.warning(
            "host %s answers %s, which is left to a conductor that knows %s",
            head.host,
            result.key,
            head.workflow,
        )
        return None
    run = _run(tx, engine, head, server)
    runner.take_result(tx, engine, run, result)
    return run


def _run(
    tx: Connection, engine: WorkflowEngine, head: ActionRow, server: PlacedServerRow
) -> AnyRun:
    """The action, with what its server has."""
    volumes = block_devices.of_server(tx, server) if server.volumes else ()
    having = shares.ids_of(tx, [server]).get(server.id, ())
    return engine.workflows[head.workflow].run(head, server, volumes, shares=having)


def _go_on(
    tx: Connection,
    engine: WorkflowEngine,
    servers: dict[str, PlacedServerRow],
    heads: Mapping[str, ActionRow],
    paid: set[str],
) -> list[AnyRun]:
    """Actions that were waiting for debts of their server look again at once."""
    runs = []
    for server_id in sorted(paid):
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
            run = _run(tx, engine, head, server)
            runner.proceed(tx, engine, workflow, index, [run])
            runs.append(run)
    return runs


def _refused(results: Sequence[tuple[str, Result]], ahead: Known) -> Known:
    """Return ``ahead`` with the fences for which hosts have refused commands. A command is refused
    mostly because it was late."""
    fences_by_place = dict(ahead)
    for host, result in results:
        if result.status == ResultStatus.REFUSED and result.known_fence is not None:
            place = result.server, host
            fences_by_place[place] = max(fences_by_place.get(place, 0), result.known_fence)
    return fences_by_place


#: server and host -> the highest fence that the host knows of the server
Known = dict[tuple[str, str], int]
News = dict[tuple[str, str], DomainState]


def _differing(tx: Connection, engine: WorkflowEngine, syncs: Sequence[Sync]) -> tuple[News, Known]:
    """Domains whose state is not what the server's row says; and higher fences of servers that a
    host knows, by server and host. Compared without locks."""
    reported = {
        (sync.host, domain.server): domain
        for sync in syncs
        for domain in [*(sync.domains or ()), *sync.changed]
    }
    if not reported:
        return {}, {}
    servers = actions.servers_of(tx, (server for _, server in reported))
    known = [
        (servers[key[1]], key[0], domain) for key, domain in reported.items() if key[1] in servers
    ]
    ahead: Known = {}
    for server, host, domain in known:
        if server.action is not None and domain.power_state != server.power_state:
            engine.heartbeats.compare_soon(host)
        if domain.fence > server.fence:
            ahead[server.id, host] = domain.fence
    return {
        (host, server.id): domain
        for server, host, domain in known
        if _is_news(server, host, domain)
    }, ahead


def _is_news(server: PlacedServerRow, host: str, domain: DomainState) -> bool:
    """A state under the server's present fence, of an idle server on this host, that its row does
    not say."""
    return bool(
        server.host == host
        and server.action is None
        and domain.fence == server.fence
        and (domain.power_state != server.power_state or _lost_power(server, domain))
    )


def _lost_power(server: PlacedServerRow, domain: DomainState) -> bool:
    """Was its host booted during an action, which has ended since? A server that should run and is
    known to be off is in that state by nothing else (``guests.lost_power``)."""
    return server.vm_state in (states.ACTIVE, states.RESCUED) and (
        domain.power_state == server.power_state == states.SHUTDOWN
    )


#: What a guest did out of band: (vm_state, power states seen) -> (vm_state, whether it may still
#: run)
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
    """What happened out of band is written down once; other differences show in power_state
    only."""
    changes: dict[str, JsonObject] = {}
    for (host, server_id), domain in news.items():
        server = servers.get(server_id)
        if server is None or not _is_news(server, host, domain):
            continue
        if _lost_power(server, domain):
            _start_again(tx, server, host)
            continue
        changes[server_id] = {"power_state": domain.power_state}
        for before, seen, after, may_run in _OUT_OF_BAND_CHANGES:
            if server.vm_state in before and domain.power_state in seen:
                changes[server_id]["vm_state"] = after
                guests.want(
                    tx, [server_id], GuestState.RUNNING if may_run else GuestState.STOPPED, may_run
                )
                log.info(
                    "server %s on host %s went from %s to %s by itself",
                    server_id,
                    host,
                    server.vm_state,
                    after,
                )
    actions.update_servers(tx, changes)


def _compared(tx: Connection, sync: Sync) -> tuple[dict[str, int], list[str]]:
    """Fences of idle servers on this host that it does not know yet: until it does, its news cannot
    count, and it may be at work for an action that was ended. And the servers whose domain runs
    here although they are elsewhere."""
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
    """What the agent may forget and what it should know; a stale session must register first.
    ``sends``: with the commands that it does not seem to know of."""
    if sync.session not in (0, session) or session == 0:
        return SyncAnswer(session=0), []
    registration = sync.session == 0
    fences_here, elsewhere = _compared(tx, sync)
    if (
        elsewhere
        and not registration
        and set(elsewhere) & set(guests.off_on(tx, sync.host, elsewhere))
    ):
        log.warning(
            "host %s runs guests of servers that are elsewhere by what the database knows: it is to register, "
            "and to make them off: %s",
            sync.host,
            ", ".join(elsewhere),
        )
        return SyncAnswer(session=0), []
    known = {*sync.working, *(result.key for result in sync.results)}
    commands: list[Command] = []
    failed: lost_commands.Failed = []
    if sends and (registration or sync.ask):
        commands, failed = lost_commands.resend(
            tx, engine, sync.host, session, known, 0 if registration else GRACE_MICROS
        )
    return SyncAnswer(
        session=session,
        acknowledged=[result.key for result in sync.results],
        commands=commands,
        guests=(guests.fences_on(tx, sync.host) if registration else {}) | fences_here or None,
        stop=guests.off_on(tx, sync.host, (one.server for one in sync.domains or ()))
        if registration
        else [],
    ), failed
