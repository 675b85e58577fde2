# SPDX-License-Identifier: Apache-2.0
"""The conductor process: the threads around the functions of the engine.

One thread advances due actions. Each lane of an external service has one more thread for the
actions before a call to that service. Further threads process the reports of agents, sweep once a
second, retry pending cleanups, advance host actions and send notifications. A thread of the
transport answers heartbeats. Wake-ups and reports wake the responsible thread. Work that arrives
during a round is done together in the next round. Several calls to an external service are made in
parallel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from oslo_config import cfg

from common import __version__, access
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
from common.service.log import get_logger
from common.service.notification_options import NotificationSettings
from common.store.engine import Connection, Store
from common.store.hosts import host_keys, hosts, services
from common.store.placement.allocations import FailedBuildLimit
from common.store.servers import actions
from common.store.version import await_version, guard
from conductor.engine import reports, runner
from conductor.engine.engine import Chore, Engine, Lane
from conductor.engine.report_inbox import ReportInbox, WaitingReport
from conductor.engine.run import AnyRun
from conductor.engine.sweep import Watch, sweep
from conductor.engine.workflow_engine import WorkflowEngine, call_one_by_one
from conductor.gauges import DatabaseGauges
from conductor.hosts import automatic_evacuation, fencing_hook, host_credentials, prefetch
from conductor.hosts.automatic_evacuation import EvacuationPolicy
from conductor.hosts.host_actions import HostActions
from conductor.hosts.host_credentials import HostSecretsSource
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

log = get_logger(__name__)
SWEEP_SECONDS = 1.0
#: Interval at which threads look for due actions without a wake-up.
LOOK_SECONDS = 1.0
CLEANUP_SECONDS = 5.0
SYNC_TIMEOUT_SECONDS = 20.0
LOOPBACK_SECONDS = 5.0
#: Number of hosts for which a sweep records refused messages.
MAX_NOTED_HOSTS = 100
NO_SECRET = (
    "[host_keys] command_secret is not set. The keys of hosts are derived from this secret. Set a long random text, "  # noqa: S105 - a message
    "the same for all conductors, and only on their machines"
)
#: Options that a running engine takes over after a reload.
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
#: Fields of the engine that a reload does not change.
NOT_LIVE = ("fence_host", "chores", "lease_micros")
T = TypeVar("T")
NOT_PROCESSED = "The conductor could not process the report of host {}. Send the report again."


class Messages:
    """RPC clients (``external_services.Messaging``), and tickets for images."""

    def __init__(self, transport: Transport, link: ControlSide, gateway: Gateway) -> None:
        self._agents = agent_rpc.AgentClient(link)
        self._scheduler = scheduler_rpc.SchedulerClient(transport)
        self._gateway = gateway

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        """Request proposed hosts from a scheduler, and return a selection for each spec.

        Without an answer there is no second try here, so that other actions need not wait. The
        runner repeats the request later.

        Args:
            specs: The requirements of each server.
            fresh: True if the scheduler must read the hosts again.

        Raises:
            Unavailable: No scheduler answers (NoAnswer), or its database does not answer.
        """
        return self._scheduler.select(specs, fresh)

    def do(self, host: str, commands: list[Command]) -> None:
        """Send commands to a host.

        If no ticket can be issued, this is logged, and the remaining commands are not sent. The
        host gets them in an answer to a later report.
        """
        for part in _parts(commands):
            try:
                access = self.access_for(host, part)
            except errors.Unavailable as problem:
                log.warning("commands of a host wait", host=host, problem=problem)
                return
            self._agents.do(host, part, access)

    def cache_images(self, host: str, images: list[ImageRef]) -> None:
        """Send a host the request to fetch images before a server needs them.

        If no ticket can be issued, this is logged, and the remaining images are not requested. The
        sweep tries again later.
        """
        for part in _parts(images):
            try:
                access = self._gateway.for_reading(host, [image.id for image in part])
            except errors.Unavailable as problem:
                log.warning("images that a host must fetch ahead wait", host=host, problem=problem)
                return
            self._agents.cache_images(host, part, access)

    def access_for(self, host: str, commands: list[Command]) -> Access | None:
        """Return the image gateway's URL and a ticket for the images of the commands.

        Returns:
            None if the commands have no images.

        Raises:
            Unavailable: No ticket can be issued.
            ValueError, TypeError: As in ``Gateway.for_commands``.
        """
        return self._gateway.for_commands(host, commands)


def _parts(items: list[T]) -> list[list[T]]:
    """Split commands or images into lists of at most ``MOST``, the limit of images of a ticket."""
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
        futures = [self._pools[lane].submit(call, run) for run in runs]
        return [future.exception() for future in futures]  # type: ignore[misc]  # Calls raise subclasses of Exception only.

    def close(self) -> None:
        """Cancel the calls that have not begun, without waiting for the others."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


