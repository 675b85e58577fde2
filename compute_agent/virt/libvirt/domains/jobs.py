# SPDX-License-Identifier: Apache-2.0
"""libvirt's jobs on a domain: saving the memory and copying the disk.

Called by ``power`` and ``snapshots``. Both jobs report progress. A cancel ends them within seconds
and leaves the guest as before. A job of an agent that died is aborted first. ``live_migration``
uses ``stats_of``, ``request_abort`` and ``BackgroundCall`` for migrations.

Invariant: when ``save``, ``backup`` or ``abort`` has returned or raised, no job of Kilonova runs on
the domain. After ``errors.NoAnswer`` or a VerbFailed of ``abort``, the job may still run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from common.domain.command_progress import CommandPhase
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.libvirt.domains.connection import (
    JOB_NONE,
    JOB_OPERATION_MIGRATION_OUT,
    JOB_OPERATION_SAVE,
    JOB_STATS_COMPLETED,
    NO_SUPPORT_ERRORS,
    SAVE_RUNNING,
    STATE_CHANGED_ERRORS,
    Connection,
    JobStats,
)

LOOK_SECONDS, ABORT_TIMEOUT_SECONDS = 0.1, 5.0


def save(libvirt: Connection, server: str, context: VerbContext) -> None:
    """Save the memory of the running or paused domain, and stop the domain.

    An earlier job of the domain is aborted first. When the memory is restored, the CPUs run even if
    the domain was paused. A cancel that comes too late has no effect.

    Raises:
        VerbFailed: The memory could not be saved, or a job could not be aborted.
        Cancelled: The job was aborted. The guest is as before.
    """
    abort(libvirt, server)
    call = BackgroundCall(
        f"save-{server}",
        lambda: libvirt.on(
            server, "save the guest's memory", lambda domain: domain.managedSave(SAVE_RUNNING)
        ),
    )
    cancelled = False
    while call.lasts(LOOK_SECONDS):
        cancelled = cancelled or context.cancelled()
        if cancelled:
            abort(libvirt, server)
        else:
            context.phase(CommandPhase.SAVING_MEMORY, _compute_percent(stats_of(libvirt, server)))
    if call.error is None:
        # The cancel came too late. The memory is saved.
        return
    raise Cancelled if cancelled else call.error


def backup(libvirt: Connection, server: str, context: VerbContext) -> None:
    """Block until the running backup job of the domain has ended, and report its progress.

    Raises:
        VerbFailed: The backup failed, so that the copy is incomplete, or could not be aborted.
        Cancelled: The verb was cancelled, and the job was aborted.
    """
    try:
        while copying := stats_of(libvirt, server):
            context.phase(CommandPhase.COPYING_DISK, _compute_percent(copying))
            if context.cancelled():
                raise Cancelled
            time.sleep(LOOK_SECONDS)
        # The cancel may have come after the last poll.
        if context.cancelled():
            raise Cancelled
    except BaseException:
        abort(libvirt, server)
        raise
    ended = stats_of(libvirt, server, JOB_STATS_COMPLETED)
    if not ended.get("success"):
        raise VerbFailed(
            "The host could not complete the copy of the guest's disk; try again.",
            retryable=True,
            details=str(ended.get("errmsg") or "libvirt reports no reason"),
        )


def abort(libvirt: Connection, server: str) -> None:
    """Abort the domain's job, if there is one, and wait until no job runs.

    Raises:
        VerbFailed: The job does not end within ``ABORT_TIMEOUT_SECONDS``.
    """
    deadline = time.monotonic() + ABORT_TIMEOUT_SECONDS
    while stats := stats_of(libvirt, server):
        if time.monotonic() > deadline:
            raise VerbFailed(
                "The host could not abort the job that runs on the server's guest; try again.",
                retryable=True,
            )
        request_abort(libvirt, server, stats)
        time.sleep(LOOK_SECONDS)


def request_abort(libvirt: Connection, server: str, stats: JobStats) -> None:
    """Request the abort of the job with these statistics, if ``is_abortable``. Do not wait."""
    if is_abortable(stats):
        libvirt.on(
            server,
            "abort the job that runs on the guest",
            lambda domain: domain.abortJob(),
            STATE_CHANGED_ERRORS,
        )


def is_abortable(stats: JobStats) -> bool:
    """Return True if the job with these statistics may be aborted now.

    A migration or a save may be aborted after some memory was copied, or while disk data remains
    to copy. Otherwise QEMU sets up the copy of the memory. Why: libvirt 9 misses the end of a job
    that is aborted during this setup. Jobs of other kinds may always be aborted.
    """
    if stats.get("operation") not in (JOB_OPERATION_MIGRATION_OUT, JOB_OPERATION_SAVE):
        return True
    return bool(stats.get("memory_processed") or stats.get("disk_remaining"))


def stats_of(libvirt: Connection, server: str, flags: int = 0) -> JobStats:
    """Return the statistics of the domain's job by libvirt's names.

    The result is {} without a job, without a domain, and if the hypervisor reports no jobs. With
    the flag ``JOB_STATS_COMPLETED`` the statistics are those of the last job that ended.
    """
    stats: JobStats = (
        libvirt.on(
            server,
            "report the job that runs on the guest",
            lambda domain: domain.jobStats(flags),
            (*STATE_CHANGED_ERRORS, *NO_SUPPORT_ERRORS),
        )
        or {}
    )
    return stats if stats.get("type", JOB_NONE) != JOB_NONE else {}


class BackgroundCall:
    """A call to libvirt in a thread, which starts at once.

    ``error`` is the exception of a failed call, and None while the call runs or if it succeeded.
    """

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def lasts(self, seconds: float) -> bool:
        """Wait for the end of the call, for at most ``seconds``. Return True if it still runs."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        # The verb's thread raises the exception.
        except Exception as error:  # noqa: BLE001
            self.error = error


def _compute_percent(stats: JobStats) -> int:
    total = int(stats.get("data_total") or stats.get("disk_total") or 0)
    processed = int(stats.get("data_processed") or stats.get("disk_processed") or 0)
    return min(100, 100 * processed // total) if total else 0
