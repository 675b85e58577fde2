# SPDX-License-Identifier: Apache-2.0
"""The agent process: the threads around ``sync`` and ``verbs``.

One thread exchanges messages with conductors, every five seconds, and at once when the host has
something to report. Worker threads carry out commands. Threads of the messaging library deliver
commands and queries. All threads share one ``Agent`` behind one lock.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from oslo_config import cfg

from common import __version__
from common.domain import errors
from common.domain.clock import Clock
from common.domain.command_progress import CommandProgress
from common.domain.json_types import JsonObject
from common.domain.models import Access, Command, HostInventory, ImageRef, Result
from common.rpc import agent as agent_rpc
from common.rpc import conductor as conductor_rpc
from common.rpc.broker import look_in
from common.rpc.host_credentials import HostCertificatesClient, HostSecretsClient
from common.rpc.host_link import HostSide
from common.security import tls
from common.security.host_keys import OwnKeys
from common.service import service, tracing
from common.service.log import get_logger, request_id
from common.service.metrics import COMMAND_SECONDS, COMMANDS, EXCHANGE_SECONDS, LEASED, SILENCE
from compute_agent import assembly, certificate, verbs
from compute_agent.consoles.consoles import Consoles
from compute_agent.fencing import Fencing, power_off
from compute_agent.host_secrets import KeyFile, LiveKeys, SecretsKeeper
from compute_agent.image_access import ImageGatewayAccess
from compute_agent.journal import Journal
from compute_agent.prefetch import Prefetch
from compute_agent.queries import HostQueries
from compute_agent.sync import Agent, Work
from compute_agent.verb_context import ImageWriter, VerbContext
from compute_agent.virt import machine
from compute_agent.virt.driver import Driver

log = get_logger(__name__)
#: Bounds of the random time between two periodic exchanges.
EXCHANGE_PERIOD_SECONDS = (4.5, 5.0)
#: Timeouts for an answer, by the number of failures before. The last holds for further failures.
ANSWER_TIMEOUTS_SECONDS = (1.0, 2.0, 4.0)
#: Time for all threads to end.
CLOSE_TIMEOUT_SECONDS = 5.0
#: Pause after a heartbeat without an answer. Exchanges replace heartbeats meanwhile, because
#: conductors of an old version do not know heartbeats.
HEARTBEAT_PAUSE_SECONDS = 60.0


class AgentProcess:
    """The operations that the process serves (``common.rpc.agent.AgentApi``), and its loops.

    Args:
        agent: The commands, fences and lease of this host.
        journal: Stores results and fences.
        driver: The driver of the hypervisor. Its events are recorded from now on.
        conductor: The client of the conductors.
        images: The client of the image gateway.
        consoles: The listener for consoles, or None on a host that offers none.
        ratios: Allocation ratios for the inventory, by resource class.
        monitor: Source of CPU metrics, or None if none are reported.
        peer: Opens a guest's files at another host.
        facts: Returns further facts for the inventory.
        compare_secrets: Called with the digest of the host's secrets in each answer of conductors.
            Returns True if ``facts`` has changed.
    """

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
        compare_secrets: Callable[[str], bool] = lambda digest: False,
    ) -> None:
        self._agent, self._journal, self._driver, self._conductor = (
            agent,
            journal,
            driver,
            conductor,
        )
        self._images, self._ratios, self._monitor = images, ratios or {}, monitor
        self._peer, self._facts, self._compare_secrets = peer, facts, compare_secrets
        self._queries = HostQueries(driver, consoles)
        self._prefetch = Prefetch(
            driver, lambda access, image: images.download(access, image), self._record_prefetch
        )
        #: Access to images, by the key of the command.
        self._access: dict[str, Access] = {}
        #: Monotonic time before which no heartbeat is sent.
        self._no_heartbeat_before = 0.0
        #: Servers with an event of the driver since the last exchange.
        self._servers_with_event: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._work, self._exchange_now, self._stop = (
            threading.Condition(self._lock),
            threading.Event(),
            threading.Event(),
        )
        driver.watch(self._record_event)

    # --- Called by conductors and the driver ---
    def do(self, commands: list[Command], access: Access | None) -> None:
        with self._work:
            self._agent.accept(commands)
            self._store_access(commands, access)
            self._work.notify_all()
            if self._agent.has_news():
                self._exchange_now.set()

    def _store_access(self, commands: list[Command], access: Access | None) -> None:
        """Store the access to images for these commands, and drop that of commands not in hand.

        ``access`` is None if the commands have no images. The caller holds the lock.
        """
        if access is not None:
            self._access |= {str(command.key): access for command in commands}
        self._access = {
            key: self._access[key] for key in self._access.keys() & self._agent.in_hand().keys()
        }

    def cache_images(self, images: list[ImageRef], access: Access) -> None:
        self._prefetch.add(images, access)

    def query(self, verb: str, arguments: JsonObject) -> JsonObject:
        return self._queries.answer(verb, arguments)

    def _record_prefetch(self, image: str, problem: str) -> None:
        """Record the outcome of a prefetch, and request an exchange.

        ``problem`` is empty if the image is on this host.
        """
        with self._lock:
            self._agent.record_prefetch(image, problem)
        self._exchange_now.set()

    def _record_event(self, server: str) -> None:
        """Record that the driver reported an event of a server's domain, for the next exchange.

        An exchange is requested at once, unless a command for the server runs. The end of the
        command requests one, and the command may have caused the event.
        """
        with self._lock:
            self._servers_with_event.add(server)
            if not self._agent.is_working_on(server):
                self._exchange_now.set()

    # --- Loops ---
    def carry_out(self) -> None:
        """Loop of a worker: power off guests that must not run here, then carry out commands.

        Commands that wait for their guest (``Verb.waits_for_guest``) get a thread of their own. The
        loop ends after ``close``. A worker whose command hung has been replaced, and ends with that
        command.
        """
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
            self._agent.record_result(work, result)
            self._work.notify_all()
        self._exchange_now.set()

    def _replace_workers(self) -> None:
        """Log commands that have begun to hang, and start a new worker for each of their workers.

        The hanging thread remains, and ends when its command ends. Commands that wait for their
        guest occupy no worker, so no worker is started for them.
        """
        with self._lock:
            hanging_work = self._agent.take_hanging()
        for work in hanging_work:
            log.error(
                "a command gives no sign of life, because the hypervisor or its storage hangs: "
                "see libvirt's log, virsh domjobinfo and the disks of this host. Further "
                "commands of this server wait, commands of other servers continue",
                verb=work.command.verb,
                server=work.command.server,
                progress=work.progress,
            )
            if not work.verb.waits_for_guest:
                self._begin("worker-more", self.carry_out)

    def _pull_plug(self, server: str) -> None:
        """Power off the domain of a server from ``Agent.take_stop``, and record the result.

        Until this succeeds, the agent starts no guest on this host. After a failure, this method
        waits a second, and a worker tries again.
        """
        is_off = power_off(self._driver, server)
        if is_off:
            log.info(
                "the domain of a server, which must not run on this host, is off", server=server
            )
        else:
            self._stop.wait(1.0)
        with self._work:
            self._agent.record_stop(server, is_off)
            self._work.notify_all()
        self._exchange_now.set()

    def _carry_out(self, work: Work) -> Result | None:
        """Carry out a command, and log the result.

        Returns:
            The result. None if ``verbs.run`` returned None or failed, for example because the
            journal cannot be written. The conductor then sends the command again if it is still
            valid.
        """
        began, outer = time.monotonic(), request_id.set(work.command.request_id)
        result = None
        try:
            result = verbs.run(self._journal, self._tools(work), work.command, work.verb)
        except Exception:
            log.exception(
                "a command cannot be journalled; check the disk of state_dir",
                verb=work.command.verb,
                server=work.command.server,
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
            if (image_access := self._access.get(work.key)) is None:
                raise errors.Unavailable("the command came without access to its image")
            return image_access

        def read_image(image: str) -> Iterator[bytes]:
            return self._images.download(access(), image)

        def write_image(image: str) -> ImageWriter:
            return lambda chunks: self._images.upload(access(), image, chunks)

        def cancelled() -> bool:
            self._agent.is_alive(work)
            # A migration continues after this agent ends, and the next agent joins it.
            return work.cancelled or (self._stop.is_set() and not work.verb.migrates)

        def may_start() -> bool:
            # An answer of a conductor changes the lease and cancels commands under this lock.
            with self._lock:
                return self._agent.may_start(work)

        context = VerbContext(
            report_progress, cancelled, lambda: work.requested, report_migration, may_start
        )
        return verbs.Tools(self._driver, read_image, write_image, context, self._peer)

    def talk(self) -> None:
        """Loop: exchange messages with conductors until ``close``.

        An exchange takes place at once if there is something to report, else about every five
        seconds. A heartbeat replaces the periodic exchange of an idle host. Without an answer the
        agent retries within a second, with timeouts of 1, 2 and then 4 seconds. The periodic
        exchange also requests commands that the host lacks. A host that often has something to
        report needs this too, because commands to the host may have been lost.
        """
        failures, next_request_at = 0, 0.0
        while not self._stop.is_set():
            has_news = not failures and self._exchange_now.wait(
                max(0.0, next_request_at - time.monotonic())
            )
            self._exchange_now.clear()
            is_periodic = (
                failures > 0
                or time.monotonic() >= next_request_at
                or self._agent.needs_registration()
            )
            if not (is_periodic or has_news):
                # The wait may end slightly too early.
                continue
            self._replace_workers()
            try:
                if failures or not is_periodic or not self._is_idle():
                    self._exchange(
                        is_periodic,
                        ANSWER_TIMEOUTS_SECONDS[min(failures, len(ANSWER_TIMEOUTS_SECONDS) - 1)],
                    )
                failures = 0
                if is_periodic:
                    next_request_at = time.monotonic() + random.uniform(*EXCHANGE_PERIOD_SECONDS)  # noqa: S311 - needs no cryptography
            except errors.Problem as problem:
                failures += 1
                log.warning("the exchange with a conductor failed", count=failures, problem=problem)
                self._stop.wait(min(failures, 3) * random.uniform(0.1, 0.3))  # noqa: S311 - needs no cryptography
            except Exception:
                failures += 1
                log.exception("the exchange with a conductor failed unexpectedly")
                self._stop.wait(1.0)

    def _is_idle(self) -> bool:
        """Send a heartbeat if the host has nothing to report. Return True if no exchange is needed.

        The result is True only if the conductor answers that it has no work for the host. No
        heartbeat is sent if ``Agent.heartbeat`` requires an exchange, if an event of the driver
        must be reported, or for ``HEARTBEAT_PAUSE_SECONDS`` after a heartbeat without an answer.
        """
        if time.monotonic() < self._no_heartbeat_before:
            return False
        with self._lock:
            is_look_due = self._agent.is_look_due()
        if is_look_due:
            self._read_host()
        with self._lock:
            heartbeat = None if self._servers_with_event else self._agent.heartbeat()
        if heartbeat is None:
            return False
        try:
            answer = self._conductor.heartbeat(heartbeat, ANSWER_TIMEOUTS_SECONDS[0])
        except Exception:
            log.exception("a heartbeat failed; the agent sends a full report in its place")
            answer = None
        with self._lock:
            self._agent.record_heartbeat_answer(answer)
        if answer is None:
            self._no_heartbeat_before = time.monotonic() + HEARTBEAT_PAUSE_SECONDS
            return False
        self._note_secrets(answer.secrets)
        return answer.nothing

    def _read_host(self) -> None:
        """Read domains, inventory, metrics and the servers with files alone, and record them."""
        domains, inventory, metrics = self._driver.domains(), self._inventory(), self._metrics()
        files = self._driver.files_alone()
        with self._lock:
            self._agent.record_host(inventory, metrics, files)
            self._agent.record_domains(domains)

    def _exchange(self, ask: bool, timeout: float) -> None:
        """Send a report to a conductor, and process the answer.

        If the exchange fails, events of the driver are reported with the next exchange.

        Args:
            ask: True to request the commands that this host lacks.
            timeout: Seconds to wait for the answer.

        Raises:
            Problem: No answer came in time, the answer is this error, or the hypervisor does not
                answer.
            Exception: The driver failed.
        """
        registration = self._agent.needs_registration()
        with self._lock:
            servers, self._servers_with_event = self._servers_with_event, set()
            full = registration or self._agent.wants_full_report()
        try:
            domains = self._driver.domains() if full or servers else []
            inventory = self._inventory() if full else None
            metrics = self._metrics() if full else None
            files = self._driver.files_alone() if full else None
            with self._lock:
                if inventory is not None:
                    self._agent.record_host(inventory, metrics, files)
                self._agent.record_changes(state for state in domains if state.server in servers)
                request = self._agent.request(
                    ask, domains if full else None, inventory if registration else None
                )
            began, answer = time.monotonic(), None
            try:
                answer, access = self._conductor.sync(request, timeout)
            finally:
                outcome = "none" if answer is None else "answered"
                EXCHANGE_SECONDS.observe(time.monotonic() - began, outcome)
        except BaseException:
            with self._lock:
                self._servers_with_event |= servers
            raise
        with self._work:
            self._agent.record_answer(request, answer)
            self._store_access(answer.commands, access)
            self._work.notify_all()
            if answer.session == 0 or self._agent.has_news():
                self._exchange_now.set()
        self._note_secrets(answer.secrets)

    def _note_secrets(self, digest: str) -> None:
        """Renew the host's secrets if necessary, and report that at once."""
        if self._compare_secrets(digest):
            self._read_host()
            self._exchange_now.set()

    def _metrics(self) -> dict[str, float] | None:
        return self._monitor.read() if self._monitor else None

    def _inventory(self) -> HostInventory:
        inventory = self._driver.inventory()
        return dataclasses.replace(
            inventory,
            ratios=self._ratios,
            facts=inventory.facts | self._facts(),
            version=__version__,
        )

    def guard(self) -> None:
        """Start the fencing thread, which needs no broker.

        Call this before the agent connects: the broker may be unreachable from the start.
        """
        self._begin("fencing", Fencing(self._agent, self._driver, self._lock).watch, self._stop)

    def start(self, workers: int) -> None:
        """Start the threads for exchanges and prefetch, and ``workers`` worker threads."""
        self._begin("talk", self.talk)
        self._begin("prefetch", self._prefetch.work)
        for number in range(workers):
            self._begin(f"worker-{number}", self.carry_out)
        self._exchange_now.set()

    def repeat(self, name: str, look: Callable[[], None], seconds: float) -> None:
        """Start a thread that calls ``look`` at once and then every ``seconds``, until ``close``.

        An exception of ``look`` ends the thread.
        """

        def loop() -> None:
            look()
            while not self._stop.wait(seconds):
                look()

        self._begin(name, loop)

    def _begin(self, name: str, loop: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=loop, args=arguments, name=name, daemon=True)
        with self._lock:
            thread.start()
            self._threads = [started for started in self._threads if started.is_alive()] + [thread]

    def close(self) -> list[threading.Thread]:
        """Request the end of all threads, and cancel running commands except live migrations.

        Conductors send the commands again to the next agent, which joins running migrations.

        Returns:
            The threads that did not end within ``CLOSE_TIMEOUT_SECONDS``, for example because a
            command hangs or migrates a guest.
        """
        self._stop.set()
        self._exchange_now.set()
        self._prefetch.close()
        with self._work:
            self._work.notify_all()
        until = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [thread for thread in self._threads if thread.is_alive()]


