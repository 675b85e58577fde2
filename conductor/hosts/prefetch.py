# SPDX-License-Identifier: Apache-2.0
"""Images that hosts were asked to fetch ahead: told to the hosts that are up, again and again until
they are there.

Called by the sweep every few seconds. Which conductor tells a host is decided by the row that it
marks; a message that is lost is sent again. After a day what is not done is given up, and the log
says so.
"""

from __future__ import annotations

import logging

from common.domain.models import ImageRef
from common.domain.wire import from_wire
from common.store.hosts import cached_images, host_images
from conductor.engine.engine import Chore, Engine

log = logging.getLogger(__name__)
PERIOD_SECONDS = 5.0  #: seconds between two looks
BATCH_SIZE = 500  #: images told in one look


def prefetch(engine: Engine) -> None:
    """One look."""
    over, rows = engine.store.read(
        lambda tx: (cached_images.is_something_over(tx), host_images.due(tx, BATCH_SIZE))
    )
    if over:
        for row in engine.store.write(cached_images.settle):
            log.warning(
                "host %s was asked to fetch image %s ahead and has not done it in a day: given up. %s",
                row.host,
                row.image_id,
                row.error or "It was not up, or has not answered.",
            )
    if rows:
        for host, images in sorted(
            engine.store.write(lambda tx: host_images.take(tx, rows)).items()
        ):
            engine.messaging.cache_images(host, [from_wire(ImageRef, image) for image in images])


CHORE = Chore(prefetch, PERIOD_SECONDS)
