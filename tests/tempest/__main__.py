# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test tempest [--latest | --least] [--unified-limits] [GROUP ...]``: Tempest, as it
comes from PyPI, against our own clouds.

Groups without guests run against three hosts of the memory driver, the others against two with real
guests; each at the least microversion 2.1, and once more asking for the latest. Prints for each
group how many passed, with negative tests apart, what failed, and why the rest was skipped.
docs/tempest.md has the reason of each skip.
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
from tests.tempest.groups import GROUPS, USUAL, Group, read_lists, sorted_into

LEAST, LATEST = "2.1", "latest"
#: How many of Tempest's tests run side by side.
WORKERS = 2
NO_LIMIT = {"instances": 1000, "cores": 1000, "ram": 1 << 24}


class Tempest:
    """Its programs, in a folder of this run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        known = folder.with_suffix(".yaml")  # not in the home of who calls this
        self._ends_well(
            self._command("tempest", "init", "--workspace-path", str(known), str(folder))
        )

    def ids(self) -> list[str]:
        """The ids of all its tests."""
        return self._ends_well(self._command("stestr", "list"))

    def run(self, ids: Sequence[str], name: str) -> outcomes.Outcomes:
        """Run these; what it prints is kept as NAME.log."""
        asked, log = self.folder / f"{name}.ids", self.folder / f"{name}.log"
        asked.write_text("\n".join(ids) + "\n")
        with log.open("w") as stream:
            self._command(
                "tempest",
                "run",
                "--load-list",
                str(asked),
                "--concurrency",
                str(WORKERS),
                to=stream,
            )
        return outcomes.read(ids, log.read_text(errors="replace").splitlines())

    @staticmethod
    def _ends_well(done: subprocess.CompletedProcess[str]) -> list[str]:
        if done.returncode != 0:
            raise Failure(
                f"{' '.join(done.args)} ended with {done.returncode}: {done.stdout[-2000:]}",
                "This is a bug; please report it.",
            )
        return done.stdout.splitlines()

    def _command(
        self, *words: str, to: int | IO[str] = subprocess.PIPE
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(TEMPEST / "bin" / words[0]), *words[1:]],
            cwd=self.folder,
            env=self._environ(),
            stdin=subprocess.DEVNULL,
            stdout=to,
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
    """A cloud for groups with guests (two real hosts), or without (three in memory); it is gone
    afterwards. ``logs``: where its processes' logs are copied before."""
    home = Path(tempfile.mkdtemp(prefix="kn-tempest-", dir="/tmp"))
    home.chmod(0o755)
    driver, more = ("libvirt", ("", "-2")) if has_guests else ("memory", ("", "-2", "-3"))
    hosts = tuple(f"{os.uname().nodename}{one}" for one in more)
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
            clear(live.rest())  # a host with a server does not join another zone
            yield live, configure.Cloud.of(live.seed)
        finally:
            if logs is not None:
                shutil.copytree(home / "log", logs)
            live.down("--purge")


def run(arguments: Sequence[str]) -> int:
    """Parse the command line and do it; 1 when a test failed."""
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
        help="in clouds where Keystone's limits are in force",
    )
    parser.add_argument(
        "group", nargs="*", help=", ".join(f"{one.name}: {one.needs}" for one in GROUPS)
    )
    asked = parser.parse_args(arguments)
    unknown = {*asked.group} - {one.name for one in GROUPS}
    if unknown:
        raise Failure(
            f"No group {', '.join(sorted(unknown))}.",
            f"Name some of {' '.join(one.name for one in GROUPS)}.",
        )
    versions = [LEAST] if asked.least else [LATEST] if asked.latest else [LEAST, LATEST]
    chosen = [group for name in asked.group or USUAL for group in GROUPS if group.name == name]
    folder, well = Path(tempfile.mkdtemp(prefix="kn-tempest-log-", dir="/tmp")), True
    for has_guests in (False, True):
        groups = [group for group in chosen if group.boots == has_guests]
        if groups:
            volumes = any(group.volumes for group in groups)
            name = "guests" if has_guests else "memory"
            logs = folder / f"{name}-cloud"
            with cloud(has_guests, asked.unified_limits, volumes, logs) as (live, found):
                tempest = Tempest(folder / name)
                well = _judge(tempest, found, groups, versions) and well
                live.judge()
    if well:
        shutil.rmtree(folder)
        return 0
    say(f"\nFAILED. What Tempest printed, and the cloud's logs, are in {folder}.")
    return 1


def _judge(
    tempest: Tempest,
    found: configure.Cloud,
    groups: Sequence[Group],
    versions: Sequence[str],
) -> bool:
    well = True
    for version in versions:
        configure.write(found, tempest.folder, version)
        ids = sorted_into(tempest.ids(), read_lists())
        for group in groups:
            configure.write(found, tempest.folder, version, group.strangers)
            began = time.monotonic()
            outcome = tempest.run(ids[group.name], f"{group.name}-{version}")
            outcome.foresee(known.LATEST if version == LATEST else ())
            say(
                f"{group.name} ({group.needs}), microversion {version}: {outcome.line()}, "
                f"{time.monotonic() - began:.0f} s"
            )
            for word, tests in (
                ("FAILED", outcome.failed),
                ("NOT RUN", outcome.not_run),
                ("PASSED, but is known to fail", outcome.stale),
            ):
                for test in tests:
                    say(f"    {word} {test}")
            for why, number in outcome.reasons().items():
                say(f"    {number} not passed: {why[:160]}")
            well = outcome.is_well and well
    return well


if __name__ == "__main__":
    sys.exit(main(lambda: run(sys.argv[1:])))
