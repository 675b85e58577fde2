# SPDX-License-Identifier: Apache-2.0
"""Confine a process to named files with the kernel's Landlock.

``sandbox.lockdown`` calls this in helpers that run a program. Landlock needs no privilege. For a
program that runs as the agent's own user, it is the only protection of the agent's files. On a
kernel without Landlock ``version`` returns 0, and nothing is confined.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
from collections.abc import Iterable
from contextlib import suppress

#: Numbers of the system calls, which are the same on all processors.
CREATE, ADD, RESTRICT = 444, 445, 446
VERSION, PATH_BENEATH = 1, 1
EXECUTE, WRITE, READ, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
#: Version of Landlock -> the accesses to files that it can forbid. The newest version that the
#: kernel supports counts.
KNOWN = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
#: Places of programs and libraries, and devices that any program may open.
PROGRAMS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/proc/self")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


@functools.cache
def version() -> int:
    """Return the kernel's version of Landlock, or 0 if Landlock is missing or disabled."""
    return max(0, int(_libc().syscall(CREATE, None, ctypes.c_size_t(0), VERSION)))


def confine(program: str, files: Iterable[int]) -> None:
    """Allow this process to open only ``program``, ``PROGRAMS``, ``DEVICES`` and the given files.

    Files that are open for reading only cannot be opened for writing. The process must have
    no_new_privs set. On a kernel without Landlock this function does nothing.

    Args:
        program: Path of the program.
        files: Descriptors of the files.

    Raises:
        OSError: The kernel refuses the rules.
    """
    if not version():
        return
    handled = KNOWN[min(version(), max(KNOWN))]
    attribute = ctypes.c_uint64(handled)
    rules = _check(_libc().syscall(CREATE, ctypes.byref(attribute), ctypes.c_size_t(8), 0))
    for path in (program, *PROGRAMS):
        _allow(rules, path, handled & (EXECUTE | READ | READ_DIR))
    for path in DEVICES:
        _allow(rules, path, handled & (READ | WRITE))
    for file in files:
        writes = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        _add(rules, file, handled & (READ | (WRITE | TRUNCATE if writes else 0)))
    _check(_libc().syscall(RESTRICT, rules, 0))
    os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    """Add a rule to a ruleset that allows this access to a path and all below it.

    A missing path is ignored.

    Args:
        rules: Descriptor of the ruleset.
        path: A file or folder.
        access: Bits of the accesses, for example ``READ``.
    """
    with suppress(FileNotFoundError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            _add(rules, place, access if os.path.isdir(path) else access & ~READ_DIR)
        finally:
            os.close(place)


def _add(rules: int, place: int, access: int) -> None:
    beneath = _Beneath(access, place)
    _check(_libc().syscall(ADD, rules, PATH_BENEATH, ctypes.byref(beneath), 0))


def _check(answer: int) -> int:
    if answer < 0:
        raise OSError(
            ctypes.get_errno(),
            f"the kernel's Landlock refused to confine the helper: {os.strerror(ctypes.get_errno())}",
        )
    return answer


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
