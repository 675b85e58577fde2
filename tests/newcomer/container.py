# SPDX-License-Identifier: Apache-2.0
"""The container of the ring newcomer: an empty Debian with this machine's access to registries.

The container gets this machine's package sources, proxies, indexes and certificate authorities.
A cache keeps downloads between runs. Each run installs all packages anew.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.progress import run, say
from tests import containers
from tests.newcomer.forms import Command, Visit
from tests.waiting import await_true

BRIDGE, PREFIX = "kn-newcomer", "172.31.78"
NAME, ADDRESS = "newcomer", f"{PREFIX}.10"
START_SECONDS = 60
#: Variables that name proxies and package indexes.
NETWORK_VARIABLES = re.compile(
    "(https?|ftp|all|no)_proxy|(pip|uv)_.*(index|host|proxy|timeout).*", re.IGNORECASE
)
#: Files and folders with this machine's access to registries, and trusted authorities.
NETWORK_FILES = (
    "etc/pip.conf",
    "etc/xdg/pip",
    "etc/uv",
    "etc/ssl/certs/ca-certificates.crt",
    "usr/local/share/ca-certificates",
)
#: Do not wait for the disk during an installation, as in Debian's container images.
DPKG = "force-unsafe-io\n"
#: Let the container write to /proc/sys and /sys, and keep /tmp on its disk, as in Docker.
NSPAWN_ENVIRONMENT = {"SYSTEMD_NSPAWN_API_VFS_WRITABLE": "1", "SYSTEMD_NSPAWN_TMPFS_TMP": "0"}


@dataclass
class Container:
    """A running container.

    Attributes:
        visit: The visit.
        folder: Folder of this machine for logs and changes.
        leader: Id of the container's first process on this machine.
    """

    visit: Visit
    folder: Path
    leader: int

    def path(self, path: str) -> Path:
        """Return a file of the container as a path of this machine."""
        return Path(f"/proc/{self.leader}/root{path}")

    def read(self, path: str) -> str | None:
        """Return a file's text, or None if the file does not exist."""
        return self.path(path).read_text() if self.path(path).exists() else None

    def run(self, command: Command, folder: str, **variables: str) -> int:
        """Run a command as the newcomer, print and log the output, and return the status."""
        script = 'umask "$1"; cd "$2"; shift 2; exec "$@"'
        words = ["sh", "-c", script, "sh", f"{self.visit.umask:o}", folder, *command.words]
        if self.visit.has_terminal:
            words = ["script", "--quiet", "--return", "--command", shlex.join(words), "/dev/null"]
        process = subprocess.Popen(
            ["nsenter", f"--target={self.leader}", "--all", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**self.visit.environment, **_network_variables(), **variables},
            start_new_session=True,
        )
        assert process.stdout is not None
        with (self.folder / f"{command.log}.log").open("ab") as log:
            for line in process.stdout:
                log.write(line.replace(b"\r\n", b"\n"))
                log.flush()
                say(f"  | {line.decode(errors='replace').rstrip()}")
        return process.wait()


@contextmanager
def start_container(build: Path, folder: Path, release: str, visit: Visit) -> Iterator[Container]:
    """Start an empty container, yield the container, and end it.

    Args:
        build: Folder for the roots and the cache of downloads.
        folder: Folder for the container's changes and the logs.
        release: Debian release.
        visit: The visit.
    """
    tree = build / release
    if not tree.exists():
        say(f"newcomer: making an empty {release} …")
    containers.make_tree(tree, release)
    folder.mkdir(parents=True)
    # A file that was downloaded with another umask would have another mode.
    cache = build / f"cache-{release}-{visit.umask:03o}"
    binds = {cache / "home": "/root/.cache", cache / "apt": "/var/cache/apt/archives"}
    for place in binds:
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o755)
    with containers.network(BRIDGE, PREFIX), containers.layer(tree, folder) as root:
        containers.write_names(root, NAME, {NAME: ADDRESS})
        _copy_network_settings(root)
        (root / "etc/dpkg/dpkg.cfg.d/container").write_text(DPKG)
        options = [f"--bind={place}:{path}" for place, path in binds.items()]
        command = containers.nspawn(root, NAME, BRIDGE, *options, "--as-pid2", "sleep", "infinity")
        with (folder / "console.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **NSPAWN_ENVIRONMENT},
            )
        try:
            leader = await_true(
                lambda: containers.leader(process),
                START_SECONDS,
                lambda: (folder / "console.log").read_text(errors="replace"),
            )
            _connect(leader)
            yield Container(visit, folder, leader)
        finally:
            if leader := containers.leader(process):
                os.kill(leader, signal.SIGKILL)
            process.wait(START_SECONDS)


def _connect(leader: int) -> None:
    """Set the address of the container with this machine's program ip.

    The container does not have this program.
    """
    enter = ["nsenter", f"--target={leader}", "--net"]
    await_true(
        lambda: (
            not subprocess.run(
                [*enter, "ip", "link", "set", "host0", "name", "eth0"],
                check=False,
                capture_output=True,
            ).returncode
        ),
        START_SECONDS,
        "the container has no interface",
    )
    for words in (
        ("address", "add", f"{ADDRESS}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
        ("link", "set", "lo", "up"),
        ("route", "add", "default", "via", f"{PREFIX}.1"),
    ):
        run([*enter, "ip", *words], containers.ADVICE)


def _copy_network_settings(root: Path) -> None:
    """Copy this machine's settings of proxies, package indexes and certificate authorities."""
    for name in NETWORK_FILES:
        source, target = Path("/") / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.exists():
            shutil.copyfile(source, target)
            target.chmod(0o644)
    settings = run(["apt-config", "dump", "Acquire", "--format", '%F "%v";%n'], containers.ADVICE)
    lines = [line for line in settings.splitlines() if re.search(r"(?i)::(proxy|cainfo)\b", line)]
    (root / "etc/apt/apt.conf.d/90host").write_text("".join(f"{line}\n" for line in lines))
    (root / "etc/apt/apt.conf.d/90host").chmod(0o644)


def _network_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if NETWORK_VARIABLES.fullmatch(name)}
