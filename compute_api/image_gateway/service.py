# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-image-gateway: hosts read and store images here, each with a ticket for just these images.

It asks the identity and the image service, and nobody else; it has no database. Any number may run side by side.
"""
from __future__ import annotations

import sys
from typing import Any

from oslo_config import cfg

from common import service
from compute_api.serving import Server


def application(conf: cfg.ConfigOpts) -> Any:
    """The WSGI application; call it in the process that will serve it."""
    from common.clients.identity import Identity
    from common.clients.own_images import OwnImages
    from common.image_tickets import Tickets
    from common.vault import Vault
    from compute_api.image_gateway import app
    return app.create(OwnImages(Identity(conf)), Tickets(Vault(conf.secret_key)))


class Streaming(Server):
    """With gunicorn's own worker: ours has read a body to its end, within bounds, before the application sees it, and
    an image has none. A client that stalls in the middle is cut off by the application."""

    def load_config(self) -> None:
        """Called by gunicorn."""
        super().load_config()
        self.cfg.set("worker_class", "gthread")


def main() -> None:
    """The console script kilonova-image-gateway."""
    conf = service.start("image-gateway")
    if not conf.secret_key.strip(", "):
        sys.exit("kilonova-image-gateway: no ticket can be checked: set [DEFAULT] secret_key, the same as conductors "
                 "have")
    own = conf.image_gateway
    Streaming("kilonova-image-gateway", own.host, own.port, lambda: application(conf), lambda: None,
              workers=own.workers, threads=own.threads).run()


if __name__ == "__main__":
    main()