class Conductor:
    """The RPC server of the process (``ConductorApi``), and the loops of its threads."""

    def __init__(
        self,
        engine: WorkflowEngine,
        messages: Messages,
        cookies: SyncCookies,
        notifications: NotificationSender | None = None,
        refusals: Refusals | None = None,
        secrets: HostSecretsSource | None = None,
    ) -> None:
        self._refusals, self._secrets = refusals, secrets
        self.engine, self._messages, self._cookies, self._notifications = (
            engine,
            messages,
            cookies,
            notifications,
        )
        self._lane_events = {lane: threading.Event() for lane in WORKFLOWS.lanes}
        self._woken, self._stop = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._inbox = ReportInbox()
        self._heard_hosts: set[str] = set()
        self._own_message_at: float | None = None
        engine.wake = self._wake

    def _wake(self, lane: Lane) -> None:
        """Wake the thread of this lane, because an action is due there."""
        self._lane_events.get(lane, self._woken).set()

    def wake(self, service_calls: bool = False) -> None:
        self._woken.set()
        if service_calls:
            for event in self._lane_events.values():
                event.set()

    def loop_back(self) -> None:
        """Record that this conductor's message to itself came back, and wake the runner.

        The broker counts as working for ``LOOPBACK_SECONDS``.
        """
        self._own_message_at = self.engine.clock.monotonic()
        self._woken.set()

    def sync(self, request: Sync) -> tuple[SyncAnswer, Access | None]:
        if not self._cookies.is_fresh(
            request.host, request.session or self._session(request.host), request.cookie
        ):
            return SyncAnswer(
                0,
                cookie=self._cookies.cookie(request.host, self._session(request.host)),
                secrets=self._digest(request.host),
            ), None
        answer, access = self._sync(request)
        session = answer.session or self._session(request.host)
        cookie = self._cookies.cookie(request.host, session)
        return replace(answer, cookie=cookie, secrets=self._digest(request.host)), access

    def _session(self, host: str) -> int:
        """Return the current session of a host, 0 without one."""
        return self.engine.store.read(lambda tx: hosts.sessions(tx, [host])).get(host, 0)

    def _sync(self, request: Sync) -> tuple[SyncAnswer, Access | None]:
        try:
            reply = self._inbox.put(request).result(timeout=SYNC_TIMEOUT_SECONDS)
        except TimeoutError as problem:
            raise errors.Unavailable(NOT_PROCESSED.format(request.host)) from problem
        try:
            return reply, self._messages.access_for(request.host, reply.commands)
        except errors.Unavailable as problem:
            log.warning("commands of a host wait", host=request.host, problem=problem)
            return replace(reply, commands=[]), None

    def heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
        is_fresh = self._cookies.is_fresh(beat.host, beat.session, beat.cookie)
        is_idle = is_fresh and self.engine.heartbeats.answer(beat)
        if is_idle:
            self._hear(beat.host)
        cookie = self._cookies.cookie(beat.host, beat.session)
        return HeartbeatAnswer(is_idle, cookie, self._digest(beat.host))

    def _digest(self, host: str) -> str:
        """Return the digest of the host's secrets, or "" if the database does not answer."""
        try:
            return self._secrets.digest(host) if self._secrets else ""
        except errors.Unavailable:
            return ""

    def _hear(self, host: str) -> None:
        with self._lock:
            self._heard_hosts.add(host)

    def advance(self, lane: Lane, woken: threading.Event) -> None:
        """Loop until ``close``: advance a lane's due actions, then wait up to a second.

        Setting ``woken`` ends the wait.
        """
        while not self._stop.is_set():
            woken.clear()
            try:
                while (
                    runner.advance(self.engine, lane) >= self.engine.batch
                    and not self._stop.is_set()
                ):
                    pass
            except errors.Unavailable as problem:
                log.warning("due actions wait", problem=problem)
            except Exception:
                log.exception("a round of the runner failed; the next begins in a second")
            woken.wait(LOOK_SECONDS)

    def take_reports(self) -> None:
        """Loop until ``close``: answer the waiting reports, a part of them in each round."""
        while not self._stop.is_set():
            self._inbox.wait(SWEEP_SECONDS)
            if batch := self._inbox.take():
                self._answer(batch)

    def _answer(self, batch: list[WaitingReport]) -> None:
        try:
            answers = reports.handle(self.engine, [waiting.sync for waiting in batch])
        except Exception as problem:
            answers = [problem] * len(batch)
            log.exception("reports cannot be processed; the agents repeat them")
        for waiting, answer in zip(batch, answers, strict=True):
            host = waiting.sync.host
            if isinstance(answer, Exception):
                waiting.answer.set_exception(errors.Unavailable(NOT_PROCESSED.format(host)))
                continue
            if answer.session:
                self._hear(host)
            waiting.answer.set_result(answer)
        if any(waiting.sync.session == 0 for waiting in batch):
            self._woken.set()  # After a boot of a host, the start of its guests is due.

    def sweep(self, wakeup: conductor_rpc.ConductorWakeup) -> None:
        """Loop until ``close``: run the sweep once a second.

        Each round first sends a message to this conductor itself, to check the broker
        (``loop_back``), and at the end stores the numbers of refused messages.
        """
        watch = Watch()
        while not self._stop.wait(SWEEP_SECONDS):
            wakeup.wake()
            with self._lock:
                hosts_heard, self._heard_hosts = self._heard_hosts, set()
            received_at = self._own_message_at
            hears = (
                received_at is not None
                and self.engine.clock.monotonic() - received_at < LOOPBACK_SECONDS
            )
            try:
                sweep(self.engine, watch, hosts_heard, hears)
                self._note_refusals()
            except errors.Unavailable as problem:
                log.warning("the sweep waits", problem=problem)
                with self._lock:
                    self._heard_hosts |= hosts_heard
            except Exception:
                log.exception("a sweep failed; the next begins in a second")

    def _note_refusals(self) -> None:
        """Add the new numbers of refused messages to the hosts' rows, for ``kilonova hosts``.

        Only the ``MAX_NOTED_HOSTS`` hosts with the highest numbers are counted.
        """
        refused = self._refusals.take() if self._refusals is not None else None
        if refused:
            # Limited, because an attacker may invent names of hosts.
            most = dict(refused.most_common(MAX_NOTED_HOSTS))
            self.engine.store.write(lambda tx: hosts.note_refusals(tx, most), alone=False)

    def clean_up(self) -> None:
        """Loop until ``close``: retry due cleanups at external services every few seconds."""
        while not self._stop.wait(CLEANUP_SECONDS):
            try:
                while (
                    cleanups.retry(self.engine) >= cleanups.BATCH_SIZE and not self._stop.is_set()
                ):
                    pass
            except errors.Unavailable as problem:
                log.warning("pending cleanups wait", problem=problem)
            except Exception:
                log.exception("a round of cleanups failed and is repeated", seconds=CLEANUP_SECONDS)

    def act_on_hosts(self, actions: HostActions) -> None:
        """Loop until ``close``: advance drains and evacuations of hosts.

        At the end, release this conductor's leases on them.
        """
        while not self._stop.wait(SWEEP_SECONDS):
            try:
                actions.advance()
            except errors.Unavailable as problem:
                log.warning("actions on hosts wait", problem=problem)
            except Exception:
                log.exception("a round of the actions on hosts failed; the next begins in a second")
        with suppress(errors.Unavailable):  # Otherwise the leases expire by themselves.
            actions.close()

    def send_notifications(self, sender: NotificationSender) -> None:
        """Loop until ``close``: write notices of the usage audit, and send the outbox.

        At the end, release the sender's lease.
        """
        while not self._stop.wait(SWEEP_SECONDS):
            try:
                sender.audit_usage()
                while sender.send_batch() and not self._stop.is_set():
                    pass
            except errors.Unavailable as problem:
                log.warning("notifications wait", problem=problem)
            except Exception:
                log.exception("a round of notifications failed; the next begins in a second")
        with suppress(errors.Unavailable):  # Otherwise the lease expires by itself.
            sender.release()

    def start(self, wakeup: conductor_rpc.ConductorWakeup) -> list[threading.Thread]:
        """Register the database gauges, start a thread for each loop, and return the threads."""
        metrics.collect(DatabaseGauges(self.engine.store))
        loops: list[tuple[str, Callable[[], None]]] = [
            ("runner", lambda: self.advance(Lane.INSIDE, self._woken)),
            ("reports", self.take_reports),
            ("sweep", lambda: self.sweep(wakeup)),
            ("cleanups", self.clean_up),
            ("host actions", partial(self.act_on_hosts, HostActions(self.engine))),
            *(
                (lane, partial(self.advance, lane, woken))
                for lane, woken in self._lane_events.items()
            ),
        ]
        if self._notifications is not None:
            loops.append(("notifications", partial(self.send_notifications, self._notifications)))
        threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops]
        for thread in threads:
            thread.start()
        return threads

    def close(self) -> None:
        """Let the threads end after their current rounds, without waiting for them.

        Reports that no round has taken yet fail with Unavailable. Their hosts send them again.
        """
        self._stop.set()
        self._inbox.close()
        self.wake(service_calls=True)


