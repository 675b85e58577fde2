# SPDX-License-Identifier: Apache-2.0
"""The process ``kilonova-metadata``.

It serves metadata to guests through the network service's proxy. It reads the database, and calls
the operator's services in [vendor_data] dynamic_targets.
"""

from __future__ import annotations

from contextlib import ExitStack
from wsgiref.types import WSGIApplication

from oslo_config import cfg

from common import access
from common.clients import vendor_data
from common.domain import errors
from common.security import tls
from common.service import service
from common.service.log import get_logger
from compute_api.http.worker.server import Server, limits
from compute_api.metadata import proxy_headers

logger = get_logger(__name__)
#: A header that proxies add to requests of guests. Guests get no health report.
OF_A_GUEST = "HTTP_" + proxy_headers.SERVER.replace("-", "_")

_resources = ExitStack()


def application(conf: cfg.ConfigOpts) -> WSGIApplication:
    """Build the WSGI application with health checks. Call this in the process that serves it."""
    from common.security.rate_limit import RateLimiter
    from common.security.vault import Vault
    from common.store.engine import Store
    from common.store.version import guard
    from compute_api.http import health
    from compute_api.metadata import app
    from compute_api.metadata.guest_cache import GuestCache

    options = conf.metadata
    store = guard(Store.open(conf, pool=options.threads))
    _resources.callback(store.close)
    guests = GuestCache(
        store,
        vendor_data.static(conf),
        Vault(conf.secret_key),
        options.cache_seconds,
        dynamic=vendor_data.configured(conf),
    )
    metadata_app = app.create(guests, options.proxy_shared_secret, RateLimiter(options.rate))
    health_checks = health.Health([health.Dependency("database", store.now)])
    return health.add_health_checks(metadata_app, health_checks, unless=OF_A_GUEST)


def main() -> None:
    """Run the console script ``kilonova-metadata``."""
    conf = service.start("metadata")
    try:
        vendor_data.static(conf)
        vendor_data.configured(conf)
    except errors.ConfigError as problem:
        service.refuse("metadata", problem)
    if not conf.metadata.proxy_shared_secret:
        logger.warning(
            "all requests of guests will be refused: set [metadata] proxy_shared_secret to the "
            "secret of the network service's proxies"
        )
    tls_settings = service.exit_on_config_error(
        "metadata",
        lambda: tls.protecting(conf, "[metadata] host", [conf.metadata.host], listens=True),
    )
    Server(
        "kilonova-metadata",
        conf.metadata.host,
        conf.metadata.port,
        lambda: application(conf),
        _resources.close,
        threads=conf.metadata.threads,
        limits=limits(conf),
        tls=tls_settings,
        check=lambda: access.check(conf, access.DATABASE),
    ).run()


if __name__ == "__main__":
    main()
