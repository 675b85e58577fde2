# SPDX-License-Identifier: Apache-2.0
"""The process ``kilonova-placement``.

It serves Placement's API to operators and their tools, reads and writes the database, and validates
tokens with the identity service. No other process of Kilonova needs this service.
"""

from __future__ import annotations

from contextlib import ExitStack
from wsgiref.types import WSGIApplication

from oslo_config import cfg

from common import access
from common.service import service
from compute_api.http.policy import Policy, load_policy
from compute_api.http.worker.server import Server, limits
from compute_api.placement.policies import PLACEMENT_RULES

_resources = ExitStack()


def application(conf: cfg.ConfigOpts, policy: Policy | None = None) -> WSGIApplication:
    """Build the WSGI application with health checks. Call this in the process that serves it.

    Args:
        conf: The configuration.
        policy: Replaces the policy from the configuration.
    """
    from common.clients.identity import IdentityClient
    from common.store.engine import Store
    from common.store.version import guard
    from compute_api.http import authentication, health
    from compute_api.placement import app, faults

    store = guard(Store.open(conf, pool=conf.placement.threads))
    _resources.callback(store.close)
    placement_app = app.create(store, policy or load_policy(conf, "placement", PLACEMENT_RULES))
    dependencies = (
        health.Dependency("database", store.now),
        health.Dependency("identity", IdentityClient(conf).require_answer),
    )
    return health.add_health_checks(
        authentication.authenticate(placement_app, conf, faults.body), health.Health(dependencies)
    )


def _build_fault(status: int, text: str) -> object:
    from compute_api.placement import faults

    return faults.body(status, text)


def main() -> None:
    """Run the console script ``kilonova-placement``."""
    conf = service.start("placement")
    options = conf.placement
    policy = None
    if options.policy_file:
        policy = service.exit_on_config_error(
            "placement", lambda: load_policy(conf, "placement", PLACEMENT_RULES)
        )
    Server(
        "kilonova-placement",
        options.host,
        options.port,
        lambda: application(conf, policy),
        _resources.close,
        threads=options.threads,
        limits=limits(conf),
        fault=_build_fault,
        check=lambda: access.check(conf, access.DATABASE, access.IDENTITY),
    ).run()


if __name__ == "__main__":
    main()
