# SPDX-License-Identifier: Apache-2.0
"""Run gunicorn with Kilonova's worker. This module sets all of gunicorn's options.

The ``service.py`` of the API, placement, metadata and image gateway use this module. Each worker
creates an application after the fork. On SIGTERM a worker finishes the running requests and exits
at once, even if threads of libraries still run.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from wsgiref.types import WSGIApplication

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import AppImportError
from gunicorn.glogging import Logger
from oslo_config import cfg

from common.domain.errors import ConfigError
from common.security.tls import Tls
from common.service import config, metrics, reload, tracing
from common.service.log import get_logger
from common.service.service import EX_CONFIG
from compute_api.http import access_log
from compute_api.http.worker import forwarded
from compute_api.http.worker.limits import ClientLimits
from compute_api.http.worker.worker import Worker

logger = get_logger(__name__)
#: Options that the master reads once, in shared sections and in the service's own section.
KEPT = ("http.*", "tls.*", "tracing.*")
KEPT_OF_SECTION = ("host", "port", "workers", "threads", "max_body", "policy_file")
#: A body that is too long by at most this is still read, so that the client gets the error.
BODY_MARGIN_BYTES = 64 * 1024
#: A worker that does not report to the master for this time is replaced.
WORKER_TIMEOUT_SECONDS = 120
#: Time for running requests after SIGTERM.
GRACE_SECONDS = 8


def worker(
    limits: ClientLimits,
    fault: Callable[[int, str], object] | None = None,
    may_wait: Callable[[str], bool] | None = None,
    waiting_threads: int = 1,
    shares_threads: bool = False,
) -> type[Worker]:
    """Return a worker class for gunicorn, which creates the instances.

    Args:
        limits: The limits of clients.
        fault: Builds the body of an error that the worker itself sends, from status and text. None:
            ``Worker.fault``.
        may_wait: Returns True for paths of requests that use the waiting threads. None: no request.
        waiting_threads: Number of waiting threads: separate threads for requests that wait for a
            host.
        shares_threads: Share the threads between projects (see ``Worker``).
    """
    attributes: dict[str, object] = {"shares_threads": shares_threads}
    attributes |= {"fault": staticmethod(fault)} if fault else {}
    if may_wait:
        attributes |= {"may_wait": staticmethod(may_wait), "waiting_threads": waiting_threads}
    return type("Worker", (Worker,), {"limits": limits, **attributes})


def limits(conf: cfg.ConfigOpts, body: int = 1024 * 1024) -> ClientLimits:
    """Return the limits of clients of an HTTP service.

    Args:
        conf: The configuration.
        body: Largest body of the service in bytes. ``BODY_MARGIN_BYTES`` more are buffered.
    """
    options = conf.http
    return ClientLimits(
        head_seconds=options.head_seconds,
        stall_timeout_seconds=options.stall_timeout_seconds,
        idle_seconds=options.idle_seconds,
        max_connections=options.connections,
        max_connections_per_address=options.connections_per_address,
        max_body_bytes=body + BODY_MARGIN_BYTES,
    )


class ServerLog(Logger):  # type: ignore[misc]  # gunicorn ships no types
    """Sends gunicorn's log lines to the process's log, in the common format."""

    def setup(self, cfg: object) -> None:
        """Send gunicorn's errors to the process's log only. gunicorn calls this."""
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True


class Server(BaseApplication):  # type: ignore[misc]  # gunicorn ships no types
    """A master and its workers on one address.

    Args:
        name: Name of the process.
        host: Address to listen on.
        port: Port to listen on.
        load: Creates the application in a worker.
        close: Releases the resources of the application when a worker exits.
        workers: Number of workers.
        threads: Threads of a worker.
        limits: The limits of clients.
        fault: See ``worker``.
        tls: The certificate, or None for plain text.
        check: Runs in the first worker. A ConfigError ends the master.
        may_wait: See ``worker``.
        waiting_threads: See ``worker``.
        shares_threads: See ``worker``.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        load: Callable[[], WSGIApplication],
        close: Callable[[], None],
        workers: int = 1,
        threads: int = 16,
        limits: ClientLimits | None = None,
        fault: Callable[[int, str], object] | None = None,
        tls: Tls | None = None,
        check: Callable[[], None] = lambda: None,
        may_wait: Callable[[str], bool] | None = None,
        waiting_threads: int = 1,
        shares_threads: bool = False,
    ) -> None:
        def exit_worker(server: object, worker: object) -> None:
            close()
            tracing.stop()
            logging.shutdown()
            # Threads of libraries may still run.
            os._exit(self._status)

        def count_fork(server: object, worker: object) -> None:
            self._forks += 1

        self._load, self._name, self._check = load, name, check
        self._forks = self._status = 0
        self._settings = {
            "bind": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            "workers": workers,
            "worker_class": worker(
                limits or ClientLimits(), fault, may_wait, waiting_threads, shares_threads
            ),
            "threads": threads,
            "timeout": WORKER_TIMEOUT_SECONDS,
            "graceful_timeout": GRACE_SECONDS,
            "limit_request_line": 8190,
            "control_socket_disable": True,
            "logger_class": ServerLog,
            "proc_name": name,
            "sendfile": False,
            "backlog": 2048,
            "worker_exit": exit_worker,
            "pre_fork": count_fork,
            "when_ready": lambda server: metrics.serve(),
            "child_exit": lambda server, worker: metrics.forget_worker(worker.pid),
        }
        # Clients need no certificate. A signature or a ticket authenticates them.
        if tls is not None:
            self._settings |= {
                "certfile": tls.cert,
                "keyfile": tls.key,
                "ssl_context": lambda conf, usual: tls.for_server(proved=False),
            }
        super().__init__()
        config.register()
        reload.takes("*")

    def load_config(self) -> None:
        """Set gunicorn's options. gunicorn calls this."""
        for name, value in self._settings.items():
            self.cfg.set(name, value)

    def load(self) -> WSGIApplication:
        """Create the application in a worker. The first worker runs ``check`` before.

        Raises:
            AppImportError: The configuration is invalid. This ends the master too.
        """
        try:
            # Later workers replace workers that passed the check.
            if self._forks == 1:
                self._check()
            return forwarded.apply_proxy_headers(access_log.log_requests(self._load()), config.CONF)
        except ConfigError as problem:
            self._status = Arbiter.APP_LOAD_ERROR
            raise AppImportError(f"{self._name}: {problem}") from problem

    def reload(self) -> None:
        """Read the configuration again. On SIGHUP gunicorn calls this, and replaces the workers.

        The new workers create the application with the changed configuration. If this is not
        possible, they use the old one. gunicorn stops the old workers at once, so a request may
        wait while the application loads.

        The master keeps what it has created: the listener with its TLS, the number of workers and
        threads, the limits of clients, the sampling of traces, and a policy loaded from a file. The
        log lists changes in ``KEPT`` and ``KEPT_OF_SECTION`` as needing a restart. Some of them
        still take effect in the new workers: ``[tls]`` for their connections to the database and
        other services, ``[tracing] endpoint``, ``max_body`` and ``threads`` as limits of the
        application, and ``policy_file`` if there was none at the start.
        """
        process = self._name.removeprefix("kilonova-")
        section = process.replace("-", "_")
        if self._can_start(process):
            reload.again(process, *KEPT, *(f"{section}.{name}" for name in KEPT_OF_SECTION))
        super().reload()

    def _can_start(self, process: str) -> bool:
        """Return True if a worker can start with the configuration files in their present state.

        A child process tries to start, because a worker that cannot start ends the master. The
        child logs the error.

        Args:
            process: Name of the process without "kilonova-".
        """
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                config.reread(process)
                self._load()
                os.write(write, b"+")
            except ConfigError as problem:
                logger.error(
                    "the configuration stays as it was, because it is invalid", problem=problem
                )
            except Exception:
                logger.exception("the configuration stays as it was, because it cannot be loaded")
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as result:
            can_start = result.read() == b"+"
        # gunicorn may have waited for the child.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        return can_start

    def run(self) -> None:
        """Serve until a signal.

        A configuration error in a worker ends the master with EX_CONFIG.
        """
        master = os.getpid()
        try:
            super().run()
        except SystemExit as end:
            if os.getpid() == master and end.code == Arbiter.APP_LOAD_ERROR:
                raise SystemExit(EX_CONFIG) from end
            raise