def _notification_sender(conf: cfg.ConfigOpts, engine: Engine) -> NotificationSender:
    """Return the sender of notifications with the configured options and usage audit."""
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
    """End the process with a message if the fencing hook or the command secret is missing.

    The fencing hook is required if [ha] evacuate is set.

    Raises:
        ConfigError: The image gateway has a plain HTTP URL on another machine without [tls]
            allow_plain_text, or the files of [tls] cannot be used.
    """
    if problem := automatic_evacuation.refusal(conf.ha.evacuate, conf.conductor.fencing_hook):
        service.refuse("conductor", problem)
    if not conf.host_keys.command_secret:
        service.refuse("conductor", NO_SECRET)
    tls.of_url(conf, "[image_gateway] url", conf.image_gateway.url)


def _engine_options(conf: cfg.ConfigOpts) -> dict[str, Any]:
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
    if not conf.ha.evacuate:
        return (prefetch.CHORE,)
    policy = EvacuationPolicy(conf.ha.after, conf.ha.max_hosts)
    return prefetch.CHORE, automatic_evacuation.chore(policy)


def _take_over(engine: WorkflowEngine, conf: cfg.ConfigOpts) -> None:
    """Apply the reloaded options in ``LIVE`` to the engine."""
    for name, value in _engine_options(conf).items():
        if name not in NOT_LIVE:
            setattr(engine, name, value)


