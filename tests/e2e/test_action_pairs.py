# SPDX-License-Identifier: Apache-2.0
"""A server keeps the data on its disk through every pair of consecutive actions.

A guest of a lab goes through a series of actions. It writes a canary to the disk at the first boot,
and a count all the time. After each action the test reads the canary, and a guest that has booted
again must find the last count of the boot before. With
KILONOVA_STEPS=all the series contains every pair and takes about an hour. Otherwise it contains
that many steps, from an order that KILONOVA_SEED draws.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT, SETTLE
from tests.e2e.mini_guest import MiniGuest, find_image, mini_guest
from tests.e2e.test_moves import admin, ask, ensure_flavor
from tests.e2e.walks import every_pair
from tests.mini_image import UNWRITTEN, MiniGuestState
from tests.waiting import await_true

pytestmark = pytest.mark.slice("moves")


@dataclass
class Walk:
    """The guest during the series. The resizes alternate between the two flavors in ``sizes``."""

    lab: LiveLab
    guest: MiniGuest
    sizes: tuple[str, str]

    def run_action(
        self, key: str, value: object = None, status: str = "ACTIVE", expected: int = 202
    ) -> None:
        ask(admin(self.lab), self.guest, key, value, expected)
        self.guest.rest.await_status(self.guest.server, status, BOOT)

    def check_kept(self, before: MiniGuestState) -> MiniGuestState:
        """Check that disk and memory are as in ``before``, or the disk after a boot."""
        after = self.guest.read_state()
        assert after.canary == before.canary
        if after.run == before.run:
            assert after.count > before.count
        else:
            assert after.was[0] == before.run and after.was[1] > before.count - UNWRITTEN
        return after

    def other_size(self) -> str:
        name = self.guest.rest.server(self.guest.server)["flavor"]["original_name"]
        compute = self.lab.seed.admin.compute
        return (
            self.sizes[1] if str(compute.find_flavor(name).id) == self.sizes[0] else self.sizes[0]
        )


def stop_and_start(walk: Walk) -> None:
    walk.run_action("os-stop", status="SHUTOFF")
    walk.run_action("os-start")


def reboot(walk: Walk) -> None:
    walk.run_action("reboot", {"type": "HARD"})


def pause(walk: Walk) -> None:
    walk.run_action("pause", status="PAUSED")
    walk.run_action("unpause")


def suspend(walk: Walk) -> None:
    walk.run_action("suspend", status="SUSPENDED")
    walk.run_action("resume")


def shelve(walk: Walk) -> None:
    walk.run_action("shelve", status="SHELVED_OFFLOADED")
    walk.run_action("unshelve")


def rescue(walk: Walk) -> None:
    walk.run_action("rescue", {"rescue_image_ref": find_image(walk.lab)}, "RESCUE", 200)
    walk.run_action("unrescue")


def snapshot(walk: Walk) -> None:
    name = f"{walk.guest.name}-snapshot"
    walk.run_action("createImage", {"name": name})
    await_true(lambda: walk.lab.images().get(name) == "active", SETTLE, walk.lab.images)
    for image in walk.lab.seed.demo.image.images(name=name):
        walk.lab.seed.demo.image.delete_image(image)


def resize(walk: Walk) -> None:
    walk.run_action("resize", {"flavorRef": walk.other_size()}, "VERIFY_RESIZE")
    walk.run_action("confirmResize", expected=204)


def revert(walk: Walk) -> None:
    walk.run_action("resize", {"flavorRef": walk.other_size()}, "VERIFY_RESIZE")
    walk.run_action("revertResize")


def migrate(walk: Walk) -> None:
    walk.run_action("migrate", status="VERIFY_RESIZE")
    walk.run_action("confirmResize", expected=204)


def migrate_live(walk: Walk) -> None:
    walk.run_action("os-migrateLive", {"host": None, "block_migration": "auto"})


ACTIONS: dict[str, Callable[[Walk], None]] = {
    action.__name__: action
    for action in (
        stop_and_start,
        reboot,
        pause,
        suspend,
        shelve,
        rescue,
        snapshot,
        resize,
        revert,
        migrate,
        migrate_live,
    )
}
#: Each series begins with the actions that lost data in an earlier version.
HEAD = ("shelve", "migrate", "shelve", "migrate_live")


def list_steps() -> list[str]:
    circuit = every_pair(list(ACTIONS), int(os.environ.get("KILONOVA_SEED", "0")))
    count = os.environ.get("KILONOVA_STEPS", "2")
    return [*HEAD, *(circuit if count == "all" else circuit[: int(count)])]


@pytest.fixture
def walk(lab: LiveLab) -> Iterator[Walk]:
    sizes = lab.flavor(), ensure_flavor(lab, "pairs.larger", ram=160, vcpus=1, disk=1)
    with mini_guest(lab, "pairs") as guest:
        yield Walk(lab, guest, sizes)


@pytest.mark.timeout(900 + 60 * len(list_steps()))
def test_server_disk_keeps_data_through_selected_pairs_of_actions(walk: Walk) -> None:
    state, finished_actions = walk.guest.read_state(), []
    for action in list_steps():
        ACTIONS[action](walk)
        finished_actions.append(action)
        try:
            state = walk.check_kept(state)
        except AssertionError as problem:
            problem.add_note(f"after {' '.join(finished_actions)}")
            raise
