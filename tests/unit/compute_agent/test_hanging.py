# SPDX-License-Identifier: Apache-2.0
"""Commands that hang in the hypervisor: what the host tells of them, and who takes their place."""

from __future__ import annotations

import pytest

from common.domain.command_progress import CommandPhase, CommandProgress
from compute_agent.sync import HANG_SECONDS
from tests.unit.compute_agent.test_sync import Rig, command, taken


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_command_without_a_sign_of_life_hangs_and_leaves_its_place() -> None:
    rig = Rig(builds=1)
    rig.agent.accept(
        [
            command("a", "s1", verb="ensure_guest"),
            command("b", "s2", verb="ensure_guest"),
            command("c", "s1", fence=1),
        ]
    )
    work = rig.agent.take()
    assert work is not None
    work.progress = CommandProgress(CommandPhase.MAKING_DISKS)
    assert taken(rig.agent) == [], "one builds, and the other command is for the same server"
    for _ in range(int(HANG_SECONDS / 20)):
        rig.clock.seconds += 20
        rig.exchange()
    assert rig.agent.take_hanging() == [work]
    assert rig.agent.take_hanging() == []
    assert rig.exchange().phases[work.key] == CommandProgress(
        CommandPhase.MAKING_DISKS, stalled_verb="ensure_guest"
    )
    assert taken(rig.agent) == ["b"]
    rig.agent.is_alive(work)
    assert rig.exchange().phases[work.key] == CommandProgress(CommandPhase.MAKING_DISKS)
    rig.finish(work)
    assert taken(rig.agent) == ["c"]


def test_a_command_that_goes_on_does_not_hang(rig: Rig) -> None:
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None
    for _ in range(int(HANG_SECONDS / 20) + 1):
        rig.clock.seconds += 20
        rig.exchange()
        rig.agent.is_alive(work)
    assert rig.agent.take_hanging() == []
