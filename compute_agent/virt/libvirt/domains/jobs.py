# SPDX-License-Identifier: Apache-2.0
"""Jobs of libvirt on a domain: saving its memory, copying its disk while it runs.

Called by ``power`` and ``snapshots``. Both report their progress. A cancel ends them within
seconds, and the guest is as it was before. A job that a dead agent has left running is aborted
first. ``live_migration`` follows its own job with ``stats_of``, ``request_abort`` and
``BackgroundCall``. Must stay true: when a function here has returned or raised, no job of ours runs
on the domain. Only a libvirtd that went away meanwhile (``errors.NoAnswer``) may have left one.
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
    """Save the memory of the running or paused domain and stop it. When it is started again, its
    CPUs run."""
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
            context.phase(CommandPhase.SAVING_MEMORY, _percent(stats_of(libvirt, server)))
    if call.error is None:
        # A cancel may have come too late: then the memory is saved.
        return
    raise Cancelled if cancelled else call.error


def backup(libvirt: Connection, server: str, context: VerbContext) -> None:
    """Wait until the backup that was begun has ended. VerbFailed when it did not succeed."""
    try:
        while copying := stats_of(libvirt, server):
            context.phase(CommandPhase.COPYING_DISK, _percent(copying))
            if context.cancelled():
                raise Cancelled
            time.sleep(LOOK_SECONDS)
        if context.cancelled():  # since the last look
            raise Cancelled
    except BaseException:
        abort(libvirt, server)
        raise
    ended = stats_of(libvirt, server, JOB_STATS_COMPLETED)
    if not ended.get("success"):
        raise VerbFailed(
            "The guest's disk could not be copied to its end; try again.",
            retryable=True,
            details=str(ended.get("errmsg") or "libvirt reports no reason"),
        )


def abort(libvirt: Connection, server: str) -> None:
    """Abort the job that runs on the domain, if there is one, and wait until it has ended."""
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
    """Ask libvirt once to abort the job with these statistics, unless libvirt would lose track of
    its end."""
    if is_abortable(stats):
        libvirt.on(
            server,
            "abort the job that runs on the guest",
            lambda domain: domain.abortJob(),
            STATE_CHANGED_ERRORS,
        )


def is_abortable(stats: JobStats) -> bool:
    """False while QEMU sets up a migration, to a host or into a file: libvirt 9 misses the end of
    one that is aborted then. Before that disks are copied, and their statistics stay afterwards;
    after that memory is copied."""
    if stats.get("operation") not in (JOB_OPERATION_MIGRATION_OUT, JOB_OPERATION_SAVE):
        return True
    return bool(stats.get("memory_processed") or stats.get("disk_remaining"))


def stats_of(libvirt: Connection, server: str, flags: int = 0) -> JobStats:
    """The statistics of the domain's job as libvirt names them; empty when there is no job."""
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
    """A call to libvirt that lasts as long as its job, in a thread of its own. ``error``: the
    exception that ended it."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def lasts(self, seconds: float) -> bool:
        """Whether it still runs after at most that long."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - the verb's thread raises it
            self.error = error


def _percent(stats: JobStats) -> int:
    total = int(stats.get("data_total") or stats.get("disk_total") or 0)
    done = int(stats.get("data_processed") or stats.get("disk_processed") or 0)
    return min(100, 100 * done // total) if total else 0
