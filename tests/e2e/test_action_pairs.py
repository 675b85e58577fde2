# SPDX-License-Identifier: Apache-2.0
"""A server's disk holds what was written on it after every pair of actions in a row.

One guest of a lab goes through a walk of actions; before each something new is written on its disk,
and after each that is read, and what was written when the disk was new. Every pair, with
KILONOVA_STEPS=all, takes about an hour; otherwise the walk has so many steps, of the circuit that
KILONOVA_SEED draws.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.guests import Witness, witness
from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT, SETTLE
from tests.e2e.test_moves import admin, ask, larger
from tests.e2e.walks import every_pair
from tests.waiting import await_true

pytestmark = pytest.mark.slice("moves")

#: Where on the disk, in MiB, each step writes its number.
WRITTEN_AT = 80


@dataclass
class Walk:
    """The guest on its way. ``sizes``: two flavors, of which it has one."""

    lab: LiveLab
    guest: Witness
    sizes: tuple[str, str]
    written: str = ""

    def does(self, key: str, value: object = None, status: str = "ACTIVE", fine: int = 202) -> None:
        ask(admin(self.lab), self.guest, key, value, fine)
        self.guest.rest.await_status(self.guest.server, status, BOOT)

    def write(self, text: str) -> None:
        self.guest.run(
            f"echo {text} | dd of=/dev/vda bs=1M seek={WRITTEN_AT} conv=notrunc,fsync 2> /dev/null"
        )
        self.written = text

    def read(self) -> str:
        return self.guest.run(
            f"dd if=/dev/vda bs=1M skip={WRITTEN_AT} count=1 iflag=direct 2> /dev/null | head -n 1"
        ).strip("\n\0")

    def other_size(self) -> str:
        name = self.guest.rest.server(self.guest.server)["flavor"]["original_name"]
        compute = self.lab.seed.admin.compute
        return (
            self.sizes[1] if str(compute.find_flavor(name).id) == self.sizes[0] else self.sizes[0]
        )


def stop_and_start(walk: Walk) -> None:
    walk.does("os-stop", status="SHUTOFF")
    walk.does("os-start")


def reboot(walk: Walk) -> None:
    walk.does("reboot", {"type": "HARD"})


def pause(walk: Walk) -> None:
    walk.does("pause", status="PAUSED")
    walk.does("unpause")


def suspend(walk: Walk) -> None:
    walk.does("suspend", status="SUSPENDED")
    walk.does("resume")


def shelve(walk: Walk) -> None:
    walk.does("shelve", status="SHELVED_OFFLOADED")
    walk.does("unshelve")


def rescue(walk: Walk) -> None:
    walk.does("rescue", {"rescue_image_ref": walk.lab.image()}, "RESCUE", 200)
    walk.does("unrescue")


def snapshot(walk: Walk) -> None:
    name = f"{walk.guest.name}-snapshot"
    walk.does("createImage", {"name": name})
    await_true(lambda: walk.lab.images().get(name) == "active", SETTLE, walk.lab.images)
    for image in walk.lab.seed.demo.image.images(name=name):
        walk.lab.seed.demo.image.delete_image(image)


def resize(walk: Walk) -> None:
    walk.does("resize", {"flavorRef": walk.other_size()}, "VERIFY_RESIZE")
    walk.does("confirmResize", fine=204)


def revert(walk: Walk) -> None:
    walk.does("resize", {"flavorRef": walk.other_size()}, "VERIFY_RESIZE")
    walk.does("revertResize")


def migrate(walk: Walk) -> None:
    walk.does("migrate", status="VERIFY_RESIZE")
    walk.does("confirmResize", fine=204)


def migrate_live(walk: Walk) -> None:
    walk.does("os-migrateLive", {"host": None, "block_migration": "auto"})


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
#: Each walk begins with what has lost data once.
HEAD = ("shelve", "migrate", "shelve", "migrate_live")


def steps() -> list[str]:
    circuit = every_pair(list(ACTIONS), int(os.environ.get("KILONOVA_SEED", "0")))
    count = os.environ.get("KILONOVA_STEPS", "2")
    return [*HEAD, *(circuit if count == "all" else circuit[: int(count)])]


@pytest.fixture
def walk(lab: LiveLab) -> Iterator[Walk]:
    """A guest of one processor: what keeps an emulated one whole while it migrates takes turns on
    one (decision 0021)."""
    sizes = lab.flavor(), larger(lab, "pairs.larger", ram=160, vcpus=1, disk=1)
    with witness(lab, "pairs") as guest:
        yield Walk(lab, guest, sizes)


@pytest.mark.timeout(900 + 60 * len(steps()))
def test_disk_holds_what_was_written_after_every_pair_of_actions(walk: Walk) -> None:
    canary, done = walk.guest.account().canary, []
    for step, action in enumerate(steps()):
        walk.write(f"step-{step}")
        ACTIONS[action](walk)
        done.append(action)
        walk.guest.await_ssh()
        assert (walk.guest.account().canary, walk.read()) == (canary, walk.written), (
            f"after {' '.join(done)}"
        )
