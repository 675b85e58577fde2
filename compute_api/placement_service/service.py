# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-placement: Placement's API on Kilonova's own tables, for operators and their tools.

Reads and writes the database, and asks the identity service who is there. Nothing of Kilonova waits for it: without
it servers are placed as ever.
"""
from __future__ import annotations

from typing import Any

from oslo_config import cfg

from common import service
from compute_api.placement_service.rules import RULES
from compute_api.policy import Policy, configured
from compute_api.serving import Server, limits

_opened: list[Any] = []


def application(conf: cfg.ConfigOpts, policy: Policy | None = None) -> Any:
    """The WSGI application; call it in the process that will serve it."""
    from common.store.engine import Store
    from common.store.version import guarded
    from compute_api import tokens
    from compute_api.placement_service import app, faults
    store = guarded(Store.opened(conf.database, pool=conf.placement.threads))
    _opened.append(store)
    made = app.create(store, policy or configured(conf, "placement", RULES))
    return tokens.authenticated(made, conf, faults.body)


def _fault(status: int, text: str) -> Any:
    from compute_api.placement_service import faults
    return faults.body(status, text)


def close() -> None:
    """Close what ``application`` opened."""
    while _opened:
        _opened.pop(0).close()


def main() -> None:
    """The console script kilonova-placement."""
    conf = service.start("placement")
    own = conf.placement
    policy = service.checked("placement", lambda: configured(conf, "placement", RULES)) if own.policy_file else None
    Server("kilonova-placement", own.host, own.port, lambda: application(conf, policy), close,
           threads=own.threads, limits=limits(conf), fault=_fault).run()


if __name__ == "__main__":
    main()
