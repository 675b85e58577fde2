# SPDX-License-Identifier: Apache-2.0
"""The source of a live migration: begins or joins a migration, and concludes the move.

Called by ``virt.libvirt.driver``. ``incoming_migration`` is the destination. The libvirtds of the
two hosts carry out the migration, which continues when the agent dies. The domain's metadata
records the beginning, and the next agent joins the migration. This host's libvirtd calls the
destination's proxy (``incoming``), and both hosts authenticate each other.

Invariant: the guest never runs on both hosts. VerbFailed means that the guest is here, as before,
and running if the CPUs ran before. Success means that the guest is not here any more. If libvirtd
died in the last moments, the state here does not show which host has the guest. Then this host
queries the destination, and does not resume or remove the guest before the answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeGuard
from urllib.parse import quote, urlsplit

from common.domain import errors
from common.domain.command_progress import CommandPhase
from common.domain.json_types import JsonObject
from common.domain.models import Control, GuestSpec
from common.security.tls import Tls, is_loopback
from common.service.log import get_logger
from compute_agent.verb_context import Cancelled, MigrationAborted, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING
from compute_agent.virt.interfaces import when_bridged
from compute_agent.virt.libvirt.domains import jobs, power
from compute_agent.virt.libvirt.domains.connection import (
    JOB_OPERATION_MIGRATION_OUT,
    MIGRATE_AUTO_CONVERGE,
    MIGRATE_FLAGS,
    MIGRATE_NON_SHARED_INC,
    MIGRATE_POSTCOPY,
    MIGRATE_TLS,
    MIGRATE_UNSAFE,
    PARAM_BANDWIDTH,
    PARAM_BANDWIDTH_POSTCOPY,
    PARAM_DEST_XML,
    PARAM_MIGRATE_DISKS,
    PARAM_PERSIST_XML,
    PARAM_URI,
    Connection,
    GuestDomain,
    JobStats,
)
from compute_agent.virt.libvirt.migration.incoming.question import has_arrived
from compute_agent.virt.libvirt.xml import running_domain, volume_xml

LOG = get_logger(__name__)
LOOK_SECONDS, CANCEL_SECONDS, VANISH_SECONDS, EARLIER_MIGRATION_SECONDS, ABORT_SECONDS = (
    0.2,
    3.0,
    5.0,
    30.0,
    60.0,
)
GIBIBYTE = 1 << 30
#: The completion timeout of a smaller guest is computed for this size.
MIN_COUNTED_GIBIBYTES = 2
#: Schemes of the URI by which a libvirtd calls another, and the default ports of earlier releases.
TLS, PLAIN = "qemu+tls", "qemu+tcp"
PORTS = {TLS: 16514, PLAIN: 16509}
#: File names that libvirt's clients expect, and the fields of ``Tls`` with our paths.
PROOF = {"cacert.pem": "ca", "clientcert.pem": "cert", "clientkey.pem": "key"}
HOST = re.compile(r"[\w.:-]{1,253}", re.ASCII)
COUNTED = tuple(
    f"{kind}_{part}" for kind in ("memory", "disk") for part in ("total", "processed", "remaining")
)


@dataclass(frozen=True, slots=True)
class MigrationOptions:
    """How this host's guests move, from the section [migration] of the configuration.

    Attributes:
        port: Port at which other hosts reach this host's proxy. 0 if no guest may come here.
        address: Address of that port, and of the transfer of memory to this host.
        bandwidth: MiB/s, or 0 for no limit.
        completion_timeout: Seconds for each GiB, or 0 for no timeout.
        timeout_action: ``abort`` or ``force_complete``, applied when the timeout is over.
        auto_converge: True to slow the guest's CPUs down if the migration does not converge.
        post_copy: True to permit that a guest continues at the destination before all memory has
            arrived.
        native_tls: True if QEMU encrypts the transfer.
        plain_text: True if guests may be transferred to other machines without encryption.
        tls: This host's certificates and key, or None.
        proof: Folder with the files of ``tls`` under libvirt's names, or "" without TLS.
    """

    port: int = 0
    address: str = ""
    bandwidth: int = 0
    completion_timeout: int = 800
    timeout_action: str = "abort"
    auto_converge: bool = False
    post_copy: bool = False
    native_tls: bool = False
    plain_text: bool = False
    tls: Tls | None = None
    proof: str = ""

    def plain_text_to(self, to: JsonObject) -> str:
        """Return why a transfer to this destination must be refused as plain text, or "".

        The transfer is permitted if libvirt's connection and QEMU's transfer are encrypted, if
        ``plain_text`` is True, or within one machine. Then the result is "".

        Args:
            to: The result of ``prepare_incoming`` at the destination.

        Raises:
            VerbFailed: The destination reports no valid address.
        """
        way = Way.of(to)
        if self.plain_text or (is_loopback(to["address"]) and is_loopback(way.host)):
            return ""
        if not way.encrypted or self.tls is None:
            return f"[tls] ca_file is not set at the {'source' if way.encrypted else 'destination'}"
        return (
            ""
            if self.native_tls
            else "[migration] live_migration_with_native_tls is false at the source"
        )

    @property
    def facts(self) -> dict[str, str]:
        """The URI of this host's proxy and the address for the transfer, for other hosts.

        The keys are ``uri`` and ``address``. Both values are "" if this host accepts no live
        migrations.
        """
        uri = f"{TLS if self.tls else PLAIN}://{in_url(self.address)}:{self.port}/system"
        return {"uri": uri if self.port else "", "address": self.address if self.port else ""}

    def uri(self, to: JsonObject) -> str:
        """Return the URI by which this host's libvirtd calls the destination's.

        Only host, port and encryption come from the destination, from its facts ``to``.

        Raises:
            VerbFailed: The destination reports no valid address.
        """
        way = Way.of(to)
        return f"{TLS if way.encrypted else PLAIN}://{in_url(way.host)}:{way.port}/system" + (
            f"?pkipath={quote(self.proof)}" if way.encrypted and self.proof else ""
        )


@dataclass(frozen=True, slots=True)
class Way:
    """The way to another host's proxy: host, port, and True if the connection uses TLS."""

    host: str
    port: int
    encrypted: bool

    @classmethod
    def of(cls, to: JsonObject) -> Way:
        """Parse the URI in the facts of a host.

        Only scheme, host and port are used, because a URI of libvirt can name programs to run.

        Raises:
            VerbFailed: The URI is missing, has no plain host name, an unknown scheme, or an invalid
                port.
        """
        try:
            parts = urlsplit(to["uri"])
            default_port = PORTS[parts.scheme]
            host, port = parts.hostname or "", parts.port or default_port
        except (ValueError, KeyError) as problem:
            raise VerbFailed(
                "The destination reports no valid address for live migrations.",
                retryable=True,
                details=f"reported URI: {to.get('uri')!r}",
            ) from problem
        if not HOST.fullmatch(host):
            raise VerbFailed(
                "The destination reports no valid address for live migrations.",
                retryable=True,
                details=f"reported URI: {to['uri']!r}",
            )
        return cls(host, port, parts.scheme == TLS)


