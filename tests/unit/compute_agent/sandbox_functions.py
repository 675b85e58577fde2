# SPDX-License-Identifier: Apache-2.0
"""Functions that test_sandbox.py runs in sandboxes. Each tries an attack of a hijacked parser."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def look(file: int) -> dict[str, Any]:
    """Return the user, groups, limits and refused operations of this process."""
    return {
        "user": os.getresuid(),
        "group": os.getresgid(),
        "groups": os.getgroups(),
        "read": os.pread(file, 100, 0).decode(),
        "environment": sorted(os.environ),
        "files": _list_open_files(),
        "refused": {
            name: _find_error(attempt)
            for name, attempt in {
                "network": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
                "unix": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
                "open": lambda: os.open("/etc/hostname", os.O_RDONLY),
                "fork": os.fork,
                "execute": lambda: os.execv("/bin/true", ["true"]),
                "kill": lambda: os.kill(1, 0),
                "become": lambda: os.setresuid(1, 1, 1),
            }.items()
        },
        "limits": {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
            for name in ("AS", "CPU", "FSIZE", "NOFILE", "CORE")
        },
    }


def eat(file: int) -> int:
    """Allocate more memory than the sandbox permits."""
    return len(bytearray(4 << 30))


def spin(file: int) -> None:
    while True:
        pass


def sleep(file: int, seconds: float) -> None:
    # The time limit of the sandbox ends this.
    time.sleep(seconds)


def write(file: int) -> int:
    return os.pwrite(file, b"x" * 4096, 0)


def chatter(file: int) -> str:
    return "x" * (8 << 20)


def vanish(file: int) -> None:
    ctypes.string_at(0)


def _find_error(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def _list_open_files() -> list[int]:
    return [
        number for number in range(256) if _find_error(functools.partial(os.fstat, number)) == ""
    ]


def read_status(pid: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status as name -> value."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
