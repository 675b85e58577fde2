# SPDX-License-Identifier: Apache-2.0
"""Processes and commands with a password that the database, the broker or Keystone refuses.

Each process runs for real, and exits with one line that names the option. An external service that
does not answer is no refusal and ends no process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from common import access
from common.domain import errors
from common.service import config
from common.service.service import EX_CONFIG
from common.store.engine import Store
from deploy.operator.main import main
from deploy.testing.servers import Servers, free_ports
from tests.standalone import Cloud
from tests.waiting import await_true

WRONG = "wr0ng-password"
#: Processes, grouped by the service that they contact at start.
DATABASE_PROCESSES = ("conductor.service", "scheduler.service", "compute_api.metadata.service")
IDENTITY_PROCESSES = ("compute_api.compute.service", "compute_api.placement.service")


def with_wrong_password(url: str) -> str:
    return sa.make_url(url).set(password=WRONG).render_as_string(hide_password=False)


def run_service(folder: Path, module: str, *lines: str) -> subprocess.CompletedProcess[str]:
    path = folder / "kilonova.conf"
    port = free_ports(3)  # first of three consecutive ports
    path.write_text(
        "\n".join(
            (
                "[DEFAULT]",
                f"state_dir = {folder}",
                "secret_key = sealing",
                *lines,
                "[host_keys]",
                "command_secret = commands",
                "query_secret = queries",
                *("[api]", f"port = {port}"),
                *("[placement]", f"port = {port + 1}"),
                *("[metadata]", f"port = {port + 2}", "proxy_shared_secret = x"),
            )
        )
        + "\n"
    )
    return subprocess.run(
        [sys.executable, "-m", module],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "KILONOVA_CONF": str(path)},
    )


def assert_exit_with_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == EX_CONFIG, result.stderr
    lines = [line for line in result.stderr.splitlines() if "INFO" not in line]
    [line] = [line for line in lines if line.startswith("kilonova-")]
    assert [word for word in words if word not in line] == []
    assert "Traceback" not in result.stderr
    assert WRONG not in result.stderr
    # gunicorn's master logs the end of the worker.
    assert len(lines) <= 4, result.stderr


@pytest.mark.parametrize("module", DATABASE_PROCESSES)
@pytest.mark.parametrize(
    "kind", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slice("operations"))]
)
def test_service_with_wrong_database_password_exits_and_names_option(
    tmp_path: Path, upgraded_database: Callable[[str], str], kind: str, module: str
) -> None:
    url = with_wrong_password(upgraded_database(kind)).replace("$", "$$")
    assert_exit_with_one_line(
        run_service(tmp_path, module, "[database]", f"url = {url}"),
        "[database] url: the database refuses",
    )


def refusal(url: str) -> str:
    """Return the database's refusal of a connection, with the remedy for the operator."""
    with closing(Store(url)) as store:
        try:
            store.look_in()
        except errors.ConfigError as problem:
            return str(problem)
    return ""


