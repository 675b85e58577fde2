# SPDX-License-Identifier: Apache-2.0
"""PostgreSQL on the first controller: role, database, and access of other controllers."""

from __future__ import annotations

import ipaddress

from common.domain.errors import ConfigError
from deploy.operator.setup.certificates import Certificates
from deploy.operator.setup.machine import Machine, read, require
from deploy.operator.setup.plan import Step

#: The result is "t" if the server has read list of hosts and certificate since their last change.
_IS_LOADED = """
SELECT pg_conf_load_time() >= greatest(
    (pg_stat_file(current_setting('hba_file'))).modification,
    (pg_stat_file(current_setting('ssl_cert_file'))).modification)
"""


class Database:
    """The database of the cloud. ``password`` is that of the role kilonova."""

    def __init__(self, machine: Machine, password: str) -> None:
        self._machine, self._password = machine, password

    def step(self) -> Step:
        return Step("PostgreSQL: role and database kilonova", self._can_log_in, self._create)

    def _can_log_in(self) -> bool:
        words = ("psql", "-XAtq", "-h", "127.0.0.1", "-U", "kilonova", "-c", "SELECT 1", "kilonova")
        return self._machine.run(*words, environment={"PGPASSWORD": self._password}).status == 0

    def _create(self) -> None:
        if not query(self._machine, "SELECT 1 FROM pg_roles WHERE rolname = 'kilonova'"):
            query(self._machine, f"CREATE ROLE kilonova LOGIN PASSWORD {quote(self._password)}")
        if not query(self._machine, "SELECT 1 FROM pg_database WHERE datname = 'kilonova'"):
            query(self._machine, "CREATE DATABASE kilonova OWNER kilonova")
        if not self._can_log_in():
            raise ConfigError(
                "PostgreSQL has a role kilonova that does not accept the password in [database] url. Set that "
                "password: runuser -u postgres -- psql -c '\\password kilonova'"
            )


class RemoteAccess:
    """Access to PostgreSQL over TLS for another controller.

    Args:
        machine: The first controller.
        certificates: The certificates of the first controller.
        address: The address of the first controller.
        other: The address of the other controller.
    """

    def __init__(
        self, machine: Machine, certificates: Certificates, address: str, other: str
    ) -> None:
        self._machine, self._certificates, self._address = machine, certificates, address
        self._copy = machine.etc / "postgresql/controller.pem"
        self._line = f"hostssl kilonova kilonova {ipaddress.ip_network(other)} scram-sha-256"
        self._title = f"PostgreSQL accepts {other} over TLS (restarts PostgreSQL)"

    def step(self) -> Step:
        return Step(self._title, self._is_open, self._open)

    def _is_open(self) -> bool:
        return (
            read(self._copy) == read(self._certificates.own)
            and self._has_line()
            and self._listens()
            and query(self._machine, "SHOW ssl_cert_file") == str(self._copy)
            and query(self._machine, _IS_LOADED) == "t"
        )

    def _has_line(self) -> bool:
        lines = query(self._machine, "SELECT pg_read_file(current_setting('hba_file'))")
        return self._line in lines.splitlines()

    def _listens(self) -> bool:
        present = query(self._machine, "SHOW listen_addresses").replace(" ", "").split(",")
        return not {"*", self._address}.isdisjoint(present)

    def _open(self) -> None:
        own = self._certificates.own.read_text()
        self._machine.write(self._copy, own, 0o400, "postgres", "postgres")
        if not self._has_line():
            path = query(self._machine, "SHOW hba_file")
            require(self._machine, "tee", "--append", path, stdin=f"{self._line}\n")
        if not self._listens():
            present = query(self._machine, "SHOW listen_addresses")
            addresses = quote(f"{present}, {self._address}")
            query(self._machine, f"ALTER SYSTEM SET listen_addresses = {addresses}")
        for name in ("ssl_cert_file", "ssl_key_file"):
            query(self._machine, f"ALTER SYSTEM SET {name} = {quote(str(self._copy))}")
        require(self._machine, "systemctl", "restart", "postgresql")


def query(machine: Machine, statement: str) -> str:
    """Run a statement as the administrator of PostgreSQL, and return the rows.

    The statement goes through the standard input, because it may contain a password.

    Raises:
        ConfigError: PostgreSQL does not run, or refuses the statement.
    """
    words = ("runuser", "-u", "postgres", "--", "psql", "-XAtq", "-v", "ON_ERROR_STOP=1")
    return require(machine, *words, stdin=f"{statement};\n")


def quote(text: str) -> str:
    """Return the text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"
