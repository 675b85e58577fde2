# SPDX-License-Identifier: Apache-2.0
"""Remove the rights of a helper process before it reads a byte: system calls, memory, time, files.

``sandbox.server`` calls this in the helper. Only the change of user needs a privilege.

Invariant: a step that fails ends the process. No step is skipped silently, except Landlock on a
kernel without Landlock.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from compute_agent.sandbox import landlock

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 1, 38, 47, 4
#: Actions of libseccomp: allow a system call, or let it fail with an error.
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
#: Comparison of libseccomp: true if (argument & first) == second.
MASKED_EQUAL = 7
#: Flag of clone that makes a thread. https://man7.org/linux/man-pages/man2/clone.2.html
CLONE_THREAD = 0x10000
#: _LINUX_CAPABILITY_VERSION_3
CAPABILITIES_VERSION = 0x20080522
#: System calls that no helper needs: for network, other processes, the kernel's configuration, and
#: mounts.
FORBIDDEN = (
    "socket",
    "socketpair",
    "connect",
    "bind",
    "listen",
    "accept",
    "accept4",
    "sendto",
    "sendmsg",
    "sendmmsg",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
    "kcmp",
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "mount_setattr",
    "unshare",
    "setns",
    "bpf",
    "perf_event_open",
    "keyctl",
    "add_key",
    "request_key",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "userfaultfd",
    "init_module",
    "finit_module",
    "delete_module",
    "kexec_load",
    "kexec_file_load",
    "reboot",
    "swapon",
    "swapoff",
    "open_by_handle_at",
    "name_to_handle_at",
    "quotactl",
    "acct",
    "settimeofday",
    "clock_settime",
    "personality",
    "msgget",
    "shmget",
    "semget",
    "mq_open",
    # Another process would outlive the helper. Threads are made by clone.
    "fork",
    "vfork",
    # All helpers of a host run as one user, and could signal each other or the agent.
    "kill",
    "tkill",
    "tgkill",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "pidfd_send_signal",
)
#: System calls that a helper without a program does not need, because all files are open already.
FORBIDDEN_ALONE = (
    "execve",
    "execveat",
    "clone",
    "clone3",
    "open",
    "openat",
    "openat2",
    "creat",
    "unlink",
    "unlinkat",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "chmod",
    "fchmod",
    "fchmodat",
    "chown",
    "fchown",
    "fchownat",
    "lchown",
    "setxattr",
    "fsetxattr",
    "lsetxattr",
    "mkdir",
    "mkdirat",
    "mknod",
    "mknodat",
    "truncate",
)


@dataclass(frozen=True, slots=True)
class HelperLimits:
    """Limits of a helper.

    Attributes:
        memory: Bytes of address space.
        cpu: Seconds of processor time.
        seconds: Total time in seconds. Then the helper is killed.
        file: Bytes of each file that the helper writes.
        files: Number of open files.
    """

    memory: int
    cpu: int
    seconds: float
    file: int = 0
    files: int = 64


def lock_down(
    limits: HelperLimits, user: tuple[int, int] | None, program: str, files: Sequence[int]
) -> None:
    """Remove all rights of this process that the work of a helper does not need.

    On a kernel without Landlock, a program can still open all files that its user may open.

    Args:
        limits: Limits of memory, processor time and files. ``seconds`` is not used here.
        user: (user id, group id) to change to, or None to keep the user. Capabilities are dropped
            in both cases.
        program: The program that the process will run, which opens ``files`` by name. "" forbids
            opening files and running programs.
        files: Descriptors of the files for the program.

    Raises:
        OSError: A step failed. The steps before are not undone.
    """
    os.umask(0o077)
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_CPU, limits.cpu),
        (resource.RLIMIT_FSIZE, limits.file),
        (resource.RLIMIT_NOFILE, limits.files),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    if user is not None:
        os.setgroups([])
        os.setresgid(user[1], user[1], user[1])
        os.setresuid(user[0], user[0], user[0])
    # This follows the change of user, which would reset the signal.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    _drop_capabilities()
    if program:
        landlock.confine(program, files)
    _check(_seccomp().seccomp_load(build_filter(alone=not program)), "seccomp_load")


@functools.cache
def build_filter(alone: bool) -> ctypes.c_void_p:
    """Return the filter of system calls for a helper. ``lock_down`` loads the filter.

    Calls of ``FORBIDDEN`` fail with EPERM. The result is cached, so that forked processes have the
    filter ready.

    Args:
        alone: True for a helper that runs no program: also forbid ``FORBIDDEN_ALONE``. False: let
            the program make threads but no processes.

    Raises:
        OSError: libseccomp is missing, cannot make a filter, or refuses a rule.
    """
    library = _seccomp()
    system_call_filter = ctypes.c_void_p(library.seccomp_init(ALLOW))
    if not system_call_filter:
        raise OSError(errno.ENOMEM, "libseccomp could not create a filter (seccomp_init)")
    for name in (*FORBIDDEN, *(FORBIDDEN_ALONE if alone else ())):
        number = library.seccomp_syscall_resolve_name(name.encode())
        # A negative number means that the processor or this libseccomp lacks the system call.
        if number >= 0:
            _check(
                library.seccomp_rule_add_array(
                    system_call_filter, REFUSE | errno.EPERM, number, 0, None
                ),
                name,
            )
    if not alone:
        _forbid_processes(library, system_call_filter)
    return system_call_filter


def _forbid_processes(library: ctypes.CDLL, system_call_filter: ctypes.c_void_p) -> None:
    """Add rules to the filter, so that clone makes threads but no processes, and clone3 fails.

    No filter can read the arguments of clone3, which are in memory. So clone3 fails as on a kernel
    without it, and the C library uses clone.
    """
    resolve = library.seccomp_syscall_resolve_name
    _check(
        library.seccomp_rule_add_array(
            system_call_filter, REFUSE | errno.ENOSYS, resolve(b"clone3"), 0, None
        ),
        "clone3",
    )
    no_thread = _Comparison(0, MASKED_EQUAL, CLONE_THREAD, 0)
    _check(
        library.seccomp_rule_add_array(
            system_call_filter, REFUSE | errno.EPERM, resolve(b"clone"), 1, ctypes.byref(no_thread)
        ),
        "clone",
    )


class _Comparison(ctypes.Structure):
    """The structure scmp_arg_cmp of libseccomp, which compares an argument of a system call."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


@functools.cache
def _seccomp() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as missing:
        raise OSError(errno.ENOSYS, f"{missing}; install libseccomp2") from missing
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
    ]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    library.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    return library


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        raise OSError(
            ctypes.get_errno(), f"prctl option {option} failed: {os.strerror(ctypes.get_errno())}"
        )


def _drop_capabilities() -> None:
    """Drop all effective, permitted and inheritable capabilities.

    Because of no_new_privs, no program can regain them.
    """
    head = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)
    if _libc().capset(head, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(
            ctypes.get_errno(),
            f"capabilities cannot be dropped: {os.strerror(ctypes.get_errno())}",
        )


def _check(answer: int, what: str) -> None:
    if answer < 0:
        raise OSError(-answer, f"libseccomp refused the filter at {what}: {os.strerror(-answer)}")
