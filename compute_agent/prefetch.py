# SPDX-License-Identifier: Apache-2.0
"""Images that a host fetches before a server asks for them, one after the other.

``service`` gives them in (``add``) and runs ``work`` in a thread of its own; what became of each goes to ``tell``.
Nothing is remembered over a restart: conductors ask again until they are told.
"""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from common import errors
from common.models import Access, ImageRef
from compute_agent.virt.driver import Cancelled, Driver, Run, VerbFailed

log = logging.getLogger(__name__)
Download = Callable[[Access, str], Iterator[bytes]]


class Prefetch:
    """``download`` reads an image from the image service; ``tell(image, problem)`` hears of each, ``problem`` empty
    when it is here. Thread-safe."""

    def __init__(self, driver: Driver, download: Download, tell: Callable[[str, str], None]) -> None:
        self._driver, self._download, self._tell = driver, download, tell
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[ImageRef, Access]] = {}
        self._closed = False

    def add(self, images: Iterable[ImageRef], access: Access) -> None:
        """Fetch these too; one that waits already gets the newer access."""
        with self._changed:
            self._waiting |= {image.id: (image, access) for image in images}
            self._changed.notify()

    def close(self) -> None:
        """Stop, also in the middle of an image."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def work(self) -> None:
        """Loop until closed."""
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
                self._tell(key, problem)

    def _fetch(self, image: ImageRef, access: Access) -> str | None:
        """Why it is not here; None when there is nothing to tell."""
        run = Run(phase=lambda name: None, cancelled=lambda: self._closed)
        try:
            self._driver.ensure_image(image, lambda wanted: self._download(access, wanted), run)
        except Cancelled:
            return None
        except (VerbFailed, errors.Problem) as problem:
            log.warning("image %s is not fetched ahead: %s %s", image.id, problem, getattr(problem, "details", ""))
            return str(problem)
        except Exception:
            log.exception("image %s is not fetched ahead", image.id)
            return "The host failed unexpectedly; its log says more."
        return ""
