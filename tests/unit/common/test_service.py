# SPDX-License-Identifier: Apache-2.0
"""The lock of a state folder at the start of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.service import service


def test_second_agent_on_state_folder_in_use_exits_with_message(tmp_path: Path) -> None:
    first = service.only_one(str(tmp_path / "state"), "agent")
    with pytest.raises(
        SystemExit,
        match=f"kilonova-agent: another kilonova-agent uses {tmp_path}/state; give each process its",
    ):
        service.only_one(str(tmp_path / "state"), "agent")
    service.only_one(str(tmp_path / "other"), "agent").close()
    first.close()
    service.only_one(str(tmp_path / "state"), "agent").close()
