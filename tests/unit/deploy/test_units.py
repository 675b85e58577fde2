# SPDX-License-Identifier: Apache-2.0
"""The systemd units start programs that exist, tell when they are ready, and are hardened."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from common.service import config, service
from deploy.testing.lint import INSTALLED, SCORES, _score_command

ROOT = Path(__file__).resolve().parents[3]
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
HARDENED = (
    "NoNewPrivileges=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "Restart=always",
    "RestartSec=1",  # what is killed is back in seconds (tests/e2e/test_storm.py), however often
    "StartLimitIntervalSec=0",
    "UMask=0077",
)
APART = (
    "Type=notify",
    "PrivateTmp=yes",
    "PrivateMounts=yes",
    "ProtectHome=yes",
    "ProtectKernelModules=yes",
    "ProtectSystem=strict",
)
#: It mounts network namespaces that its successor must see, so it has the machine's own mounts.
AMONG_OTHERS = "kilonova-network-helper"
#: What can serve as soon as it runs, or when it has asked others.
WITHOUT_NOTICE = ("kilonova-network-host", "kilonova-bridges", "kilonova-volumes")
#: Who others than the user kilonova run as; None is root, or nobody
#: else: a user of systemd's making.
USERS = {
    "kilonova-agent": "kilonova-agent",
    "kilonova-network-host": "kilonova-network",
    AMONG_OTHERS: None,
    "kilonova-bridges": None,
    "kilonova-volumes": None,
}


def lines(unit: Path) -> list[str]:
    return unit.read_text().splitlines()


def test_every_process_has_a_unit() -> None:
    assert {unit.stem for unit in UNITS} == {
        f"kilonova-{name}"
        for name in (
            "api",
            "conductor",
            "scheduler",
            "agent",
            "metadata",
            "console",
            "placement",
            "image-gateway",
            "identity",
            "image",
            "network",
            "network-host",
            "network-helper",
            "bridges",
            "volumes",
        )
    }


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_tells_when_ready_comes_back_and_is_hardened(unit: Path) -> None:
    for wanted in (*HARDENED, *(APART if unit.stem != AMONG_OTHERS else ())):
        assert wanted in lines(unit) or (wanted == "Type=notify" and unit.stem in WITHOUT_NOTICE)
    user = USERS.get(unit.stem, "kilonova")
    assert [line for line in lines(unit) if line.startswith("User=")] == (
        [f"User={user}"] if user else []
    )


def test_users_of_units_are_made() -> None:
    made = {
        line.split()[1]
        for file in (ROOT / "deploy/sysusers.d").iterdir()
        for line in lines(file)
        if line.startswith("u ")
    }
    named = {
        line.partition("=")[2]
        for unit in (ROOT / "deploy/systemd").iterdir()
        for line in lines(unit)
        if line.startswith(("User=", "Group=", "SocketUser="))
    }
    kept = {
        line.split()[4]
        for file in (ROOT / "deploy/tmpfiles.d").iterdir()
        for line in lines(file)
        if line[0] in "dz"
    }
    assert named == made
    assert kept <= made | {"root"}


def test_secrets_are_their_readers_alone() -> None:
    files = [
        line.split()
        for file in (ROOT / "deploy/tmpfiles.d").iterdir()
        for line in lines(file)
        if line.startswith("z ")
    ]
    assert files
    assert [words for words in files if int(words[2], 8) & 0o027] == []
    assert [words for words in files if int(words[2], 8) & 0o040 and words[4] == "root"] == []


def test_lint_refuses_a_unit_that_leaves_more_open(tmp_path: Path) -> None:
    unit = next(unit for unit in UNITS if unit.stem == "kilonova-conductor")
    opened = tmp_path / unit.name
    opened.write_text(
        "".join(
            f"{line}\n" for line in lines(unit) if not line.startswith(("Protect", "Capability"))
        )
    )
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    said = [
        subprocess.run(list(map(str, _score_command(one))), capture_output=True, check=False)
        for one in (unit, opened)
    ]
    assert [done.returncode for done in said] == [0, 1], said


def test_each_unit_has_a_score() -> None:
    assert sorted(SCORES) == sorted(unit.stem.removeprefix("kilonova-") for unit in UNITS)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_may_score_what_it_does_and_no_more(unit: Path) -> None:
    """The highest score that is allowed passes, a tenth less does not."""
    *command, _ = map(str, _score_command(unit))
    [highest] = [word for word in command if word.startswith("--threshold=")]
    lower = f"--threshold={int(highest.partition('=')[2]) - 1}"
    asked = {
        word: [word if one == highest else one for one in command] for word in (highest, lower)
    }
    told = [
        subprocess.run([*words, str(unit)], capture_output=True, check=False).returncode
        for words in asked.values()
    ]
    assert told == [0, 1]


def test_helper_shares_the_machines_mounts() -> None:
    unit = ROOT / f"deploy/systemd/{AMONG_OTHERS}.service"
    forbidden = ("Protect", "Private", "ReadOnly", "Mount", "Dynamic")
    # by system calls and a name, without mounts
    allowed = (
        "ProtectClock=yes",
        "ProtectHostname=yes",
        "PrivateMounts=no",
    )
    assert [
        line for line in lines(unit) if line.startswith(forbidden) and line not in allowed
    ] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_starts_a_program_of_the_package(unit: Path) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    programs = {
        line.split("=")[0].strip()
        for line in setup["options.entry_points"]["console_scripts"].split("\n")
    }
    start = (
        next(line for line in lines(unit) if line.startswith("ExecStart="))
        .removeprefix("ExecStart=")
        .split()
    )
    assert start[0].startswith(INSTALLED)
    assert start[0].removeprefix(INSTALLED) in programs | {"python"}
    if start[1:2] == ["-m"]:
        module = ROOT / start[2].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()


def test_agent_has_a_configuration_of_its_own_without_the_database() -> None:
    unit = ROOT / "deploy/systemd/kilonova-agent.service"
    assert "Environment=KILONOVA_CONF=/etc/kilonova/agent.conf" in lines(unit)


OWN = [unit for unit in UNITS if "KILONOVA_CONF" in unit.read_text()]


@pytest.mark.parametrize("unit", OWN, ids=lambda unit: unit.stem)
def test_state_is_where_the_process_looks_for_it(unit: Path) -> None:
    folder = config.AGENT_STATE if unit.stem == "kilonova-agent" else config.STATE
    assert f"StateDirectory={folder.removeprefix('/var/lib/')}" in lines(unit)


@pytest.mark.parametrize("unit", OWN, ids=lambda unit: unit.stem)
def test_reload_has_the_configuration_read_again(unit: Path) -> None:
    assert "ExecReload=/bin/kill -HUP $MAINPID" in lines(unit)


@pytest.mark.parametrize("unit", OWN, ids=lambda unit: unit.stem)
def test_what_has_to_be_mended_first_is_not_started_again(unit: Path) -> None:
    assert f"RestartPreventExitStatus={service.EX_CONFIG}" in lines(unit)
