# SPDX-License-Identifier: Apache-2.0
"""``kilonova setup live-migration``: QEMU's certificate and the agent's options, on a host.

The agent renews its certificate. After that, a repeated command renews QEMU's copy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common.domain.errors import ConfigError
from common.security.certificates import Certificate, pem, private_pem
from common.service import config
from deploy.operator.hosts.join_files import HEAD, merged
from deploy.operator.setup import plan
from deploy.operator.setup.machine import Machine, read, require, require_programs
from deploy.operator.setup.plan import Step

UNIT, GROUP = "kilonova-agent", "libvirt-qemu"
OPTIONS = {"migration": {"live_migration_port": "16598", "live_migration_with_native_tls": "true"}}


def live_migration(options: argparse.Namespace) -> int:
    """Give QEMU the host's certificate, and let the agent migrate running servers.

    Raises:
        ConfigError: This machine has not joined, agent.conf has other values, or a step fails.
    """
    set_up(Machine(), yes=options.yes)
    return 0


def set_up(machine: Machine, *, yes: bool) -> None:
    """Carry out the plan on the machine. Errors as ``live_migration``."""
    require_programs(machine, {UNIT: UNIT})
    path = machine.etc / "kilonova/agent.conf"
    conf = config.load(str(path), config.AGENT) if path.exists() else None
    if conf is None or not (conf.tls.ca_file and conf.tls.cert_file):
        raise ConfigError(f"{path} names no certificate. First run: kilonova join TOKEN")
    agent = _Agent(machine, path)
    steps = [_qemu_step(machine, conf.tls.ca_file, conf.tls.cert_file), agent.step()]
    print("Live migration to and from this host:")
    plan.carry_out(steps, yes=yes)
    print("The other hosts must reach port 16598 and QEMU's ports 49152 to 49215 of this host")


def _qemu_step(machine: Machine, ca_file: str, cert_file: str) -> Step:
    """Return the step that copies certificate, key and authority into QEMU's folder."""
    folder = machine.etc / "pki/qemu"
    try:
        own = Certificate.read(cert_file)
    except (OSError, ValueError, TypeError) as problem:
        raise ConfigError(
            f"{cert_file} must have a certificate and its key: {problem}. Follow docs/install.md by hand"
        ) from problem
    files = {"ca-cert.pem": (Path(ca_file).read_text(), 0o444, "root")}
    for side in ("server", "client"):
        files[f"{side}-cert.pem"] = (pem(own.cert), 0o444, "root")
        files[f"{side}-key.pem"] = (private_pem(own.key), 0o640, GROUP)

    def write() -> None:
        for path in (folder.parent, folder):
            if not path.exists():
                path.mkdir()
                # QEMU's user reaches the files. The umask of this process is narrower.
                path.chmod(0o755)
        for name, (text, mode, group) in files.items():
            machine.write(folder / name, text, mode, group=group)

    def is_done() -> bool:
        return all(read(folder / name) == text for name, (text, _, _) in files.items())

    return Step(f"QEMU's certificate in {folder}", is_done, write)


class _Agent:
    """The agent's options for live migration.

    Args:
        machine: The host.
        path: Path of agent.conf.
    """

    def __init__(self, machine: Machine, path: Path) -> None:
        self._machine, self._path = machine, path

    def step(self) -> Step:
        title = f"options of live migration in {self._path} (restarts {UNIT})"
        return Step(title, self._uses_options, self._write)

    def _uses_options(self) -> bool:
        """Return True if the file has the options, and the agent started after the last change."""
        if merged(self._path, OPTIONS, HEAD) != self._path.read_text():
            return False
        words = ("--property=ActiveEnterTimestamp", "--value", "--timestamp=unix", UNIT)
        started = self._machine.run("systemctl", "show", *words).output.lstrip("@")
        return started.isdigit() and int(started) >= int(self._path.stat().st_mtime)

    def _write(self) -> None:
        text = merged(self._path, OPTIONS, HEAD)
        if text != self._path.read_text():
            self._machine.write(self._path, text, 0o640, group=UNIT)
        require(self._machine, "systemctl", "restart", UNIT)
