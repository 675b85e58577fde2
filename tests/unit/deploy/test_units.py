# SPDX-License-Identifier: Apache-2.0
"""The systemd units start programs that exist, tell when they are ready, and are hardened."""
from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from deploy.lint import INSTALLED

ROOT = Path(__file__).resolve().parents[3]
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
HARDENED = ("NoNewPrivileges=yes", "RestrictSUIDSGID=yes", "LockPersonality=yes", "Restart=always", "UMask=0077")
APART = ("Type=notify", "PrivateTmp=yes", "ProtectHome=yes", "ProtectKernelModules=yes", "ProtectSystem=strict")
#: It mounts network namespaces that others must see, so it has the machine's own mounts.
AMONG_OTHERS = "kilonova-network-host"
ROOT_THERE = ("kilonova-agent", AMONG_OTHERS)


def lines(unit: Path) -> list[str]:
    return unit.read_text().splitlines()


def test_every_process_has_a_unit() -> None:
    assert {unit.stem for unit in UNITS} == {f"kilonova-{name}" for name in (
        "api", "conductor", "scheduler", "agent", "metadata", "console", "placement", "image-gateway", "identity",
        "image", "network", "network-host")}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_tells_when_ready_comes_back_and_is_hardened(unit: Path) -> None:
    for wanted in (*HARDENED, *(APART if unit.stem != AMONG_OTHERS else ())):
        assert wanted in lines(unit)
    assert ("User=kilonova" in lines(unit)) == (unit.stem not in ROOT_THERE)


def test_host_part_shares_the_machines_mounts() -> None:
    unit = ROOT / f"deploy/systemd/{AMONG_OTHERS}.service"
    forbidden = ("Protect", "Private", "ReadOnly", "Mount", "Dynamic")
    assert [line for line in lines(unit) if line.startswith(forbidden)] == []


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
