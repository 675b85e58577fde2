# SPDX-License-Identifier: Apache-2.0
"""A guest that leaves while it runs: one migration of libvirt's, from its beginning or from where a
dead agent left it.

Called by ``virt.libvirt.driver``; ``incoming_migration`` is the other end. The two libvirtds do the
work between them, so that it goes on whatever becomes of the agent; that it has begun is marked on
the domain. This host's calls the other's proxy (``incoming``), which proves both. Must stay true:
VerbFailed is said only of a guest that is here, as before, its CPUs running if they ran; success
only when it is not here any more. Where that is not plain, because libvirtd died in the last
moments, the destination is asked, and while it does not answer nothing is resumed and nothing
removed: never do both run.
"""

from __future__ import annotations

import logging
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

LOG = logging.getLogger(__name__)
LOOK_SECONDS, CANCEL_SECONDS, VANISH_SECONDS, EARLIER_MIGRATION_SECONDS, ABORT_SECONDS = (
    0.2,
    3.0,
    5.0,
    30.0,
    60.0,
)
GIBIBYTE = 1 << 30
#: Time is given for at least this many GiB.
MIN_COUNTED_GIBIBYTES = 2
#: How one libvirtd calls another: over TLS or in plain text, with the ports on which earlier
#: releases listened.
TLS, PLAIN = "qemu+tls", "qemu+tcp"
PORTS = {TLS: 16514, PLAIN: 16509}
#: What libvirt's clients call their files, and whose they are here.
PROOF = {"cacert.pem": "ca", "clientcert.pem": "cert", "clientkey.pem": "key"}
HOST = re.compile(r"[\w.:-]{1,253}", re.ASCII)
COUNTED = tuple(
    f"{what}_{part}" for what in ("memory", "disk") for part in ("total", "processed", "remaining")
)


@dataclass(frozen=True, slots=True)
class MigrationOptions:
    """How this host's guests move, as [migration] has it. port: where the libvirtd of another host
    reaches this one's (0: no guest comes here), address: where that is, and where this host takes
    their memory in; bandwidth in MiB/s (0: no limit); completion_timeout in seconds for each GiB
    (0: none); timeout_action: abort or force_complete;
    plain_text: whether guests may travel so to other machines; tls: how hosts prove themselves,
    proof: a folder with the same files under libvirt's names."""

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
        """Why what goes to that host would be plain text on its way; "" when it is not, or may
        be."""
        where = Way.of(to)
        if self.plain_text or (is_loopback(to["address"]) and is_loopback(where.host)):
            return ""
        if not where.encrypted or self.tls is None:
            return f"[tls] ca_file is not set {'here' if where.encrypted else 'there'}"
        return "" if self.native_tls else "[migration] live_migration_with_native_tls is false"

    @property
    def facts(self) -> dict[str, str]:
        """What others need to know of this host."""
        uri = f"{TLS if self.tls else PLAIN}://{in_url(self.address)}:{self.port}/system"
        return {"uri": uri if self.port else "", "address": self.address if self.port else ""}

    def uri(self, to: JsonObject) -> str:
        """What this host's libvirtd calls the other as; of what the other says of itself only host
        and port count."""
        where = Way.of(to)
        return f"{TLS if where.encrypted else PLAIN}://{in_url(where.host)}:{where.port}/system" + (
            f"?pkipath={quote(self.proof)}" if where.encrypted and self.proof else ""
        )


@dataclass(frozen=True, slots=True)
class Way:
    """Where the libvirtd of another host is reached."""

    host: str
    port: int
    encrypted: bool

    @classmethod
    def of(cls, to: JsonObject) -> Way:
        """As the host itself says. VerbFailed when that is no address: a URI can name programs to
        be run."""
        try:
            where = urlsplit(to["uri"])
            host, port = where.hostname or "", where.port or PORTS[where.scheme]
        except (ValueError, KeyError) as problem:
            raise VerbFailed(
                "The destination does not say where it takes servers in.",
                retryable=True,
                details=f"it says {to.get('uri')!r}",
            ) from problem
        if not HOST.fullmatch(host):
            raise VerbFailed(
                "The destination does not say where it takes servers in.",
                retryable=True,
                details=f"it says {to['uri']!r}",
            )
        return cls(host, port, where.scheme == TLS)


