# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-api: gunicorn with threads, and the real services behind the application.

gunicorn's master reads the configuration. Several workers share the code that it imports for them; for a single one
that would only keep a second copy. Each worker makes its own store, broker connection and threads after the fork. On
TERM a worker finishes what it has in hand and ends at once, whatever threads the libraries still have.
"""
from __future__ import annotations

import gc
import importlib
import logging
import os
from typing import Any

from gunicorn.app.base import BaseApplication
from oslo_config import cfg

from common import service

KEEP_ALIVE = 75          # seconds that an idle connection of a client stays open
TIMEOUT = 120            # seconds after which a worker that does not answer the master is replaced
GRACE = 8                # seconds for requests in hand after TERM
#: What several workers share.
_SHARED = ("compute_api.app", "compute_api.tokens", "common.rpc.agent", "common.rpc.conductor",
           "common.clients.identity")

_opened: list[Any] = []


def application(conf: cfg.ConfigOpts | None = None) -> Any:
    """The WSGI application over the real services; call it in the process that will serve it."""
    from common.clients.identity import Identity
    from common.clients.image import Client
    from common.rpc import agent, conductor
    from common.rpc.transport import Transport
    from common.store.engine import Store
    from common.vault import Vault
    from compute_api import app, tokens
    from compute_api.dependencies import Services
    conf = conf or service.start("api")
    store, transport = Store(conf.database.url, pool=conf.api.threads), Transport(conf)
    _opened.extend((transport, store))
    identity = Identity(conf)
    images = Client(conf.image.endpoint or (lambda: identity.image_access().url), conf.image.cache_seconds)
    vault = Vault(conf.secret_key) if conf.secret_key.strip(", ") else None
    services = Services(store, conductor.Bell(transport), agent.Client(transport), images, settings(conf), vault)
    return tokens.authenticated(app.create(services), conf)


def settings(conf: cfg.ConfigOpts) -> Any:
    """The configuration in the API's words."""
    from compute_api.dependencies import Settings
    return Settings(max_limit=conf.api.max_limit, max_body=conf.api.max_body, public_url=conf.api.public_url,
                    policy_file=conf.api.policy_file, default_zone=conf.scheduler.default_availability_zone,
                    threads=conf.api.threads, reclaim_interval=conf.reclaim_instance_interval,
                    console_url=conf.console.public_url, console_token_seconds=conf.console.token_seconds,
                    quota={name: conf.quota[name] for name in conf.quota})


def close() -> None:
    """Close what ``application`` opened."""
    while _opened:
        _opened.pop(0).close()


class Server(BaseApplication):  # type: ignore[misc]  # gunicorn ships no types
    """gunicorn, configured by us alone: no command line, no file of its own."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self._conf = conf
        super().__init__()

    def load_config(self) -> None:
        """Called by gunicorn."""
        host = f"[{self._conf.api.host}]" if ":" in self._conf.api.host else self._conf.api.host
        for name, value in {
            "bind": f"{host}:{self._conf.api.port}", "workers": self._conf.api.workers, "worker_class": "gthread",
            "threads": self._conf.api.threads, "keepalive": KEEP_ALIVE, "timeout": TIMEOUT, "graceful_timeout": GRACE,
            "limit_request_line": 8190, "control_socket_disable": True, "proc_name": "kilonova-api",
            "worker_exit": _ended,
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """Called by gunicorn in each worker."""
        return application(self._conf)


def _ended(server: Any, worker: Any) -> None:
    """The worker's last act: close, and end although threads of the libraries linger."""
    close()
    logging.shutdown()
    os._exit(0)


def main() -> None:
    """The console script kilonova-api."""
    conf = service.start("api")
    if conf.api.workers > 1:
        for name in _SHARED:
            importlib.import_module(name)
        gc.freeze()
    Server(conf).run()


if __name__ == "__main__":
    main()
