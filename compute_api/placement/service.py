# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-placement: Placement's API on Kilonova's own tables, for operators and their
tools.

It reads and writes the database, and asks the identity service about tokens. No other process of
Kilonova needs it."""

from __future__ import annotations

from contextlib import ExitStack
from wsgiref.types import WSGIApplication

from oslo_config import cfg

from common import access
from common.service import service
from compute_api.http.policy import Policy, configured
from compute_api.http.worker.server import Server, limits
from compute_api.placement.policies import PLACEMENT_RULES

_opened = ExitStack()


def application(conf: cfg.ConfigOpts, policy: Policy | None = None) -> WSGIApplication:
    """The WSGI application; call it in the process that will serve it."""
    from common.clients.identity import IdentityClient
    from common.store.engine import Store
    from common.store.version import guarded
    from compute_api.http import authentication, health
    from compute_api.placement import app, faults

    store = guarded(Store.opened(conf, pool=conf.placement.threads))
    _opened.callback(store.close)
    made = app.create(store, policy or configured(conf, "placement", PLACEMENT_RULES))
    needs = (
        health.Dependency("database", store.now),
        health.Dependency("identity", IdentityClient(conf).require_answer),
    )
    return health.answered(
        authentication.authenticated(made, conf, faults.body), health.Health(needs)
    )


def _fault(status: int, text: str) -> object:
    from compute_api.placement import faults

    return faults.body(status, text)


def main() -> None:
    """The console script kilonova-placement."""
    conf = service.start("placement")
    own = conf.placement
    policy = None
    if own.policy_file:
        policy = service.exit_on_config_error(
            "placement", lambda: configured(conf, "placement", PLACEMENT_RULES)
        )
    Server(
        "kilonova-placement",
        own.host,
        own.port,
        lambda: application(conf, policy),
        _opened.close,
        threads=own.threads,
        limits=limits(conf),
        fault=_fault,
        check=lambda: access.check(conf, access.DATABASE, access.IDENTITY),
    ).run()


if __name__ == "__main__":
    main()
