# SPDX-License-Identifier: Apache-2.0
"""gunicorn with threads, configured by us alone: no command line, no file of its own.

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

KEEP_ALIVE = 75          # seconds that an idle connection of a client stays open
TIMEOUT = 120            # seconds after which a worker that does not answer the master is replaced
GRACE = 8                # seconds for requests in hand after TERM
PATIENCE = 10            # seconds for the next bytes of a request


def patient(application: Any) -> Any:
    """The application, where a client that stalls in the middle of a request is cut off: it would hold a thread."""
    def entry(environ: dict[str, Any], start_response: Any) -> Any:
        environ["gunicorn.socket"].settimeout(PATIENCE)
        return application(environ, start_response)
    return entry


class Server(BaseApplication):  # type: ignore[misc]  # gunicorn ships no types
    """A master and its workers on one address. ``load`` makes the application in a worker, ``close`` is its end."""

    def __init__(self, name: str, host: str, port: int, load: Callable[[], Any], close: Callable[[], None],
                 workers: int = 1, threads: int = 16) -> None:
        def ended(server: Any, worker: Any) -> None:
            close()
            logging.shutdown()
            os._exit(0)             # threads of the libraries may linger
        self._load = load
        self._settings = {
            "bind": f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "workers": workers,
            "worker_class": "gthread", "threads": threads, "keepalive": KEEP_ALIVE, "timeout": TIMEOUT,
            "graceful_timeout": GRACE, "limit_request_line": 8190, "control_socket_disable": True, "proc_name": name,
            "worker_exit": ended}
        super().__init__()

    def load_config(self) -> None:
        """Called by gunicorn."""
        for name, value in self._settings.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """Called by gunicorn in each worker."""
        return self._load()
