# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-metadata: metadata for guests over HTTP, through the network service's
proxy.

It reads the database, and asks nobody else but the operator's services of [vendor_data]
dynamic_targets."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from wsgiref.types import WSGIApplication

from oslo_config import cfg

from common import access
from common.clients import vendor_data
from common.domain import errors
from common.security import tls
from common.service import service
from compute_api.http.worker.server import Server, limits
from compute_api.metadata import proxy_headers

logger = logging.getLogger(__name__)
#: What proxies add to the requests of guests, which are told nothing of the cloud.
OF_A_GUEST = "HTTP_" + proxy_headers.SERVER.replace("-", "_")

_opened = ExitStack()


def application(conf: cfg.ConfigOpts) -> WSGIApplication:
    """The WSGI application; call it in the process that will serve it."""
    from common.security.rate_limit import RateLimiter
    from common.security.vault import Vault
    from common.store.engine import Store
    from common.store.version import guarded
    from compute_api.http import health
    from compute_api.metadata import app
    from compute_api.metadata.guest_cache import GuestCache

    own = conf.metadata
    store = guarded(Store.opened(conf, pool=own.threads))
    _opened.callback(store.close)
    guests = GuestCache(
        store,
        vendor_data.static(conf),
        Vault(conf.secret_key),
        own.cache_seconds,
        dynamic=vendor_data.configured(conf),
    )
    made = app.create(guests, own.proxy_shared_secret, RateLimiter(own.rate))
    found = health.Health([health.Dependency("database", store.now)])
    return health.answered(made, found, unless=OF_A_GUEST)


def main() -> None:
    """The console script kilonova-metadata."""
    conf = service.start("metadata")
    try:
        vendor_data.static(conf)
        vendor_data.configured(conf)
    except errors.ConfigError as problem:
        service.refuse("metadata", problem)
    if not conf.metadata.proxy_shared_secret:
        logger.warning(
            "no guest will be answered: set [metadata] proxy_shared_secret, the same as the network "
            "service's proxies have"
        )
    proof = service.exit_on_config_error(
        "metadata",
        lambda: tls.protecting(conf, "[metadata] host", [conf.metadata.host], listens=True),
    )
    Server(
        "kilonova-metadata",
        conf.metadata.host,
        conf.metadata.port,
        lambda: application(conf),
        _opened.close,
        threads=conf.metadata.threads,
        limits=limits(conf),
        tls=proof,
        check=lambda: access.check(conf, access.DATABASE),
    ).run()


if __name__ == "__main__":
    main()
