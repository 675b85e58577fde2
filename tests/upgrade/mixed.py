# SPDX-License-Identifier: Apache-2.0
"""A cloud whose processes run either an older release or this code, and change one by one.

The older release is the tree of the commit in deploy/releases/VERSION/commit. Its processes run in
the environment of the tests, with the tree before this one in PYTHONPATH. Identity, image, network
and volume service, the broker and the database always run this code.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy.environment import VENV
from deploy.one_machine.cloud import lifecycle, processes
from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.machine.supervise import Program
from deploy.packages import ROOT
from tests.e2e.live import Live

#: The processes of the first controller, of the second one, and of the hosts.
FIRST = ("conductor", "api", "scheduler", "placement", "image-gateway", "metadata")
SECOND = ("conductor-2",)
HOSTS = ("agent", "agent-2")
#: Seconds that a process of another version may need to start.
START_SECONDS = 120


def find_commit(release: str) -> str:
    """Return the commit of a release."""
    return (ROOT / "deploy/releases" / release / "commit").read_text().strip()


def unpack(release: str, folder: Path) -> str:
    """Write the tree of a release into the folder.

    Returns:
        "", or the reason why the tree is not available.
    """
    try:
        archive = subprocess.run(
            ["git", "-C", ROOT, "archive", find_commit(release)], capture_output=True, check=False
        )
    except FileNotFoundError:
        return "git is not installed"
    if archive.returncode != 0:
        return f"the history has no commit of {release}: {archive.stderr.decode().strip()}"
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return ""


@dataclass
class MixedCloud:
    """A cloud, and which of its processes run the older release.

    Attributes:
        live: The cloud, whose hosts have a driver in memory.
        tree: The tree of the older release.
        old: The names of the processes that run the older release.
    """

    live: Live
    tree: Path
    old: set[str] = field(default_factory=lambda: {*FIRST, *SECOND, *HOSTS})

    @property
    def cloud(self) -> Cloud:
        return self.live.cloud

    def programs(self) -> list[Program]:
        """Return the programs of the cloud, with a second conductor."""
        found = []
        for program in processes.programs(self.cloud):
            found.append(self._choose_version(program))
            if program.name == "conductor":
                second = replace(
                    program, name="conductor-2", log=str(self.cloud.log("conductor-2"))
                )
                found.append(self._choose_version(second))
        return found

    def _choose_version(self, program: Program) -> Program:
        if program.name not in self.old:
            return program
        return replace(program, env={**program.env, "PYTHONPATH": str(self.tree)}, entry=None)

    def upgrade(self, names: Iterable[str]) -> None:
        """Restart these processes with this code. They may still wait for the database."""
        self.old -= set(names)
        lifecycle.launch(self.cloud, self.programs())

    def go_back(self, names: Iterable[str]) -> None:
        """Restart these processes with the older release."""
        self.old |= set(names)
        lifecycle.launch(self.cloud, self.programs())

    def kilonova(self, *words: str, old: bool = False) -> str:
        """Run ``kilonova`` of the older release or of this code, and return the output.

        Exit statuses 0 and 1 are accepted, because commands that check return 1 for findings.
        """
        result = self.live.run(
            VENV / "bin/kilonova",
            *words,
            KILONOVA_CONF=str(self.cloud.config()),
            PYTHONPATH=str(self.tree) if old else "",
        )
        assert result.returncode in (0, 1), result
        return result.stdout + result.stderr

    def versions(self) -> dict[str, str]:
        """Return the version of each service that ``kilonova status`` shows.

        The keys are the kind of the service and the host, for example "nova-compute one".
        """
        lines = [line.split() for line in self.kilonova("status").splitlines()]
        return {f"{line[0]} {line[1]}": line[2] for line in lines if line and "nova-" in line[0]}
