# SPDX-License-Identifier: Apache-2.0
"""Commands that hang in the hypervisor: their report, and the build slots that they free."""

from __future__ import annotations

import pytest

from common.domain.command_progress import CommandPhase, CommandProgress
from compute_agent.sync import HANG_SECONDS
from tests.unit.compute_agent.test_sync import Rig, command, take_all


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_command_without_progress_is_hanging_and_frees_build_slot() -> None:
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
    assert take_all(rig.agent) == [], "one builds, and the other command is for the same server"
    for _ in range(int(HANG_SECONDS / 20)):
        rig.clock.seconds += 20
        rig.exchange()
    assert rig.agent.take_hanging() == [work]
    assert rig.agent.take_hanging() == []
    assert rig.exchange().phases[work.key] == CommandProgress(
        CommandPhase.MAKING_DISKS, stalled_verb="ensure_guest"
    )
    assert take_all(rig.agent) == ["b"]
    rig.agent.is_alive(work)
    assert rig.exchange().phases[work.key] == CommandProgress(CommandPhase.MAKING_DISKS)
    rig.finish(work)
    assert take_all(rig.agent) == ["c"]


def test_command_with_progress_is_not_hanging(rig: Rig) -> None:
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None
    for _ in range(int(HANG_SECONDS / 20) + 1):
        rig.clock.seconds += 20
        rig.exchange()
        rig.agent.is_alive(work)
    assert rig.agent.take_hanging() == []