def test_postgresql_refusal_without_pg_hba_entry_names_line_to_add() -> None:
    with tempfile.TemporaryDirectory(prefix="kn-hba-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            url = servers.start("postgresql")
            with closing(Store(url)) as store, store.begin() as tx:
                [path] = Path(folder).glob("**/pg_hba.conf")
                path.write_text("local all all scram-sha-256\n")
                tx.execute(sa.text("SELECT pg_reload_conf()"))

            def is_refused() -> bool:
                return "no pg_hba.conf entry for host" in refusal(url)

            await_true(is_refused, 10)
            text = refusal(url)
    assert "hostssl postgres kilonova ADDRESS/32 scram-sha-256" in text
    assert "SELECT pg_reload_conf()" in text and "password and database" not in text


def test_mariadb_refusal_without_account_names_create_user_command(
    new_database: Callable[[str], str],
) -> None:
    text = refusal(
        sa.make_url(new_database("mariadb"))
        .update_query_dict({"bind_address": "127.0.0.2"})
        .render_as_string(hide_password=False)
    )
    assert "not allowed to connect" in text
    assert "CREATE USER 'kilonova'@'ADDRESS' IDENTIFIED BY 'PASSWORD'" in text


def test_mariadb_refusal_of_password_suggests_account_for_this_address(
    new_database: Callable[[str], str],
) -> None:
    text = refusal(with_wrong_password(new_database("mariadb")))
    assert "Access denied" in text and "or create the account for the address" in text


@pytest.mark.parametrize("command", ["hosts", "status", "doctor"])
def test_cli_command_names_database_option_when_password_is_refused(
    tmp_path: Path,
    new_database: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    path = tmp_path / "kilonova.conf"
    path.write_text(f"[database]\nurl = {with_wrong_password(new_database('postgresql'))}\n")
    assert main(["--config", str(path), command]) != 0
    output = capsys.readouterr().err
    assert "[database] url: the database refuses" in output and WRONG not in output
    assert "does not answer" not in output


def test_conductor_with_invalid_sqlite_file_exits_and_names_option(tmp_path: Path) -> None:
    (tmp_path / "k.db").write_text("no database" * 200)
    assert_exit_with_one_line(
        run_service(
            tmp_path, "conductor.service", "[database]", f"url = sqlite:///{tmp_path}/k.db"
        ),
        "[database] url: the database refuses the connection",
    )


@pytest.mark.parametrize("module", ["conductor.service", "scheduler.service"])
def test_service_with_wrong_broker_password_exits_and_names_option(
    tmp_path: Path, rabbitmq_url: str, module: str
) -> None:
    url = sa.make_url(rabbitmq_url)
    result = run_service(
        tmp_path,
        module,
        f"transport_url = {with_wrong_password(rabbitmq_url)}",
        "[database]",
        f"url = sqlite:///{tmp_path}/k.db",
    )
    assert_exit_with_one_line(
        result, f"transport_url: the broker refuses {url.username}", "ACCESS_REFUSED"
    )


@pytest.mark.parametrize("module", IDENTITY_PROCESSES)
def test_api_with_wrong_keystone_password_exits_and_names_options(
    tmp_path: Path, standalone_cloud: Cloud, module: str
) -> None:
    result = run_service(
        tmp_path,
        module,
        "transport_url = rabbit://u:p@127.0.0.1:1/",
        "[database]",
        f"url = sqlite:///{tmp_path}/k.db",
        "[identity]",
        f"auth_url = {standalone_cloud.auth_url}",
        f"password = {WRONG}",
    )
    assert_exit_with_one_line(
        result, "[identity] username, password, project_name", "401 to user kilonova"
    )


@pytest.mark.parametrize("neighbour", access.CHECKS)
def test_access_check_passes_when_service_does_not_answer(tmp_path: Path, neighbour: str) -> None:
    path = tmp_path / "kilonova.conf"
    path.write_text(
        "[DEFAULT]\ntransport_url = rabbit://u:p@127.0.0.1:1/\n"
        "[database]\nurl = postgresql+psycopg://u:p@127.0.0.1:1/k\n"
        "[identity]\nauth_url = http://127.0.0.1:1/v3\n"
    )
    try:
        access.check(config.load(str(path)), neighbour)
    finally:
        config.CONF.clear()


@pytest.mark.parametrize(
    ("service", "lines"),
    [
        (access.DATABASE, "[database]\nurl = postgresql+psycopg://u:p@127.0.0.1:{port}/k\n"),
        (access.BROKER, "[DEFAULT]\ntransport_url = rabbit://u:p@127.0.0.1:{port}/\n"),
    ],
)
@pytest.mark.parametrize("port", ["secret", "99999"])
def test_access_check_with_invalid_port_names_option_and_hides_url(
    tmp_path: Path, service: str, lines: str, port: str
) -> None:
    """In a URL whose password has the character # or /, the password counts as the port."""
    path = tmp_path / "kilonova.conf"
    path.write_text(lines.format(port=port))
    try:
        with pytest.raises(errors.ConfigError, match="url") as refusal:
            access.check(config.load(str(path)), service)
    finally:
        config.CONF.clear()
    assert "port" in str(refusal.value) and port not in str(refusal.value)
