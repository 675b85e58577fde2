# SPDX-License-Identifier: Apache-2.0
"""The connection to libvirt. No other module imports libvirt.

The other modules work on a domain through ``Connection.on``. The connection is opened on first use
and again after libvirtd went away. ``Connection`` keeps the connection alive, translates errors,
and calls watchers for libvirt's events. libvirt needs one thread for its event loop. Watchers are
called in another thread, so that they may call libvirt.

Invariant: VerbFailed is raised only if libvirtd answered, errors.NoAnswer if not.
"""

from __future__ import annotations

import contextlib
import errno
import functools
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
from common.service.log import get_logger
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

LOG = get_logger(__name__)
Answer = TypeVar("Answer")
Domain: TypeAlias = libvirt.virDomain
LibvirtConnection: TypeAlias = libvirt.virConnect
Secret: TypeAlias = libvirt.virSecret
#: Statistics of a job by libvirt's names (virDomainGetJobStats).
JobStats = dict[str, int | str | bool]

#: libvirt's states -> power states of the Compute API. A domain that is shutting down still runs.
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
#: The domain changed its state in the meantime, so that the call is unnecessary.
STATE_CHANGED_ERRORS = (libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_NO_DOMAIN)
#: The hypervisor does not support the call, as often with libvirt's test driver.
NO_SUPPORT_ERRORS = (libvirt.VIR_ERR_NO_SUPPORT,)
#: The guest's agent is absent or does not answer in time.
AGENT_UNRESPONSIVE_ERRORS = (
    libvirt.VIR_ERR_AGENT_UNRESPONSIVE,
    libvirt.VIR_ERR_AGENT_UNSYNCED,
    libvirt.VIR_ERR_OPERATION_INVALID,
)
#: libvirt's constants for the modules that call ``Connection.on``.
SAVE_RUNNING = libvirt.VIR_DOMAIN_SAVE_RUNNING
AFFECT_LIVE, AFFECT_CONFIG = libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG
BLOCK_RESIZE_BYTES = libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES
#: Copy to an existing volume, also for a persistent domain, and mirror writes synchronously.
BLOCK_COPY_FLAGS = (
    libvirt.VIR_DOMAIN_BLOCK_COPY_REUSE_EXT
    | libvirt.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB
    | libvirt.VIR_DOMAIN_BLOCK_COPY_SYNCHRONOUS_WRITES
)
#: Switch one disk to an existing file. libvirt keeps no record of the snapshot.
SNAPSHOT_FLAGS = (
    libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_REUSE_EXT
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
)
#: Keep the names of backing files relative, because the folder's path differs by host.
REBASE_RELATIVE = libvirt.VIR_DOMAIN_BLOCK_REBASE_RELATIVE
COMMIT_RELATIVE = libvirt.VIR_DOMAIN_BLOCK_COMMIT_RELATIVE
BLOCK_JOB_PIVOT = libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT
BASELINE_CPU_EXPAND_FEATURES = libvirt.VIR_CONNECT_BASELINE_CPU_EXPAND_FEATURES
JOB_NONE, JOB_STATS_COMPLETED = libvirt.VIR_DOMAIN_JOB_NONE, libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED
JOB_OPERATION_MIGRATION_OUT, JOB_OPERATION_SAVE = (
    libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT,
    libvirt.VIR_DOMAIN_JOB_OPERATION_SAVE,
)
#: Flags of a migration. The libvirtds carry out the migration between themselves, even if the agent
#: dies. Afterwards the domain is defined only at the destination.
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
#: Parameters of a migration.
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
    """A domain with Kilonova's metadata.

    Attributes:
        marks: Kilonova's metadata on the domain.
        power_state: Power state of the Compute API.
        saved: True if the domain is off, with saved memory.
        is_incoming: True if the guest's memory is still arriving from another host. The guest still
            belongs to that host.
        postcopy_failed: True if a post-copy migration broke: the guest runs at another host, and
            part of its memory is still here.
    """

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
        """True if a QEMU process has the domain's disks open."""
        return self.power_state in (RUNNING, PAUSED, SUSPENDED, CRASHED)


