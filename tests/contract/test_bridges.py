# SPDX-License-Identifier: Apache-2.0
"""The bridge helper makes bridges for Neutron's Linux bridge agents in this machine's kernel.

Another process may make the same bridge at the same time.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compute_agent.privileged import bridges
from compute_agent.privileged.bridges import BridgeHelper, NotMade
from tests.contract.bridge_helper import start_helper
from tests.log_lines import logged_fields


@pytest.fixture
def helper(tmp_path: Path) -> BridgeHelper:
    return start_helper(tmp_path)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"brq{str(uuid.uuid4())[:11]}"
    yield name
    subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def read_attribute(name: str, attribute: str) -> str:
    return Path("/sys/class/net", name, attribute).read_text().strip()


def assert_ready(name: str) -> None:
    assert int(read_attribute(name, "flags"), 16) & bridges.IFF_UP
    assert (
        read_attribute(name, "bridge/stp_state"),
        read_attribute(name, "bridge/forward_delay"),
    ) == ("0", "0")
    ipv6 = bridges.IPV6 / name / "disable_ipv6"
    assert not ipv6.exists() or ipv6.read_text() == "1\n"


def test_bridge_helper_makes_bridge_up_without_stp_forward_delay_or_ipv6(
    helper: BridgeHelper, name: str
) -> None:
    helper.ensure(["kv-0123abcdef", name, "br-int"])
    assert_ready(name)
    number = read_attribute(name, "ifindex")
    helper.ensure([name])
    assert read_attribute(name, "ifindex") == number


def test_bridge_helper_leaves_settings_of_existing_bridge(helper: BridgeHelper, name: str) -> None:
    ip("link", "add", name, "up", "type", "bridge", "forward_delay", "300")
    helper.ensure([name])
    assert read_attribute(name, "bridge/forward_delay") == "300"


def test_bridge_helper_completes_existing_bridge_left_down(helper: BridgeHelper, name: str) -> None:
    ip("link", "add", name, "type", "bridge", "forward_delay", "0")
    helper.ensure([name])
    assert_ready(name)


def test_concurrent_creation_of_same_bridge_succeeds_for_all_callers(name: str) -> None:
    """Eight calls of the helper race with Neutron's agent, which makes the bridge directly."""
    start = threading.Barrier(9)

    def ours() -> None:
        start.wait()
        bridges.make(name)

    with ThreadPoolExecutor(9) as pool:
        calls = [pool.submit(ours) for _ in range(8)]
        start.wait()
        subprocess.run(
            ["ip", "link", "add", name, "type", "bridge", "forward_delay", "0"],
            check=False,
            capture_output=True,
        )
        for call in calls:
            call.result()
    assert_ready(name)


@pytest.mark.parametrize("state", ["down", "up"])
def test_bridge_helper_refuses_and_keeps_device_of_other_type(
    helper: BridgeHelper, name: str, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    ip("link", "add", name, "type", "ifb")
    ip("link", "set", name, state)
    caplog.set_level(logging.WARNING, bridges.__name__)
    with pytest.raises(NotMade, match=f"is not a bridge; delete it: ip link delete {name}"):
        bridges.make(name)
    helper.ensure([name])
    [fields] = logged_fields(caplog, "kilonova-bridges did not make a bridge")
    assert fields["bridge"] == name
    assert bool(int(read_attribute(name, "flags"), 16) & bridges.IFF_UP) == (state == "up")
