# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-metadata: tells guests who they are, over HTTP, through the network service's proxy.

Reads the database and asks nobody else.
"""
from __future__ import annotations

import logging
import sys
from typing import Any

from oslo_config import cfg

from common import config, service
from compute_api.serving import Server, limits

logger = logging.getLogger(__name__)

_opened: list[Any] = []


def application(conf: cfg.ConfigOpts) -> Any:
    """The WSGI application; call it in the process that will serve it."""
    from common.store.engine import Store
    from common.store.version import guarded
    from compute_api.metadata_service import app
    from compute_api.metadata_service.guests import Guests
    from compute_api.metadata_service.rate import Rate
    own = conf.metadata
    store = guarded(Store.opened(conf.database, pool=own.threads))
    _opened.append(store)
    return app.create(Guests(store, config.vendor_data(conf), own.cache_seconds), own.proxy_shared_secret,
                      Rate(own.rate))


def close() -> None:
    """Close what ``application`` opened."""
    while _opened:
        _opened.pop(0).close()


def main() -> None:
    """The console script kilonova-metadata."""
    conf = service.start("metadata")
    try:
        config.vendor_data(conf)
    except config.ConfigError as problem:
        sys.exit(f"kilonova-metadata: {problem}")
    if not conf.metadata.proxy_shared_secret:
        logger.warning("no guest will be answered: set [metadata] proxy_shared_secret, the same as the network "
                       "service's proxies have")
    Server("kilonova-metadata", conf.metadata.host, conf.metadata.port, lambda: application(conf), close,
           threads=conf.metadata.threads, limits=limits(conf)).run()


if __name__ == "__main__":
    main()
