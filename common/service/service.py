# SPDX-License-Identifier: Apache-2.0
"""The main function of a process: configuration, log, identity, readiness, signals.

Used by the ``service.py`` of each process. TERM and INT request a stop. A second signal, or eight
seconds without an end, kills the process at once. That is safe, because every process may be killed
between any two statements.
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

logger = log.get_logger(__name__)
#: Seconds from a request to stop until the process is killed.
GRACE = 8.0
#: Seconds after which systemd counts a process as started although it still waits for the database
#: or the broker. Otherwise the installation of a package would wait, and systemd would kill the
#: process after 90 s.
PATIENCE = 15.0
WAITING = "waits for a service that it needs; the log names it"
#: Exit status of a process with a wrong configuration, as in sysexits(3). Systemd does not restart
#: such a process.
EX_CONFIG = 78
#: Files of a process are readable only by its user.
UMASK = 0o077
T = TypeVar("T")


def start(name: str) -> cfg.ConfigOpts:
    """Read command line and configuration, start log, metrics and tracing, and return the options.

    Also set the umask to ``UMASK``. A wrong value ends the process with an explanation.

    Args:
        name: Name of the process without "kilonova-".
    """
    path = command_line(name).parse_args().config
    os.umask(UMASK)
    conf = exit_on_config_error(name, lambda: config.load(path, name))
    log.start(conf.log_level, conf.log.format)
    metrics.start(conf, name)
    if conf.tls.cert_file:
        metrics.collect(metrics.CertificateGauge(conf.tls.cert_file))
    exit_on_config_error(name, lambda: tracing.start(conf, name))
    return conf


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the arguments that every process accepts."""
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
    """The exit of a process with a wrong configuration. The message has been printed."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = EX_CONFIG


def refuse(name: str, problem: object) -> NoReturn:
    """Print the problem in one line to standard error, and raise Misconfigured.

    The process ends with the status ``EX_CONFIG``, which prevents a restart by systemd.
    """
    text = f"kilonova-{name}: {problem}"
    print(" ".join(text.split("\n")), file=sys.stderr, flush=True)
    raise Misconfigured(text)


def exit_on_config_error(name: str, read: Callable[[], T]) -> T:
    """Return the result of ``read``. A ConfigError ends the process with an explanation."""
    try:
        return read()
    except errors.ConfigError as problem:
        refuse(name, problem)


def run(
    name: str, conf: cfg.ConfigOpts, open_up: Callable[[cfg.ConfigOpts], Callable[[], None]]
) -> None:
    """Call ``open_up``, notify systemd, wait for TERM or INT, close, and end the process.

    Systemd is notified after ``PATIENCE`` seconds at the latest. Its status then says that the
    process waits.

    HUP reloads the configuration. TERM or INT before the end of ``open_up``, or a second
    time, ends the process at once. So does a close that takes longer than ``GRACE`` seconds. A
    ConfigError of ``open_up`` ends the process with an explanation. This function does not return.

    Args:
        name: Name of the process without "kilonova-".
        conf: The configuration.
        open_up: Opens the service and returns the function that closes it.
    """
    stop, opened = threading.Event(), threading.Event()
    # A signal can arrive between the last bytecode and a wait, or in another thread. Then it does
    # not end the wait of this thread, but its number is in the socket.
    signal_numbers, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)

    def request_stop(number: int, frame: object) -> None:
        # A process that still waits for an external service has no work to finish.
        if stop.is_set() or not opened.is_set():
            os._exit(1 if stop.is_set() else 0)
        stop.set()

    signal.signal(signal.SIGHUP, lambda number, frame: None)
    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    waits = threading.Timer(PATIENCE, notify, ("READY=1\nSTATUS=" + WAITING,))
    waits.daemon = True
    waits.start()
    close = exit_on_config_error(name, lambda: open_up(conf))
    waits.cancel()
    waits.join()  # Its message must not follow the next one.
    opened.set()
    metrics.serve()
    notify("READY=1\nSTATUS=ready")
    logger.info("ready")
    while (number := signal_numbers.recv(1)[0]) not in (signal.SIGTERM, signal.SIGINT):
        if number == signal.SIGHUP:
            reload.again(name)
    notify("STOPPING=1")
    threading.Timer(GRACE, os._exit, (0,)).start()
    close()
    tracing.stop()
    logging.shutdown()
    # Threads of the messaging library may take minutes to end.
    os._exit(0)


def notify(state: str) -> None:
    """Send a state like "READY=1" to systemd (sd_notify's protocol), if NOTIFY_SOCKET is set."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        channel.send(state.encode())


def only_one(state_dir: str, kind: str) -> IO[str]:
    """Lock the folder ``state_dir`` for one process of this kind.

    If another process of this kind has the lock, end this process with an explanation.

    Returns:
        The lock file, which must stay open as long as this process uses the folder.
    """
    folder = Path(state_dir)
    folder.mkdir(parents=True, exist_ok=True)
    handle = open(folder / f"{kind}.lock", "w")  # noqa: SIM115  # stays open as long as the process
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(
            f"kilonova-{kind}: another kilonova-{kind} uses {folder}; give each process its own state_dir"
        )
    return handle


def own_name(state_dir: str, kind: str, host: str) -> tuple[str, IO[str]]:
    """Return a name HOST/NUMBER that no other running process of this kind has.

    All these processes must have the same ``state_dir``. The number is the lowest whose lock file
    is free, so the only process of a kind gets the same name after each restart.

    Returns:
        The name, and the lock file, which must stay open as long as this process uses the name.

    Raises:
        RuntimeError: All 999 names of this host are in use.
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
    raise RuntimeError(f"kilonova-{kind}: all 999 names of this host are in use ({host}/1 to 999)")
