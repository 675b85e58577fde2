# SPDX-License-Identifier: Apache-2.0
"""The systemd units start programs that exist, tell when they are ready, and are hardened."""
from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from deploy.lint import INSTALLED

ROOT = Path(__file__).resolve().parents[3]
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
HARDENED = ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "ProtectKernelModules", "RestrictSUIDSGID",
            "LockPersonality")


def lines(unit: Path) -> list[str]:
    return unit.read_text().splitlines()


def test_every_process_has_a_unit() -> None:
    assert {unit.stem for unit in UNITS} == {f"kilonova-{name}" for name in (
        "api", "console", "conductor", "scheduler", "agent", "identity", "image", "metadata")}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_tells_when_ready_comes_back_and_is_hardened(unit: Path) -> None:
    for wanted in ("Type=notify", "Restart=always", "ProtectSystem=strict", "UMask=0077",
                   *(f"{name}=yes" for name in HARDENED)):
        assert wanted in lines(unit)
    assert ("User=kilonova" in lines(unit)) == (unit.stem != "kilonova-agent")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_starts_a_program_of_the_package(unit: Path) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    programs = {line.split("=")[0].strip() for line in setup["options.entry_points"]["console_scripts"].split("\n")}
    start = next(line for line in lines(unit) if line.startswith("ExecStart=")).removeprefix("ExecStart=").split()
    assert start[0].startswith(INSTALLED)
    assert start[0].removeprefix(INSTALLED) in programs | {"python"}
    if start[1:2] == ["-m"]:
        assert (ROOT / start[2].replace(".", "/") / "__main__.py").exists()


def test_agent_has_a_configuration_of_its_own_without_the_database() -> None:
    unit = ROOT / "deploy/systemd/kilonova-agent.service"
    assert "Environment=KILONOVA_CONF=/etc/kilonova/agent.conf" in lines(unit)
