# SPDX-License-Identifier: Apache-2.0
"""The connection to libvirt: the only module that imports it.

The other modules here work on a domain through ``Connection.on``. The connection is opened when it
is first needed, and again after libvirtd went away. It is kept alive, translates errors, and calls
watchers for libvirt's events. libvirt needs one thread for its event loop; watchers are called from
another thread, so that they may call libvirt. Must stay true: VerbFailed is raised only while
libvirtd answers, errors.NoAnswer when it does not.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import libvirt

from common.domain import errors
from common.domain.json_types import JsonObject
from compute_agent.privileged.bridges import BridgeHelper
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import CRASHED, NOSTATE, PAUSED, RUNNING, SHUTDOWN, SUSPENDED
from compute_agent.virt.interfaces import no_bridge
from compute_agent.virt.libvirt.xml import interface_xml, nova_xml
from compute_agent.virt.libvirt.xml.domain_xml import (
    NAMESPACE,
    PREFIX,
    DomainMetadata,
    domain_name,
    metadata,
    read_metadata,
)

LOG = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Domain: TypeAlias = libvirt.virDomain
LibvirtConnection: TypeAlias = libvirt.virConnect
Secret: TypeAlias = libvirt.virSecret
#: What libvirt reports of a job, by its names (virDomainGetJobStats).
JobStats = dict[str, int | str | bool]

#: libvirt's states in the API's numbers. A domain that is shutting down still runs.
POWER_STATES = {
    libvirt.VIR_DOMAIN_NOSTATE: NOSTATE,
    libvirt.VIR_DOMAIN_RUNNING: RUNNING,
    libvirt.VIR_DOMAIN_BLOCKED: RUNNING,
    libvirt.VIR_DOMAIN_PAUSED: PAUSED,
    libvirt.VIR_DOMAIN_SHUTDOWN: RUNNING,
    libvirt.VIR_DOMAIN_SHUTOFF: SHUTDOWN,
    libvirt.VIR_DOMAIN_CRASHED: CRASHED,
    libvirt.VIR_DOMAIN_PMSUSPENDED: SUSPENDED,
}
KEEPALIVE_SECONDS, KEEPALIVE_COUNT, REOPEN_SECONDS = 5, 3, 1.0
UNDEFINE_FLAGS = (
    libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
)
#: The domain changed its state between our look and our call: there is nothing left to do.
STATE_CHANGED_ERRORS = (libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_NO_DOMAIN)
#: The hypervisor does not support the call; libvirt's test driver often does not.
NO_SUPPORT_ERRORS = (libvirt.VIR_ERR_NO_SUPPORT,)
#: The guest's agent is not there, or does not answer in its time.
AGENT_UNRESPONSIVE_ERRORS = (
    libvirt.VIR_ERR_AGENT_UNRESPONSIVE,
    libvirt.VIR_ERR_AGENT_UNSYNCED,
    libvirt.VIR_ERR_OPERATION_INVALID,
)
#: Flags and numbers of libvirt that the modules beside this one hand to ``on``.
SAVE_RUNNING = libvirt.VIR_DOMAIN_SAVE_RUNNING
AFFECT_LIVE, AFFECT_CONFIG = libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG
BLOCK_RESIZE_BYTES = libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES
#: Into a volume that is there; of a domain that is stored too; what is written is written to both.
BLOCK_COPY_FLAGS = (
    libvirt.VIR_DOMAIN_BLOCK_COPY_REUSE_EXT
    | libvirt.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB
    | libvirt.VIR_DOMAIN_BLOCK_COPY_SYNCHRONOUS_WRITES
)
#: Into a file that is there, of this one disk alone; libvirt keeps no record of it.
SNAPSHOT_FLAGS = (
    libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_REUSE_EXT
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
)
#: Files go on to name each other without their folder, which is another one elsewhere.
REBASE_RELATIVE = libvirt.VIR_DOMAIN_BLOCK_REBASE_RELATIVE
COMMIT_RELATIVE = libvirt.VIR_DOMAIN_BLOCK_COMMIT_RELATIVE
BLOCK_JOB_PIVOT = libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT
BASELINE_CPU_EXPAND_FEATURES = libvirt.VIR_CONNECT_BASELINE_CPU_EXPAND_FEATURES
JOB_NONE, JOB_STATS_COMPLETED = libvirt.VIR_DOMAIN_JOB_NONE, libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED
JOB_OPERATION_MIGRATION_OUT, JOB_OPERATION_SAVE = (
    libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT,
    libvirt.VIR_DOMAIN_JOB_OPERATION_SAVE,
)
#: A migration: between the two libvirtds, so that it outlives the agent; afterwards the domain is
#: there and not here.
MIGRATE_FLAGS = (
    libvirt.VIR_MIGRATE_LIVE
    | libvirt.VIR_MIGRATE_PEER2PEER
    | libvirt.VIR_MIGRATE_PERSIST_DEST
    | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE
)
MIGRATE_NON_SHARED_INC, MIGRATE_UNSAFE = (
    libvirt.VIR_MIGRATE_NON_SHARED_INC,
    libvirt.VIR_MIGRATE_UNSAFE,
)
MIGRATE_AUTO_CONVERGE, MIGRATE_POSTCOPY = (
    libvirt.VIR_MIGRATE_AUTO_CONVERGE,
    libvirt.VIR_MIGRATE_POSTCOPY,
)
MIGRATE_TLS = libvirt.VIR_MIGRATE_TLS
#: Its parameters.
PARAM_URI, PARAM_DEST_XML, PARAM_PERSIST_XML = (
    libvirt.VIR_MIGRATE_PARAM_URI,
    libvirt.VIR_MIGRATE_PARAM_DEST_XML,
    libvirt.VIR_MIGRATE_PARAM_PERSIST_XML,
)
PARAM_MIGRATE_DISKS, PARAM_BANDWIDTH, PARAM_BANDWIDTH_POSTCOPY = (
    libvirt.VIR_MIGRATE_PARAM_MIGRATE_DISKS,
    libvirt.VIR_MIGRATE_PARAM_BANDWIDTH,
    libvirt.VIR_MIGRATE_PARAM_BANDWIDTH_POSTCOPY,
)


@dataclass(frozen=True, slots=True)
class GuestDomain:
    """A domain that carries our metadata; ``saved``: its memory is saved, it is off and can go on.
    ``is_incoming``: it is still another host's, from which its memory comes. ``postcopy_failed``:
    it goes on at another host, which lacks memory that is here."""

    marks: DomainMetadata
    power_state: int
    saved: bool = False
    is_incoming: bool = False
    postcopy_failed: bool = False

    @property
    def server(self) -> str:
        return self.marks.server

    @property
    def fence(self) -> int:
        return self.marks.fence

    @property
    def active(self) -> bool:
        """A QEMU holds its disks."""
        return self.power_state in (RUNNING, PAUSED, SUSPENDED, CRASHED)


class Connection:
    """One libvirtd. Thread-safe."""

    def __init__(self, uri: str, bridges: BridgeHelper | None = None) -> None:
        self._uri = uri
        self._bridges = bridges or BridgeHelper()
        self._lock = threading.Lock()
        self._open: Any = None
        self._closed = False
        #: Servers whose domain changed; None when the connection was lost.
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._watchers: list[Callable[[str], None]] = []
        #: Server -> what libvirt told at the end of its migration.
        self._ended_jobs: dict[str, JobStats] = {}
        _start_event_loop()

    def ask(self, what: str, work: Callable[[Any], Answer]) -> Answer:
        """Do ``work`` with the connection itself."""
        return self._call(what, work)

    def domains(self) -> list[GuestDomain]:
        """All domains of ours."""
        found = self._call(
            "list its guests", lambda connection: [_found(d) for d in connection.listAllDomains()]
        )
        return [domain for domain in found if domain]

    def find(self, server: str) -> GuestDomain | None:
        """The server's domain, None when there is none."""
        return self.on(server, "look for the guest", _found)

    def define(self, xml: str) -> None:
        self._call(
            "define the guest",
            lambda connection: connection.defineXMLFlags(xml, libvirt.VIR_DOMAIN_DEFINE_VALIDATE),
        )

    def start(self, server: str, paused: bool = False) -> None:
        """Nothing happens when it is active. ``paused``: its CPUs wait. NoBridge when one that it
        needs is missing."""

        def create(domain: Domain) -> None:
            if domain.isActive():
                return
            described = domain.XMLDesc(0)
            self.ensure_bridges(interface_xml.bridges(described))
            with _bridges_of(described):
                _start_paused(domain) if paused else domain.create()

        self.on(server, "start the guest", create)

    def move(self, server: str, uri: str, parameters: JsonObject, flags: int) -> None:
        """Move the guest to the libvirtd at ``uri``; lasts until it is there. NoBridge when one
        that it needs there is missing."""

        def migrate(domain: Domain) -> None:
            with _bridges_of(parameters[PARAM_DEST_XML]):
                domain.migrateToURI3(uri, parameters, flags)

        self.on(server, "move the guest", migrate)

    def ensure_bridges(self, names: Iterable[str]) -> None:
        """These bridges are there, where making them is the compute service's."""
        self._bridges.ensure(names)

    def take_ended_job(self, server: str) -> JobStats:
        """What libvirt told at the end of the guest's last migration from here, once; empty when it
        told nothing."""
        return self._ended_jobs.pop(server, {})

    def attach(self, server: str, interface: str, flags: int) -> None:
        """Plug an interface into what ``flags`` says: LIVE, STORED or both. NoBridge when its
        bridge is missing."""

        def plug(domain: Domain) -> None:
            self.ensure_bridges(interface_xml.bridges(interface))
            with _bridges_of(interface):
                domain.attachDeviceFlags(interface, flags)

        self.on(server, "plug in the interface", plug)

    def pause(self, server: str) -> None:
        """Stop the CPUs; the memory stays."""
        self.on(server, "pause the guest", lambda domain: domain.suspend(), STATE_CHANGED_ERRORS)

    def resume(self, server: str) -> None:
        self.on(server, "resume the guest", lambda domain: domain.resume(), STATE_CHANGED_ERRORS)

    def open_screen(self, server: str, number: int = 0) -> socket.socket:
        """A connection to a graphics server of the guest, the first, second … of its description,
        handed over by QEMU: it listens nowhere."""
        descriptor = self.on(
            server, "open the guest's screen", lambda domain: domain.openGraphicsFD(number)
        )
        if descriptor is None:
            raise VerbFailed(
                "The server has no guest on this host.", details=f"libvirt knows no domain {server}"
            )
        return socket.socket(fileno=descriptor)

    def press_power_button(self, server: str) -> None:
        """ACPI; the guest may take its time, or ignore it."""
        self.on(
            server,
            "ask the guest to power off",
            lambda domain: domain.shutdown(),
            STATE_CHANGED_ERRORS,
        )

    def destroy(self, server: str) -> None:
        """Destroy the domain, if it is active."""
        self.on(
            server,
            "stop the guest",
            lambda domain: domain.destroy() if domain.isActive() else None,
            STATE_CHANGED_ERRORS,
        )

    def undefine(self, server: str) -> None:
        """Undefine the domain, if there is one."""
        self.on(server, "remove the guest", _undefine)

    def drop_saved(self, server: str) -> None:
        """Remove the saved memory, if there is any."""
        self.on(
            server,
            "remove the guest's saved memory",
            lambda domain: domain.managedSaveRemove(0) if domain.hasManagedSaveImage(0) else None,
        )

    def describe(self, server: str, stored: bool = False, portable: bool = False) -> str:
        """The domain's XML: of the running guest when it runs, else (or when asked so) as it is
        stored. ``portable``: in the words of another libvirtd that takes it over. Empty when there
        is none."""
        flags = (libvirt.VIR_DOMAIN_XML_INACTIVE * stored) | (
            libvirt.VIR_DOMAIN_XML_MIGRATABLE * portable
        )
        return (
            self.on(server, "describe the guest", lambda domain: str(domain.XMLDesc(flags))) or ""
        )

    def mark(self, server: str, **changed: Any) -> None:  # noqa: ANN401 - fields of DomainMetadata
        """Change our metadata in the stored definition, and in the running domain."""

        def write(domain: Domain) -> None:
            known = read_metadata(
                domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE, 0)
            )
            flags = libvirt.VIR_DOMAIN_AFFECT_CONFIG
            flags |= libvirt.VIR_DOMAIN_AFFECT_LIVE if domain.isActive() else 0
            domain.setMetadata(
                libvirt.VIR_DOMAIN_METADATA_ELEMENT,
                metadata(replace(known, **changed)),
                PREFIX,
                NAMESPACE,
                flags,
            )

        self.on(server, "mark the guest", write)

    def change_metadata(self, server: str, changed: Callable[[str], str]) -> None:
        """Change Nova's element in the stored definition, and in the running domain."""

        def write(domain: Domain) -> None:
            kind = libvirt.VIR_DOMAIN_METADATA_ELEMENT
            text = changed(domain.metadata(kind, nova_xml.NAMESPACE, 0))
            flags = libvirt.VIR_DOMAIN_AFFECT_CONFIG
            flags |= libvirt.VIR_DOMAIN_AFFECT_LIVE if domain.isActive() else 0
            domain.setMetadata(kind, text, nova_xml.PREFIX, nova_xml.NAMESPACE, flags)

        self.on(server, "describe the guest", write)

    def watch(self, changed: Callable[[str], None]) -> None:
        """Call ``changed(server)`` whenever a domain's state changed, and for all after a
        reconnect."""
        self._watchers.append(changed)
        if len(self._watchers) == 1:
            threading.Thread(
                target=self._notify_watchers, name="libvirt-watch", daemon=True
            ).start()
            self._events.put(None)

    def close(self) -> None:
        with self._lock:
            self._closed, connection, self._open = True, self._open, None
        self._events.put(None)
        if connection is not None:
            try:
                connection.close()
            except libvirt.libvirtError as error:
                LOG.debug("libvirt was gone already: %s", error)

    def on(
        self, server: str, what: str, work: Callable[[Any], Answer], ignored: tuple[int, ...] = ()
    ) -> Answer | None:
        """Do ``work`` with the server's domain; None when there is no domain or the error says it
        is done."""

        def look_and_work(connection: LibvirtConnection) -> Answer | None:
            try:
                domain = connection.lookupByUUIDString(server)
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                    return None
                raise
            try:
                return work(domain)
            except libvirt.libvirtError as error:
                if error.get_error_code() in ignored:
                    return None
                raise

        return self._call(what, look_and_work)

    def _call(self, what: str, work: Callable[[Any], Answer]) -> Answer:
        connection = self._connected()
        try:
            return work(connection)
        except libvirt.libvirtError as error:
            if not _is_alive(connection):
                self._lost(connection)
                raise errors.NoAnswer(f"libvirt went away while it was asked to {what}.") from error
            raise VerbFailed(
                f"The hypervisor could not {what}; try again.", details=str(error), retryable=True
            ) from error

    def _connected(self) -> LibvirtConnection:
        with self._lock:
            if self._closed:
                raise errors.NoAnswer("The connection to libvirt was closed.")
            if self._open is None:
                try:
                    self._open = self._new()
                except libvirt.libvirtError as error:
                    raise errors.NoAnswer(
                        f"libvirt at {self._uri} does not answer; see whether libvirtd runs."
                    ) from error
            return self._open

    def _new(self) -> LibvirtConnection:
        connection = libvirt.open(self._uri)
        try:
            connection.setKeepAlive(KEEPALIVE_SECONDS, KEEPALIVE_COUNT)
            connection.registerCloseCallback(
                lambda closed, reason, opaque: self._lost(closed), None
            )
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_SUPPORT:
                raise
        connection.domainEventRegisterAny(
            None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._changed, None
        )
        connection.domainEventRegisterAny(
            None, libvirt.VIR_DOMAIN_EVENT_ID_JOB_COMPLETED, self._job_ended, None
        )
        return connection

    def _lost(self, connection: LibvirtConnection) -> None:
        with self._lock:
            if self._open is not connection and self._open is not None:
                return
            self._open = None
        self._events.put(None)

    def _changed(
        self, connection: object, domain: Domain, event: int, detail: int, opaque: object
    ) -> None:
        server = domain.UUIDString()
        if domain.name() == domain_name(server):
            self._events.put(server)

    def _job_ended(
        self, connection: object, domain: Domain, stats: JobStats, opaque: object
    ) -> None:
        if stats.get("operation") == JOB_OPERATION_MIGRATION_OUT:
            self._ended_jobs[domain.UUIDString()] = stats

    def _notify_watchers(self) -> None:
        """The watchers' thread: events one by one; after a loss it reconnects and tells of all
        domains."""
        while True:
            server = self._events.get()
            if self._closed:
                return
            try:
                servers = [server] if server else [domain.server for domain in self.domains()]
            except (errors.NoAnswer, VerbFailed) as error:
                LOG.warning("no events from libvirt: %s", error)
                time.sleep(REOPEN_SECONDS)
                self._events.put(None)
                continue
            for changed in servers:
                for watcher in self._watchers:
                    watcher(changed)


