# SPDX-License-Identifier: Apache-2.0
"""Names of bridges that the bridge helper accepts, without the kernel.

tests/contract/test_bridges.py creates real bridges.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest

from common.domain.models import Interface
from compute_agent.privileged import bridges
from compute_agent.privileged.bridges import BridgeHelper, NotMade
from compute_agent.virt.interfaces import plug
from tests.contract.bridge_helper import start_helper
from tests.log_lines import logged_fields


def test_bridge_helper_accepts_bridge_name_of_every_network() -> None:
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
def test_make_bridge_refuses_invalid_name_without_running_ip(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridges, "_ip", lambda *arguments: pytest.fail(f"ip {arguments}"))
    with pytest.raises(NotMade, match="not the name of a network's bridge"):
        bridges.make(name)


def test_bridge_helper_logs_no_message_when_not_installed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    BridgeHelper(tmp_path / "none").ensure([f"brq{str(uuid.uuid4())[:11]}"])
    assert caplog.records == []


def test_bridge_helper_logs_device_without_readable_flags(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"brq{str(uuid.uuid4())[:11]}"
    (tmp_path / name / "bridge").mkdir(parents=True)
    monkeypatch.setattr(bridges, "DEVICES", tmp_path)
    start_helper(tmp_path).ensure([name])
    [fields] = logged_fields(caplog, "kilonova-bridges did not make a bridge")
    assert fields["bridge"] == name and "[Errno 2]" in str(fields["problem"])
