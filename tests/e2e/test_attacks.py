# SPDX-License-Identifier: Apache-2.0
"""Attacks that succeeded against earlier versions, repeated against running clouds."""

from __future__ import annotations

import sys

import pytest

from tests.attacks.__main__ import ATTACKS
from tests.e2e.lab import LiveLab
from tests.e2e.live import Live

SECONDS = 800


#: Takes four minutes. tests/contract/test_host_link.py shows that the broker drops a flood.
BY_HAND = {"floods"}


def run_attacks(live: Live) -> None:
    names = [word for name in ATTACKS if name not in BY_HAND for word in ("--only", name)]
    result = live.run(
        sys.executable, "-m", "tests.attacks", "--home", live.home, *names, seconds=SECONDS
    )
    assert "refused in its name" in live.doctor().stdout
    # Later tests of this cloud expect that the doctor finds nothing.
    live.forget_refusals()
    lines = result.stdout.splitlines()
    assert result.returncode == 0, "\n".join(line for line in lines if line[:4] != "held")
    assert [line for line in lines if line.startswith("held")], result


@pytest.mark.slice("guests")
def test_formerly_successful_attacks_fail_on_cloud_of_one_machine(cloud: Live) -> None:
    cloud.open_all()
    try:
        run_attacks(cloud)
    finally:
        cloud.open_only(1)


@pytest.mark.slice("moves")
def test_formerly_successful_attacks_fail_on_lab_of_several_hosts(lab: LiveLab) -> None:
    run_attacks(lab)
