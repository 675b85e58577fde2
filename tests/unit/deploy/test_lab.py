# SPDX-License-Identifier: Apache-2.0
"""What ``deploy/lab`` says before anything runs: its facts, its hosts, and what to do about each
mistake. The lab itself is in tests/e2e/test_lab.py."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from deploy.one_machine import lab, lab_hosts
from deploy.one_machine.lab_hosts import Facts, Guest, Lab
from deploy.progress import Failure

FACTS = Facts(3, False, 20000)


def test_lab_knows_what_it_is_made_of(tmp_path: Path) -> None:
    made = Lab.make(tmp_path / "home", FACTS)
    again = Lab.open(tmp_path / "home")
    assert (tmp_path / "home/lab.json").stat().st_mode & 0o077 == 0
    assert again.cloud == made.cloud == Lab.make(tmp_path / "home", FACTS).cloud
    assert (
        again.cloud.hosts == ("lab1", "lab2", "lab3")
        and again.cloud.apart
        and not again.cloud.shared
    )
    assert again.cloud.ports.identity == 20000


def test_another_lab_and_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    Lab.make(tmp_path / "home", FACTS)
    with pytest.raises(
        Failure, match="3 hosts with storage of their own, ports from 20000"
    ) as told:
        Lab.make(tmp_path / "home", Facts(3, True, 20000))
    assert "lab down" in told.value.todo
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    with pytest.raises(Failure, match="is no lab, and not empty"):
        Lab.make(tmp_path / "mine", FACTS)
    with pytest.raises(Failure, match="There is no lab in") as told:
        Lab.open(tmp_path / "mine")
    assert "lab up 3" in told.value.todo


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["up"],
        ["up", "0"],
        ["up", "ten"],
        ["up", "3", "--share"],
        ["kill"],
        ["kill", "lab1", "lab2"],
        ["kill", "lab9"],
        ["kill", "lab1"],
        ["fence", "lab1"],
        ["strike", "lab1"],
        ["status", "lab1"],
        ["heal", "lab1"],
        ["start", "lab1"],
        ["status"],
    ],
)
def test_mistake_is_said_with_what_to_do(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILONOVA_HOME", str(tmp_path / "home"))
    Lab.make(tmp_path / "home", FACTS)
    with pytest.raises(Failure) as told:
        lab.command(arguments)
    assert told.value.what and told.value.todo


def test_unknown_host_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="no host 'rack1'") as told:
        Lab.make(tmp_path / "home", FACTS).kill("rack1")
    assert "lab1, lab2, lab3" in told.value.todo


@pytest.mark.parametrize("base", ["80", "many"])
def test_wrong_port_base_is_refused(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILONOVA_PORT_BASE", base)
    with pytest.raises(Failure, match=f"KILONOVA_PORT_BASE is '{base}'"):
        lab_hosts.facts("3", False)


def test_down_without_a_lab_is_harmless_and_leaves_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KILONOVA_HOME", str(tmp_path / "none"))
    assert lab.command(["down"]) == 0 and "there is no lab" in capsys.readouterr().out
    monkeypatch.setenv("KILONOVA_HOME", str(tmp_path))
    (tmp_path / "letter").touch()
    with pytest.raises(Failure, match="There is no lab"):
        lab.command(["down"])
    assert (tmp_path / "letter").exists()


def test_hook_is_a_program_that_takes_a_hosts_name(tmp_path: Path) -> None:
    made = Lab.make(tmp_path / "a home", FACTS)
    made.write_hook()
    ran = subprocess.run(
        [made.cloud.fencing_hook, "rack1"], capture_output=True, text=True, check=False
    )
    assert (
        ran.returncode == 1 and "no host 'rack1'" in ran.stderr and "lab1, lab2, lab3" in ran.stderr
    )
    assert json.loads((tmp_path / "a home/lab.json").read_text())["hosts"] == 3


def test_guests_are_all_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question to virsh: a guest that goes on between two questions was neither paused nor
    running."""
    folder, asked = tmp_path / "bin", tmp_path / "asked"
    folder.mkdir()
    (folder / "virsh").write_text(
        f'#!/bin/sh\necho "$*" >> {asked}\ncase "$*" in *domstats*)\n'
        + "".join(
            f"printf \"Domain: '{name}'\\n  state.state={state}\\n  state.reason=1\\n\\n\"\n"
            for name, state in (
                ("instance-c", 1),
                ("instance-b", 5),
                ("instance-a", 3),
                ("somebody's", 6),
            )
        )
        + ";;\nesac\n"
    )
    (folder / "virsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    guests = Lab.make(tmp_path / "home", FACTS).guests("lab2")
    assert guests == [
        Guest("a", "paused"),
        Guest("b", "shutoff"),
        Guest("c", "running"),
        Guest("somebody's", "other"),
    ]
    assert len(asked.read_text().splitlines()) == 1
