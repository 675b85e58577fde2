# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test tempest [--latest | --least] [--unified-limits] [GROUP ...]``: Tempest from PyPI.

Groups without guests run against three hosts of the memory driver, the others against two hosts
with real guests. Each group runs with the least microversion 2.1 and with the latest. For each
group the command prints the numbers of passed tests and of negative tests among them, the failed
tests, and the reasons of skips. docs/tempest.md explains each skip.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import IO

from deploy.environment import TEMPEST
from deploy.one_machine import preflight, up
from deploy.one_machine.cloud.cloud import Ports
from deploy.progress import Failure, main, say
from deploy.testing.servers import free_ports
from tests.e2e.guests import clear
from tests.e2e.live import Live
from tests.shared_blocks import sharing_blocks
from tests.tempest import configure, known, outcomes
from tests.tempest.groups import GROUPS, USUAL, Group, read_lists, sort_into_groups

LEAST, LATEST = "2.1", "latest"
#: Number of concurrent tests.
WORKERS = 2
NO_LIMIT = {"instances": 1000, "cores": 1000, "ram": 1 << 24}


class Tempest:
    """Runs the programs of Tempest in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        # By default Tempest would write the list of workspaces to the caller's home.
        workspaces = folder.with_suffix(".yaml")
        self._check(
            self._run_program("tempest", "init", "--workspace-path", str(workspaces), str(folder))
        )

    def list_tests(self) -> list[str]:
        """Return the ids of all tests, with their tags in brackets."""
        return self._check(self._run_program("stestr", "list"))

    def run(self, ids: Sequence[str], name: str) -> outcomes.Outcomes:
        """Run tests and return the outcomes. The output is stored as NAME.log in the folder."""
        list_file, log = self.folder / f"{name}.ids", self.folder / f"{name}.log"
        list_file.write_text("\n".join(ids) + "\n")
        with log.open("w") as stream:
            self._run_program(
                "tempest",
                "run",
                "--load-list",
                str(list_file),
                "--concurrency",
                str(WORKERS),
                output=stream,
            )
        return outcomes.read(ids, log.read_text(errors="replace").splitlines())

    @staticmethod
    def _check(process: subprocess.CompletedProcess[str]) -> list[str]:
        """Return the lines of the output of a process.

        Raises:
            Failure: The process failed.
        """
        if process.returncode != 0:
            command, output = " ".join(process.args), process.stdout[-2000:]
            raise Failure(
                f"{command} ended with {process.returncode}: {output}",
                "This is a bug. Please report it.",
            )
        return process.stdout.splitlines()

    def _run_program(
        self, *words: str, output: int | IO[str] = subprocess.PIPE
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(TEMPEST / "bin" / words[0]), *words[1:]],
            cwd=self.folder,
            env=self._environ(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def _environ(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{TEMPEST / 'bin'}:{os.environ['PATH']}",
            "TEMPEST_CONFIG_DIR": str(self.folder),
            "TEMPEST_CONFIG": configure.FILE,
        }


@contextmanager
def cloud(
    has_guests: bool, unified: bool = False, volumes: bool = False, logs: Path | None = None
) -> Iterator[tuple[Live, configure.Cloud]]:
    """Yield a cloud, and remove the cloud afterwards.

    Args:
        has_guests: True for two hosts with libvirt, False for three hosts in memory.
        unified: True to enforce Keystone's registered limits.
        volumes: True for a cloud with a volume service.
        logs: Folder for a copy of the cloud's logs, or None.
    """
    home = Path(tempfile.mkdtemp(prefix="kn-tempest-", dir="/tmp"))
    home.chmod(0o755)
    driver, suffixes = ("libvirt", ("", "-2")) if has_guests else ("memory", ("", "-2", "-3"))
    hosts = tuple(f"{os.uname().nodename}{suffix}" for suffix in suffixes)
    live = Live(
        home,
        free_ports(Ports.COUNT),
        hosts=hosts,
        networks=True,
        driver=driver,
        volumes=volumes,
        options=configure.FILTERED + (configure.UNIFIED if unified else ()),
    )
    say(f"A cloud of {len(hosts)} hosts, driver {driver} …")
    preflight.check(live.cloud)
    with sharing_blocks(home / "volume") if volumes else nullcontext():
        try:
            with redirect_stdout(StringIO()):
                up.run_later_steps(live.cloud)
            if unified:
                configure.register_limits(live.seed.admin.identity)
            else:
                live.seed.admin.compute.update_quota_set(
                    live.seed.admin.session.get_project_id(), **NO_LIMIT
                )
            # Delete the user's servers, because a host with a server cannot join another zone.
            clear(live.rest())
            yield live, configure.Cloud.of(live.seed)
        finally:
            if logs is not None:
                shutil.copytree(home / "log", logs)
            live.down("--purge")


def run(arguments: Sequence[str]) -> int:
    """Parse the command line, run the groups, and return 1 if a test failed."""
    parser = argparse.ArgumentParser(
        prog="./deploy/test tempest", description=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument(
        "--least", action="store_true", help=f"only with the least microversion {LEAST}"
    )
    parser.add_argument("--latest", action="store_true", help="only with the latest microversion")
    parser.add_argument(
        "--unified-limits",
        action="store_true",
        help="in clouds that enforce Keystone's limits",
    )
    parser.add_argument(
        "group", nargs="*", help=", ".join(f"{group.name}: {group.needs}" for group in GROUPS)
    )
    parsed = parser.parse_args(arguments)
    unknown = {*parsed.group} - {group.name for group in GROUPS}
    if unknown:
        raise Failure(
            f"There is no group {', '.join(sorted(unknown))}.",
            f"Pass names from: {' '.join(group.name for group in GROUPS)}.",
        )
    versions = [LEAST] if parsed.least else [LATEST] if parsed.latest else [LEAST, LATEST]
    chosen = [group for name in parsed.group or USUAL for group in GROUPS if group.name == name]
    folder, is_ok = Path(tempfile.mkdtemp(prefix="kn-tempest-log-", dir="/tmp")), True
    for has_guests in (False, True):
        groups = [group for group in chosen if group.boots == has_guests]
        if groups:
            volumes = any(group.volumes for group in groups)
            name = "guests" if has_guests else "memory"
            logs = folder / f"{name}-cloud"
            with cloud(has_guests, parsed.unified_limits, volumes, logs) as (live, tempest_cloud):
                tempest = Tempest(folder / name)
                is_ok = _run_groups(tempest, tempest_cloud, groups, versions) and is_ok
                live.assert_healthy()
    if is_ok:
        shutil.rmtree(folder)
        return 0
    say(f"\nFAILED. The output of Tempest and the cloud's logs are in {folder}.")
    return 1


def _run_groups(
    tempest: Tempest,
    tempest_cloud: configure.Cloud,
    groups: Sequence[Group],
    versions: Sequence[str],
) -> bool:
    """Run groups at each version, print the outcomes, and return True if no group failed."""
    is_ok = True
    for version in versions:
        configure.write(tempest_cloud, tempest.folder, version)
        ids = sort_into_groups(tempest.list_tests(), read_lists())
        for group in groups:
            configure.write(tempest_cloud, tempest.folder, version, group.without_different_host)
            start = time.monotonic()
            outcome = tempest.run(ids[group.name], f"{group.name}-{version}")
            outcome.accept_known(known.LATEST if version == LATEST else ())
            say(
                f"{group.name} ({group.needs}), microversion {version}: {outcome.line()}, "
                f"{time.monotonic() - start:.0f} s"
            )
            for word, tests in (
                ("FAILED", outcome.failed),
                ("NOT RUN", outcome.not_run),
                ("PASSED, but is known to fail", outcome.stale),
            ):
                for test in tests:
                    say(f"    {word} {test}")
            for reason, number in outcome.reasons().items():
                say(f"    {number} not passed: {reason[:160]}")
            is_ok = outcome.is_ok and is_ok
    return is_ok


if __name__ == "__main__":
    sys.exit(main(lambda: run(sys.argv[1:])))