def _log_command(command: Command, result: Result | None, seconds: float) -> None:
    """Write the log line, the span and the metrics of a command that has ended.

    Without a result the event is ``again``: the conductor sends the command again if it is still
    valid.
    """
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
    log.info("command", **parts)
    if tracing.spans:
        tracing.command(parts, command.key.attempt)
    COMMANDS.add(command.verb, result.status if result else "again")
    COMMAND_SECONDS.observe(seconds, command.verb)


def _key_file(conf: cfg.ConfigOpts) -> Path:
    return Path(conf.agent.key_file or f"{conf.state_dir}/host.key")


def _keys(conf: cfg.ConfigOpts) -> LiveKeys:
    """Return the keys of this host, or end the process if they cannot be read.

    Why: without them no conductor accepts the agent's messages.
    """
    try:
        return LiveKeys(OwnKeys.read(_key_file(conf), conf.host), Clock())
    except ValueError as problem:
        service.refuse("agent", problem)


def _facts(conf: cfg.ConfigOpts, more: JsonObject, secrets: SecretsKeeper) -> JsonObject:
    return more | certificate.facts(conf) | secrets.facts()


def open_up(conf: cfg.ConfigOpts) -> Callable[[], None]:
    """Open journal, driver and broker, and start all threads.

    An unreachable broker is no error. The link connects later.

    Returns:
        The function that ends the threads and closes everything.

    Raises:
        ConfigError: The configuration cannot be used.
        SystemExit: Another agent uses ``state_dir``, or a part of the agent cannot be created.
    """
    process_lock = service.only_one(conf.state_dir, "agent")
    driver = assembly.make_driver(conf)
    journal = Journal(Path(conf.state_dir) / "agent.db")
    keys, key_file = _keys(conf), KeyFile(_key_file(conf), conf)
    # If the broker is unreachable, the link connects later.
    with suppress(errors.Unavailable):
        url = keys.own.transport_url or None
        where = f"transport_url in {key_file.path}" if url else "transport_url"
        look_in(conf, url, where, keys.own.other_passwords)
    link = HostSide(key_file.connect(keys.own), keys, conf.host)
    secrets = SecretsKeeper(key_file, keys, HostSecretsClient(link), link.change_broker, Clock())
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
        partial(_facts, conf, {"transfer": transfer.start()}, secrets),
        secrets.compare,
    )
    keeper = certificate.keeper(conf, HostCertificatesClient(link))
    LEASED.track(lambda: float(agent.has_lease()))
    SILENCE.track(agent.silence)
    host.guard()
    agent_rpc.serve(link, host)
    host.start(conf.agent.workers)
    console_thread = consoles.start()
    if keeper:
        host.repeat("certificate", keeper.look, certificate.PERIOD_SECONDS)

    def close() -> None:
        host.close()
        consoles.close()
        transfer.close()
        console_thread.join(timeout=5)
        link.close()
        driver.close()
        journal.close()
        process_lock.close()

    return close


def main() -> None:
    """Run the console script kilonova-agent."""
    service.run("agent", service.start("agent"), open_up)


if __name__ == "__main__":
    main()
