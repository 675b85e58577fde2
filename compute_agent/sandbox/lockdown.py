# SPDX-License-Identifier: Apache-2.0
"""What a helper process gives up before it reads the first byte: rights, system calls, memory,
time.

Called by ``sandbox.server`` in the process itself. None of it needs a right that a plain user lacks
but for the change of user. Must stay true: a step that fails ends the process; nothing here is left
out in silence.
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
#: libseccomp's words: let a system call pass; let it fail with an error.
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
#: A comparison: the argument, masked with the first datum, is the second one.
MASKED_EQUAL = 7
#: The flag of clone with which it makes a thread. https://man7.org/linux/man-pages/man2/clone.2.html
CLONE_THREAD = 0x10000
#: _LINUX_CAPABILITY_VERSION_3
CAPABILITIES_VERSION = 0x20080522
#: What no helper needs: other machines, other processes, the kernel's set-up, another view of the
#: file system.
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
    # A second process would outlive the helper. Threads are made by clone.
    "fork",
    "vfork",
    # Helpers of one host run as one user, who may signal each of them, or the agent.
    "kill",
    "tkill",
    "tgkill",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "pidfd_send_signal",
)
#: Nor does one that runs no other program and was given its files open.
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
    """memory: bytes of address space; cpu: seconds of processor time; seconds: until it is ended;
    file: how long a file that it writes may become; files: that it has open at a time."""

    memory: int
    cpu: int
    seconds: float
    file: int = 0
    files: int = 64


def lock_down(
    limits: HelperLimits, user: tuple[int, int] | None, program: str, files: Sequence[int]
) -> None:
    """From here on the process can do what its limits and open files allow. ``user``: who it
    becomes (user, group);
    None: it stays who it is, without capabilities. ``program``: what it runs, which opens these
    files anew; empty: it opens no file and runs no program. Raises OSError."""
    os.umask(0o077)
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_CPU, limits.cpu),
        (resource.RLIMIT_FSIZE, limits.file),
        (resource.RLIMIT_NOFILE, limits.files),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    if user is not None:
        os.setgroups([])
        os.setresgid(user[1], user[1], user[1])
        os.setresuid(user[0], user[0], user[0])
    # After the change of user, which would undo it.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    _drop_capabilities()
    if program:
        landlock.confine(program, files)
    _checked(_seccomp().seccomp_load(forbidding(alone=not program)), "seccomp_load")


@functools.cache
def forbidding(alone: bool) -> ctypes.c_void_p:
    """The filter of system calls, made once: processes that are forked later have it ready."""
    library = _seccomp()
    made = ctypes.c_void_p(library.seccomp_init(ALLOW))
    if not made:
        raise OSError(errno.ENOMEM, "seccomp_init")
    for name in (*FORBIDDEN, *(FORBIDDEN_ALONE if alone else ())):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # else this processor, or this libseccomp, has none of that name
            _checked(
                library.seccomp_rule_add_array(made, REFUSE | errno.EPERM, number, 0, None), name
            )
    if not alone:
        _forbid_processes(library, made)
    return made


def _forbid_processes(library: ctypes.CDLL, made: ctypes.c_void_p) -> None:
    """Let a program make threads and no processes.

    The arguments of clone3 are in memory, where no filter can look. As on a kernel without clone3,
    the C library then uses clone.
    """
    resolve = library.seccomp_syscall_resolve_name
    _checked(
        library.seccomp_rule_add_array(made, REFUSE | errno.ENOSYS, resolve(b"clone3"), 0, None),
        "clone3",
    )
    no_thread = _Comparison(0, MASKED_EQUAL, CLONE_THREAD, 0)
    _checked(
        library.seccomp_rule_add_array(
            made, REFUSE | errno.EPERM, resolve(b"clone"), 1, ctypes.byref(no_thread)
        ),
        "clone",
    )


class _Comparison(ctypes.Structure):
    """libseccomp's struct scmp_arg_cmp: what an argument of a system call is compared with."""

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
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _drop_capabilities() -> None:
    """Effective, permitted and inheritable ones; with no_new_privs no program brings them back."""
    head = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)
    if _libc().capset(head, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _checked(answer: int, what: str) -> None:
    if answer < 0:
        raise OSError(-answer, f"{what}: {os.strerror(-answer)}")