def lay_proof(folder: Path, tls: Tls) -> str:
    """Make symbolic links to the files of ``tls`` in ``folder``, under libvirt's names.

    Each existing link is replaced atomically. libvirtd uses new files at the next connection.

    Returns:
        The path of the folder.
    """
    folder.mkdir(mode=0o711, exist_ok=True)
    for name, kind in PROOF.items():
        link = folder / f"{name}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(getattr(tls, kind)).absolute())
        link.replace(folder / name)
    return str(folder)


#: Returns the domain XML for the destination, from the running domain's XML and state.
Describe = Callable[[str, GuestDomain], str]


def migrate(
    libvirt: Connection,
    spec: GuestSpec,
    to: JsonObject,
    shared: bool,
    describe: Describe,
    options: MigrationOptions,
    context: VerbContext,
) -> JsonObject:
    """Migrate the guest to the destination, with its disks unless storage is ``shared``.

    Volumes are not copied. A migration that an earlier agent began under this fence is joined. A
    migration under another fence is aborted first. If the guest is not on this host any more, the
    migration counts as successful.

    Returns:
        ``{"bytes": transferred, "job_seconds": duration}``.

    Raises:
        VerbFailed: The guest is here, as before.
        MigrationAborted: As VerbFailed, after an abort by request.
        NoAnswer: It is unknown which host has the guest, or a post-copy migration broke.
        Unavailable: This host has no lease, so no migration was begun.
        Cancelled: The verb was cancelled. The abort may still be in progress.
    """
    migration = _Migration(libvirt, spec, to, shared, options, context)
    domain = libvirt.find(spec.server)
    if domain is not None and domain.marks.moving == spec.fence:
        migration.follow(None)
    elif domain is not None and (guest := migration.await_earlier()) is not None:
        migration.check(guest)
        when_bridged(context, lambda: migration.begin(guest, describe))
    migration.conclude()
    return migration.totals()


