# SPDX-License-Identifier: Apache-2.0
"""The skeleton of a process: configuration, log, identity, readiness, signals.

Used by the ``service.py`` of each process. TERM and INT ask it to stop; a second one, or eight
seconds without coming to an end, ends it at once: every process can be killed between any two lines
anyway.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn, TypeVar

from oslo_config import cfg

from common import __version__
from common.domain import errors
from common.service import config, log, metrics, reload, tracing

logger = logging.getLogger(__name__)
GRACE = 8.0
#: Status of a process that cannot run until its configuration is mended, as sysexits(3) has it. Its
#: unit does not start it again.
EX_CONFIG = 78
UMASK = 0o077  #: what a process of ours makes is its user's alone
T = TypeVar("T")


def start(name: str) -> cfg.ConfigOpts:
    """Read the command line and the configuration, and start logging; a wrong value ends the
    process with its explanation."""
    path = command_line(name).parse_args().config
    os.umask(UMASK)
    conf = checked(name, lambda: config.load(path, name))
    log.start(conf.log_level, conf.log.format)
    metrics.start(conf, name)
    if conf.tls.cert_file:
        metrics.collect(metrics.CertificateGauge(conf.tls.cert_file))
    checked(name, lambda: tracing.start(conf, name))
    return conf


def command_line(name: str) -> argparse.ArgumentParser:
    """What every process takes."""
    parser = argparse.ArgumentParser(
        prog=f"kilonova-{name}",
        description=f"The {name.replace('-', ' ')} process of Kilonova; systemd starts it. "
        "Everything else is configured in the file: kilonova config sample",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="default: $KILONOVA_CONF or "
        + (config.AGENT_FILE if name == config.AGENT else config.DEFAULT_FILE),
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


class Misconfigured(SystemExit):
    """The end of a process whose configuration somebody has to mend; it has been said."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = EX_CONFIG


def refuse(name: str, problem: object) -> NoReturn:
    """End the process with one line, so that systemd does not start it again."""
    text = f"kilonova-{name}: {problem}"
    print(" ".join(text.split("\n")), file=sys.stderr, flush=True)
    raise Misconfigured(text)


def checked(name: str, read: Callable[[], T]) -> T:
    """What it reads; a ConfigError ends the process with its explanation."""
    try:
        return read()
    except errors.ConfigError as problem:
        refuse(name, problem)


def run(
    name: str, conf: cfg.ConfigOpts, open_up: Callable[[cfg.ConfigOpts], Callable[[], None]]
) -> None:
    """Call ``open_up``, tell the supervisor that the process is ready, wait for a signal, and
    close. HUP has the configuration read again.

    ``open_up`` returns what closes everything that it opened.
    """
    stop, opened = threading.Event(), threading.Event()
    # A signal can come between the last bytecode and a wait, or to another thread. Then it does not
    # end the wait of this thread, but its number is in the socket.
    numbers, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)

    def asked(number: int, frame: object) -> None:
        # what still waits for a neighbour has nothing to finish
        if stop.is_set() or not opened.is_set():
            os._exit(1 if stop.is_set() else 0)
        stop.set()

    signal.signal(signal.SIGHUP, lambda number, frame: None)
    signal.signal(signal.SIGTERM, asked)
    signal.signal(signal.SIGINT, asked)
    close = checked(name, lambda: open_up(conf))
    opened.set()
    metrics.serve()
    notify("READY=1")
    logger.info("ready")
    while (number := numbers.recv(1)[0]) not in (signal.SIGTERM, signal.SIGINT):
        if number == signal.SIGHUP:
            reload.again(name)
    notify("STOPPING=1")
    threading.Timer(GRACE, os._exit, (0,)).start()
    close()
    tracing.stop()
    logging.shutdown()
    os._exit(0)  # threads of the messaging library may linger for minutes


def notify(state: str) -> None:
    """Tell systemd, when it started us (sd_notify's protocol)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        channel.send(state.encode())


def only_one(state_dir: str, kind: str) -> IO[str]:
    """Make sure that no other process of this kind works on this folder; the returned file must be
    kept open.

    Ends the process when one does.
    """
    folder = Path(state_dir)
    folder.mkdir(parents=True, exist_ok=True)
    handle = open(folder / f"{kind}.lock", "w")  # noqa: SIM115  # stays open as long as the process
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"kilonova-{kind}: another one works on {folder}; give each its own state_dir")
    return handle


def own_name(state_dir: str, kind: str, host: str) -> tuple[str, IO[str]]:
    """A name for this process that a successor of it, and nobody else, takes again: HOST/NUMBER.

    The lowest number whose lock file is free; the returned file must be kept open.
    """
    folder = Path(state_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        handle = open(folder / f"{kind}-{number}.lock", "w")  # noqa: SIM115  # stays open as long as the process
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            continue
        return f"{host}/{number}", handle
    raise RuntimeError(f"a thousand {kind}s run on {host}")
