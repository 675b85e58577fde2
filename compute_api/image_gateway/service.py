# SPDX-License-Identifier: Apache-2.0
"""The process ``kilonova-image-gateway``.

Hosts read and store images here, with a ticket that names the images. The process calls the
identity and image services and has no database. Any number of these processes may run.
"""

from __future__ import annotations

from dataclasses import replace
from wsgiref.types import WSGIApplication

from oslo_config import cfg

from common import access
from common.security import secret_lists, tls
from common.service import service
from compute_api.http.worker import server
from compute_api.http.worker.limits import ClientLimits

#: Time that a host may stall during a transfer, for example because its disk is busy.
STALL_SECONDS = 60


def application(conf: cfg.ConfigOpts) -> WSGIApplication:
    """Build the WSGI application with health checks. Call this in the process that serves it."""
    from common.clients.identity import IdentityClient
    from common.clients.own_images import OwnImages
    from common.security.image_tickets import configured
    from compute_api.http import health
    from compute_api.image_gateway import app

    identity = IdentityClient(conf)
    images = OwnImages(identity)
    dependencies = (
        health.Dependency("identity", identity.require_answer),
        health.Dependency("image", images.require_answer),
    )
    return health.add_health_checks(
        app.create(images, configured(conf)), health.Health(dependencies)
    )


def limits(conf: cfg.ConfigOpts) -> ClientLimits:
    """Return the limits for hosts.

    Half of the threads may receive images from hosts, and half of these from a single address, but
    at least one. The timeout for stalled transfers is at least ``STALL_SECONDS``.
    """
    streams = max(1, conf.image_gateway.threads // 2)
    default_limits = server.limits(conf, body=0)
    return replace(
        default_limits,
        stall_timeout_seconds=max(default_limits.stall_timeout_seconds, STALL_SECONDS),
        max_streams=streams,
        max_streams_per_address=max(1, streams // 2),
    )


def main() -> None:
    """Run the console script ``kilonova-image-gateway``."""
    conf = service.start("image-gateway")
    if not secret_lists.split(conf.image_gateway.ticket_secret + conf.secret_key):
        service.refuse(
            "image-gateway",
            "tickets cannot be validated: set [image_gateway] ticket_secret to the value of the conductors",
        )
    options = conf.image_gateway
    tls_settings = service.exit_on_config_error(
        "image-gateway",
        lambda: tls.protecting(conf, "[image_gateway] host", [options.host], listens=True),
    )
    server.Server(
        "kilonova-image-gateway",
        options.host,
        options.port,
        lambda: application(conf),
        lambda: None,
        workers=options.workers,
        threads=options.threads,
        limits=limits(conf),
        tls=tls_settings,
        check=lambda: access.check(conf, access.IDENTITY),
    ).run()


if __name__ == "__main__":
    main()