class _Migration:
    """One outgoing migration of a guest."""

    def __init__(
        self,
        libvirt: Connection,
        spec: GuestSpec,
        to: JsonObject,
        shared: bool,
        options: MigrationOptions,
        context: VerbContext,
    ) -> None:
        self._libvirt, self._spec, self._server = libvirt, spec, spec.server
        self._to, self._shared, self._options, self._context = to, shared, options, context
        self._stats: JobStats = {}
        #: The exception to raise when the requested abort has ended the job.
        self._abort_reason: Exception | None = None
        self._aborted_at = 0.0
        #: The guest was paused or switched to post-copy, so that the migration completes.
        self._is_forced = False

    def job(self) -> JobStats:
        """Return libvirt's statistics of the guest's outgoing migration, or {} if none runs."""
        stats = jobs.stats_of(self._libvirt, self._server)
        return stats if stats.get("operation") == JOB_OPERATION_MIGRATION_OUT else {}

    def await_earlier(self) -> GuestDomain | None:
        """Abort an earlier migration of the guest, if one still runs, and wait for its end.

        The command of an earlier migration had another fence and was cancelled.

        Returns:
            The guest, or None if the guest is not on this host any more, because the earlier
            migration has succeeded.

        Raises:
            VerbFailed: The earlier migration does not end within ``EARLIER_MIGRATION_SECONDS``.
            Cancelled: The verb was cancelled during the wait.
            MigrationAborted: A user aborted the new migration during the wait.
        """
        deadline = time.monotonic() + EARLIER_MIGRATION_SECONDS
        while stats := self.job():
            self._raise_if_stopped()
            if time.monotonic() > deadline:
                raise VerbFailed(
                    "An earlier migration of the server has not ended yet; try again.",
                    retryable=True,
                    details=f"no end within {EARLIER_MIGRATION_SECONDS:.0f} seconds",
                )
            self._context.phase(CommandPhase.ENDING_MIGRATION)
            jobs.request_abort(self._libvirt, self._server, stats)
            time.sleep(LOOK_SECONDS)
        return self._libvirt.find(self._server)

    def check(self, guest: GuestDomain) -> None:
        """Check that the migration can begin.

        Raises:
            VerbFailed: The guest is off, or the destination or this host does not permit the
                migration.
            Cancelled: The verb was cancelled.
            MigrationAborted: A user aborted the migration.
        """
        if not guest.active:
            raise VerbFailed(
                "The server does not run, so it cannot be live migrated; use a cold migration.",
                details=f"power state {guest.power_state}",
            )
        if not self._to.get("uri"):
            raise VerbFailed(
                "The destination does not accept live migrations.",
                details="[migration] live_migration_port is not set at the destination",
            )
        if reason := self._options.plain_text_to(self._to):
            raise VerbFailed(
                "The memory of the server would be transferred as plain text, which this host does not permit.",
                details=f"{reason}; set it, or set [tls] allow_plain_text = true on an isolated network",
            )
        self._raise_if_stopped()

    def begin(self, guest: GuestDomain, describe: Describe) -> None:
        """Start the migration and follow the job to the end.

        If no exception is raised, the caller finds out with ``conclude`` which host has the guest.

        Args:
            guest: State of the guest before the migration.
            describe: Returns the domain XML for the destination.

        Raises:
            VerbFailed: The migration failed, and the guest is here as before.
            NoBridge: As VerbFailed, because a bridge is missing at the destination.
            MigrationAborted: As VerbFailed, because a user aborted the migration.
            Cancelled: The verb was cancelled. The abort may still be in progress.
            Unavailable: This host has no lease, so no migration was begun.
            NoAnswer: libvirtd does not answer, or a post-copy migration broke.
        """
        self._context.require_lease()
        self._libvirt.mark(
            self._server, moving=self._spec.fence, resumes=int(guest.power_state == RUNNING)
        )
        running = self._libvirt.describe(self._server, portable=True)
        destination_xml = describe(running, power.find_active(self._libvirt, self._server))
        parameters: JsonObject = {
            PARAM_URI: f"tcp://{in_url(self._to['address'])}",
            PARAM_DEST_XML: destination_xml,
            PARAM_PERSIST_XML: destination_xml,
        }
        flags = (
            MIGRATE_FLAGS
            | MIGRATE_AUTO_CONVERGE * self._options.auto_converge
            | MIGRATE_POSTCOPY * self._options.post_copy
        )
        flags |= MIGRATE_TLS * self._options.native_tls
        copied = [] if self._shared else list(running_domain.disks(running))
        if copied:
            # Both hosts reach the volumes. Without a list libvirt would copy them too.
            flags |= MIGRATE_NON_SHARED_INC
            parameters[PARAM_MIGRATE_DISKS] = copied
        if not copied or volume_xml.find_disks(running):
            # libvirt recognizes shared storage only by the type of the file system. Here both
            # agents have read the same marker file there, and a volume is the same on both hosts.
            # QEMU 3 and later drops the host's cache of a disk before the other host opens the
            # disk.
            flags |= MIGRATE_UNSAFE
        if self._options.bandwidth:
            limits = (
                [PARAM_BANDWIDTH, PARAM_BANDWIDTH_POSTCOPY]
                if self._options.post_copy
                else [PARAM_BANDWIDTH]
            )
            parameters |= dict.fromkeys(limits, self._options.bandwidth)
        # Discard the figures of an earlier job.
        self._libvirt.take_ended_job(self._server)
        call = jobs.BackgroundCall(
            f"move-{self._server}",
            lambda: self._libvirt.move(
                self._server, self._options.uri(self._to), parameters, flags
            ),
        )
        self.follow(call)
        if isinstance(call.error, VerbFailed):
            self._fail_at_source(call.error)
        elif call.error is not None:
            raise call.error

    def follow(self, call: jobs.BackgroundCall | None) -> None:
        """Report progress and apply the user's controls and the timeout until the job has ended.

        If the verb is cancelled, return when ``_cancel`` returns. The error of a failed ``call`` is
        not raised, but is in ``call.error``.

        Args:
            call: The call that began the migration, or None to follow a job of an earlier agent.

        Raises:
            Cancelled: The verb was cancelled, and the abort is still in progress.
            VerbFailed: libvirt refuses a request, for example to pause the guest.
            NoAnswer: libvirtd does not answer.
        """
        while call.lasts(LOOK_SECONDS) if call else self.job():
            if self._context.cancelled():
                self._cancel(call)
                return
            self._report()
            if self._context.requested_control() is Control.ABORT:
                self._abort(MigrationAborted())
            elif self._context.requested_control() is Control.COMPLETE:
                self._force()
            else:
                self._enforce_timeout()
            if call is None:
                time.sleep(LOOK_SECONDS)

    def conclude(self) -> None:
        """Find out which host has the guest after the job has ended.

        Returns only if the destination has the guest. A remaining domain is removed from this host.
        If the guest is here, a guest that ran before is resumed.

        Raises:
            VerbFailed: The guest is here. After an abort, the reason of the abort is raised
                instead, for example MigrationAborted or Cancelled.
            NoAnswer: The destination does not answer which host has the guest, or a post-copy
                migration broke.
        """
        domain, deadline = self._libvirt.find(self._server), time.monotonic() + VANISH_SECONDS
        while domain is not None and not domain.active and time.monotonic() < deadline:
            # libvirt may be about to remove the domain.
            time.sleep(LOOK_SECONDS)
            domain = self._libvirt.find(self._server)
        if domain is None:
            return
        if domain.postcopy_failed:
            raise _postcopy_failed()
        if domain.power_state == RUNNING or not self._is_at_destination():
            self._fail_at_source(
                VerbFailed(
                    "The migration ended early, and the server is still on the source host; try again.",
                    details="libvirt reports no reason; see the logs of libvirtd on both hosts",
                    retryable=True,
                )
            )
        self._libvirt.destroy(self._server)
        self._libvirt.undefine(self._server)

    def totals(self) -> JsonObject:
        """Report the final statistics, and return bytes and duration in the format of ``migrate``.

        If libvirt did not report the end, the last statistics during the migration count. Without
        any statistics the values are 0.
        """
        stats = self._libvirt.take_ended_job(self._server) or self._stats
        if stats:
            self._context.report_migration(_select_counters(stats))
        return {
            "bytes": int(stats.get("memory_processed", 0)) + int(stats.get("disk_processed", 0)),
            "job_seconds": int(stats.get("time_elapsed", 0)) / 1000,
        }

    def _raise_if_stopped(self) -> None:
        """Raise Cancelled if the verb was cancelled, or MigrationAborted after a user's abort."""
        if self._context.cancelled():
            raise Cancelled
        if self._context.requested_control() is Control.ABORT:
            raise MigrationAborted()

    def _report(self) -> None:
        if not (stats := self.job()):
            return
        self._stats = stats
        self._context.report_migration(_select_counters(stats))
        kind = "memory" if stats.get("memory_total") else "disk"
        total, remaining = (int(stats.get(f"{kind}_{part}", 0)) for part in ("total", "remaining"))
        self._context.phase(
            CommandPhase.MOVING_MEMORY if kind == "memory" else CommandPhase.MOVING_DISK,
            100 * (total - remaining) // total if total else 0,
        )

    def _enforce_timeout(self) -> None:
        """Abort or force the migration, as configured, if it lasts too long for the guest's size.

        Without a configured timeout nothing happens. libvirt counts the time, so that a restart of
        the agent does not change the limit.
        """
        size = self._spec.flavor.memory_mb / 1024 + (0 if self._shared else self._spec.local_gb)
        max_seconds = self._options.completion_timeout * max(MIN_COUNTED_GIBIBYTES, size)
        if not max_seconds or int(self._stats.get("time_elapsed", 0)) <= max_seconds * 1000:
            return
        if self._options.timeout_action == "force_complete":
            self._force()
        else:
            self._abort(
                VerbFailed(
                    f"The migration did not complete within {max_seconds:.0f} seconds and was aborted; try again when "
                    "the server is less busy, or force the migration to complete."
                )
            )

    def _abort(self, reason: Exception) -> None:
        """Request the abort of the job. Do not wait.

        ``reason`` is the exception to raise when the job has ended. The reason of the first call
        counts. Called at each poll, because libvirt ignores requests in some phases. If the job
        still runs after ``ABORT_SECONDS``, log an error.
        """
        if self._abort_reason is None:
            self._abort_reason, self._aborted_at = reason, time.monotonic()
        jobs.request_abort(self._libvirt, self._server, self._stats)
        if time.monotonic() > self._aborted_at + ABORT_SECONDS:
            self._aborted_at = time.monotonic()
            LOG.error(
                "libvirt does not abort the migration of a server, which still runs on this "
                "host. If this continues, run: systemctl restart libvirtd. This ends the "
                "migration, and guests continue to run",
                server=self._server,
            )

    def _cancel(self, call: jobs.BackgroundCall | None) -> None:
        """Abort the job of a cancelled verb, in a thread. ``call`` is as in ``follow``.

        If the thread ends within ``CANCEL_SECONDS``, return, and the caller concludes. Otherwise
        raise Cancelled. The thread then continues to abort the job, and resumes a guest that ran
        before and belongs to this host. The thread stops after ``ABORT_SECONDS``, or if a later
        command has changed the domain.
        """
        self._abort_reason, now = Cancelled(), time.monotonic()
        stop_at, give_up_at = now + CANCEL_SECONDS, now + ABORT_SECONDS
        domain_before = self._libvirt.find(self._server)

        def is_ours(domain: GuestDomain | None) -> TypeGuard[GuestDomain]:
            """Return True if the domain exists and no later command has changed its marks."""
            return (
                domain is not None
                and domain_before is not None
                and domain.marks.moving == self._spec.fence
                and domain.marks.fence == domain_before.marks.fence
            )

        def end() -> None:
            while (stats := self.job()) or (call and call.lasts(0)):
                if time.monotonic() > give_up_at or not is_ours(self._libvirt.find(self._server)):
                    return
                if stats:
                    jobs.request_abort(self._libvirt, self._server, stats)
                time.sleep(LOOK_SECONDS)
            is_here = call is not None and isinstance(call.error, VerbFailed)
            while is_ours(domain := self._libvirt.find(self._server)):
                if self._settle_guest(domain, is_here) or time.monotonic() > give_up_at:
                    return
                time.sleep(LOOK_SECONDS)

        ending = jobs.BackgroundCall(f"abort-{self._server}", end)
        while ending.lasts(LOOK_SECONDS):
            if time.monotonic() > stop_at:
                raise Cancelled

    def _settle_guest(self, domain: GuestDomain, is_here: bool) -> bool:
        """Resume the guest if the failed migration left it paused and it belongs to this host.

        Args:
            domain: State of the domain on this host.
            is_here: True if the guest is known to belong to this host. False: query the
                destination.

        Returns:
            True if nothing more is to do. False if the destination does not answer, or still waits
            for the guest. Then the caller tries again.
        """
        if domain.power_state != PAUSED or not domain.marks.resumes or domain.postcopy_failed:
            return True
        try:
            if is_here or not self._is_at_destination():
                self._libvirt.resume(self._server)
        except errors.NoAnswer as problem:
            LOG.warning(
                "a server stays paused until the destination of its migration answers",
                server=self._server,
                problem=problem,
            )
            return False
        return True

    def _force(self) -> None:
        """Make the migration complete. After the first success, further calls have no effect.

        With post-copy the guest continues at the destination before all memory has arrived.
        Without post-copy, or if libvirt refuses it, the guest is paused, so that no memory changes
        any more. libvirt resumes the guest at the destination.
        """
        if self._is_forced:
            return
        if self._options.post_copy and self._stats.get("memory_total"):
            try:
                self._libvirt.on(
                    self._server,
                    "switch the migration to post-copy",
                    lambda domain: domain.migrateStartPostCopy(0),
                )
                self._is_forced = True
                return
            except VerbFailed as refused:
                LOG.info(
                    "a server is paused to complete its migration",
                    server=self._server,
                    details=refused.details,
                )
        self._libvirt.pause(self._server)
        self._is_forced = True

    def _fail_at_source(self, reason: Exception) -> NoReturn:
        """Resume a guest that ran before, and raise the reason of the abort, else ``reason``.

        After a broken post-copy migration, the guest is not resumed and NoAnswer is raised.
        """
        domain = power.find(self._libvirt, self._server)
        if domain.postcopy_failed:
            raise _postcopy_failed() from reason
        if domain.power_state == PAUSED and domain.marks.resumes:
            self._libvirt.resume(self._server)
        self._libvirt.mark(self._server, moving=0, resumes=0)
        raise self._abort_reason or reason

    def _is_at_destination(self) -> bool:
        """Return True if the destination has the guest, as its proxy answers.

        Raises:
            NoAnswer: The destination does not answer, or still waits for the guest.
            VerbFailed: The facts of the destination contain no valid address.
        """
        way = Way.of(self._to)
        return has_arrived(
            way.host, way.port, self._server, self._options.tls if way.encrypted else None
        )


def in_url(address: str) -> str:
    """Return the address as the host of a URL. IPv6 addresses get brackets."""
    return f"[{address}]" if ":" in address else address


def _postcopy_failed() -> errors.NoAnswer:
    """Return the error of a broken post-copy migration.

    Until the rest of the memory has been transferred, neither host has the whole guest, and the
    guest must not be resumed.
    """
    return errors.NoAnswer(
        "The connection broke during the post-copy phase of the migration: the server runs at the destination, and "
        "part of its memory is at the source. Repair the network and run virsh migrate --postcopy-resume, or delete "
        "the server."
    )


def _select_counters(stats: JobStats) -> dict[str, int]:
    return {name: int(stats.get(name, 0)) for name in COUNTED}
