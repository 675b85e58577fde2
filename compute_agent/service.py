# SPDX-License-Identifier: Apache-2.0
"""The agent process: the threads around ``sync`` and ``verbs``.

One thread exchanges with the conductor, every five seconds and at once when there is something to
report. Workers carry out commands. Threads of the messaging library deliver commands and queries.
All share one ``Agent`` behind one lock.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from oslo_config import cfg

from common.domain import errors
from common.domain.clock import Clock
from common.domain.command_progress import CommandProgress
from common.domain.json_types import JsonObject
from common.domain.models import Access, Command, HostInventory, ImageRef, Result
from common.rpc import agent as agent_rpc
from common.rpc import conductor as conductor_rpc
from common.rpc.broker import look_in, opener
from common.rpc.host_credentials import HostCertificatesClient
from common.rpc.host_link import HostSide
from common.security import tls
from common.security.host_keys import OwnKeys
from common.service import service, tracing
from common.service.log import event, request_id
from common.service.metrics import COMMAND_SECONDS, COMMANDS, EXCHANGE_SECONDS, LEASED, SILENCE
from compute_agent import assembly, certificate, verbs
from compute_agent.consoles.consoles import Consoles
from compute_agent.fencing import Fencing, make_off
from compute_agent.image_access import ImageGatewayAccess
from compute_agent.journal import Journal
from compute_agent.prefetch import Prefetch
from compute_agent.queries import HostQueries
from compute_agent.sync import Agent, Work
from compute_agent.verb_context import ImageWriter, VerbContext
from compute_agent.virt import machine
from compute_agent.virt.driver import Driver

log = logging.getLogger(__name__)
EXCHANGE_PERIOD_SECONDS = (4.5, 5.0)  #: between exchanges, with jitter
ANSWER_TIMEOUTS_SECONDS = (1.0, 2.0, 4.0)  #: for an answer, by the number of tries
CLOSE_TIMEOUT_SECONDS = 5.0  #: for threads to end
#: without heartbeats after one without an answer: old conductors do not know them
HEARTBEAT_PAUSE_SECONDS = 60.0


class AgentProcess:
    """What the process serves (``common.rpc.agent.AgentApi``) and the loops of its threads."""

    def __init__(
        self,
        agent: Agent,
        journal: Journal,
        driver: Driver,
        conductor: conductor_rpc.ConductorClient,
        images: ImageGatewayAccess,
        consoles: Consoles | None = None,
        ratios: dict[str, float] | None = None,
        monitor: machine.Monitor | None = None,
        peer: verbs.PeerOpener = verbs.no_peer,
        facts: Callable[[], JsonObject] = dict,
    ) -> None:
        self._agent, self._journal, self._driver, self._conductor = (
            agent,
            journal,
            driver,
            conductor,
        )
        self._images, self._ratios, self._monitor = images, ratios or {}, monitor
        self._peer, self._facts = peer, facts
        self._questions = HostQueries(driver, consoles)
        self._prefetch = Prefetch(
            driver, lambda access, image: images.download(access, image), self._cached
        )
        self._access: dict[str, Access] = {}  # by the key of its command
        self._beats_from = 0.0
        self._moved: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._work, self._speak, self._stop = (
            threading.Condition(self._lock),
            threading.Event(),
            threading.Event(),
        )
        driver.watch(self._saw)

    # --- what others call ---
    def do(self, commands: list[Command], access: Access | None) -> None:
        with self._work:
            self._agent.accept(commands)
            self._keep(commands, access)
            self._work.notify_all()
            if self._agent.has_news():
                self._speak.set()

    def _keep(self, commands: list[Command], access: Access | None) -> None:
        """Keep the access to the images of these commands. Drop the access of commands that have
        ended."""
        if access is not None:
            self._access |= {str(command.key): access for command in commands}
        self._access = {
            key: self._access[key] for key in self._access.keys() & self._agent.in_hand().keys()
        }

    def cache_images(self, images: list[ImageRef], access: Access) -> None:
        self._prefetch.add(images, access)

    def query(self, verb: str, arguments: JsonObject) -> JsonObject:
        return self._questions.answer(verb, arguments)

    def _cached(self, image: str, problem: str) -> None:
        """An image that was fetched ahead is here; ``problem``: why it is not."""
        with self._lock:
            self._agent.cached(image, problem)
        self._speak.set()

    def _saw(self, server: str) -> None:
        """An event of the driver: the next exchange reports the domain's state. It takes place now,
        or when the command that caused the event has ended."""
        with self._lock:
            self._moved.add(server)
            if not self._agent.is_working_on(server):
                self._speak.set()

    # --- the loops ---
    def carry_out(self) -> None:
        """Loop of a worker: it stops guests that must not run here, then carries out commands one
        by one. It ends when another worker has replaced it."""
        replaced = False
        while not self._stop.is_set() and not replaced:
            with self._work:
                stop = self._agent.take_stop()
                work = self._agent.take() if stop is None else None
                if stop is None and work is None:
                    self._work.wait(1.0)
                    continue
            if stop is not None:
                self._pull_plug(stop)
            elif work is not None and work.verb.waits_for_guest:
                self._begin(work.command.verb, self._finish, work)
            elif work is not None:
                self._finish(work)
                replaced = work.replaced

    def _finish(self, work: Work) -> None:
        result = self._carry_out(work)
        with self._work:
            self._agent.ended(work, result)
            self._work.notify_all()
        self._speak.set()

    def _replace_workers(self) -> None:
        """Start a worker in place of each one whose command hangs; that one keeps its thread."""
        with self._lock:
            hanging = self._agent.hanging()
        for work in hanging:
            log.error(
                "%s of server %s gives no sign of life (%s): the hypervisor or its storage hangs; see libvirt's "
                "log, virsh domjobinfo and the disks of this host. Other servers go on, this one waits for it.",
                work.command.verb,
                work.command.server,
                work.progress,
            )
            if not work.verb.waits_for_guest:
                self._begin("worker-more", self.carry_out)

    def _pull_plug(self, server: str) -> None:
        """Stop a guest; until this succeeds nothing is started on this host."""
        is_off = make_off(self._driver, server)
        if is_off:
            log.info("the domain of server %s must not run here: it is off", server)
        else:
            self._stop.wait(1.0)
        with self._work:
            self._agent.stopped(server, is_off)
            self._work.notify_all()
        self._speak.set()

    def _carry_out(self, work: Work) -> Result | None:
        """The result; None when it could not be journalled: then the command is sent again."""
        began, outer = time.monotonic(), request_id.set(work.command.request_id)
        result = None
        try:
            result = verbs.run(self._journal, self._tools(work), work.command, work.verb)
        except Exception:
            log.exception(
                "%s of server %s could not be journalled; see to the disk of state_dir",
                work.command.verb,
                work.command.server,
            )
        finally:
            _log_command(work.command, result, time.monotonic() - began)
            request_id.reset(outer)
        return result

    def _tools(self, work: Work) -> verbs.Tools:
        def report_progress(progress: CommandProgress) -> None:
            work.progress = progress
            self._agent.is_alive(work)

        def report_migration(numbers: Mapping[str, int]) -> None:
            work.measured = dict(numbers)
            self._agent.is_alive(work)

        def access() -> Access:
            if (found := self._access.get(work.key)) is None:
                raise errors.Unavailable("no ticket for the image came with the command")
            return found

        def read_image(image: str) -> Iterator[bytes]:
            return self._images.download(access(), image)

        def write_image(image: str) -> ImageWriter:
            return lambda chunks: self._images.upload(access(), image, chunks)

        def cancelled() -> bool:
            self._agent.is_alive(work)
            # A migration goes on without this agent; the next agent joins it.
            return work.cancelled or (self._stop.is_set() and not work.verb.migrates)

        def may_start() -> bool:
            with self._lock:  # an answer changes lease and cancelled commands at once
                return self._agent.may_start(work)

        context = VerbContext(
            report_progress, cancelled, lambda: work.requested, report_migration, may_start
        )
        return verbs.Tools(self._driver, read_image, write_image, context, self._peer)

    def talk(self) -> None:
        """Loop: exchange at once when there is something to report, else every five seconds; repeat
        after 1, 2, 4 s without an answer. The periodic exchange, which asks for commands, also
        takes place on a busy host, since that one may have lost a command too."""
        failed, ask_at = 0, 0.0
        while not self._stop.is_set():
            has_news = not failed and self._speak.wait(max(0.0, ask_at - time.monotonic()))
            self._speak.clear()
            asks = failed > 0 or time.monotonic() >= ask_at or self._agent.needs_registration()
            if not (asks or has_news):
                continue  # the wait may end slightly too early
            self._replace_workers()
            try:
                if failed or not asks or not self._is_idle():
                    self._exchange(
                        asks, ANSWER_TIMEOUTS_SECONDS[min(failed, len(ANSWER_TIMEOUTS_SECONDS) - 1)]
                    )
                failed = 0
                if asks:
                    ask_at = time.monotonic() + random.uniform(*EXCHANGE_PERIOD_SECONDS)  # noqa: S311 - needs no cryptography
            except errors.Problem as problem:
                failed += 1
                log.warning("no exchange with a conductor (%d in a row): %s", failed, problem)
                self._stop.wait(min(failed, 3) * random.uniform(0.1, 0.3))  # noqa: S311 - needs no cryptography
            except Exception:
                failed += 1
                log.exception("the exchange with the conductor failed")
                self._stop.wait(1.0)

    def _is_idle(self) -> bool:
        """Send a heartbeat: has neither this host nor the conductor anything to report?"""
        if time.monotonic() < self._beats_from:
            return False
        with self._lock:
            looks = self._agent.looks_again()
        if looks:
            self._look()
        with self._lock:
            beat = None if self._moved else self._agent.heartbeat()
        if beat is None:
            return False
        try:
            answer = self._conductor.heartbeat(beat, ANSWER_TIMEOUTS_SECONDS[0])
        except Exception:
            log.exception("a heartbeat failed; the host syncs in its place")
            answer = None
        with self._lock:
            self._agent.heard(answer)
        if answer is None:
            self._beats_from = time.monotonic() + HEARTBEAT_PAUSE_SECONDS
        return answer is not None and answer.nothing

    def _look(self) -> None:
        """Read domains, inventory and metrics, as for a full report."""
        domains, inventory, metrics = self._driver.domains(), self._inventory(), self._metrics()
        files = self._driver.files_alone()
        with self._lock:
            self._agent.noticed(inventory, metrics, files)
            self._agent.looked(domains)

    def _exchange(self, ask: bool, timeout: float) -> None:
        registration = self._agent.needs_registration()
        with self._lock:
            moved, self._moved = self._moved, set()
            full = registration or self._agent.wants_full_report()
        try:
            domains = self._driver.domains() if full or moved else []
            inventory = self._inventory() if full else None
            metrics = self._metrics() if full else None
            files = self._driver.files_alone() if full else None
            with self._lock:
                if inventory is not None:
                    self._agent.noticed(inventory, metrics, files)
                self._agent.changed(state for state in domains if state.server in moved)
                request = self._agent.request(
                    ask, domains if full else None, inventory if registration else None
                )
            began, answer = time.monotonic(), None
            try:
                answer, access = self._conductor.sync(request, timeout)
            finally:
                reported = "none" if answer is None else "answered"
                EXCHANGE_SECONDS.observe(time.monotonic() - began, reported)
        except BaseException:
            with self._lock:
                self._moved |= moved
            raise
        with self._work:
            self._agent.answered(request, answer)
            self._keep(answer.commands, access)
            self._work.notify_all()
            if answer.session == 0 or self._agent.has_news():
                self._speak.set()

    def _metrics(self) -> dict[str, float] | None:
        return self._monitor.read() if self._monitor else None

    def _inventory(self) -> HostInventory:
        has = self._driver.inventory()
        return dataclasses.replace(has, ratios=self._ratios, facts=has.facts | self._facts())

    def guard(self) -> None:
        """Start what needs no broker: a host may be cut off before it could begin to listen."""
        self._begin("fencing", Fencing(self._agent, self._driver, self._lock).watch, self._stop)

    def start(self, workers: int) -> None:
        """Start the threads."""
        self._begin("talk", self.talk)
        self._begin("prefetch", self._prefetch.work)
        for number in range(workers):
            self._begin(f"worker-{number}", self.carry_out)
        self._speak.set()

    def repeat(self, name: str, look: Callable[[], None], seconds: float) -> None:
        """Have a thread look at once, and then every so many seconds."""

        def loop() -> None:
            look()
            while not self._stop.wait(seconds):
                look()

        self._begin(name, loop)

    def _begin(self, name: str, loop: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=loop, args=arguments, name=name, daemon=True)
        with self._lock:
            thread.start()
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]

    def close(self) -> list[threading.Thread]:
        """Cancel the commands in hand; they are sent again to the next agent. Returns the threads
        that did not end, which are those of commands that hang."""
        self._stop.set()
        self._speak.set()
        self._prefetch.close()
        with self._work:
            self._work.notify_all()
        until = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [thread for thread in self._threads if thread.is_alive()]


def _log_command(command: Command, result: Result | None, seconds: float) -> None:
    """A line for each command that is over; ``again``: nothing is reported, and a conductor sends
    it again if it is still wanted."""
    parts: JsonObject = {
        "action": command.key.owner if command.key.is_of_action else None,
        "step": command.key.label,
        "verb": command.verb,
        "event": result.status if result else "again",
        "ms": seconds * 1000,
        "server": command.server,
        "request": command.request_id,
        "why": result.error if result else None,
    }
    event(log, "command", **parts)
    if tracing.spans:
        tracing.command(parts, command.key.attempt)
    COMMANDS.add(command.verb, result.status if result else "again")
    COMMAND_SECONDS.observe(seconds, command.verb)


def _key_file(conf: cfg.ConfigOpts) -> Path:
    return Path(conf.agent.key_file or f"{conf.state_dir}/host.key")


def _keys(conf: cfg.ConfigOpts) -> OwnKeys:
    """The keys of this host. Without them no conductor accepts its messages, so the agent does not
    start."""
    try:
        return OwnKeys.read(_key_file(conf), conf.host)
    except ValueError as problem:
        service.refuse("agent", problem)


def _facts(conf: cfg.ConfigOpts, more: JsonObject) -> JsonObject:
    return more | certificate.facts(conf)


def open_up(conf: cfg.ConfigOpts) -> Callable[[], None]:
    """Open journal, driver and broker, start the threads; returns what closes them."""
    alone = service.only_one(conf.state_dir, "agent")
    driver = assembly.make_driver(conf)
    journal = Journal(Path(conf.state_dir) / "agent.db")
    keys = _keys(conf)
    with suppress(errors.Unavailable):  # a broker that is away is waited for
        where = f"transport_url in {_key_file(conf)}" if keys.transport_url else "transport_url"
        look_in(conf, keys.transport_url or None, where)
    link = HostSide(opener(conf, keys.transport_url or None), keys, conf.host)
    agent = Agent(
        conf.host,
        journal,
        Clock(),
        driver.boot_id(),
        assembly.builds_at_a_time(conf.agent.workers, conf.agent.max_concurrent_builds),
        assembly.copies_at_a_time(conf.agent.workers),
        conf.migration.max_concurrent_live_migrations,
        conf.agent.hang_timeout,
        conf.agent.fence_after,
    )
    consoles = assembly.make_consoles(conf, driver)
    transfer, peer = assembly.make_transfer(conf, driver)
    images = ImageGatewayAccess(lambda url: tls.of_url(conf, "[image_gateway] url", url))
    ratios = {
        "VCPU": conf.agent.cpu_allocation_ratio,
        "MEMORY_MB": conf.agent.ram_allocation_ratio,
        "DISK_GB": conf.agent.disk_allocation_ratio,
    }
    monitor = machine.Monitor() if conf.agent.compute_monitors else None
    host = AgentProcess(
        agent,
        journal,
        driver,
        conductor_rpc.ConductorClient(link),
        images,
        consoles,
        ratios,
        monitor,
        peer,
        partial(_facts, conf, {"transfer": transfer.start()}),
    )
    keeper = certificate.keeper(conf, HostCertificatesClient(link))
    LEASED.track(lambda: float(agent.has_lease()))
    SILENCE.track(agent.silence)
    host.guard()
    agent_rpc.serve(link, host)
    host.start(conf.agent.workers)
    talking = consoles.start()
    if keeper:
        host.repeat("certificate", keeper.look, certificate.PERIOD_SECONDS)

    def close() -> None:
        host.close()
        consoles.close()
        transfer.close()
        talking.join(timeout=5)
        link.close()
        driver.close()
        journal.close()
        alone.close()

    return close


def main() -> None:
    """The console script kilonova-agent."""
    service.run("agent", service.start("agent"), open_up)


if __name__ == "__main__":
    main()
