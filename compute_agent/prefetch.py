# SPDX-License-Identifier: Apache-2.0
"""Download of images to a host before a server needs them, one image after the other.

``service`` adds images and runs ``work`` in a thread. Each outcome is passed to ``report``. A
restart forgets waiting images. Conductors send them again until an outcome is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from common.domain import errors
from common.domain.models import Access, ImageRef
from common.service.log import get_logger
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import Driver

log = get_logger(__name__)
Download = Callable[[Access, str], Iterator[bytes]]


class Prefetch:
    """The queue of images. Thread-safe.

    Args:
        driver: Stores the images on this host.
        download: Yields the data of an image from the image gateway.
        report: Called with the image id and the reason of the failure, which is empty on success.
            Not called for a download that ``close`` cancels.
    """

    def __init__(
        self, driver: Driver, download: Download, report: Callable[[str, str], None]
    ) -> None:
        self._driver, self._download, self._report = driver, download, report
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[ImageRef, Access]] = {}
        self._closed = False

    def add(self, images: Iterable[ImageRef], access: Access) -> None:
        """Add images to the queue. An image that waits already gets the newer access.

        An image whose download runs is not downloaded again.
        """
        with self._changed:
            self._waiting |= {image.id: (image, access) for image in images}
            self._changed.notify()

    def close(self) -> None:
        """Make ``work`` return, and cancel a running download. Do not wait for either."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def work(self) -> None:
        """Download the queued images one after the other, and report each outcome, until ``close``.

        A download that ``close`` cancels is not reported.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                key = next(iter(self._waiting))
                image, access = self._waiting[key]
            problem = self._fetch(image, access)
            with self._changed:
                self._waiting.pop(key)
            if problem is not None:
                self._report(key, problem)

    def _fetch(self, image: ImageRef, access: Access) -> str | None:
        """Download one image to this host.

        Returns:
            The reason of the failure, "" on success, or None if the download was cancelled.
        """
        context = VerbContext(lambda progress: None, cancelled=lambda: self._closed)
        try:
            self._driver.ensure_image(
                image, lambda image_id: self._download(access, image_id), context
            )
        except Cancelled:
            return None
        except (VerbFailed, errors.Problem) as problem:
            log.warning(
                "an image cannot be prefetched",
                image=image.id,
                problem=problem,
                details=getattr(problem, "details", ""),
            )
            return str(problem)
        except Exception:
            log.exception("an image cannot be prefetched", image=image.id)
            return "The host failed unexpectedly; its log says more."
        return ""
