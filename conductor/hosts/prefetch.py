# SPDX-License-Identifier: Apache-2.0
"""Send hosts the images to fetch ahead, again until the hosts report them as cached.

The sweep calls ``prefetch`` every few seconds. A conductor marks the rows that it sends, so that no
other conductor sends them at the same time. A lost message is sent again. After a day the request
is given up with a warning in the log.
"""

from __future__ import annotations

from common.domain.models import ImageRef
from common.domain.wire import from_wire
from common.service.log import get_logger
from common.store.hosts import cached_images, host_images
from conductor.engine.engine import Chore, Engine

log = get_logger(__name__)
#: Interval of the rounds.
PERIOD_SECONDS = 5.0
#: Images sent in one round.
BATCH_SIZE = 500


def prefetch(engine: Engine) -> None:
    """Send the due requests to fetch an image ahead to hosts that are up, at most ``BATCH_SIZE``.

    A request is due again, with growing pauses, until the host reports the image as cached.
    Complete requests are deleted, and so are requests that are older than a day, with a warning in
    the log. If notifications are on, notices about them are written (``cached_images.settle``).
    """
    over, rows = engine.store.read(
        lambda tx: (cached_images.is_something_over(tx), host_images.due(tx, BATCH_SIZE))
    )
    if over:
        for row in engine.store.write(cached_images.settle):
            if row.error == "":
                # The image is cached, and its row has waited for other images of the request.
                continue
            log.warning(
                "a host has not fetched an image ahead within a day, and the request is deleted",
                host=row.host,
                image=row.image_id,
                problem=row.error or "the host was down or has not answered",
            )
    if rows:
        for host, images in sorted(
            engine.store.write(lambda tx: host_images.take(tx, rows)).items()
        ):
            engine.messaging.cache_images(host, [from_wire(ImageRef, image) for image in images])


CHORE = Chore(prefetch, PERIOD_SECONDS)