def open_up(conf: cfg.ConfigOpts) -> Callable[[], None]:
    """Connect to the database and the broker, and start the threads of the conductor.

    This waits until the database has the tables of this release.

    Returns:
        The function that stops the threads and closes the connections.

    Raises:
        ConfigError: An option is not valid, or a service refuses the login.
    """
    check_options(conf)
    access.check(conf, access.DATABASE, access.BROKER, access.IDENTITY)
    owner, identity_file = service.own_name(conf.state_dir, "conductor", conf.host)
    settings = NotificationSettings.of(conf)
    store = guard(Store.open(conf, notifications=settings))
    await_version(store)
    keys = host_keys.of_all(store, conf)
    signer = host_credentials.signer(conf)
    joins = host_credentials.HostJoins(store, keys, signer)
    secrets = HostSecretsSource(keys, conf.host_keys.broker_addresses)
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
        services.enrol(tx, conf.host, Binary.CONDUCTOR, __version__)

    store.write(settle_in)
    conductor = Conductor(
        engine,
        messages,
        SyncCookies(conf.host_keys.command_secret),
        _notification_sender(conf, engine) if settings else None,
        link.refusals,
        secrets,
    )
    conductor_rpc.serve(transport, owner, conductor)
    conductor_rpc.listen(
        link,
        conductor,
        joins,
        host_credentials.HostCertificates(signer),
        secrets,
    )
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
    """Run the console script kilonova-conductor until the process is stopped."""
    service.run("conductor", service.start("conductor"), open_up)


if __name__ == "__main__":
    main()
