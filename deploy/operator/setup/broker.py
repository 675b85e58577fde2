# SPDX-License-Identifier: Apache-2.0
"""RabbitMQ on the first controller: TLS, management API and users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from common.domain.errors import ConfigError
from deploy.operator.setup.certificates import Certificates
from deploy.operator.setup.configuration import Values
from deploy.operator.setup.machine import Machine, read, require
from deploy.operator.setup.plan import Step

TLS_PORT, MANAGEMENT_PORT, PLUGIN = 5671, 15672, "rabbitmq_management"


class Broker:
    """The broker of the cloud.

    Args:
        machine: The first controller.
        values: Has the address, and the passwords of the two users.
        certificates: The certificates of the controller.
    """

    def __init__(self, machine: Machine, values: Values, certificates: Certificates) -> None:
        self._machine, self._address, self._certificates = machine, values.address, certificates
        self._folder = machine.etc / "rabbitmq"
        self._passwords = {"kilonova": unquote(values.broker), "operator": values.management}

    def steps(self) -> list[Step]:
        return [
            Step("RabbitMQ: only TLS (restarts RabbitMQ)", self._is_running, self._restart),
            Step("RabbitMQ: users kilonova and operator", self._has_users, self._add_users),
        ]

    def _files(self) -> dict[Path, tuple[str, int]]:
        """Return path -> text and mode of RabbitMQ's files."""
        folder = self._folder
        configuration = (
            f"listeners.tcp = none\nlisteners.ssl.default = {TLS_PORT}\n"
            f"ssl_options.cacertfile = {folder}/ca.pem\n"
            f"ssl_options.certfile = {folder}/controller.pem\n"
            f"ssl_options.keyfile = {folder}/controller.pem\n"
            "management.tcp.ip = 127.0.0.1\nmax_message_size = 17825792\n"
        )
        return {
            folder / "ca.pem": (read(self._certificates.ca), 0o444),
            folder / "controller.pem": (read(self._certificates.own), 0o400),
            folder / "rabbitmq.conf": (configuration, 0o644),
        }

    def _is_running(self) -> bool:
        path = self._folder / "rabbitmq.conf"
        present, required = set(read(path).splitlines()), self._files()[path][0].splitlines()
        if present and not present.issuperset(required):
            line = next(line for line in required if line not in present)
            raise ConfigError(f"{path} has other lines: add {line}, or move the file away")
        return (
            present.issuperset(required)
            and all(read(file) == text for file, (text, _) in self._files().items() if file != path)
            and PLUGIN in read(self._folder / "enabled_plugins")
            and self._machine.answers(self._address, TLS_PORT)
            and self._machine.answers("127.0.0.1", MANAGEMENT_PORT)
        )

    def _restart(self) -> None:
        for path, (text, mode) in self._files().items():
            if path.suffix == ".pem" or not path.exists():
                self._machine.write(path, text, mode, "rabbitmq", "rabbitmq")
        require(self._machine, "rabbitmq-plugins", "enable", "--offline", PLUGIN)
        require(self._machine, "systemctl", "restart", "rabbitmq-server")

    def _has_users(self) -> bool:
        tags, allowed = self._list("list_users"), self._list("list_permissions")
        return "administrator" in tags.get("operator", {}).get("tags", ()) and all(
            {allowed.get(name, {}).get(key) for key in ("configure", "write", "read")} == {".*"}
            and self._accepts(name)
            for name in self._passwords
        )

    def _list(self, kind: str) -> dict[str, Any]:
        """Return user -> row of a list of rabbitmqctl. No user if RabbitMQ does not run."""
        result = self._machine.run("rabbitmqctl", "--quiet", kind, "--formatter", "json")
        return {} if result.status else {row["user"]: row for row in json.loads(result.output)}

    def _accepts(self, name: str) -> bool:
        words = ("rabbitmqctl", "authenticate_user", name)
        return self._machine.run(*words, stdin=f"{self._passwords[name]}\n").status == 0

    def _add_users(self) -> None:
        present = self._list("list_users")
        for name, password in self._passwords.items():
            if name not in present:
                require(self._machine, "rabbitmqctl", "add_user", name, stdin=f"{password}\n")
            elif not self._accepts(name):
                raise ConfigError(
                    f"RabbitMQ has a user {name} with another password. If no other program uses that user, run: "
                    f"rabbitmqctl delete_user {name}"
                )
            require(self._machine, "rabbitmqctl", "set_permissions", name, ".*", ".*", ".*")
        require(self._machine, "rabbitmqctl", "set_user_tags", "operator", "administrator")