class Connection:
    """A connection to one libvirtd. Thread-safe."""

    def __init__(self, uri: str, bridges: BridgeHelper | None = None) -> None:
        self._uri = uri
        self._bridges = bridges or BridgeHelper()
        self._lock = threading.Lock()
        self._open: Any = None
        self._closed = False
        #: Servers whose domain changed. None: the connection was lost.
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._watchers: list[Callable[[str], None]] = []
        #: Server -> statistics at the end of the last migration.
        self._ended_jobs: dict[str, JobStats] = {}
        _start_event_loop()

    def ask(self, purpose: str, work: Callable[[Any], Answer]) -> Answer:
        """Call ``work`` with libvirt's connection, and return the result of ``work``.

        Args:
            purpose: Completes "The hypervisor could not …" in an error.
            work: Makes calls to libvirt.

        Raises:
            VerbFailed: libvirt refused a call.
            NoAnswer: libvirtd does not answer, or this connection was closed.
        """
        return self._call(purpose, work)

    def domains(self) -> list[GuestDomain]:
        """Return all domains with valid metadata of Kilonova, also incoming domains."""
        guests = self._call(
            "list the guests",
            lambda connection: [_read_domain(d) for d in connection.listAllDomains()],
        )
        return [domain for domain in guests if domain]

    def find(self, server: str) -> GuestDomain | None:
        """Return the server's domain, or None without a domain or valid metadata of Kilonova."""
        return self.on(server, "return the state of the guest", _read_domain)

    def define(self, xml: str) -> None:
        self._call(
            "define the guest",
            lambda connection: connection.defineXMLFlags(xml, libvirt.VIR_DOMAIN_DEFINE_VALIDATE),
        )

    def start(self, server: str, paused: bool = False) -> None:
        """Start the domain, unless already active. With ``paused`` the CPUs stay stopped.

        Saved memory is restored. Missing bridges are made first, if this host makes bridges.
        Without a domain nothing happens.

        Raises:
            VerbFailed: libvirt could not start the domain.
            NoBridge: A bridge of the domain does not exist.
        """

        def create(domain: Domain) -> None:
            if domain.isActive():
                return
            xml = domain.XMLDesc(0)
            self.ensure_bridges(interface_xml.bridges(xml))
            with _translate_missing_bridge(xml):
                _start_paused(domain) if paused else domain.create()

        self.on(server, "start the guest", create)

    def move(self, server: str, uri: str, parameters: JsonObject, flags: int) -> None:
        """Migrate the guest to the libvirtd at ``uri``, and return when the migration has ended.

        Without a domain nothing happens.

        Args:
            server: Id of the server.
            uri: URI by which this host's libvirtd calls the destination's.
            parameters: Parameters of libvirt's migrateToURI3, with ``PARAM_DEST_XML``.
            flags: Flags of the migration.

        Raises:
            VerbFailed: libvirt could not migrate the guest.
            NoBridge: A bridge does not exist at the destination.
            NoAnswer: This host's libvirtd does not answer. The migration may continue.
        """

        def migrate(domain: Domain) -> None:
            with _translate_missing_bridge(parameters[PARAM_DEST_XML]):
                domain.migrateToURI3(uri, parameters, flags)

        self.on(server, "migrate the guest", migrate)

    def ensure_bridges(self, names: Iterable[str]) -> None:
        """Make missing bridges through ``kilonova-bridges``, if this host has that service.

        A failure is only logged. See ``BridgeHelper.ensure``.
        """
        self._bridges.ensure(names)

    def take_ended_job(self, server: str) -> JobStats:
        """Return the final statistics of the guest's last outgoing migration, or {} if unknown.

        A second call returns {}, until the next migration ends.
        """
        return self._ended_jobs.pop(server, {})

    def attach(self, server: str, interface: str, flags: int) -> None:
        """Attach an interface to the running domain, the stored definition, or both.

        Missing bridges are made first, if this host makes bridges. Without a domain nothing
        happens.

        Args:
            server: Id of the server.
            interface: libvirt's XML of the interface.
            flags: ``AFFECT_LIVE``, ``AFFECT_CONFIG``, or both.

        Raises:
            VerbFailed: libvirt could not attach the interface.
            NoBridge: The interface's bridge does not exist.
        """

        def plug(domain: Domain) -> None:
            self.ensure_bridges(interface_xml.bridges(interface))
            with _translate_missing_bridge(interface):
                domain.attachDeviceFlags(interface, flags)

        self.on(server, "attach the interface", plug)

    def pause(self, server: str) -> None:
        """Stop the domain's CPUs, and keep the memory. A domain that does not run is ignored."""
        self.on(server, "pause the guest", lambda domain: domain.suspend(), STATE_CHANGED_ERRORS)

    def resume(self, server: str) -> None:
        self.on(server, "resume the guest", lambda domain: domain.resume(), STATE_CHANGED_ERRORS)

    def open_screen(self, server: str, number: int = 0) -> socket.socket:
        """Return a connection to a screen of the guest.

        QEMU passes the connection, because the screen listens on no address.

        Args:
            server: Id of the server.
            number: Index of the graphics device in the domain's XML.

        Raises:
            VerbFailed: The domain does not exist, is off, or has no such screen.
        """
        descriptor = self.on(
            server, "open the guest's screen", lambda domain: domain.openGraphicsFD(number)
        )
        if descriptor is None:
            raise VerbFailed(
                "The server has no guest on this host.", details=f"libvirt has no domain {server}"
            )
        return socket.socket(fileno=descriptor)

    def press_power_button(self, server: str) -> None:
        """Request the shutdown of a running guest by ACPI, which the guest may delay or ignore."""
        self.on(
            server,
            "request the shutdown of the guest",
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
        """Remove the domain's saved memory, if there is any."""
        self.on(
            server,
            "remove the guest's saved memory",
            lambda domain: domain.managedSaveRemove(0) if domain.hasManagedSaveImage(0) else None,
        )

    def describe(self, server: str, stored: bool = False, portable: bool = False) -> str:
        """Return the domain's XML, or "" without a domain.

        Args:
            server: Id of the server.
            stored: True for the stored definition, even if the domain is active. False for the live
                state of an active domain.
            portable: True for XML that other versions of libvirt accept, for a migration.
        """
        flags = (libvirt.VIR_DOMAIN_XML_INACTIVE * stored) | (
            libvirt.VIR_DOMAIN_XML_MIGRATABLE * portable
        )
        return (
            self.on(
                server,
                "return the definition of the guest",
                lambda domain: str(domain.XMLDesc(flags)),
            )
            or ""
        )

    def mark(self, server: str, **changed: Any) -> None:  # noqa: ANN401 - fields of DomainMetadata
        """Change fields of Kilonova's metadata in the stored definition and in the active domain.

        ``changed`` contains new values by field of ``DomainMetadata``. Without a domain nothing
        happens.
        """

        def write(domain: Domain) -> None:
            marks = read_metadata(
                domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE, 0)
            )
            flags = libvirt.VIR_DOMAIN_AFFECT_CONFIG
            flags |= libvirt.VIR_DOMAIN_AFFECT_LIVE if domain.isActive() else 0
            domain.setMetadata(
                libvirt.VIR_DOMAIN_METADATA_ELEMENT,
                metadata(replace(marks, **changed)),
                PREFIX,
                NAMESPACE,
                flags,
            )

        self.on(server, "write Kilonova's metadata of the guest", write)

    def change_metadata(self, server: str, changed: Callable[[str], str]) -> None:
        """Replace Nova's metadata in the stored definition and in the active domain.

        ``changed`` gets the present metadata element as text and returns the new element. Without a
        domain nothing happens.

        Raises:
            VerbFailed: The domain has no metadata of Nova.
        """

        def write(domain: Domain) -> None:
            kind = libvirt.VIR_DOMAIN_METADATA_ELEMENT
            text = changed(domain.metadata(kind, nova_xml.NAMESPACE, 0))
            flags = libvirt.VIR_DOMAIN_AFFECT_CONFIG
            flags |= libvirt.VIR_DOMAIN_AFFECT_LIVE if domain.isActive() else 0
            domain.setMetadata(kind, text, nova_xml.PREFIX, nova_xml.NAMESPACE, flags)

        self.on(server, "write Nova's metadata of the guest", write)

    def watch(self, changed: Callable[[str], None]) -> None:
        """Let a thread call ``changed(server)`` for each change of a domain's state.

        At the first call of ``watch`` and after each reconnect, all watchers are called for all
        domains with Kilonova's metadata.
        """
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
                LOG.debug("libvirt was gone already", problem=error)

    def on(
        self,
        server: str,
        purpose: str,
        work: Callable[[Any], Answer],
        ignored: tuple[int, ...] = (),
    ) -> Answer | None:
        """Call ``work`` with the server's domain, which need not have Kilonova's metadata.

        Args:
            server: Id of the server.
            purpose: Completes "The hypervisor could not …" in an error.
            work: Makes calls to libvirt.
            ignored: libvirt's error codes that count as success.

        Returns:
            The result of ``work``. None if there is no domain, or after an ignored error.

        Raises:
            VerbFailed: libvirt refused a call.
            NoAnswer: libvirtd does not answer, or this connection was closed.
        """

        def find_and_work(connection: LibvirtConnection) -> Answer | None:
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

        return self._call(purpose, find_and_work)

    def _call(self, purpose: str, work: Callable[[Any], Answer]) -> Answer:
        connection = self._connect()
        try:
            return work(connection)
        except libvirt.libvirtError as error:
            if not _is_alive(connection):
                self._handle_loss(connection)
                raise errors.NoAnswer(
                    f"libvirt at {self._uri} did not answer the request to {purpose}; check that libvirtd runs."
                ) from error
            raise VerbFailed(
                f"The hypervisor could not {purpose}; try again.",
                details=str(error),
                retryable=True,
            ) from error

    def _connect(self) -> LibvirtConnection:
        with self._lock:
            if self._closed:
                raise errors.NoAnswer(
                    "The agent is stopping and has closed its connection to libvirt. The command is repeated after "
                    "the next start of the agent."
                )
            if self._open is None:
                try:
                    self._open = self._open_connection()
                except libvirt.libvirtError as error:
                    raise errors.NoAnswer(
                        f"libvirt at {self._uri} does not answer; check that libvirtd runs."
                    ) from error
            return self._open

    def _open_connection(self) -> LibvirtConnection:
        connection = libvirt.open(self._uri)
        try:
            connection.setKeepAlive(KEEPALIVE_SECONDS, KEEPALIVE_COUNT)
            connection.registerCloseCallback(
                lambda closed, reason, opaque: self._handle_loss(closed), None
            )
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_SUPPORT:
                raise
        connection.domainEventRegisterAny(
            None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._handle_event, None
        )
        connection.domainEventRegisterAny(
            None, libvirt.VIR_DOMAIN_EVENT_ID_JOB_COMPLETED, self._handle_ended_job, None
        )
        return connection

    def _handle_loss(self, connection: LibvirtConnection) -> None:
        with self._lock:
            if self._open is not connection and self._open is not None:
                return
            self._open = None
        self._events.put(None)

    def _handle_event(
        self, connection: object, domain: Domain, event: int, detail: int, opaque: object
    ) -> None:
        server = domain.UUIDString()
        if domain.name() == domain_name(server):
            self._events.put(server)

    def _handle_ended_job(
        self, connection: object, domain: Domain, stats: JobStats, opaque: object
    ) -> None:
        if stats.get("operation") == JOB_OPERATION_MIGRATION_OUT:
            self._ended_jobs[domain.UUIDString()] = stats

    def _notify_watchers(self) -> None:
        """Call the watchers for each event until ``close``. Runs in a thread.

        After a lost connection, reconnect and call the watchers for all domains.
        """
        while True:
            server = self._events.get()
            if self._closed:
                return
            try:
                servers = [server] if server else [domain.server for domain in self.domains()]
            except (errors.NoAnswer, VerbFailed) as error:
                LOG.warning("libvirt sends no events; the agent tries again", problem=error)
                time.sleep(REOPEN_SECONDS)
                self._events.put(None)
                continue
            for changed in servers:
                for watcher in self._watchers:
                    watcher(changed)


