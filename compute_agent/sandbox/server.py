# SPDX-License-Identifier: Apache-2.0
"""The fork server: a process without threads that forks a helper for each request.

``sandbox.client`` starts the server. The server loads the modules of helpers once, and ends when
the client closes the socket. Each request gets two processes: the helper, and a watcher. The
watcher kills the helper after a timeout or when the requester has closed its socket, and reports
the end of the helper to the requester.

Invariant: a helper is locked down before it reads a byte of the files. Server and watcher read no
files.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from common.domain.json_types import JsonObject
from compute_agent.sandbox import lockdown

#: Limits of a request, and the number of a helper's first file. A request comes with descriptors:
#: the requester's socket, the pipe for the helper's output, and the files.
MAX_ORDER_BYTES, MAX_FILES, FIRST_FILE = 1 << 16, 32, 3
#: Descriptors from this number on are free while the files of a helper get their numbers.
FIRST_FREE_FILE = 64
DIED_STATUS = 70


def main(descriptor: int, modules: Sequence[str]) -> None:
    """Fork a watcher, which starts a helper, for each request until the client closes the socket.

    Args:
        descriptor: Descriptor of the socket.
        modules: Modules with the functions of helpers, which are loaded once.
    """
    # The kernel reaps the watchers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for alone in (True, False):
        lockdown.build_filter(alone)
    for name in modules:
        importlib.import_module(name)
    with socket.socket(fileno=descriptor) as orders:
        while True:
            order, files, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, MAX_FILES)
            if not order:
                return
            if os.fork() == 0:
                orders.close()
                _run_and_exit(functools.partial(_watch, order, files))
            for file in files:
                os.close(file)


def _run_and_exit(work: Callable[[], object]) -> None:
    """Run ``work`` in this forked process, and end the process.

    The status is 0, or ``DIED_STATUS`` after an exception, whose traceback is written to stderr.
    """
    status = DIED_STATUS
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - this process ends in any case, and says with what
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _watch(message: bytes, files: list[int]) -> None:
    """Start the helper of a request, wait for its end, and report the end to the requester.

    The helper is killed after its time limit, or when the requester has closed the socket. In the
    second case there is no report.

    Args:
        message: The request as JSON.
        files: Descriptors of the requester's socket, of the output, and of the helper's files.
    """
    order = json.loads(message)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requester = socket.socket(fileno=files[0])
    helper = os.fork()
    if helper == 0:
        requester.close()
        _run_and_exit(lambda: _help(order, files[1], files[2:]))
    for file in files[1:]:
        os.close(file)
    why = _await_end(
        os.pidfd_open(helper), requester, time.monotonic() + order["limits"]["seconds"]
    )
    if why:
        os.kill(helper, signal.SIGKILL)
    _, status, used = os.wait4(helper, 0)
    report = {
        "status": os.waitstatus_to_exitcode(status),
        "why": why,
        "cpu": used.ru_utime + used.ru_stime,
        "memory": used.ru_maxrss * 1024,
    }
    if why != "left":
        requester.send(json.dumps(report).encode())


def _await_end(helper: int, requester: socket.socket, until: float) -> str:
    """Wait until a helper ends, its time is over, or the requester closes the socket.

    Args:
        helper: Descriptor of the helper's process (pidfd).
        requester: The requester's socket.
        until: Monotonic time of the timeout.

    Returns:
        "" if the helper has ended, "time" after the timeout, or "left" if the requester has closed
        its socket.
    """
    poller = select.poll()
    poller.register(helper, select.POLLIN)
    poller.register(requester, select.POLLIN | select.POLLHUP)
    ready = dict(poller.poll(max(0.0, until - time.monotonic()) * 1000))
    if helper in ready:
        return ""
    return "left" if ready else "time"


def _help(order: JsonObject, output: int, files: list[int]) -> None:
    """Lock down this process, which is the helper, and run the request in it.

    The files get the descriptors 3, 4 and so on. Output goes to 1 and 2. A program replaces this
    process. The return value of a function is written to 1 as JSON.
    """
    descriptors = [
        fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_FREE_FILE)
        for file in (os.open(os.devnull, os.O_RDONLY), output, output, *files)
    ]
    for number, file in enumerate(descriptors):
        os.dup2(file, number)
    os.closerange(len(descriptors), os.sysconf("SC_OPEN_MAX"))
    user, program, call = order["user"], order["program"], order["call"]
    function = None
    # The output is the result, and must not contain log lines.
    logging.disable()
    if call:
        module, _, name = call.partition(":")
        function = getattr(importlib.import_module(module), name)
    numbers = range(FIRST_FILE, FIRST_FILE + len(files))
    lockdown.lock_down(
        lockdown.HelperLimits(**order["limits"]),
        tuple(user) if user else None,
        "" if function else program[0],
        numbers,
    )
    if function is None:
        # With an arena of memory for each thread, the limit of address space would be reached.
        os.execve(program[0], program, {"PATH": os.defpath, "LC_ALL": "C", "MALLOC_ARENA_MAX": "1"})
    output_data = json.dumps(function(*numbers, **order["arguments"])).encode() if function else b""
    with open(1, "wb", closefd=False) as out:
        out.write(output_data)
