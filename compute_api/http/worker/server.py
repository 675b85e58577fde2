# SPDX-License-Identifier: Apache-2.0
"""gunicorn with a worker of ours, configured here alone: no command line, no file of its own.

Used by the ``service.py`` of the API, placement, metadata and image gateway. Each worker makes its
application after the fork. On SIGTERM a worker finishes its requests and ends at once, whatever
threads of libraries still run."""

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
from common.service.service import EX_CONFIG
from compute_api.http import access_log
from compute_api.http.worker import forwarded
from compute_api.http.worker.limits import ClientLimits
from compute_api.http.worker.worker import Worker

logger = logging.getLogger(__name__)
#: What a master has read for good: options, and those of a service's own section.
KEPT = ("http.*", "tls.*", "tracing.*")
KEPT_OF_SECTION = ("host", "port", "workers", "threads", "max_body", "policy_file")
# bytes by which a body may be too long and is still read, to be told so
BODY_MARGIN_BYTES = 64 * 1024
# seconds after which a worker that does not answer the master is replaced
WORKER_TIMEOUT_SECONDS = 120
GRACE_SECONDS = 8  # seconds for requests in hand after TERM


def worker(
    limits: ClientLimits,
    fault: Callable[[int, str], object] | None = None,
    may_wait: Callable[[str], bool] | None = None,
    waiting_threads: int = 1,
    shares_threads: bool = False,
) -> type[Worker]:
    """A class for gunicorn, which makes the objects. ``fault``: the body of an error before the
    application; ``may_wait``: whether requests for a path have the ``waiting_threads``;
    ``shares_threads``: as ``Worker`` has it."""
    more: dict[str, object] = {"shares_threads": shares_threads}
    more |= {"fault": staticmethod(fault)} if fault else {}
    if may_wait:
        more |= {"may_wait": staticmethod(may_wait), "waiting_threads": waiting_threads}
    return type("Worker", (Worker,), {"limits": limits, **more})


def limits(conf: cfg.ConfigOpts, body: int = 1024 * 1024) -> ClientLimits:
    """What clients of an HTTP service may take; ``body``: the bytes of the longest that it
    reads."""
    own = conf.http
    return ClientLimits(
        head_seconds=own.head_seconds,
        stall_timeout_seconds=own.stall_timeout_seconds,
        idle_seconds=own.idle_seconds,
        max_connections=own.connections,
        max_connections_per_address=own.connections_per_address,
        max_body_bytes=body + BODY_MARGIN_BYTES,
    )


class ServerLog(Logger):  # type: ignore[misc]  # gunicorn ships no types
    """What gunicorn tells goes where all lines go, in the form of all (``common.service.log``)."""

    def setup(self, cfg: object) -> None:
        """Called by gunicorn."""
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True


class Server(BaseApplication):  # type: ignore[misc]  # gunicorn ships no types
    """A master and its workers on one address. ``load`` makes the application in a worker,
    ``close`` is its end; ``check``: what the first worker asks before that, which may end all;
    ``may_wait``, ``waiting_threads`` and ``shares_threads``: as ``worker`` has them."""

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
        def ended(server: object, worker: object) -> None:
            close()
            tracing.stop()
            logging.shutdown()
            os._exit(self._status)  # threads of the libraries may linger

        def forking(server: object, worker: object) -> None:
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
            "worker_exit": ended,
            "pre_fork": forking,
            "when_ready": lambda server: metrics.serve(),
            "child_exit": lambda server, worker: metrics.forget_worker(worker.pid),
        }
        if tls is not None:  # who asks is known by what it brings: a signature, a ticket
            self._settings |= {
                "certfile": tls.cert,
                "keyfile": tls.key,
                "ssl_context": lambda conf, usual: tls.for_server(proved=False),
            }
        super().__init__()
        config.register()
        reload.takes("*")

    def load_config(self) -> None:
        """Called by gunicorn."""
        for name, value in self._settings.items():
            self.cfg.set(name, value)

    def load(self) -> WSGIApplication:
        """Called by gunicorn in each worker."""
        try:
            if self._forks == 1:  # later ones take the place of those that served
                self._check()
            return forwarded.parsed(access_log.logged(self._load()), config.CONF)
        except ConfigError as problem:
            self._status = Arbiter.APP_LOAD_ERROR
            raise AppImportError(
                f"{self._name}: {problem}"
            ) from problem  # which ends the master too

    def reload(self) -> None:
        """Called by gunicorn in the master on HUP; new workers then take the place of the old ones,
        and read everything anew but what the master holds: ``KEPT``."""
        own = self._name.removeprefix("kilonova-")
        section = own.replace("-", "_")
        if self._can_be_made_again(own):
            reload.again(own, *KEPT, *(f"{section}.{name}" for name in KEPT_OF_SECTION))
        super().reload()

    def _can_be_made_again(self, own: str) -> bool:
        """Would a worker start with the file as it is now? Tried in a child, because one that does
        not would end the master."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                config.reread(own)
                self._load()
                os.write(write, b"+")
            except ConfigError as problem:
                logger.error("the configuration stays as it was: %s", problem)
            except Exception:
                logger.exception("the configuration stays as it was")
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            made = answer.read() == b"+"
        with contextlib.suppress(ChildProcessError):  # gunicorn has waited for it
            os.waitpid(child, 0)
        return made

    def run(self) -> None:
        """Serve until a signal. What a worker finds wrong with the configuration ends the master as
        it ends other processes."""
        master = os.getpid()
        try:
            super().run()
        except SystemExit as end:
            if os.getpid() == master and end.code == Arbiter.APP_LOAD_ERROR:
                raise SystemExit(EX_CONFIG) from end
            raise
