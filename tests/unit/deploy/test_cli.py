# SPDX-License-Identifier: Apache-2.0
"""The command ``kilonova``: subcommands, output and exit status.

The database is an SQLite file. No host and no external service answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.domain.clock import SECOND
from common.security.broker_names import ROLES
from common.security.vault import Vault
from common.service import config
from common.service.notification_options import NotificationSettings
from common.store import schema
from common.store.engine import Store, now
from common.store.notifications import outbox
from common.store.servers import console_tokens, guests
from common.store.version import UPGRADED_TO, USABLE_FROM
from deploy.operator import doctor
from deploy.operator.commands import ARGUMENTS, COMMANDS
from deploy.operator.config import text
from deploy.operator.doctor.command import NO_ANSWER, facts, findings, status, tell
from deploy.operator.hosts.facts import ask_hosts
from deploy.operator.main import main, parser
from deploy.operator.store import sealed_columns
from tests.schemas import upgrade

FLAVOR = {"id": "f1", "name": "m1.nano", "vcpus": 1, "memory_mb": 64, "root_gb": 1}
SAMPLE = Path(__file__).resolve().parents[3] / "deploy/samples/kilonova.conf"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "kilonova.conf"
    path.write_text(f"[database]\nurl = sqlite:///{tmp_path}/k.db\n")
    return path


def test_config_sample_prints_sample_file_of_the_repository() -> None:
    assert SAMPLE.read_text() == text(), (
        "run: kilonova config sample > deploy/samples/kilonova.conf"
    )


def test_config_sample_names_every_option_and_loads_when_uncommented(tmp_path: Path) -> None:
    for options in config.OPTIONS.values():
        for option in options:
            assert f"#{option.dest} =" in text()
    lines = [
        line[1:] if line.startswith("#") and " = " in line and not line.startswith("# ") else line
        for line in text().splitlines()
    ]
    path = tmp_path / "all.conf"
    path.write_text(
        "\n".join(
            line for line in lines if "the host's name" not in line and not line.endswith("=")
        )
    )
    config.load(str(path))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_parser_accepts_every_command_and_its_function_exists(words: tuple[str, ...]) -> None:
    import importlib

    takes_one = any(
        name in ("host", "id", "about", "token", "file") for name, _ in ARGUMENTS.get(words, ())
    )
    required = [
        word
        for name, properties in ARGUMENTS.get(words, ())
        if properties.get("required")
        for word in (name, "192.0.2.1")
    ]
    role = [ROLES[0]] if "role" in dict(ARGUMENTS.get(words, ())) else []
    more = ["1"] if words in (("host", "discard"), ("host", "adopt")) else []
    words = (*words, *required)
    options = parser().parse_args([*words, "1", *more] if takes_one else [*words, *role])
    assert callable(getattr(importlib.import_module(options.module), options.function))


@pytest.mark.parametrize(
    "words",
    [
        ["doctor"],
        ["hosts"],
        ["status"],
        ["explain", "--flavor", "x"],
        ["consoles", "list"],
        ["database", "version"],
        ["host", "removals"],
        ["action", "list"],
        ["timeline", "a"],
        ["action", "show", "a"],
        ["action", "retry", "a"],
        ["cleanup", "list"],
        ["cleanup", "retry", "1"],
        ["cleanup", "cancel", "1"],
        ["host", "restore", "a"],
        ["host", "drain", "a"],
        ["host", "evacuate", "a"],
        ["host", "verify", "a"],
    ],
    ids=" ".join,
)
def test_command_on_missing_database_fails_and_creates_no_file(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = tmp_path / "kilonova.conf"
    conf.write_text(f"[database]\nurl = sqlite:///{tmp_path}/not/there/k.db\n")
    assert main(["--config", str(conf), *words]) == 1
    assert not (tmp_path / "not").exists()
    output = capsys.readouterr()
    if words != ["database", "version"]:
        assert (
            f"sqlite:///{tmp_path}/not/there/k.db" in output.err
            and "kilonova database upgrade" in output.err
        )


@pytest.mark.parametrize("words", [["config", "sample"], ["--help"]], ids=" ".join)
def test_command_ends_with_141_and_no_message_when_its_reader_closes_pipe(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed_pipe:
        done = subprocess.run(
            [sys.executable, "-m", "deploy.operator.main", *words],
            stdout=closed_pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_command_raises_broken_pipe_of_other_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_broken_pipe(options: object) -> int:
        raise BrokenPipeError("the broker's socket")

    monkeypatch.setattr("deploy.operator.config.sample", raise_broken_pipe)
    with pytest.raises(BrokenPipeError, match="broker"):
        main(["config", "sample"])


def test_database_upgrade_is_repeatable_and_version_shows_state(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(conf), "database", "version"]) == 1
    assert main(["--config", str(conf), "database", "upgrade"]) == 0
    assert main(["--config", str(conf), "database", "upgrade"]) == 0
    assert main(["--config", str(conf), "database", "version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "was empty" in lines[1] and "already" in lines[2]


def test_database_upgrade_refuses_database_newer_than_the_code(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--config", str(conf), "database", "upgrade"])
    store = Store.open(config.load(str(conf)))
    store.write(lambda tx: tx.execute(sa.text(f"UPDATE {USABLE_FROM} SET version_num = '9999'")))
    store.close()
    assert main(["--config", str(conf), "database", "upgrade"]) == 1
    output = capsys.readouterr().err
    assert "this code needs" in output and "install the release" in output


def test_database_upgrade_seals_user_data_only_when_secret_key_is_set(
    conf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def seal(store: Store, vault: Vault) -> int:
        return len(vault.open_text(Vault("key").seal_text("abc")))

    monkeypatch.setattr(sealed_columns, "seal_user_data", seal)
    assert main(["--config", str(conf), "database", "upgrade"]) == 0
    assert "sealed" not in capsys.readouterr().out
    conf.write_text(f"[DEFAULT]\nsecret_key = key\n{conf.read_text()}")
    assert main(["--config", str(conf), "database", "upgrade"]) == 0
    assert "user data of 3 servers" in capsys.readouterr().out


def test_consoles_list_shows_sessions_and_consoles_end_closes_them(
    conf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(conf), "database", "upgrade"]) == 0
    store, server = Store(f"sqlite:///{tmp_path}/k.db"), "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"
    store.write(lambda tx: guests.add(tx, [{"server_id": server, "host": "h1", "fence": 1}]))
    token = store.write(
        lambda tx: console_tokens.create(
            tx, server, "novnc", project_id="p", user_id="mira", seconds=60
        )
    )
    store.write(lambda tx: console_tokens.use(tx, token))
    capsys.readouterr()
    assert main(["--config", str(conf), "consoles", "list"]) == 0
    output = capsys.readouterr().out
    assert server in output and "mira" in output and token not in output
    assert main(["--config", str(conf), "consoles", "end"]) == 2
    assert main(["--config", str(conf), "consoles", "end", "--server", server]) == 0
    assert "1 console sessions" in capsys.readouterr().out
    assert store.read(console_tokens.sessions) == []
    store.close()


def test_status_and_doctor_refuse_an_empty_database(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["status"], ["doctor", "--no-hosts"]):
        assert main(["--config", str(conf), *command]) == 1
        assert "kilonova database upgrade" in capsys.readouterr().err


def test_doctor_of_empty_cloud_finds_nothing_and_names_missing_services(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--config", str(conf), "database", "upgrade"])
    assert main(["--config", str(conf), "doctor", "--no-hosts"]) == NO_ANSWER
    output = capsys.readouterr()
    last = output.out.splitlines()[-1]
    assert last.startswith("nothing found; not checked: ") and "the image service" in last
    # The other external services do not answer either, and stderr names them for monitoring.
    assert "the image service did not answer" in output.err
    assert main(["--config", str(conf), "doctor", "--no-hosts", "--fix", "lock/s"]) == 0
    assert "nothing to repair" in capsys.readouterr().out


def test_doctor_has_an_exit_status_for_each_outcome(
    conf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = doctor.Finding("two-domains", "s", "runs on h1, h2", facts=("h1", "h2"))
    assert [status([finding], ["h1"]), status([], ["h1"]), status([], [])] == [1, NO_ANSWER, 0]
    assert facts(finding)["id"] == "two-domains/s/h1/h2"
    store = upgrade(Store("sqlite://"))
    tell(store, [finding], as_json=False)
    first, cause, remedy, command, count = capsys.readouterr().out.splitlines()
    assert (first, count) == ("two-domains: s: runs on h1, h2", "1 findings")
    assert cause.startswith("    cause   ") and remedy.startswith("    remedy  ")
    assert command.strip() == "kilonova doctor --fix two-domains/s/h1/h2"
    tell(store, [finding], as_json=True)
    assert json.loads(capsys.readouterr().out) == [facts(finding)]
    store.close()

    def raise_no_store(*anything: object, **more: object) -> Store:
        raise errors.NoStore("The database does not answer.")

    monkeypatch.setattr(Store, "open", raise_no_store)
    assert main(["--config", str(conf), "doctor", "--no-hosts"]) == NO_ANSWER


def test_config_check_names_option_with_wrong_value(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conf.write_text("[api]\nport = 99999\n")
    assert main(["--config", str(conf), "config", "check"]) == 1
    assert "port" in capsys.readouterr().err


def test_config_check_refuses_wrong_vendor_data_target(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conf.write_text("[vendor_data]\nproviders = dynamic\ndynamic_targets = https://cmdb.example/\n")
    assert main(["--config", str(conf), "config", "check"]) == 1
    assert "[vendor_data] dynamic_targets" in capsys.readouterr().err


def test_doctor_reports_only_findings_seen_twice(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(store)
    looks = [{"h1": {"s": 1}}, {}]
    assert findings(store, lambda: looks.pop(0), pause=0) == []
    steady = findings(store, lambda: {"h1": {"s": 1}, "h2": {"s": 1}}, pause=0)
    assert doctor.Finding("two-domains", "s", "runs on h1, h2") in steady
    silent: list[str] = []
    assert ask_hosts(store, lambda host, verb, arguments: {}, silent) == {} and silent == []
    store.close()


def test_status_counts_waiting_notifications_and_doctor_finds_late_ones(
    conf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--config", str(conf), "database", "upgrade"])
    main(["--config", str(conf), "status"])
    assert capsys.readouterr().out.endswith("\nnotifications: 0\n")
    store = Store(f"sqlite:///{tmp_path}/k.db")
    store.notify_with(NotificationSettings("api"))
    for age in (outbox.LATE + 40 * SECOND, 0):
        store.write(lambda tx: outbox.tell(tx, "f1", FLAVOR, "flavor.create"))
        store.write(
            lambda tx, age=age: tx.execute(
                sa.update(schema.notifications)
                .where(  # type: ignore[misc]
                    schema.notifications.c.id
                    == sa.select(sa.func.max(schema.notifications.c.id)).scalar_subquery()
                )
                .values(created_at=now() - age)
            )
        )
    main(["--config", str(conf), "status"])
    assert (
        "\nnotifications: 2\n  the oldest, flavor.create of f1, for 34" in capsys.readouterr().out
    )
    outbox_findings = findings(store, dict, pause=0)
    assert [(finding.invariant, finding.subject) for finding in outbox_findings] == [
        ("notifications-sent", "outbox")
    ]
    assert "[oslo_messaging_notifications] transport_url" in outbox_findings[0].text
    [first, _second] = store.read(lambda tx: list(tx.execute(sa.select(schema.notifications.c.id))))
    store.write(lambda tx: outbox.strike(tx, [first.id]))
    assert findings(store, dict, pause=0) == []
    store.close()


def test_command_without_controller_libraries_names_package_to_install() -> None:
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "from deploy.operator.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "hosts"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("kilonova: this command needs the Python module ")
    assert "sqlalchemy" in done.stderr and "kilonova-control" in done.stderr
    assert done.stderr.count("\n") == 1


def test_command_on_newer_database_asks_for_newer_release(
    conf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--config", str(conf), "database", "upgrade"])
    store = Store(f"sqlite:///{tmp_path}/k.db")
    with store.begin() as tx:
        for table in (UPGRADED_TO, USABLE_FROM):
            tx.execute(sa.text(f"UPDATE {table} SET version_num = '9999'"))
    store.close()
    assert main(["--config", str(conf), "hosts"]) != 0
    output = capsys.readouterr().err
    assert "The database is newer than this code: install the release" in output
    assert "kilonova database upgrade" not in output
