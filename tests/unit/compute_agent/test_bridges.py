# SPDX-License-Identifier: Apache-2.0
"""Who may have which bridge made; the kernel's part is in tests/contract/test_bridges.py."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest

from common.domain.models import Interface
from compute_agent.privileged import bridges
from compute_agent.privileged.bridges import BridgeHelper, NotMade
from compute_agent.virt.interfaces import plug


def test_bridge_of_every_network_has_a_name_that_the_helper_takes() -> None:
    for _ in range(100):
        port = Interface("p", mac="fa:16:3e:0:0:1", vif_type="bridge", network=str(uuid.uuid4()))
        assert bridges.NAME.fullmatch(plug(port).bridge)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "br-int",
        "eth0",
        "brq",
        "brq0123abcd-0",
        "brq0123abcd-012",
        "brq../../abcd",
        "brq0123abcd-01\n",
    ],
)
def test_nothing_of_another_name_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "_ip", lambda *arguments: pytest.fail(f"ip {arguments}"))
    with pytest.raises(NotMade, match="no name of a network's bridge"):
        bridges.make(name)


def test_host_without_a_helper_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    BridgeHelper(tmp_path / "none").ensure([f"brq{str(uuid.uuid4())[:11]}"])
    assert caplog.records == []
