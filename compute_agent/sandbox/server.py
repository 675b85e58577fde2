# SPDX-License-Identifier: Apache-2.0
"""The fork server: a process without threads that has loaded what helpers need, and forks one for
each order.

Started by ``sandbox.client``, and ends with it: an order that is empty is the end of the socket.
Each order gets two
processes: the helper, and one beside it that ends the helper when its time is up or whoever asked
is gone, and tells how it ended. Must stay true: a helper is locked down before it reads a byte of
its files; the other two read none.
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

#: An order and its files; the first of these is the socket of whoever asked, the second takes what
#: the helper says.
MAX_ORDER_BYTES, MAX_FILES, FIRST_FILE = 1 << 16, 32, 3
#: Above the numbers at which a helper's files end up.
FIRST_FREE_FILE = 64
DIED_STATUS = 70


def main(descriptor: int, modules: Sequence[str]) -> None:
    """Serve the socket until it ends. ``modules``: whose functions helpers are."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    for alone in (True, False):
        lockdown.forbidding(alone)
    for name in modules:
        importlib.import_module(name)
    with socket.socket(fileno=descriptor) as orders:
        while True:
            order, files, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, MAX_FILES)
            if not order:
                return
            if os.fork() == 0:
                orders.close()
                _forked(functools.partial(_watch, order, files))
            for file in files:
                os.close(file)


def _forked(work: Callable[[], object]) -> None:
    """The rest of this process."""
    status = DIED_STATUS
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - this process ends in any case, and says with what
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _watch(said: bytes, files: list[int]) -> None:
    """Have the order done, end it when it is time, and tell whoever asked."""
    order = json.loads(said)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requester = socket.socket(fileno=files[0])
    helper = os.fork()
    if helper == 0:
        requester.close()
        _forked(lambda: _help(order, files[1], files[2:]))
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
    """Why it has to be ended; "" when it has ended by itself."""
    poller = select.poll()
    poller.register(helper, select.POLLIN)
    poller.register(requester, select.POLLIN | select.POLLHUP)
    ready = dict(poller.poll(max(0.0, until - time.monotonic()) * 1000))
    if helper in ready:
        return ""
    return "left" if ready else "time"


def _help(order: JsonObject, output: int, files: list[int]) -> None:
    """The helper itself: its files are 3, 4, …, its output 1 and 2."""
    moved = [
        fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_FREE_FILE)
        for file in (os.open(os.devnull, os.O_RDONLY), output, output, *files)
    ]
    for number, file in enumerate(moved):
        os.dup2(file, number)
    os.closerange(len(moved), os.sysconf("SC_OPEN_MAX"))
    user, program, call = order["user"], order["program"], order["call"]
    function = None
    logging.disable()  # its output is its answer
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
        # One arena of memory: each thread's own would count as used.
        os.execve(program[0], program, {"PATH": os.defpath, "LC_ALL": "C", "MALLOC_ARENA_MAX": "1"})
    said = json.dumps(function(*numbers, **order["arguments"])).encode() if function else b""
    with open(1, "wb", closefd=False) as out:
        out.write(said)
