# SPDX-License-Identifier: Apache-2.0
"""Signals to the processes of a cloud, and their states, by process name.

``kill(cloud, "conductor")`` sends SIGKILL, after which the supervisor starts another conductor.
``stop`` keeps a process down until ``start``. All state is in files in the cloud's folder ``run``,
which the supervisor (deploy/one_machine/machine/supervise.py) writes and reads.
"""

from __future__ import annotations

import fcntl
import os
import signal

from deploy.one_machine.cloud.cloud import Cloud
from deploy.progress import Failure, wait


def find_supervisor(cloud: Cloud) -> int | None:
    """Return the process id of the running supervisor, or None.

    A living supervisor holds a lock. The result is also None if the supervisor has the lock, but
    has not written its id yet.
    """
    try:
        with (cloud.run / "supervise.lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        text = (cloud.run / "supervise.lock").read_text().strip()
        return int(text) if text else None
    return None


def find_process(cloud: Cloud, name: str) -> int | None:
    """Return the process id that the supervisor recorded, or None if the process does not run.

    If the supervisor itself was killed, the id may be that of a process that has ended.
    """
    try:
        return int((cloud.run / f"{name}.pid").read_text())
    except (FileNotFoundError, ValueError):
        return None


def kill(cloud: Cloud, name: str, number: int = signal.SIGKILL) -> int:
    """Send the signal with this number to the process and return the process id.

    If the process dies, the supervisor starts another one.

    Raises:
        Failure: The process does not run.
        ProcessLookupError: The process has just ended.
    """
    pid = find_process(cloud, name)
    if pid is None:
        raise Failure(f"The process {name} does not run.", f"See {cloud.log('supervise')}.")
    os.kill(pid, number)
    return pid


def stop(cloud: Cloud, name: str, seconds: float = 30) -> None:
    """End the process and prevent restarts until ``start``.

    Raises:
        Failure: The process still runs after this many seconds.
    """
    (cloud.run / f"{name}.down").touch()
    wait(
        lambda: find_process(cloud, name) is None,
        seconds,
        f"The process {name} does not stop",
        f"See {cloud.log(name)}.",
    )


def start(cloud: Cloud, name: str, seconds: float = 30) -> int:
    """Let a stopped process run again and return the id, or 0 if it has ended again.

    Raises:
        Failure: The process does not run after this many seconds.
    """
    (cloud.run / f"{name}.down").unlink(missing_ok=True)
    wait(
        lambda: find_process(cloud, name) is not None,
        seconds,
        f"The process {name} does not start",
        f"See {cloud.log(name)}.",
    )
    return find_process(cloud, name) or 0


def restart(cloud: Cloud, name: str) -> int:
    """Stop and start the process, and return the new id, or 0 if it has ended again.

    Raises:
        Failure: The process does not stop or start within 30 s.
    """
    stop(cloud, name)
    return start(cloud, name)


def explain_failure(cloud: Cloud, name: str) -> str:
    """Return advice on a failing process: the last 5 lines of its log and the paths of the logs."""
    log = cloud.log(name)
    lines = (
        log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else ["(no log)"]
    )
    return "\n".join(
        [
            f"The last lines in the log of {name}:",
            *("  | " + line[:300] for line in lines),
            f"See {log} and {cloud.log('supervise')}; then run this again.",
        ]
    )