def lay_proof(folder: Path, tls: Tls) -> str:
    """A folder in which libvirtd finds the files of ``tls`` under its own names; new ones count at
    once."""
    folder.mkdir(mode=0o711, exist_ok=True)
    for name, kind in PROOF.items():
        link = folder / f"{name}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(getattr(tls, kind)).absolute())
        link.replace(folder / name)
    return str(folder)


#: The guest as the destination's libvirt shall have it, from its running description and its marks.
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
    """Move the guest, with its disks unless storage is ``shared``; returns {"bytes",
    "job_seconds"}. VerbFailed: it is here as before."""
    migration = _Migration(libvirt, spec, to, shared, options, context)
    found = libvirt.find(spec.server)
    if found is not None and found.marks.moving == spec.fence:
        migration.follow(None)
    elif found is not None and (guest := migration.await_earlier()) is not None:
        migration.check(guest)
        when_bridged(context, lambda: migration.begin(guest, describe))
    migration.conclude()
    return migration.totals()


class _Migration:
    """One guest on its way out."""

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
        #: Why it is being aborted, if it is; and whether it was forced to come to its end.
        self._aborted: Exception | None = None
        self._aborted_at = 0.0
        self._forced = False

    def job(self) -> JobStats:
        """The migration that runs; empty when none does."""
        stats = jobs.stats_of(self._libvirt, self._server)
        return stats if stats.get("operation") == JOB_OPERATION_MIGRATION_OUT else {}

    def await_earlier(self) -> GuestDomain | None:
        """The guest, once no earlier migration is under way: one of another fence was given up, and
        may still be ending. None when it has left with that."""
        deadline = time.monotonic() + EARLIER_MIGRATION_SECONDS
        while stats := self.job():
            self._raise_if_stopped()
            if time.monotonic() > deadline:
                raise VerbFailed(
                    "An earlier migration of the server is still being ended; try again.",
                    retryable=True,
                    details=f"no end within {EARLIER_MIGRATION_SECONDS:.0f} seconds",
                )
            self._context.phase(CommandPhase.ENDING_MIGRATION)
            jobs.request_abort(self._libvirt, self._server, stats)
            time.sleep(LOOK_SECONDS)
        return self._libvirt.find(self._server)

    def check(self, found: GuestDomain) -> None:
        """Whether it can begin."""
        if not found.active:
            raise VerbFailed(
                "The server does not run; it can be moved without live migration.",
                details=f"power state {found.power_state}",
            )
        if not self._to.get("uri"):
            raise VerbFailed(
                "The destination takes no servers in while they run.",
                details="[migration] live_migration_port is not set there",
            )
        if reason := self._options.plain_text_to(self._to):
            raise VerbFailed(
                "The server would travel to its destination as plain text.",
                details=f"{reason}; where nobody else reaches that network: [tls] allow_plain_text = true",
            )
        self._raise_if_stopped()

    def begin(self, found: GuestDomain, describe: Describe) -> None:
        """Start the migration and follow it to its end."""
        self._context.require_lease()
        self._libvirt.mark(
            self._server, moving=self._spec.fence, resumes=int(found.power_state == RUNNING)
        )
        running = self._libvirt.describe(self._server, portable=True)
        described = describe(running, power.find_active(self._libvirt, self._server))
        parameters: JsonObject = {
            PARAM_URI: f"tcp://{in_url(self._to['address'])}",
            PARAM_DEST_XML: described,
            PARAM_PERSIST_XML: described,
        }
        flags = (
            MIGRATE_FLAGS
            | MIGRATE_AUTO_CONVERGE * self._options.auto_converge
            | MIGRATE_POSTCOPY * self._options.post_copy
        )
        flags |= MIGRATE_TLS * self._options.native_tls
        copied = [] if self._shared else list(running_domain.disks(running))
        if copied:
            # Volumes are reached from both hosts; without a list libvirt would copy them too.
            flags |= MIGRATE_NON_SHARED_INC
            parameters[PARAM_MIGRATE_DISKS] = copied
        if not copied or volume_xml.found(running):
            # libvirt knows shared storage by the kind of its file system alone; both agents have
            # read the same mark in it, and a volume is the same wherever it is served from. QEMU 3
            # and later drops what the host has cached of a disk before the other host opens it.
            flags |= MIGRATE_UNSAFE
        if self._options.bandwidth:
            limits = (
                [PARAM_BANDWIDTH, PARAM_BANDWIDTH_POSTCOPY]
                if self._options.post_copy
                else [PARAM_BANDWIDTH]
            )
            parameters |= dict.fromkeys(limits, self._options.bandwidth)
        self._libvirt.take_ended_job(self._server)  # what an earlier one has left
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
        """Until the call, or the job that another agent began, is over: tell how far it is, do what
        is requested."""
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
        """Nothing happens any more: whose is the guest? Returns when it is gone from here."""
        found, deadline = self._libvirt.find(self._server), time.monotonic() + VANISH_SECONDS
        while found is not None and not found.active and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)  # libvirt may be about to forget it
            found = self._libvirt.find(self._server)
        if found is None:
            return
        if found.postcopy_failed:
            raise _postcopy_failed()
        if found.power_state == RUNNING or not self._is_at_destination():
            self._fail_at_source(
                VerbFailed(
                    "The migration ended before its time; the server stays where it is. Try again.",
                    details="libvirt does not say why; its logs on both hosts may",
                    retryable=True,
                )
            )
        self._libvirt.destroy(self._server)
        self._libvirt.undefine(self._server)

    def totals(self) -> JsonObject:
        """What has travelled, and how long libvirt was at it."""
        stats = self._libvirt.take_ended_job(self._server) or self._stats
        if stats:
            self._context.report_migration(_counted(stats))
        return {
            "bytes": int(stats.get("memory_processed", 0)) + int(stats.get("disk_processed", 0)),
            "job_seconds": int(stats.get("time_elapsed", 0)) / 1000,
        }

    def _raise_if_stopped(self) -> None:
        """Raises what ends it before it has begun."""
        if self._context.cancelled():
            raise Cancelled
        if self._context.requested_control() is Control.ABORT:
            raise MigrationAborted()

    def _report(self) -> None:
        if not (stats := self.job()):
            return
        self._stats = stats
        self._context.report_migration(_counted(stats))
        what = "memory" if stats.get("memory_total") else "disk"
        total, left = (int(stats.get(f"{what}_{part}", 0)) for part in ("total", "remaining"))
        self._context.phase(
            CommandPhase.MOVING_MEMORY if what == "memory" else CommandPhase.MOVING_DISK,
            100 * (total - left) // total if total else 0,
        )

    def _enforce_timeout(self) -> None:
        """More time for a larger guest; counted by libvirt, so that an agent that died does not
        prolong it."""
        size = self._spec.flavor.memory_mb / 1024 + (0 if self._shared else self._spec.local_gb)
        most = self._options.completion_timeout * max(MIN_COUNTED_GIBIBYTES, size)
        if not most or int(self._stats.get("time_elapsed", 0)) <= most * 1000:
            return
        if self._options.timeout_action == "force_complete":
            self._force()
        else:
            self._abort(
                VerbFailed(
                    f"The migration did not come to its end within {most:.0f} seconds and was aborted; "
                    "try again when the server is less busy, or force it to complete."
                )
            )

    def _abort(self, reason: Exception) -> None:
        """Asked for at each look: libvirt does not hear it in each phase of its job."""
        if self._aborted is None:
            self._aborted, self._aborted_at = reason, time.monotonic()
        jobs.request_abort(self._libvirt, self._server, self._stats)
        if time.monotonic() > self._aborted_at + ABORT_SECONDS:
            self._aborted_at = time.monotonic()
            LOG.error(
                "libvirt does not abort the migration of server %s, which runs on here. If that lasts: systemctl "
                "restart libvirtd, which harms no guest and ends it",
                self._server,
            )

    def _cancel(self, call: jobs.BackgroundCall | None) -> None:
        """Within seconds, also when QEMU is too busy to answer libvirt: then the job is still being
        ended, and the guest goes on after that."""
        self._aborted, now = Cancelled(), time.monotonic()
        stop_at, give_up_at = now + CANCEL_SECONDS, now + ABORT_SECONDS
        before = self._libvirt.find(self._server)

        def is_ours(found: GuestDomain | None) -> TypeGuard[GuestDomain]:
            """Whether no later command has had to do with it."""
            return (
                found is not None
                and before is not None
                and found.marks.moving == self._spec.fence
                and found.marks.fence == before.marks.fence
            )

        def end() -> None:
            while (stats := self.job()) or (call and call.lasts(0)):
                if time.monotonic() > give_up_at or not is_ours(self._libvirt.find(self._server)):
                    return
                if stats:
                    jobs.request_abort(self._libvirt, self._server, stats)
                time.sleep(LOOK_SECONDS)
            is_here = call is not None and isinstance(call.error, VerbFailed)
            while is_ours(found := self._libvirt.find(self._server)):
                if self._goes_on(found, is_here) or time.monotonic() > give_up_at:
                    return
                time.sleep(LOOK_SECONDS)

        ending = jobs.BackgroundCall(f"abort-{self._server}", end)
        while ending.lasts(LOOK_SECONDS):
            if time.monotonic() > stop_at:
                raise Cancelled

    def _goes_on(self, found: GuestDomain, is_here: bool) -> bool:
        """libvirt may leave a guest paused whose migration broke off as it was handed over: resume
        it where it is surely the source's. False while the destination does not say."""
        if found.power_state != PAUSED or not found.marks.resumes or found.postcopy_failed:
            return True
        try:
            if is_here or not self._is_at_destination():
                self._libvirt.resume(self._server)
        except errors.NoAnswer as problem:
            LOG.warning("server %s waits, paused: %s", self._server, problem)
            return False
        return True

    def _force(self) -> None:
        """The guest goes on at the destination at once, its memory following, or else it stands
        still, so that nothing changes any more; then libvirt lets it go on there."""
        if self._forced:
            return
        if self._options.post_copy and self._stats.get("memory_total"):
            try:
                self._libvirt.on(
                    self._server,
                    "let the guest run at its destination",
                    lambda domain: domain.migrateStartPostCopy(0),
                )
                self._forced = True
                return
            except VerbFailed as refused:
                LOG.info(
                    "%s is paused to complete its migration: %s", self._server, refused.details
                )
        self._libvirt.pause(self._server)
        self._forced = True

    def _fail_at_source(self, reason: Exception) -> NoReturn:
        """The guest is here, and goes on if it ran."""
        found = power.find(self._libvirt, self._server)
        if found.postcopy_failed:
            raise _postcopy_failed() from reason
        if found.power_state == PAUSED and found.marks.resumes:
            self._libvirt.resume(self._server)
        self._libvirt.mark(self._server, moving=0, resumes=0)
        raise self._aborted or reason

    def _is_at_destination(self) -> bool:
        """Whether it is the destination's; NoAnswer while that is not known."""
        where = Way.of(self._to)
        return has_arrived(
            where.host, where.port, self._server, self._options.tls if where.encrypted else None
        )


def in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _postcopy_failed() -> errors.NoAnswer:
    """Until the rest of its memory has followed it the guest is neither here nor there: nothing may
    be resumed."""
    return errors.NoAnswer(
        "The server went on at its destination, and the connection broke before all of its memory "
        "had followed: repair the network, then virsh migrate --postcopy-resume; or delete it."
    )


def _counted(stats: JobStats) -> dict[str, int]:
    return {name: int(stats.get(name, 0)) for name in COUNTED}
