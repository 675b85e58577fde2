# SPDX-License-Identifier: Apache-2.0
"""Bridges of networks that the compute service makes, in this machine's kernel: as Neutron's Linux
bridge agents want to find them, whoever makes the same one meanwhile."""

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
from tests.contract.bridge_helper import helper_of


@pytest.fixture
def helper(tmp_path: Path) -> BridgeHelper:
    return helper_of(tmp_path)


@pytest.fixture
def name() -> Iterator[str]:
    made = f"brq{str(uuid.uuid4())[:11]}"
    yield made
    subprocess.run(["ip", "link", "delete", made], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def said(name: str, what: str) -> str:
    return Path("/sys/class/net", name, what).read_text().strip()


def assert_ready(name: str) -> None:
    assert int(said(name, "flags"), 16) & bridges.IFF_UP
    assert (said(name, "bridge/stp_state"), said(name, "bridge/forward_delay")) == ("0", "0")
    ipv6 = bridges.IPV6 / name / "disable_ipv6"
    assert not ipv6.exists() or ipv6.read_text() == "1\n"


def test_bridge_is_made_and_the_host_has_no_address_on_it(helper: BridgeHelper, name: str) -> None:
    helper.ensure(["kv-0123abcdef", name, "br-int"])
    assert_ready(name)
    number = said(name, "ifindex")
    helper.ensure([name])
    assert said(name, "ifindex") == number


def test_one_that_others_made_is_left_as_it_is(helper: BridgeHelper, name: str) -> None:
    ip("link", "add", name, "up", "type", "bridge", "forward_delay", "300")
    helper.ensure([name])
    assert said(name, "bridge/forward_delay") == "300"


def test_one_that_is_half_made_is_completed(helper: BridgeHelper, name: str) -> None:
    ip("link", "add", name, "type", "bridge", "forward_delay", "0")
    helper.ensure([name])
    assert_ready(name)


def test_all_who_make_the_same_one_have_it(name: str) -> None:
    """Our helper, and Neutron's agent, which makes it without asking."""
    start = threading.Barrier(9)

    def ours() -> None:
        start.wait()
        bridges.make(name)

    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(ours) for _ in range(8)]
        start.wait()
        subprocess.run(
            ["ip", "link", "add", name, "type", "bridge", "forward_delay", "0"],
            check=False,
            capture_output=True,
        )
        for one in asked:
            one.result()
    assert_ready(name)


def test_device_that_is_no_bridge_is_refused_and_kept(
    helper: BridgeHelper, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ip("link", "add", name, "type", "ifb")
    caplog.set_level(logging.WARNING, bridges.__name__)
    with pytest.raises(NotMade, match=f"is no bridge; remove it: ip link delete {name}"):
        bridges.make(name)
    helper.ensure([name])
    assert f"did not make the bridge {name}" in caplog.text
    assert int(said(name, "flags"), 16) & bridges.IFF_UP == 0
