# SPDX-License-Identifier: Apache-2.0
"""``kilonova config check`` and ``show``.

The tests cover the checks of external services, and the source of each value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import libvirt
import pytest

from common.clients import identity
from common.clients.identity import IdentityClient
from common.service import config
from deploy.operator import config_check
from deploy.operator.main import main

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def run_config(text: str, *words: str, name: str = "kilonova.conf") -> tuple[int, str]:
        path = tmp_path / name
        path.write_text(text)
        status = main(["--config", str(path), "config", *words])
        output = capsys.readouterr()
        return status, output.out + output.err

    yield run_config
    config.CONF.clear()


def control_plane(folder: Path) -> str:
    return (
        "[DEFAULT]\ntransport_url = rabbit://kilonova:broker-secret@127.0.0.1:1/\n"
        f"[database]\nurl = sqlite:///{folder}/k.db\n"
        "[identity]\nauth_url = http://127.0.0.1:1/v3\n"
        "[image]\nendpoint = http://127.0.0.1:1\n"
    )


def test_config_check_prints_line_for_database_broker_and_each_service(
    run_config: Run, tmp_path: Path
) -> None:
    status, output = run_config(control_plane(tmp_path), "check")
    lines = output.splitlines()
    assert status == 1
    assert lines[0] == "the options are fine"
    names = [line.partition(": ")[0] for line in lines[1:]]
    assert names == ["database", "broker", "identity", "image", "network"]
    assert all("does not work: " in line for line in lines[1:])
    assert "Run: kilonova database upgrade" in lines[1]
    assert "broker-secret" not in output
    assert main(["--config", str(tmp_path / "kilonova.conf"), "database", "upgrade"]) == 0
    assert "database: works: sqlite, version " in run_config(control_plane(tmp_path), "check")[1]


class UserWithoutRoles(IdentityClient):
    """A client of an identity service that accepts the login."""

    def look_in(self) -> None:
        """Accept the login."""

    def roles(self) -> list[str]:
        return ["Reader"]


def test_config_check_names_a_command_for_each_missing_role(
    run_config: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "IdentityClient", UserWithoutRoles)
    _, output = run_config(control_plane(tmp_path), "check")
    [line] = [line for line in output.splitlines() if line.startswith("identity: ")]
    assert "lacks admin and service. Run: openstack role add" in line
    assert line.count("openstack role add") == 2 and " admin; " in line and " service (" in line


def test_config_check_names_missing_transport_url(run_config: Run) -> None:
    status, output = run_config("[identity]\nauth_url = http://127.0.0.1:1/v3\n", "check")
    assert status == 1
    assert "\nbroker: does not work: transport_url names no broker: set [DEFAULT]" in output


def test_config_check_without_external_services_reads_only_the_file(
    run_config: Run, tmp_path: Path
) -> None:
    assert run_config(control_plane(tmp_path), "check", "--no-external-services") == (
        0,
        "the options are fine\n",
    )


def test_config_check_fails_on_unknown_option_and_names_nearest(run_config: Run) -> None:
    status, output = run_config("[api]\nprot = 1\n", "check")
    assert status == 1
    assert output.endswith("kilonova.conf:2: [api] has no option prot; the nearest is port\n")


@pytest.mark.parametrize("words", [("--agent",), ()])
def test_config_check_of_agent_checks_host_key_and_libvirt(
    run_config: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    name = "kilonova.conf" if words else "agent.conf"
    text = f"[DEFAULT]\nstate_dir = {tmp_path}\n[agent]\nlibvirt_uri = test:///default\n"
    status, output = run_config(text, "check", *words, name=name)
    broker, libvirt = output.splitlines()[1:]
    assert status == 1
    assert broker.startswith("broker: does not work: ") and str(tmp_path / "host.key") in broker
    assert libvirt.startswith("libvirt: works: test:///default, version ")


def test_config_check_of_agent_prints_refusal_of_libvirt(
    run_config: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(connection: object) -> str:
        raise libvirt.libvirtError("access denied")

    monkeypatch.setattr(config_check, "_version", refuse)
    text = f"[DEFAULT]\nstate_dir = {tmp_path}\n[agent]\nlibvirt_uri = test:///default\n"
    status, output = run_config(text, "check", "--agent")
    assert status == 1
    assert output.splitlines()[-1] == (
        "libvirt: does not work: libvirt at test:///default refuses to report its version: access denied."
    )


def test_config_check_reports_malformed_transport_url(run_config: Run, tmp_path: Path) -> None:
    text = control_plane(tmp_path).replace("rabbit://", "no url ")
    status, output = run_config(text, "check")
    assert status == 1
    assert "\nbroker: does not work: " in output and "\nidentity: " in output


def test_config_show_names_source_of_each_value_and_hides_secrets(
    run_config: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials/identity.password").write_text("hush")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    monkeypatch.setenv("OS_API__WORKERS", "3")
    text = "[DEFAULT]\nsecret_key = hush\n\n[api]\nport = 1\nmax_limit = 7\n"
    status, output = run_config(text, "show", "--json")
    assert status == 0 and "hush" not in output
    values_by_option = {row["option"]: (row["value"], row["from"]) for row in json.loads(output)}
    path = tmp_path / "kilonova.conf"
    assert values_by_option["[DEFAULT] secret_key"] == ("(set)", f"{path}:2")
    assert values_by_option["[api] port"] == ("1", f"{path}:5")
    assert values_by_option["[api] max_limit"] == ("7", f"{path}:6")
    assert values_by_option["[api] workers"] == ("3", "environment OS_API__WORKERS")
    assert values_by_option["[identity] password"] == ("(set)", "credential identity.password")
    assert values_by_option["[host_keys] query_secret"] == ("", "default")
    assert values_by_option["[api] threads"] == ("16", "default")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    output = run_config(text, "show", "--set")[1]
    assert [line.split()[:2] for line in output.splitlines()[1:]] == [
        ["[DEFAULT]", "secret_key"],
        ["[api]", "port"],
        ["[api]", "workers"],
        ["[api]", "max_limit"],
    ]
