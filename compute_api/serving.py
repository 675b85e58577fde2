# SPDX-License-Identifier: Apache-2.0
"""gunicorn with a worker of ours, configured by us alone: no command line, no file of its own.

Used by the ``service.py`` of the API, of the metadata and of the placement service. The application is made in each
worker, after the fork. On TERM a worker finishes what it has in hand and ends at once, whatever threads the libraries
still have.
"""
from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from gunicorn.app.base import BaseApplication
from oslo_config import cfg

from compute_api.edge.limits import Limits
from compute_api.edge.worker import Worker

MARGIN = 64 * 1024       # bytes by which a body may be too long and is still read, to be told so
TIMEOUT = 120            # seconds after which a worker that does not answer the master is replaced
GRACE = 8                # seconds for requests in hand after TERM


def worker(limits: Limits, fault: Callable[[int, str], Any] | None = None) -> type[Worker]:
    """A class for gunicorn, which makes the objects. ``fault``: the body of an error before the application."""
    more = {"fault": staticmethod(fault)} if fault else {}
    return type("Worker", (Worker,), {"limits": limits, **more})


def limits(conf: cfg.ConfigOpts, body: int = 1024 * 1024) -> Limits:
    """What clients of an HTTP service may take; ``body``: the bytes of the longest that it reads."""
    own = conf.http
    return Limits(head=own.head_seconds, patience=own.patience_seconds, idle=own.idle_seconds,
                  connections=own.connections, each=own.connections_per_address, body=body + MARGIN)


class Server(BaseApplication):  # type: ignore[misc]  # gunicorn ships no types
    """A master and its workers on one address. ``load`` makes the application in a worker, ``close`` is its end."""

    def __init__(self, name: str, host: str, port: int, load: Callable[[], Any], close: Callable[[], None],
                 workers: int = 1, threads: int = 16, limits: Limits | None = None,
                 fault: Callable[[int, str], Any] | None = None) -> None:
        def ended(server: Any, worker: Any) -> None:
            close()
            logging.shutdown()
            os._exit(0)             # threads of the libraries may linger
        self._load = load
        self._settings = {
            "bind": f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "workers": workers,
            "worker_class": worker(limits or Limits(), fault), "threads": threads, "timeout": TIMEOUT,
            "graceful_timeout": GRACE, "limit_request_line": 8190, "control_socket_disable": True, "proc_name": name,
            "sendfile": False, "backlog": 2048, "worker_exit": ended}
        super().__init__()

    def load_config(self) -> None:
        """Called by gunicorn."""
        for name, value in self._settings.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """Called by gunicorn in each worker."""
        return self._load()
