# SPDX-License-Identifier: Apache-2.0
"""The systemd units: their programs, users, readiness notifications and hardening."""

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
    # A killed process is back within seconds, however often it dies (tests/e2e/test_storm.py).
    "RestartSec=1",
    "StartLimitIntervalSec=0",
    "UMask=0077",
    # All threads of a process share two heaps of malloc.
    "Environment=MALLOC_ARENA_MAX=2",
)
APART = (
    "Type=notify",
    "PrivateTmp=yes",
    "PrivateMounts=yes",
    "ProtectHome=yes",
    "ProtectKernelModules=yes",
    "ProtectSystem=strict",
)
#: This helper mounts network namespaces that its successor must see, so it shares the machine's
#: mounts.
NETWORK_HELPER = "kilonova-network-helper"
#: Units without readiness notification.
WITHOUT_NOTICE = ("kilonova-network-host", "kilonova-bridges", "kilonova-volumes")
#: Units that do not run as the user kilonova -> their user. None: the unit names no user.
USERS = {
    "kilonova-agent": "kilonova-agent",
    "kilonova-network-host": "kilonova-network",
    NETWORK_HELPER: None,
    "kilonova-bridges": None,
    "kilonova-volumes": None,
}


def read_lines(unit: Path) -> list[str]:
    return unit.read_text().splitlines()


def test_units_exist_for_every_process() -> None:
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
def test_unit_notifies_readiness_restarts_and_is_hardened(unit: Path) -> None:
    for line in (*HARDENED, *(APART if unit.stem != NETWORK_HELPER else ())):
        assert line in read_lines(unit) or (line == "Type=notify" and unit.stem in WITHOUT_NOTICE)
    user = USERS.get(unit.stem, "kilonova")
    assert [line for line in read_lines(unit) if line.startswith("User=")] == (
        [f"User={user}"] if user else []
    )


def test_sysusers_create_users_of_units() -> None:
    users = {
        line.split()[1]
        for file in (ROOT / "deploy/sysusers.d").iterdir()
        for line in read_lines(file)
        if line.startswith("u ")
    }
    users_of_units = {
        line.partition("=")[2]
        for unit in (ROOT / "deploy/systemd").iterdir()
        for line in read_lines(unit)
        if line.startswith(("User=", "Group=", "SocketUser="))
    }
    owners_of_files = {
        line.split()[4]
        for file in (ROOT / "deploy/tmpfiles.d").iterdir()
        for line in read_lines(file)
        if line[0] in "dz"
    }
    assert users_of_units == users
    assert owners_of_files <= users | {"root"}


def test_tmpfiles_keep_secrets_unreadable_for_others() -> None:
    files = [
        line.split()
        for file in (ROOT / "deploy/tmpfiles.d").iterdir()
        for line in read_lines(file)
        if line.startswith("z ")
    ]
    assert files
    assert [words for words in files if int(words[2], 8) & 0o027] == []
    assert [words for words in files if int(words[2], 8) & 0o040 and words[4] == "root"] == []


def test_security_lint_refuses_systemd_unit_with_less_protection(tmp_path: Path) -> None:
    unit = next(unit for unit in UNITS if unit.stem == "kilonova-conductor")
    opened_unit = tmp_path / unit.name
    opened_unit.write_text(
        "".join(
            f"{line}\n"
            for line in read_lines(unit)
            if not line.startswith(("Protect", "Capability"))
        )
    )
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    results = [
        subprocess.run(list(map(str, _score_command(path))), capture_output=True, check=False)
        for path in (unit, opened_unit)
    ]
    assert [result.returncode for result in results] == [0, 1], results


def test_security_lint_has_score_of_each_systemd_unit() -> None:
    assert sorted(SCORES) == sorted(unit.stem.removeprefix("kilonova-") for unit in UNITS)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_security_lint_threshold_of_systemd_unit_equals_its_score(unit: Path) -> None:
    """The unit passes with its threshold, and fails with a threshold that is lower by one."""
    *command, _ = map(str, _score_command(unit))
    [highest] = [word for word in command if word.startswith("--threshold=")]
    lower = f"--threshold={int(highest.partition('=')[2]) - 1}"
    commands = {
        word: [word if one == highest else one for one in command] for word in (highest, lower)
    }
    statuses = [
        subprocess.run([*words, str(unit)], capture_output=True, check=False).returncode
        for words in commands.values()
    ]
    assert statuses == [0, 1]


def test_network_helper_unit_shares_mounts_of_machine() -> None:
    unit = ROOT / f"deploy/systemd/{NETWORK_HELPER}.service"
    forbidden = ("Protect", "Private", "ReadOnly", "Mount", "Dynamic")
    # These options do not use mounts of their own.
    allowed = (
        "ProtectClock=yes",
        "ProtectHostname=yes",
        "PrivateMounts=no",
    )
    assert [
        line for line in read_lines(unit) if line.startswith(forbidden) and line not in allowed
    ] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_starts_program_of_package(unit: Path) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    programs = {
        line.split("=")[0].strip()
        for line in setup["options.entry_points"]["console_scripts"].split("\n")
    }
    start = (
        next(line for line in read_lines(unit) if line.startswith("ExecStart="))
        .removeprefix("ExecStart=")
        .split()
    )
    assert start[0].startswith(INSTALLED)
    assert start[0].removeprefix(INSTALLED) in programs | {"python"}
    if start[1:2] == ["-m"]:
        module = ROOT / start[2].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()


def test_agent_unit_reads_its_own_configuration_file() -> None:
    unit = ROOT / "deploy/systemd/kilonova-agent.service"
    assert "Environment=KILONOVA_CONF=/etc/kilonova/agent.conf" in read_lines(unit)


OWN = [unit for unit in UNITS if "KILONOVA_CONF" in unit.read_text()]


@pytest.mark.parametrize("unit", OWN, ids=lambda unit: unit.stem)
def test_unit_state_directory_is_state_dir_of_process(unit: Path) -> None:
    folder = config.AGENT_STATE if unit.stem == "kilonova-agent" else config.STATE
    assert f"StateDirectory={folder.removeprefix('/var/lib/')}" in read_lines(unit)


@pytest.mark.parametrize("unit", OWN, ids=lambda unit: unit.stem)
def test_unit_reload_sends_sighup(unit: Path) -> None:
    assert "ExecReload=/bin/kill -HUP $MAINPID" in read_lines(unit)


@pytest.mark.parametrize("unit", OWN, ids=lambda unit: unit.stem)
def test_unit_is_not_restarted_after_configuration_error(unit: Path) -> None:
    assert f"RestartPreventExitStatus={service.EX_CONFIG}" in read_lines(unit)