def _read_domain(domain: Domain) -> GuestDomain | None:
    """Return the domain, or None if it has ended or has no valid metadata of Kilonova."""
    try:
        state, reason = domain.state()
        marks = read_metadata(domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE, 0))
        saved = state == libvirt.VIR_DOMAIN_SHUTOFF and bool(domain.hasManagedSaveImage(0))
        # This host defines a domain before the start, but defines an incoming domain only after the
        # arrival.
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
        LOG.warning(
            "a domain of libvirt is ignored, because its metadata is not valid", problem=error
        )
        return None
    return GuestDomain(marks, POWER_STATES.get(state, NOSTATE), saved, is_incoming, postcopy_failed)


@contextlib.contextmanager
def _translate_missing_bridge(xml: str) -> Iterator[None]:
    """Turn libvirt's error in this block about a missing bridge of the XML into NoBridge."""
    try:
        yield
    except libvirt.libvirtError as error:
        if error.get_int1() == errno.ENODEV and any(
            name in str(error) for name in interface_xml.bridges(xml)
        ):
            raise no_bridge(str(error)) from error
        raise


def _start_paused(domain: Domain) -> None:
    try:
        domain.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_INVALID_ARG:
            raise
        # libvirt's test driver does not support the flag.
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
    """Start libvirt's event loop in a thread. Later calls in this process have no effect."""

    def run_loop() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    # Errors are raised as exceptions. libvirt would also print them to stderr.
    libvirt.registerErrorHandler(lambda context, error: None, None)
    libvirt.virEventRegisterDefaultImpl()
    threading.Thread(target=run_loop, name="libvirt-events", daemon=True).start()