def _found(domain: Domain) -> GuestDomain | None:
    """None for a domain that is not ours or has just gone."""
    try:
        state, reason = domain.state()
        marks = read_metadata(domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE, 0))
        saved = state == libvirt.VIR_DOMAIN_SHUTOFF and bool(domain.hasManagedSaveImage(0))
        # What we start is defined first; what comes from elsewhere is defined when all of it is
        # here.
        postcopy_failed = (state, reason) == (
            libvirt.VIR_DOMAIN_PAUSED,
            libvirt.VIR_DOMAIN_PAUSED_POSTCOPY_FAILED,
        )
        is_incoming = state == libvirt.VIR_DOMAIN_PAUSED and not domain.isPersistent()
    except libvirt.libvirtError as error:
        if error.get_error_code() in (
            libvirt.VIR_ERR_NO_DOMAIN_METADATA,
            libvirt.VIR_ERR_NO_DOMAIN,
        ):
            return None
        raise
    except ValueError as error:
        LOG.warning("%s", error)
        return None
    return GuestDomain(marks, POWER_STATES.get(state, NOSTATE), saved, is_incoming, postcopy_failed)


@contextlib.contextmanager
def _bridges_of(described: str) -> Iterator[None]:
    """Raises NoBridge in place of libvirt's error about a bridge of what is described."""
    try:
        yield
    except libvirt.libvirtError as error:
        if error.get_int1() == errno.ENODEV and any(
            name in str(error) for name in interface_xml.bridges(described)
        ):
            raise no_bridge(str(error)) from error
        raise


def _start_paused(domain: Domain) -> None:
    try:
        domain.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_INVALID_ARG:
            raise
        # libvirt's mock-up does not know the flag.
        domain.create()
        domain.suspend()


def _undefine(domain: Domain) -> None:
    try:
        domain.undefineFlags(UNDEFINE_FLAGS)
    except libvirt.libvirtError as error:
        if error.get_error_code() in (libvirt.VIR_ERR_INVALID_ARG, libvirt.VIR_ERR_NO_SUPPORT):
            domain.undefine()
        elif error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
            raise


def _is_alive(connection: LibvirtConnection) -> bool:
    try:
        return bool(connection.isAlive())
    except libvirt.libvirtError:
        return False


@functools.cache
def _start_event_loop() -> None:
    """Once in a process, before the first connection is opened."""

    def run_loop() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    # Errors reach us as exceptions; libvirt would print them to stderr as well.
    libvirt.registerErrorHandler(lambda context, error: None, None)
    libvirt.virEventRegisterDefaultImpl()
    threading.Thread(target=run_loop, name="libvirt-events", daemon=True).start()
