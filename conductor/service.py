# SPDX-License-Identifier: Apache-2.0
"""The conductor process: the threads around the plain functions.

One thread advances due actions, and one more for each neighbour those that stand before a call to
it; one takes in what agents say, one of the transport answers their heartbeats, one sweeps once a
second, one carries out pending cleanups. A wakeup message or a sync wakes its thread; what piles up
while a round runs is the next round's list. Calls to a neighbour are made several at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from oslo_config import cfg

from common import access
from common.clients.identity import IdentityClient
from common.clients.network_bindings import Bindings
from common.domain import errors
from common.domain.clock import SECOND, Clock
from common.domain.models import (
    Access,
    Command,
    Heartbeat,
    HeartbeatAnswer,
    ImageRef,
    RequestSpec,
    Selection,
    Sync,
    SyncAnswer,
)
from common.domain.service_binaries import Binary
from common.notifications.periods import Periods
from common.rpc import agent as agent_rpc
from common.rpc import conductor as conductor_rpc
from common.rpc import scheduler as scheduler_rpc
from common.rpc.broker import opener
from common.rpc.host_link import ControlSide
from common.rpc.host_messages import Refusals
from common.rpc.notifier import Notifier
from common.rpc.transport import Transport
from common.security import image_tickets, tls
from common.security.image_tickets import MOST, Gateway
from common.security.vault import Vault
from common.service import metrics, reload, service
from common.service.notification_options import NotificationSettings
from common.store.engine import Connection, Store
from common.store.hosts import host_keys, hosts, services
from common.store.placement.allocations import FailedBuildLimit
from common.store.servers import actions
from common.store.version import await_version, guarded
from conductor.engine import reports, runner
from conductor.engine.engine import Chore, Engine, Lane
from conductor.engine.run import AnyRun
from conductor.engine.sweep import Watch, sweep
from conductor.engine.workflow_engine import WorkflowEngine, call_one_by_one
from conductor.gauges import DatabaseGauges
from conductor.hosts import automatic_evacuation, fencing_hook, host_credentials, prefetch
from conductor.hosts.automatic_evacuation import EvacuationPolicy
from conductor.hosts.host_actions import HostActions
from conductor.hosts.sync_cookies import SyncCookies
from conductor.notifications import notices as notifications
from conductor.notifications.notification_sender import NotificationSender
from conductor.steps import cleanups
from conductor.steps.service_clients import (
    BlockStorageService,
    ImageService,
    NetworkService,
    ShareService,
)
from conductor.workflows import WORKFLOWS

log = logging.getLogger(__name__)
SWEEP_SECONDS = 1.0
LOOK_SECONDS = 1.0  #: after which due actions are looked for without being woken
CLEANUP_SECONDS = 5.0
SYNC_TIMEOUT_SECONDS = 20.0
LOOPBACK_SECONDS = 5.0
MAX_SYNCS = 256
MAX_NOTED_HOSTS = 100  #: whose refused messages a sweep notes
NO_SECRET = (
    "there is no [host_keys] command_secret to make the keys of hosts with: set any long random text, the "  # noqa: S105 - a message
    "same for all conductors and on no other machine"
)
#: Options that the engine takes over while it runs; and what of it those do not change.
LIVE = (
    *(
        f"conductor.{name}"
        for name in (
            "batch",
            "max_attempts",
            "host_silence",
            "resize_confirm_window",
            "allow_resize_to_same_host",
        )
    ),
    "agent.shutdown_timeout",
    "share.apply_timeout",
    "volume.create_timeout",
    "network.vif_plugging_*",
    "scheduler.build_failure_limit",
    "scheduler.build_failure_pause",
    "scheduler.default_availability_zone",
    "DEFAULT.reclaim_instance_interval",
    "DEFAULT.shelved_offload_time",
)
NOT_LIVE = ("fence_host", "chores", "lease_micros")
T = TypeVar("T")
STOPPING = "This conductor is stopping; ask again."


class Messages:
    """RPC clients (``external_services.Messaging``), and tickets for hosts that read or write
    images."""

    def __init__(self, transport: Transport, link: ControlSide, gateway: Gateway) -> None:
        self._agents = agent_rpc.AgentClient(link)
        self._scheduler = scheduler_rpc.SchedulerClient(transport)
        self._gateway = gateway

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        """Ask a scheduler once: what waits behind this must not wait for its repetition, which the
        runner makes."""
        return self._scheduler.select(specs, fresh)

    def do(self, host: str, commands: list[Command]) -> None:
        """Cast; without a ticket nothing is sent, and the host's next sync asks for it again."""
        for some in _parts(commands):
            try:
                access = self.access_for(host, some)
            except errors.Unavailable as problem:
                log.warning("commands for host %s wait: %s", host, problem)
                return
            self._agents.do(host, some, access)

    def cache_images(self, host: str, images: list[ImageRef]) -> None:
        """Cast; without a ticket nothing is sent, and the sweep sends it again later."""
        for some in _parts(images):
            try:
                access = self._gateway.for_reading(host, [image.id for image in some])
            except errors.Unavailable as problem:
                log.warning("images for host %s to fetch ahead wait: %s", host, problem)
                return
            self._agents.cache_images(host, some, access)

    def access_for(self, host: str, commands: list[Command]) -> Access | None:
        """The image gateway's URL and a ticket for the images of these commands, when they have
        any."""
        return self._gateway.for_commands(host, commands)


