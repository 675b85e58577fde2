# SPDX-License-Identifier: Apache-2.0
"""Doubles of a machine and of Keystone for ``kilonova setup``.

They keep the state of PostgreSQL, RabbitMQ, systemd and Keystone in memory, and files in a folder.
``Effects`` counts all changes, and can interrupt the command before any of them.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.domain.errors import ConfigError
from deploy.operator.setup.keystone_client import KeystoneClient, Login
from deploy.operator.setup.machine import Machine, Result
from deploy.operator.setup.services import PAIRED, SINGLE

FIRST, SECOND = "192.0.2.10", "192.0.2.11"
UNITS = tuple(f"kilonova-{name}" for name in PAIRED + SINGLE)
FAILED = Result(1, error="refused")


class Effects:
    """Counts changes. Raises KeyboardInterrupt instead of the change ``interrupt_at``."""

    def __init__(self) -> None:
        self.count, self.interrupt_at = 0, 0

    def add(self) -> None:
        self.count += 1
        if self.count == self.interrupt_at:
            raise KeyboardInterrupt


class FakeMachine(Machine):
    """A machine with all packages, before and after ``kilonova setup``."""

    is_root = True
    host_name = "controller"

    def __init__(self, folder: Path, address: str = FIRST, effects: Effects | None = None) -> None:
        self.etc, self.address, self.effects = folder / "etc", address, effects or Effects()
        for name in ("kilonova/tls", "kilonova/secrets", "rabbitmq", "postgresql"):
            (self.etc / name).mkdir(parents=True)
            (self.etc / name).chmod(0o750)
        self.missing: set[str] = set()
        self.modes: dict[str, tuple[int, str, str]] = {}
        #: PostgreSQL: role -> password, names of databases, settings in use and in the files.
        self.roles: dict[str, str] = {}
        self.databases: set[str] = set()
        self.settings = {"listen_addresses": "localhost", "ssl_cert_file": "snakeoil"}
        self.next_settings = dict(self.settings)
        self.hba = folder / "hba"
        self.hba.write_text("local all all peer\n")
        self.loaded: tuple[str, str] | None = None
        #: RabbitMQ: user -> password, tags and permissions.
        self.users: dict[str, dict[str, Any]] = {"guest": {"password": "guest", "tags": []}}
        self.uses_tls = False
        self.enabled: set[str] = set()
        self.active: set[str] = set()
        # Another controller uses the database of the first.
        self.has_tables = address != FIRST
        #: Seconds since 1970, or 0 if the agent does not run.
        self.agent_started = 0
        #: The output of a failing check of external services.
        self.problem = ""
        self.arguments: list[str] = []

    def has_program(self, name: str) -> bool:
        return name not in self.missing

    def require_address(self, address: str) -> None:
        if address != self.address:
            raise ConfigError(f"{address} is not an address of this machine")

    def answers(self, address: str, port: int) -> bool:
        return self.uses_tls and (address, port) in ((self.address, 5671), ("127.0.0.1", 15672))

    def write(
        self, path: Path, text: str, mode: int, user: str = "root", group: str = "root"
    ) -> None:
        self.effects.add()
        path.write_text(text)
        self.modes[path.name] = (mode, user, group)

    def run(
        self, *command: str, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> Result:
        self.arguments += command
        function = getattr(self, "_" + command[0].replace("-", "_"))
        result: Result = function(command[1:], stdin, environment or {})
        return result

    def _psql(self, words: tuple[str, ...], stdin: str, environment: Mapping[str, str]) -> Result:
        password = self.roles.get("kilonova")
        is_right = "kilonova" in self.databases and environment["PGPASSWORD"] == password
        return Result(0, "1") if is_right else FAILED

    def _runuser(self, words: tuple[str, ...], stdin: str, environment: object) -> Result:
        if match := re.fullmatch(r"SHOW (\w+);\n", stdin):
            return Result(0, {**self.settings, "hba_file": str(self.hba)}[match[1]])
        if "pg_roles" in stdin or "pg_database" in stdin:
            names = self.roles if "pg_roles" in stdin else self.databases
            return Result(0, "1" if "kilonova" in names else "")
        if "pg_read_file" in stdin:
            return Result(0, self.hba.read_text())
        if "pg_conf_load_time" in stdin:
            return Result(0, "t" if self.loaded == self._pg_files() else "f")
        self.effects.add()
        if match := re.fullmatch(r"CREATE ROLE (\w+) LOGIN PASSWORD '(.+)';\n", stdin):
            self.roles[match[1]] = match[2]
        elif match := re.fullmatch(r"CREATE DATABASE (\w+) OWNER kilonova;\n", stdin):
            self.databases.add(match[1])
        elif match := re.fullmatch(r"ALTER SYSTEM SET (\w+) = '(.+)';\n", stdin):
            self.next_settings[match[1]] = match[2]
        else:
            return Result(1, error=f"unknown statement {stdin}")
        return Result(0)

    def _pg_files(self) -> tuple[str, str]:
        certificate = self.etc / "postgresql/controller.pem"
        return self.hba.read_text(), certificate.read_text() if certificate.exists() else ""

    def _tee(self, words: tuple[str, ...], stdin: str, environment: object) -> Result:
        self.effects.add()
        with open(words[-1], "a") as file:
            file.write(stdin)
        return Result(0)

    def _rabbitmq_plugins(self, words: tuple[str, ...], stdin: str, environment: object) -> Result:
        self.effects.add()
        (self.etc / "rabbitmq/enabled_plugins").write_text(f"[{words[-1]}].")
        return Result(0)

    def _rabbitmqctl(self, words: tuple[str, ...], stdin: str, environment: object) -> Result:
        if "list_users" in words:
            rows = [{"user": name, "tags": user["tags"]} for name, user in self.users.items()]
            return Result(0, json.dumps(rows))
        if "list_permissions" in words:
            rows = [
                {"user": name, **dict.fromkeys(("configure", "write", "read"), ".*")}
                for name, user in self.users.items()
                if user.get("allowed")
            ]
            return Result(0, json.dumps(rows))
        verb, name = words[:2]
        if verb == "authenticate_user":
            is_right = self.users.get(name, {}).get("password") == stdin.strip()
            return Result(0) if is_right else FAILED
        self.effects.add()
        if verb == "add_user":
            assert name not in self.users
            self.users[name] = {"password": stdin.strip(), "tags": []}
        elif verb == "set_permissions":
            self.users[name]["allowed"] = words[2:] == (".*", ".*", ".*")
        else:
            assert verb == "set_user_tags"
            self.users[name]["tags"] = list(words[2:])
        return Result(0)

    def _systemctl(self, words: tuple[str, ...], stdin: str, environment: object) -> Result:
        units = words[2:] if words[0] == "enable" else words[1:]
        if words[0] == "is-enabled":
            states = ["enabled" if unit in self.enabled else "disabled" for unit in units]
            return Result(0, "\n".join(states))
        if words[0] == "is-active":
            states = ["active" if unit in self.active else "inactive" for unit in units]
            return Result(0, "\n".join(states))
        if words[0] == "show":
            return Result(0, f"@{self.agent_started}" if self.agent_started else "")
        self.effects.add()
        if words[0] == "enable":
            self.enabled |= set(units)
            self.active |= set(units)
        elif units == ("kilonova-agent",):
            self.agent_started = int(time.time())
        elif units == ("rabbitmq-server",):
            self.uses_tls = "listeners.tcp = none" in self._rabbitmq_conf()
        else:
            assert units == ("postgresql",)
            self.settings, self.loaded = dict(self.next_settings), self._pg_files()
        return Result(0)

    def _rabbitmq_conf(self) -> str:
        path = self.etc / "rabbitmq/rabbitmq.conf"
        return path.read_text() if path.exists() else ""

    def _kilonova(self, words: tuple[str, ...], stdin: str, environment: object) -> Result:
        assert words[:2] == ("--config", str(self.configuration))
        if words[2:] == ("database", "version"):
            return Result(0) if self.has_tables else FAILED
        if words[2:] == ("database", "upgrade"):
            self.effects.add()
            self.has_tables = True
            return Result(0)
        if words[2:] == ("config", "check"):
            is_ready = self.has_tables and not self.problem
            return Result(0) if is_ready else Result(1, f"the options are fine\n{self.problem}")
        assert words[2:] == ("status",)
        return Result(
            0,
            "\n".join(
                f"nova-{name}   {self.host_name}   0.1.0   up   2026-01-01"
                for name in ("conductor", "scheduler")
                if f"kilonova-{name}" in self.active
            ),
        )


class FakeKeystone(KeystoneClient):
    """Keystone with a domain, an admin and a role, before and after ``kilonova setup``."""

    def __init__(self, effects: Effects) -> None:
        self.region, self._effects = "RegionOne", effects
        self.rows: dict[str, list[dict[str, str]]] = defaultdict(list)
        self.rows["domains"].append({"id": "default", "name": "Default"})
        self.rows["roles"].append({"id": "r0", "name": "admin"})
        self.assigned: set[str] = set()

    def log_in(self, password: str, *, scoped: bool = True) -> Login | None:
        if not any(row["password"] == password for row in self.rows["users"]):
            return None
        if scoped and not self.assigned:
            return None
        kinds = {row["id"]: row["type"] for row in self.rows["services"]}
        endpoints = {(kinds[row["service_id"]], row["url"]) for row in self.rows["endpoints"]}
        names = {row["name"] for row in self.rows["roles"] if row["id"] in self.assigned}
        return Login(frozenset(names), frozenset(endpoints))

    def find(self, collection: str, **filters: str) -> list[dict[str, Any]]:
        filters = {name.replace("region_id", "region"): value for name, value in filters.items()}
        return [row for row in self.rows[collection] if filters.items() <= row.items()]

    def create(self, collection: str, **attributes: str) -> str:
        self._effects.add()
        identifier = f"{collection}{len(self.rows[collection])}"
        self.rows[collection].append({"id": identifier, **attributes})
        return identifier

    def assign(self, project: str, user: str, role: str) -> None:
        self._effects.add()
        self.assigned.add(role)
