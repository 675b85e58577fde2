# SPDX-License-Identifier: Apache-2.0
"""``deploy/lab`` before any process runs.

The tests cover stored facts, arguments, and the advice after mistakes. tests/e2e/test_lab.py tests
the running lab.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from deploy.one_machine import lab, lab_hosts
from deploy.one_machine.lab_hosts import Facts, Guest, Lab
from deploy.progress import Failure

FACTS = Facts(3, False, 20000)


def test_lab_open_reads_facts_of_made_lab(tmp_path: Path) -> None:
    new_lab = Lab.make(tmp_path / "home", FACTS)
    again = Lab.open(tmp_path / "home")
    assert (tmp_path / "home/lab.json").stat().st_mode & 0o077 == 0
    assert again.cloud == new_lab.cloud == Lab.make(tmp_path / "home", FACTS).cloud
    assert (
        again.cloud.hosts == ("lab1", "lab2", "lab3")
        and again.cloud.apart
        and not again.cloud.shared
    )
    assert again.cloud.ports.identity == 20000


def test_lab_make_and_open_refuse_other_lab_and_foreign_folder(tmp_path: Path) -> None:
    Lab.make(tmp_path / "home", FACTS)
    with pytest.raises(
        Failure, match="3 hosts with storage of their own, ports from 20000"
    ) as failure:
        Lab.make(tmp_path / "home", Facts(3, True, 20000))
    assert "lab down" in failure.value.todo
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    with pytest.raises(Failure, match="is not empty, and not the home of a lab"):
        Lab.make(tmp_path / "mine", FACTS)
    with pytest.raises(Failure, match="There is no lab in") as failure:
        Lab.open(tmp_path / "mine")
    assert "lab up 3" in failure.value.todo


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
def test_lab_command_with_wrong_arguments_or_stopped_lab_fails_with_advice(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILONOVA_HOME", str(tmp_path / "home"))
    Lab.make(tmp_path / "home", FACTS)
    with pytest.raises(Failure) as failure:
        lab.command(arguments)
    assert failure.value.what and failure.value.todo


def test_lab_kill_of_unknown_host_lists_known_hosts(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="no host 'rack1'") as failure:
        Lab.make(tmp_path / "home", FACTS).kill("rack1")
    assert "lab1, lab2, lab3" in failure.value.todo


@pytest.mark.parametrize("base", ["80", "many"])
def test_lab_refuses_wrong_port_base(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILONOVA_PORT_BASE", base)
    with pytest.raises(Failure, match=f"KILONOVA_PORT_BASE is '{base}'"):
        lab_hosts.facts("3", False)


def test_lab_down_succeeds_without_folder_and_refuses_foreign_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KILONOVA_HOME", str(tmp_path / "none"))
    assert lab.command(["down"]) == 0 and "there is no lab" in capsys.readouterr().out
    monkeypatch.setenv("KILONOVA_HOME", str(tmp_path))
    (tmp_path / "letter").touch()
    with pytest.raises(Failure, match="There is no lab"):
        lab.command(["down"])
    assert (tmp_path / "letter").exists()


def test_lab_fencing_hook_is_program_and_refuses_unknown_host(tmp_path: Path) -> None:
    new_lab = Lab.make(tmp_path / "a home", FACTS)
    new_lab.write_hook()
    result = subprocess.run(
        [new_lab.cloud.fencing_hook, "rack1"], capture_output=True, text=True, check=False
    )
    assert (
        result.returncode == 1
        and "no host 'rack1'" in result.stderr
        and "lab1, lab2, lab3" in result.stderr
    )
    assert json.loads((tmp_path / "a home/lab.json").read_text())["hosts"] == 3


def test_lab_guests_reads_all_states_with_one_virsh_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two calls, a guest that is resumed between them would be missing from both answers."""
    folder, calls_file = tmp_path / "bin", tmp_path / "asked"
    folder.mkdir()
    (folder / "virsh").write_text(
        f'#!/bin/sh\necho "$*" >> {calls_file}\ncase "$*" in *domstats*)\n'
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
    assert len(calls_file.read_text().splitlines()) == 1
