# SPDX-License-Identifier: Apache-2.0
"""A guest that leaves while it runs: one migration of libvirt's, from its beginning or from where a dead agent left it.

Called by ``virt.libvirt.driver``; ``arrivals`` is the other end. The two libvirtds do the work between them, so that it
goes on whatever becomes of the agent; that it has begun is marked on the domain.
Must stay true: VerbFailed is said only of a guest that is here, as before, its CPUs running if they ran; success only
when it is not here any more. Where that is not plain, because libvirtd died in the last moments, the destination is
asked, and while it does not answer nothing is resumed and nothing removed: never do both run.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from common import errors
from common.models import GuestSpec
from compute_agent.virt.driver import ABORTED, PAUSED, RUNNING, Cancelled, Run, VerbFailed
from compute_agent.virt.interfaces import when_bridged
from compute_agent.virt.libvirt import jobs, layout, power
from compute_agent.virt.libvirt.connection import (
    AFTERWARDS_AT_MOST,
    AT_MOST,
    LEAVES,
    MOVE,
    MOVE_CONVERGING,
    MOVE_DISKS,
    MOVE_ENCRYPTED,
    MOVE_POST_COPY,
    MOVE_UNCHECKED,
    OF_DISKS,
    TO_ADDRESS,
    TO_BE_STORED,
    TO_BECOME,
    Connection,
    Found,
)

LOG = logging.getLogger(__name__)
LOOK_EVERY, CANCEL_SECONDS, VANISH_SECONDS, OUTLAST_SECONDS, ABORT_SECONDS = 0.2, 3.0, 5.0, 30.0, 60.0
GIBIBYTE = 1 << 30
#: Time is given for at least this many GiB.
LEAST_GIBIBYTES = 2
COUNTED = tuple(f"{what}_{part}" for what in ("memory", "disk") for part in ("total", "processed", "remaining"))


@dataclass(frozen=True, slots=True)
class Options:
    """How this host's guests move, as [migration] has it. uri: this host's libvirt as others reach it ("": no guest
    comes here), address: where it takes their memory in; bandwidth in MiB/s (0: no limit); completion_timeout in
    seconds for each GiB (0: none); timeout_action: abort or force_complete."""

    uri: str = ""
    address: str = ""
    bandwidth: int = 0
    completion_timeout: int = 800
    timeout_action: str = "abort"
    auto_converge: bool = False
    post_copy: bool = False
    native_tls: bool = False

    @property
    def facts(self) -> dict[str, str]:
        """What others need to know of this host."""
        return {"uri": self.uri.replace("%s", _in_url(self.address)), "address": self.address if self.uri else ""}


#: The guest as the destination's libvirt shall have it, from its running description and its marks.
Describe = Callable[[str, Found], str]


def migrate(libvirt: Connection, spec: GuestSpec, to: dict[str, Any], shared: bool, describe: Describe,
            options: Options, run: Run) -> dict[str, Any]:
    """Move the guest, with its disks unless storage is ``shared``; returns {"bytes", "job_seconds"}. VerbFailed: it is
    here as before."""
    leave = _Leave(libvirt, spec, to, shared, options, run)
    found = libvirt.find(spec.server)
    if found is not None and found.marks.moving == spec.fence:
        leave.follow(None)
    elif found is not None and (still := leave.outlast()) is not None:
        leave.check(still)
        when_bridged(run, lambda: leave.begin(still, describe))
    leave.settle()
    return leave.figures()


class _Leave:
    """One guest on its way out."""

    def __init__(self, libvirt: Connection, spec: GuestSpec, to: dict[str, Any], shared: bool, options: Options,
                 run: Run) -> None:
        self._libvirt, self._spec, self._server = libvirt, spec, spec.server
        self._to, self._shared, self._options, self._run = to, shared, options, run
        self._told: dict[str, Any] = {}
        #: Why it is being aborted, if it is; and whether it was forced to come to its end.
        self._aborted: Exception | None = None
        self._aborted_at = 0.0
        self._forced = False

    def job(self) -> dict[str, Any]:
        """The migration that runs; empty when none does."""
        told = jobs.job(self._libvirt, self._server)
        return told if told.get("operation") == LEAVES else {}

    def outlast(self) -> Found | None:
        """The guest, once no earlier migration is under way: one of another fence was given up, and may still be
        ending. None when it has left with that."""
        deadline = time.monotonic() + OUTLAST_SECONDS
        while told := self.job():
            self._go_on()
            if time.monotonic() > deadline:
                raise VerbFailed("An earlier migration of the server is still being ended; try again.", retryable=True,
                                 details=f"no end within {OUTLAST_SECONDS:.0f} seconds")
            self._run.phase("ending an earlier migration")
            jobs.stop(self._libvirt, self._server, told)
            time.sleep(LOOK_EVERY)
        return self._libvirt.find(self._server)

    def check(self, found: Found) -> None:
        """Whether it can begin."""
        if not found.active:
            raise VerbFailed("The server does not run; it can be moved without live migration.",
                             details=f"power state {found.power_state}")
        if not self._to.get("uri"):
            raise VerbFailed("The destination takes no servers in while they run.",
                             details="[migration] live_migration_uri is not set there")
        self._go_on()

    def begin(self, found: Found, describe: Describe) -> None:
        """Start the migration and follow it to its end."""
        self._run.require_lease()
        self._libvirt.mark(self._server, moving=self._spec.fence, resumes=int(found.power_state == RUNNING))
        running = self._libvirt.describe(self._server, portable=True)
        described = describe(running, power.find_active(self._libvirt, self._server))
        parameters: dict[str, Any] = {TO_ADDRESS: f"tcp://{_in_url(self._to['address'])}", TO_BECOME: described,
                                      TO_BE_STORED: described}
        flags = MOVE | MOVE_CONVERGING * self._options.auto_converge | MOVE_POST_COPY * self._options.post_copy
        flags |= MOVE_ENCRYPTED * self._options.native_tls
        if not self._shared:
            flags |= MOVE_DISKS
            parameters[OF_DISKS] = list(layout.disks(running))
        else:
            # libvirt knows shared storage by the kind of its file system alone; both agents have read the same mark
            # in it. QEMU 3 and later drops what the host has cached of a disk before the other host opens it.
            flags |= MOVE_UNCHECKED
        if self._options.bandwidth:
            limits = [AT_MOST, AFTERWARDS_AT_MOST] if self._options.post_copy else [AT_MOST]
            parameters |= dict.fromkeys(limits, self._options.bandwidth)
        self._libvirt.take_ended_job(self._server)      # what an earlier one has left
        call = jobs.Aside(f"move-{self._server}",
                          lambda: self._libvirt.move(self._server, self._to["uri"], parameters, flags))
        self.follow(call)
        if isinstance(call.error, VerbFailed):
            self._stay(call.error)
        elif call.error is not None:
            raise call.error

    def follow(self, call: jobs.Aside | None) -> None:
        """Until the call, or the job that another agent began, is over: tell how far it is, do what is wished."""
        while call.lasts(LOOK_EVERY) if call else self.job():
            if self._run.cancelled():
                self._cancel(call)
                return
            self._tell()
            if self._run.wish() == "abort":
                self._abort(VerbFailed(ABORTED))
            elif self._run.wish() == "complete":
                self._force()
            else:
                self._keep_time()
            if call is None:
                time.sleep(LOOK_EVERY)

    def settle(self) -> None:
        """Nothing happens any more: whose is the guest? Returns when it is gone from here."""
        found, deadline = self._libvirt.find(self._server), time.monotonic() + VANISH_SECONDS
        while found is not None and not found.active and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)      # libvirt may be about to forget it
            found = self._libvirt.find(self._server)
        if found is None:
            return
        if found.torn:
            raise _torn()
        if found.power_state == RUNNING or not self._has_arrived():
            self._stay(VerbFailed("The migration ended before its time; the server stays where it is. Try again.",
                                  details="libvirt does not say why; its logs on both hosts may", retryable=True))
        self._libvirt.destroy(self._server)
        self._libvirt.undefine(self._server)

    def figures(self) -> dict[str, Any]:
        """What has travelled, and how long libvirt was at it."""
        told = self._libvirt.take_ended_job(self._server) or self._told
        if told:
            self._run.measured(_counted(told))
        return {"bytes": int(told.get("memory_processed", 0)) + int(told.get("disk_processed", 0)),
                "job_seconds": int(told.get("time_elapsed", 0)) / 1000}

    def _go_on(self) -> None:
        """Raises what ends it before it has begun."""
        if self._run.cancelled():
            raise Cancelled
        if self._run.wish() == "abort":
            raise VerbFailed(ABORTED)

    def _tell(self) -> None:
        if not (told := self.job()):
            return
        self._told = told
        self._run.measured(_counted(told))
        what = "memory" if told.get("memory_total") else "disk"
        total, left = (int(told.get(f"{what}_{part}", 0)) for part in ("total", "remaining"))
        self._run.phase(f"moving {what} {100 * (total - left) // total if total else 0} %")

    def _keep_time(self) -> None:
        """More time for a larger guest; counted by libvirt, so that an agent that died does not prolong it."""
        size = self._spec.flavor.memory_mb / 1024 + (0 if self._shared else self._spec.flavor.disk_gb)
        most = self._options.completion_timeout * max(LEAST_GIBIBYTES, size)
        if not most or int(self._told.get("time_elapsed", 0)) <= most * 1000:
            return
        if self._options.timeout_action == "force_complete":
            self._force()
        else:
            self._abort(VerbFailed(f"The migration did not come to its end within {most:.0f} seconds and was aborted; "
                                   "try again when the server is less busy, or force it to complete."))

    def _abort(self, reason: Exception) -> None:
        """Asked for at each look: libvirt does not hear it in each phase of its job."""
        if self._aborted is None:
            self._aborted, self._aborted_at = reason, time.monotonic()
        jobs.stop(self._libvirt, self._server, self._told)
        if time.monotonic() > self._aborted_at + ABORT_SECONDS:
            self._aborted_at = time.monotonic()
            LOG.error("libvirt does not abort the migration of server %s, which runs on here. If that lasts: systemctl "
                      "restart libvirtd, which harms no guest and ends it", self._server)

    def _cancel(self, call: jobs.Aside | None) -> None:
        """Within seconds, also when QEMU is too busy to answer libvirt: then the job is still being ended."""
        self._aborted, now = Cancelled(), time.monotonic()
        stop_at, give_up_at = now + CANCEL_SECONDS, now + ABORT_SECONDS

        def stop() -> None:
            while time.monotonic() < give_up_at and (told := self.job()):
                found = self._libvirt.find(self._server)
                if found is None or found.marks.moving != self._spec.fence:
                    return      # it has ended, and this job is the next one's
                jobs.stop(self._libvirt, self._server, told)
                time.sleep(LOOK_EVERY)
        abort = jobs.Aside(f"abort-{self._server}", stop)
        while (call or abort).lasts(LOOK_EVERY):
            if time.monotonic() > stop_at:
                raise Cancelled

    def _force(self) -> None:
        """The guest goes on at the destination at once, its memory following, or else it stands still, so that nothing
        changes any more; then libvirt lets it go on there."""
        if self._forced:
            return
        if self._options.post_copy and self._told.get("memory_total"):
            try:
                self._libvirt.on(self._server, "run at its destination", lambda domain: domain.migrateStartPostCopy(0))
                self._forced = True
                return
            except VerbFailed as refused:
                LOG.info("%s is paused to complete its migration: %s", self._server, refused.details)
        self._libvirt.pause(self._server)
        self._forced = True

    def _stay(self, reason: Exception) -> NoReturn:
        """The guest is here, and goes on if it ran."""
        found = power.find(self._libvirt, self._server)
        if found.torn:
            raise _torn() from reason
        if found.power_state == PAUSED and found.marks.resumes:
            self._libvirt.resume(self._server)
        self._libvirt.mark(self._server, moving=0, resumes=0)
        raise self._aborted or reason

    def _has_arrived(self) -> bool:
        """Whether it is the destination's; NoAnswer while that is not known."""
        there = Connection(self._to["uri"])
        try:
            found = there.find(self._server)
        except (VerbFailed, errors.NoAnswer) as error:
            raise errors.NoAnswer("It is not known whether the guest has arrived: the destination's libvirt does not "
                                  "answer. It stands still until that is known.") from error
        finally:
            there.close()
        if found is not None and found.arriving:
            raise errors.NoAnswer("It is not known whether the guest arrives: the destination still waits for it.")
        return found is not None and found.active


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _torn() -> errors.NoAnswer:
    """Until the rest of its memory has followed it the guest is neither here nor there: nothing may be resumed."""
    return errors.NoAnswer("The server went on at its destination, and the connection broke before all of its memory "
                           "had followed: repair the network, then virsh migrate --postcopy-resume; or delete it.")


def _counted(told: dict[str, Any]) -> dict[str, int]:
    return {name: int(told.get(name, 0)) for name in COUNTED}
