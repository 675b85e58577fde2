# SPDX-License-Identifier: Apache-2.0
"""The kernel's Landlock: from here on a process opens the files that were named, whoever it is, and
no others.

Called by ``sandbox.lockdown`` for helpers that run a program, in the process itself. It takes no
right, and is all that keeps a program that runs as the agent's own user from the agent's files.
Kernels without it: ``version`` is 0.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
from collections.abc import Iterable
from contextlib import suppress

CREATE, ADD, RESTRICT = 444, 445, 446  #: system calls, by the same numbers on all processors
VERSION, PATH_BENEATH = 1, 1
EXECUTE, WRITE, READ, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
#: What each version of Landlock knows to forbid of files: the newest that is not newer than the
#: kernel's counts.
KNOWN = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
#: Where programs and their libraries are, and devices that any program may want.
PROGRAMS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/proc/self")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


@functools.cache
def version() -> int:
    """Of this kernel; 0: it has none, or does not let us use it."""
    return max(0, int(_libc().syscall(CREATE, None, ctypes.c_size_t(0), VERSION)))


def confine(program: str, files: Iterable[int]) -> None:
    """Nothing else can be opened but the program with its libraries, and these files as far as they
    are open. Needs no_new_privs. Raises OSError."""
    if not version():
        return
    handled = KNOWN[min(version(), max(KNOWN))]
    attribute = ctypes.c_uint64(handled)
    rules = _checked(_libc().syscall(CREATE, ctypes.byref(attribute), ctypes.c_size_t(8), 0))
    for path in (program, *PROGRAMS):
        _allow(rules, path, handled & (EXECUTE | READ | READ_DIR))
    for path in DEVICES:
        _allow(rules, path, handled & (READ | WRITE))
    for file in files:
        writes = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        _add(rules, file, handled & (READ | (WRITE | TRUNCATE if writes else 0)))
    _checked(_libc().syscall(RESTRICT, rules, 0))
    os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    """What is not there need not be allowed."""
    with suppress(FileNotFoundError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            _add(rules, place, access if os.path.isdir(path) else access & ~READ_DIR)
        finally:
            os.close(place)


def _add(rules: int, place: int, access: int) -> None:
    beneath = _Beneath(access, place)
    _checked(_libc().syscall(ADD, rules, PATH_BENEATH, ctypes.byref(beneath), 0))


def _checked(answer: int) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return answer


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