def _parts(items: list[T]) -> list[list[T]]:
    """Messages of which none has more images than a ticket opens."""
    return [items[at : at + MOST] for at in range(0, len(items), MOST)]


class CallPools:
    """Makes several calls at the same time (``CallPool``), in a pool for each lane."""

    def __init__(self, calls: int) -> None:
        self._pools = {
            lane: ThreadPoolExecutor(calls, thread_name_prefix=lane) for lane in WORKFLOWS.lanes
        }

    def __call__(
        self, lane: Lane, call: Callable[[AnyRun], None], runs: Sequence[AnyRun]
    ) -> list[Exception | None]:
        if len(runs) == 1:
            return call_one_by_one(lane, call, runs)
        begun = [self._pools[lane].submit(call, run) for run in runs]
        return [future.exception() for future in begun]  # type: ignore[misc]  # calls raise nothing but Exceptions

    def close(self) -> None:
        """Begin no more calls."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


class Conductor:
    """What the process serves (``common.rpc.conductor.ConductorApi``) and the loops of its
    threads."""

    def __init__(
        self,
        engine: WorkflowEngine,
        messages: Messages,
        cookies: SyncCookies,
        notifications: NotificationSender | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        self._refusals = refusals
        self.engine, self._messages, self._cookies, self._notifications = (
            engine,
            messages,
            cookies,
            notifications,
        )
        self._outside = {lane: threading.Event() for lane in WORKFLOWS.lanes}
        self._woken, self._spoken, self._stop = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._lock = threading.Lock()
        self._inbox: list[tuple[Sync, Future[SyncAnswer]]] = []
        self._heard: set[str] = set()
        self._own_message_at: float | None = None
        engine.wake = self._wake

    def _wake(self, lane: Lane) -> None:
        """Some action is due in this lane."""
        self._outside.get(lane, self._woken).set()

    def wake(self, neighbours: bool = False) -> None:
        self._woken.set()
        if neighbours:
            for woken in self._outside.values():
                woken.set()

    def loop_back(self) -> None:
        """Our own message came back: the broker works."""
        self._own_message_at = self.engine.clock.monotonic()
        self._woken.set()

    def sync(self, request: Sync) -> tuple[SyncAnswer, Access | None]:
        if not self._cookies.is_fresh(
            request.host, request.session or self._session(request.host), request.cookie
        ):
            return SyncAnswer(
                0, cookie=self._cookies.cookie(request.host, self._session(request.host))
            ), None
        given, access = self._sync(request)
        session = given.session or self._session(request.host)
        return replace(given, cookie=self._cookies.cookie(request.host, session)), access

    def _session(self, host: str) -> int:
        """The session in force of a host that registers, or is to."""
        return self.engine.store.read(lambda tx: hosts.sessions(tx, [host])).get(host, 0)

    def _sync(self, request: Sync) -> tuple[SyncAnswer, Access | None]:
        answer: Future[SyncAnswer] = Future()
        with self._lock:
            if self._stop.is_set():
                raise errors.Unavailable(STOPPING)
            self._inbox.append((request, answer))
        self._spoken.set()
        given = answer.result(timeout=SYNC_TIMEOUT_SECONDS)
        try:
            return given, self._messages.access_for(request.host, given.commands)
        except errors.Unavailable as problem:
            log.warning("commands for host %s wait: %s", request.host, problem)
            return replace(given, commands=[]), None

    def heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
        is_fresh = self._cookies.is_fresh(beat.host, beat.session, beat.cookie)
        nothing = is_fresh and self.engine.heartbeats.answer(beat)
        if nothing:
            self._hear(beat.host)
        return HeartbeatAnswer(nothing, self._cookies.cookie(beat.host, beat.session))

    def _hear(self, host: str) -> None:
        with self._lock:
            self._heard.add(host)

    def advance(self, lane: Lane, woken: threading.Event) -> None:
        """Loop: bring a lane's due actions on, while there may be more of them, then wait to be
        woken or for a second."""
        while not self._stop.is_set():
            woken.clear()
            try:
                while (
                    runner.advance(self.engine, lane) >= self.engine.batch
                    and not self._stop.is_set()
                ):
                    pass
            except errors.Unavailable as problem:
                log.warning("due actions wait: %s", problem)
            except Exception:
                log.exception("a round of the runner failed; the next begins in a second")
            woken.wait(LOOK_SECONDS)

    def take_reports(self) -> None:
        """Loop: answer the syncs that have come in since the last round."""
        while not self._stop.is_set():
            self._spoken.wait(SWEEP_SECONDS)
            self._spoken.clear()
            with self._lock:
                batch, self._inbox = self._inbox[:MAX_SYNCS], self._inbox[MAX_SYNCS:]
                if self._inbox:
                    self._spoken.set()
            if batch:
                self._answer(batch)

    def _answer(self, batch: list[tuple[Sync, Future[SyncAnswer]]]) -> None:
        try:
            answers = reports.handle(self.engine, [sync for sync, _ in batch])
        except Exception as problem:
            answers = [problem] * len(batch)
            log.exception("reports could not be taken in; the agents repeat them")
        for (sync, future), answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(
                    errors.Unavailable("The conductor could not take the report in.")
                )
                continue
            if answer.session:
                self._hear(sync.host)
            future.set_result(answer)
        if any(sync.session == 0 for sync, _ in batch):
            self._woken.set()  # a host that was booted anew has its guests started

    def sweep(self, wakeup: conductor_rpc.ConductorWakeup) -> None:
        """Loop: once a second."""
        watch = Watch()
        while not self._stop.wait(SWEEP_SECONDS):
            wakeup.wake()
            with self._lock:
                heard, self._heard = self._heard, set()
            own = self._own_message_at
            hears = own is not None and self.engine.clock.monotonic() - own < LOOPBACK_SECONDS
            try:
                sweep(self.engine, watch, heard, hears)
                self._note_refusals()
            except errors.Unavailable as problem:
                log.warning("the sweep waits: %s", problem)
                with self._lock:
                    self._heard |= heard
            except Exception:
                log.exception("a sweep failed; the next begins in a second")

    def _note_refusals(self) -> None:
        """Keep the numbers of refused messages of hosts, for ``kilonova hosts``."""
        refused = self._refusals.take() if self._refusals is not None else None
        if refused:
            most = dict(refused.most_common(MAX_NOTED_HOSTS))  # names may be made up
            self.engine.store.write(lambda tx: hosts.note_refusals(tx, most), alone=False)

    def clean_up(self) -> None:
        """Loop: what neighbours have still to remove."""
        while not self._stop.wait(CLEANUP_SECONDS):
            try:
                while (
                    cleanups.retry(self.engine) >= cleanups.BATCH_SIZE and not self._stop.is_set()
                ):
                    pass
            except errors.Unavailable as problem:
                log.warning("pending cleanups wait: %s", problem)
            except Exception:
                log.exception(
                    "a round of cleanups failed; the next begins in %d seconds", CLEANUP_SECONDS
                )

    def act_on_hosts(self, actions: HostActions) -> None:
        """Loop: bring drains and evacuations on."""
        while not self._stop.wait(SWEEP_SECONDS):
            try:
                actions.advance()
            except errors.Unavailable as problem:
                log.warning("actions on hosts wait: %s", problem)
            except Exception:
                log.exception("a round of the actions on hosts failed; the next begins in a second")
        with suppress(errors.Unavailable):  # the lease runs out by itself
            actions.close()

    def send_notifications(self, sender: NotificationSender) -> None:
        """Loop: send what the outbox has."""
        while not self._stop.wait(SWEEP_SECONDS):
            try:
                sender.audit_usage()
                while sender.send_batch() and not self._stop.is_set():
                    pass
            except errors.Unavailable as problem:
                log.warning("notifications wait: %s", problem)
            except Exception:
                log.exception("a round of notifications failed; the next begins in a second")
        with suppress(errors.Unavailable):  # the lease runs out by itself
            sender.release()

    def start(self, wakeup: conductor_rpc.ConductorWakeup) -> list[threading.Thread]:
        """Start the threads."""
        metrics.collect(DatabaseGauges(self.engine.store))
        loops: list[tuple[str, Callable[[], None]]] = [
            ("runner", lambda: self.advance(Lane.INSIDE, self._woken)),
            ("reports", self.take_reports),
            ("sweep", lambda: self.sweep(wakeup)),
            ("cleanups", self.clean_up),
            ("host actions", partial(self.act_on_hosts, HostActions(self.engine))),
            *((lane, partial(self.advance, lane, woken)) for lane, woken in self._outside.items()),
        ]
        if self._notifications is not None:
            loops.append(("notifications", partial(self.send_notifications, self._notifications)))
        threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops]
        for thread in threads:
            thread.start()
        return threads

    def close(self) -> None:
        """Finish the rounds in hand; syncs that came after them are answered by another
        conductor."""
        with self._lock:
            self._stop.set()
            left, self._inbox = self._inbox, []
        for _, answer in left:
            answer.set_exception(errors.Unavailable(STOPPING))
        self.wake(neighbours=True)
        self._spoken.set()


def _notification_sender(conf: cfg.ConfigOpts, engine: Engine) -> NotificationSender:
    """What sends notifications, as configured."""
    options = conf.notifications
    return NotificationSender(
        engine.store,
        engine.clock,
        Notifier(conf),
        engine.owner,
        options.notification_format,
        options.outbox_limit,
        audit=Periods.of(conf.instance_usage_audit_period) if conf.instance_usage_audit else None,
    )


def check_options(conf: cfg.ConfigOpts) -> None:
    """Ends the process where options do not go together."""
    if refused := automatic_evacuation.refusal(conf.ha.evacuate, conf.conductor.fencing_hook):
        service.refuse("conductor", refused)
    if not conf.host_keys.command_secret:
        service.refuse("conductor", NO_SECRET)
    tls.of_url(conf, "[image_gateway] url", conf.image_gateway.url)


def _engine_options(conf: cfg.ConfigOpts) -> dict[str, Any]:
    """Return the fields of the engine that the configuration sets."""
    own = conf.conductor
    return {
        "batch": own.batch,
        "max_attempts": own.max_attempts,
        "shutdown_timeout": conf.agent.shutdown_timeout,
        "host_silence": own.host_silence,
        "share_timeout": conf.share.apply_timeout,
        "volume_timeout": conf.volume.create_timeout,
        "vif_plugging_timeout": conf.network.vif_plugging_timeout,
        "vif_plugging_is_fatal": conf.network.vif_plugging_is_fatal,
        "failed_build_limit": FailedBuildLimit(
            conf.scheduler.build_failure_limit, conf.scheduler.build_failure_pause
        ),
        "default_zone": conf.scheduler.default_availability_zone,
        "reclaim_interval": conf.reclaim_instance_interval,
        "shelved_offload_time": conf.shelved_offload_time,
        "resize_confirm_window": own.resize_confirm_window,
        "allow_resize_to_same_host": own.allow_resize_to_same_host,
        "fence_host": fencing_hook.hook(own.fencing_hook, own.fencing_timeout),
        "chores": _chores(conf),
        "lease_micros": {Lane.FENCING: actions.LONG_LEASE + own.fencing_timeout * SECOND},
    }


def _chores(conf: cfg.ConfigOpts) -> tuple[Chore, ...]:
    """Return the chores of the sweep."""
    if not conf.ha.evacuate:
        return (prefetch.CHORE,)
    policy = EvacuationPolicy(conf.ha.after, conf.ha.max_hosts)
    return prefetch.CHORE, automatic_evacuation.chore(policy)


def _take_over(engine: WorkflowEngine, conf: cfg.ConfigOpts) -> None:
    """Let the rounds to come use the options in ``LIVE``."""
    for name, value in _engine_options(conf).items():
        if name not in NOT_LIVE:
            setattr(engine, name, value)


def open_up(conf: cfg.ConfigOpts) -> Callable[[], None]:
    """Open the store and the broker, start the threads; returns what closes them."""
    check_options(conf)
    access.check(conf, access.DATABASE, access.BROKER, access.IDENTITY)
    owner, identity_file = service.own_name(conf.state_dir, "conductor", conf.host)
    settings = NotificationSettings.of(conf)
    store = guarded(Store.opened(conf, notifications=settings))
    await_version(store)
    keys = host_keys.of_all(store, conf)
    signer = host_credentials.signer(conf)
    joins = host_credentials.HostJoins(store, keys, signer)
    transport, link = Transport(conf), ControlSide(opener(conf), keys)
    identity, calls = IdentityClient(conf), CallPools(conf.network.calls)
    messages = Messages(
        transport, link, Gateway(conf.image_gateway.url, image_tickets.configured(conf))
    )
    engine = WorkflowEngine(
        store,
        Clock(),
        messages,
        owner,
        workflows=WORKFLOWS,
        notices=notifications.of,
        images=ImageService(identity),
        call_pool=calls,
        networks=NetworkService(identity, Bindings(identity.network_url, conf.network.timeout)),
        shares=ShareService(identity, conf.share.timeout),
        volumes=BlockStorageService(identity, conf.volume.timeout),
        vault=Vault(conf.secret_key),
        **_engine_options(conf),
    )

    reload.takes(*reload.OF_IDENTITY)
    reload.takes(*LIVE, then=lambda conf: _take_over(engine, conf))

    def settle_in(tx: Connection) -> None:
        actions.free_leases_of(tx, owner)
        services.enrol(tx, conf.host, Binary.CONDUCTOR)

    store.write(settle_in)
    conductor = Conductor(
        engine,
        messages,
        SyncCookies(conf.host_keys.command_secret),
        _notification_sender(conf, engine) if settings else None,
        link.refusals,
    )
    conductor_rpc.serve(transport, owner, conductor)
    conductor_rpc.listen(link, conductor, joins, host_credentials.HostCertificates(signer))
    threads = conductor.start(
        conductor_rpc.ConductorWakeup(transport, server=owner, method="loop_back")
    )

    def close() -> None:
        conductor.close()
        for thread in threads:
            thread.join(timeout=5)
        calls.close()
        link.close()
        transport.close()
        store.close()
        identity_file.close()

    return close


def main() -> None:
    """The console script kilonova-conductor."""
    service.run("conductor", service.start("conductor"), open_up)


if __name__ == "__main__":
    main()
