# SPDX-License-Identifier: Apache-2.0
"""Guests of a cloud that run the mini image (tests/mini_image.py)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tests.e2e.guests import LiveServer, create_server
from tests.e2e.live import BOOT, LATE, Live
from tests.mini_image import MiniGuestState, assemble
from tests.waiting import await_true

IMAGE = "mini"


def find_image(live: Live) -> str:
    """Return the id of the guest's image. Create the image if the cloud has none."""
    images = live.seed.demo.image
    for image in images.images(name=IMAGE, status="active"):
        return str(image.id)
    image = images.create_image(
        IMAGE, data=assemble(), disk_format="qcow2", container_format="bare"
    )
    return str(image.id)


@dataclass(frozen=True)
class MiniGuest(LiveServer):
    """A guest that runs mini_image.S."""

    def read_console_state(self) -> MiniGuestState | None:
        """Return the last state on the console. The guest may not run any more."""
        return MiniGuestState.of(self.rest.console(self.server))

    def read_state(self, seconds: float = BOOT) -> MiniGuestState:
        """Wait until the guest counts, and return its state."""
        before = self.read_console_state()

        def read_newer() -> MiniGuestState | None:
            state = self.read_console_state()
            return state if state and state != before else None

        state = await_true(
            read_newer, seconds, lambda: f"{self.name} does not count: {before}", late=LATE
        )
        assert state is not None
        return state


@contextmanager
def mini_guest(live: Live, name: str, host: str | None = None, **more: Any) -> Iterator[MiniGuest]:
    """Create a mini guest for the block, on ``host`` if given, and wait until it counts.

    ``more`` has further fields of the create request.
    """
    full_name, fields = f"{name}-{uuid.uuid4().hex[:6]}", {"image": find_image(live), **more}
    with live.only(live.cloud.hosts.index(host) + 1) if host else nullcontext():
        guest = MiniGuest(live, create_server(live, full_name, **fields), full_name)
    try:
        guest.read_state()
        yield guest
    finally:
        guest.remove()
