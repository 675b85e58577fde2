# SPDX-License-Identifier: Apache-2.0
"""The edge between ``kilonova setup`` and this machine: programs, files and addresses.

Tests replace ``Machine`` by a double. All other modules of this package decide only.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.domain.errors import ConfigError
from common.security import private_files
from deploy.operator.hosts import join_checks

#: Time limit of a program. On a busy machine a start of RabbitMQ takes minutes.
RUN_SECONDS = 900
CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Result:
    """The end of a program: exit status, standard output and standard error."""

    status: int
    output: str = ""
    error: str = ""


class Machine:
    """This machine."""

    #: The folder of all configuration files.
    etc = Path("/etc")

    @property
    def configuration(self) -> Path:
        """The configuration of the controller's services."""
        return self.etc / "kilonova/kilonova.conf"

    @property
    def is_root(self) -> bool:
        """True if this process may change the machine."""
        return os.geteuid() == 0

    @property
    def host_name(self) -> str:
        """The name of this machine in the cloud."""
        return socket.gethostname()

    def has_program(self, name: str) -> bool:
        return shutil.which(name) is not None

    def require_address(self, address: str) -> None:
        """Check that the address belongs to this machine.

        Raises:
            ConfigError: Another machine has the address, or none.
        """
        join_checks.require_own_address(address)

    def answers(self, address: str, port: int) -> bool:
        """Return True if a program listens at this TCP port."""
        try:
            with socket.create_connection((address, port), CONNECT_SECONDS):
                return True
        except OSError:
            return False

    def run(
        self, *command: str, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> Result:
        """Run a program without a shell, and wait for the end.

        Args:
            *command: The program and the arguments. Invariant: no argument contains a secret,
                because other users can list arguments.
            stdin: The standard input.
            environment: Variables in addition to those of this process.
        """
        try:
            process = subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=RUN_SECONDS,
                check=False,
                cwd="/",
                # Other users read files of these programs, for example RabbitMQ's list of plugins.
                umask=0o022,
                env={**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})},
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            return Result(127, error=str(problem))
        return Result(process.returncode, process.stdout.strip(), process.stderr.strip())

    def write(
        self, path: Path, text: str, mode: int, user: str = "root", group: str = "root"
    ) -> None:
        """Write a file atomically, with mode and owner.

        Raises:
            ConfigError: The user or the group does not exist.
            OSError: The file cannot be written.
        """
        try:
            owner = (pwd.getpwnam(user).pw_uid, grp.getgrnam(group).gr_gid)
        except KeyError as problem:
            raise ConfigError(
                f"{path} needs user {user} and group {group}: {problem}. Install the package that creates them"
            ) from problem
        private_files.replace(path, text, mode, owner)


def read(path: Path) -> str:
    """Return the text of a file, or an empty text if the file does not exist."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def require(machine: Machine, *command: str, stdin: str = "") -> str:
    """Run a program and return the standard output.

    Raises:
        ConfigError: The program fails. The text has the end of the program's messages.
    """
    result = machine.run(*command, stdin=stdin)
    if result.status != 0:
        text = " ".join((result.error or result.output).split())[-500:]
        raise ConfigError(f"{' '.join(command)}: {text or f'status {result.status}'}")
    return result.output


def require_programs(machine: Machine, programs: Mapping[str, str]) -> None:
    """Check that this process is root, and that all programs are installed.

    Args:
        machine: The machine.
        programs: Program -> the Debian package with the program.

    Raises:
        ConfigError: This process is not root, or a program is missing. The text names the packages.
    """
    if not machine.is_root:
        raise ConfigError("this command changes the machine: run it as root")
    missing = [package for name, package in programs.items() if not machine.has_program(name)]
    if missing:
        raise ConfigError(
            f"packages are missing: {', '.join(missing)}. Install them with apt-get, then run the same command again "
            "(docs/install.md)"
        )


def bracket(address: str) -> str:
    """Return an IP address as part of a URL."""
    return f"[{address}]" if ":" in address else address
