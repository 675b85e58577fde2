# SPDX-License-Identifier: Apache-2.0
"""``kilonova config check|show``: what works and what does not, and where each value comes from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.service import config
from deploy.operator.main import main

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def run(text: str, *words: str, name: str = "kilonova.conf") -> tuple[int, str]:
        path = tmp_path / name
        path.write_text(text)
        status = main(["--config", str(path), "config", *words])
        told = capsys.readouterr()
        return status, told.out + told.err

    yield run
    config.CONF.clear()


def control_plane(folder: Path) -> str:
    return (
        "[DEFAULT]\ntransport_url = rabbit://kilonova:broker-secret@127.0.0.1:1/\n"
        f"[database]\nurl = sqlite:///{folder}/k.db\n"
        "[identity]\nauth_url = http://127.0.0.1:1/v3\n"
        "[image]\nendpoint = http://127.0.0.1:1\n"
    )


def test_each_neighbour_has_a_line(run: Run, tmp_path: Path) -> None:
    status, told = run(control_plane(tmp_path), "check")
    lines = told.splitlines()
    assert status == 1
    assert lines[0] == "the options are fine"
    names = [line.partition(": ")[0] for line in lines[1:]]
    assert names == ["database", "broker", "identity", "image", "network"]
    assert all("does not work: " in line for line in lines[1:])
    assert "Run: kilonova database upgrade" in lines[1]
    assert "broker-secret" not in told
    assert main(["--config", str(tmp_path / "kilonova.conf"), "database", "upgrade"]) == 0
    assert "database: works: sqlite, version " in run(control_plane(tmp_path), "check")[1]


def test_a_broker_that_is_not_named_is_said(run: Run) -> None:
    status, told = run("[identity]\nauth_url = http://127.0.0.1:1/v3\n", "check")
    assert status == 1
    assert "\nbroker: does not work: transport_url names no broker: set [DEFAULT]" in told


def test_only_the_file_is_read_when_that_is_asked(run: Run, tmp_path: Path) -> None:
    assert run(control_plane(tmp_path), "check", "--no-neighbours") == (
        0,
        "the options are fine\n",
    )


def test_what_nobody_reads_fails_the_check(run: Run) -> None:
    status, told = run("[api]\nprot = 1\n", "check")
    assert status == 1
    assert told.endswith("kilonova.conf:2: [api] has no option prot; the nearest is port\n")


@pytest.mark.parametrize("words", [("--agent",), ()])
def test_of_a_host_its_keys_and_libvirt_are_asked(
    run: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    name = "kilonova.conf" if words else "agent.conf"
    text = f"[DEFAULT]\nstate_dir = {tmp_path}\n[agent]\nlibvirt_uri = test:///default\n"
    status, told = run(text, "check", *words, name=name)
    broker, libvirt = told.splitlines()[1:]
    assert status == 1
    assert broker.startswith("broker: does not work: ") and str(tmp_path / "host.key") in broker
    assert libvirt.startswith("libvirt: works: test:///default, version ")


def test_show_tells_where_each_value_comes_from(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials/identity.password").write_text("hush")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    monkeypatch.setenv("OS_API__WORKERS", "3")
    text = "[DEFAULT]\nsecret_key = hush\n\n[api]\nport = 1\nmax_limit = 7\n"
    status, told = run(text, "show", "--json")
    assert status == 0 and "hush" not in told
    found = {row["option"]: (row["value"], row["from"]) for row in json.loads(told)}
    path = tmp_path / "kilonova.conf"
    assert found["[DEFAULT] secret_key"] == ("(set)", f"{path}:2")
    assert found["[api] port"] == ("1", f"{path}:5")
    assert found["[api] max_limit"] == ("7", f"{path}:6")
    assert found["[api] workers"] == ("3", "environment OS_API__WORKERS")
    assert found["[identity] password"] == ("(set)", "credential identity.password")
    assert found["[host_keys] query_secret"] == ("", "default")
    assert found["[api] threads"] == ("16", "default")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    told = run(text, "show", "--set")[1]
    assert [line.split()[:2] for line in told.splitlines()[1:]] == [
        ["[DEFAULT]", "secret_key"],
        ["[api]", "port"],
        ["[api]", "workers"],
        ["[api]", "max_limit"],
    ]
