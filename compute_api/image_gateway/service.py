# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-image-gateway: hosts read and store images here, each with a ticket for just
these images.

It asks the identity and the image service, and nobody else; it has no database. Any number may run
side by side.
"""

from __future__ import annotations

from dataclasses import replace
from wsgiref.types import WSGIApplication

from oslo_config import cfg

from common import access
from common.security import tls
from common.service import service
from compute_api.http.worker import server
from compute_api.http.worker.limits import ClientLimits

STALL_SECONDS = 60  #: that a host may stall in the middle of an image: its disk may be busy


def application(conf: cfg.ConfigOpts) -> WSGIApplication:
    """The WSGI application; call it in the process that will serve it."""
    from common.clients.identity import IdentityClient
    from common.clients.own_images import OwnImages
    from common.security.image_tickets import configured
    from compute_api.http import health
    from compute_api.image_gateway import app

    identity = IdentityClient(conf)
    images = OwnImages(identity)
    needs = (
        health.Dependency("identity", identity.require_answer),
        health.Dependency("image", images.require_answer),
    )
    return health.answered(app.create(images, configured(conf)), health.Health(needs))


def limits(conf: cfg.ConfigOpts) -> ClientLimits:
    """What hosts may take. Half of the threads may read images from them, half of these from one
    address; a host may also stall for a while."""
    streams = max(1, conf.image_gateway.threads // 2)
    usual = server.limits(conf, body=0)
    return replace(
        usual,
        stall_timeout_seconds=max(usual.stall_timeout_seconds, STALL_SECONDS),
        max_streams=streams,
        max_streams_per_address=max(1, streams // 2),
    )


def main() -> None:
    """The console script kilonova-image-gateway."""
    conf = service.start("image-gateway")
    if not (conf.image_gateway.ticket_secret + conf.secret_key).strip(", "):
        service.refuse(
            "image-gateway",
            "no ticket can be checked: set [image_gateway] ticket_secret, the same as conductors have",
        )
    own = conf.image_gateway
    proof = service.exit_on_config_error(
        "image-gateway",
        lambda: tls.protecting(conf, "[image_gateway] host", [own.host], listens=True),
    )
    server.Server(
        "kilonova-image-gateway",
        own.host,
        own.port,
        lambda: application(conf),
        lambda: None,
        workers=own.workers,
        threads=own.threads,
        limits=limits(conf),
        tls=proof,
        check=lambda: access.check(conf, access.IDENTITY),
    ).run()


if __name__ == "__main__":
    main()
