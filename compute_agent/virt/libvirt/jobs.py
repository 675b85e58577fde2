# SPDX-License-Identifier: Apache-2.0
"""Long work of libvirt on a domain: saving its memory, copying its disk while it runs.

Called by ``power`` and ``snapshots``. Both tell how far they are, and a cancel ends them within seconds with the guest
as it was before. A job that an agent which died has left behind is aborted first. ``live`` has its own way with its job
and takes ``job``, ``stop`` and ``Aside`` from here.
Must stay true: when a function here has returned or raised, no job of ours runs on the domain; only a libvirtd that
went away meanwhile (``errors.NoAnswer``) may have left one.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from compute_agent.virt.driver import Cancelled, Run, VerbFailed
from compute_agent.virt.libvirt.connection import (
    IS_SAVED,
    LAST_JOB,
    LEAVES,
    NO_JOB,
    OVERTAKEN,
    SAVE_RUNNING,
    UNSUPPORTED,
    Connection,
)

LOOK_EVERY, ABORT_SECONDS = 0.1, 5.0


def save(libvirt: Connection, server: str, run: Run) -> None:
    """Save the running or paused domain's memory and end it; started again, its CPUs run."""
    abort(libvirt, server)
    call = Aside(f"save-{server}", lambda: libvirt.on(server, "save the guest's memory",
                                                      lambda domain: domain.managedSave(SAVE_RUNNING)))
    cancelled = False
    while call.lasts(LOOK_EVERY):
        cancelled = cancelled or run.cancelled()
        if cancelled:
            abort(libvirt, server)
        else:
            run.phase(f"saving memory {_percent(job(libvirt, server))} %")
    if call.error is None:
        # Also when a cancel came too late: it is saved, and what comes next finds it so.
        return
    raise Cancelled if cancelled else call.error


def backup(libvirt: Connection, server: str, run: Run) -> None:
    """Follow the backup that has begun to its end. VerbFailed when it did not succeed."""
    try:
        while copying := job(libvirt, server):
            run.phase(f"copying disk {_percent(copying)} %")
            if run.cancelled():
                raise Cancelled
            time.sleep(LOOK_EVERY)
        if run.cancelled():     # by one that came since the last look
            raise Cancelled
    except BaseException:
        abort(libvirt, server)
        raise
    ended = job(libvirt, server, LAST_JOB)
    if not ended.get("success"):
        raise VerbFailed("The guest's disk could not be copied to its end; try again.", retryable=True,
                         details=str(ended.get("errmsg") or "libvirt does not say how the backup ended"))


def abort(libvirt: Connection, server: str) -> None:
    """End the job that runs on the domain, if one does, and wait until it has ended."""
    deadline = time.monotonic() + ABORT_SECONDS
    while told := job(libvirt, server):
        if time.monotonic() > deadline:
            raise VerbFailed("The hypervisor is busy with the guest and does not stop; try again.", retryable=True)
        stop(libvirt, server, told)
        time.sleep(LOOK_EVERY)


def stop(libvirt: Connection, server: str, told: dict[str, Any]) -> None:
    """Ask once that the job, which libvirt tells this of, ends; not yet when libvirt would miss its end."""
    if ends_when_told(told):
        libvirt.on(server, "stop what it does with the guest", lambda domain: domain.abortJob(), OVERTAKEN)


def ends_when_told(told: dict[str, Any]) -> bool:
    """Of a migration, to a host or into a file, that QEMU only sets up, libvirt 9 misses the end. Before, a disk is
    being copied, and its figures stay when it has been; then memory travels."""
    if told.get("operation") not in (LEAVES, IS_SAVED):
        return True
    return bool(told.get("memory_processed") or told.get("disk_remaining"))


def job(libvirt: Connection, server: str, flags: int = 0) -> dict[str, Any]:
    """What libvirt tells of the domain's job, in its own words; empty when there is none."""
    told: dict[str, Any] = libvirt.on(server, "say what it does with the guest",
                                      lambda domain: domain.jobStats(flags), (*OVERTAKEN, *UNSUPPORTED)) or {}
    return told if told.get("type", NO_JOB) != NO_JOB else {}


class Aside:
    """A call of libvirt's that lasts as long as its job, in a thread of its own; ``error``: what it ended with."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def lasts(self, seconds: float) -> bool:
        """Whether it is still under way after at most that long."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - told to the verb's thread, which raises it
            self.error = error


def _percent(told: dict[str, Any]) -> int:
    total = int(told.get("data_total") or told.get("disk_total") or 0)
    done = int(told.get("data_processed") or told.get("disk_processed") or 0)
    return min(100, 100 * done // total) if total else 0
