# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test clients [SUITE ...]``: the clients' own functional suites, as they come from
PyPI, against our cloud.

The cloud has three hosts of the memory driver. Prints for each suite how many of its tests passed,
failed and were skipped, and why; and every answer of 500 and more, and every one that Nova's
schemas do not allow, which fail too. docs/clients.md has the reason of each skip.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import IO

from deploy.environment import CLIENTS
from deploy.one_machine import preflight, up
from deploy.one_machine.cloud.cloud import Ports
from deploy.progress import Failure, main, say
from deploy.testing.servers import free_ports
from tests.clients import wiring
from tests.clients.recorder import Recorder
from tests.clients.suites import SUITES, Suite
from tests.e2e.guests import clear
from tests.e2e.live import Live
from tests.shared_blocks import sharing_blocks
from tests.tempest import outcomes

#: No name is a part of another: a suite looks for one host by its name.
HOSTS = ("one", "two", "three")
#: Seconds that a test may take; openstacksdk's own is for unit tests.
LIMIT = 600
PACKAGES = next((CLIENTS / "lib").glob("python3*/site-packages"), CLIENTS)


class Runner:
    """The suites' programs, in a folder of this run; where clouds.yaml is, which clients look
    for."""

    def __init__(self, folder: Path, proxy: str) -> None:
        self.folder = folder
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("OS_") and name.lower() not in ("http_proxy", "no_proxy")
        }
        self._environ = {
            **kept,
            "PATH": f"{CLIENTS / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "PYTHONWARNINGS": "ignore",
            "http_proxy": proxy,
            "TOX_ENV_DIR": str(CLIENTS),
            "OS_TEST_TIMEOUT": str(LIMIT),
            "OS_STDOUT_CAPTURE": "1",
            "OS_STDERR_CAPTURE": "1",
            "OS_LOG_CAPTURE": "1",
            "OS_NOVACLIENT_NETWORK": wiring.NETWORK,
            "OPENSTACKSDK_IMAGE": wiring.IMAGE_NAME,
        }
        self._ends_well(self._stestr("init"))

    def ids(self, part: str) -> list[str]:
        """The ids of all tests in a folder."""
        return self._ends_well(self._stestr("list", part=part)).split()

    def run(self, part: str, ids: Sequence[str], workers: int) -> outcomes.Outcomes:
        """Run these; what is printed is kept."""
        name = part.replace("/", ".")
        asked, log = self.folder / f"{name}.ids", self.folder / f"{name}.log"
        asked.write_text("\n".join(ids) + "\n")
        with log.open("w") as stream:
            self._stestr(
                "run",
                "--load-list",
                str(asked),
                "--concurrency",
                str(workers),
                part=part,
                to=stream,
            )
        return outcomes.read(ids, log.read_text(errors="replace").splitlines())

    @staticmethod
    def _ends_well(done: subprocess.CompletedProcess[str]) -> str:
        if done.returncode != 0:
            raise Failure(
                f"{' '.join(done.args)} ended with {done.returncode}: {done.stdout[-2000:]}",
                "This is a bug; please report it.",
            )
        return done.stdout

    def _stestr(
        self, *words: str, part: str = "", to: int | IO[str] = subprocess.PIPE
    ) -> subprocess.CompletedProcess[str]:
        where = ["--test-path", str(PACKAGES / part), "--top-dir", str(PACKAGES)] if part else []
        # Tests of one class may use the same names: openstackclient makes a flavor "qaz" in two of
        # them.
        return subprocess.run(
            [str(CLIENTS / "bin/stestr"), "--parallel-class", *where, *words],
            cwd=self.folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=to,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


@contextmanager
def cloud() -> Iterator[Live]:
    """Three hosts in memory, with networks; all is gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix="kn-clients-", dir="/tmp"))
    home.chmod(0o755)
    live = Live(
        home, free_ports(Ports.COUNT), hosts=HOSTS, networks=True, driver="memory", volumes=True
    )
    say(f"A cloud of the hosts {', '.join(HOSTS)}, driver memory …")
    preflight.check(live.cloud)
    with sharing_blocks(home / "volume"):
        try:
            with redirect_stdout(StringIO()):
                up.run_later_steps(live.cloud)
            clear(live.rest())  # a host with a server does not join another zone
            yield live
        finally:
            live.down("--purge")


def run(arguments: Sequence[str]) -> int:
    """Parse the command line and do it; 1 when a test failed, or an answer was a fault or not
    Nova's."""
    parser = argparse.ArgumentParser(
        prog="./deploy/test clients", description=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument("suite", nargs="*", help=", ".join(suite.name for suite in SUITES))
    asked = parser.parse_args(arguments).suite
    unknown = {*asked} - {suite.name for suite in SUITES}
    if unknown:
        raise Failure(
            f"No suite {', '.join(sorted(unknown))}.",
            f"Name some of {' '.join(suite.name for suite in SUITES)}.",
        )
    folder, well = Path(tempfile.mkdtemp(prefix="kn-clients-log-", dir="/tmp")), True
    with cloud() as live, Recorder(live.cloud.api_url) as recorder:
        wiring.furnish(live.seed, folder)
        runner = Runner(folder, recorder.url)
        for suite in SUITES:
            if not asked or suite.name in asked:
                well = _judge(runner, suite, live, recorder) and well
        live.assert_healthy()
    if well:
        shutil.rmtree(folder)
        return 0
    (folder / "clouds.yaml").unlink()
    say(f"\nFAILED. What the suites printed is in {folder}.")
    return 1


def _judge(runner: Runner, suite: Suite, live: Live, recorder: Recorder) -> bool:
    began, before = (
        time.monotonic(),
        (len(recorder.faults), len(recorder.disagreements), recorder.judged),
    )
    parts, out, seen = list[outcomes.Outcomes](), dict[str, str](), list[str]()
    if suite.resident:
        wiring.occupy(live.seed)
    for part in suite.folders:
        ids = runner.ids(part)
        chosen, more = suite.chosen(ids)
        out.update(more)
        seen += ids
        parts.append(runner.run(part, chosen, suite.workers))
    found, faults, unused = _together(parts), recorder.faults[before[0] :], suite.unused(seen)
    disagreements = recorder.disagreements[before[1] :]
    say(
        f"{suite.name}: {len(found.passed)} passed, {len(found.failed) + len(found.not_run)} failed, "
        f"{len(found.skipped) + len(out)} skipped, {len(faults)} answers of 500 and more, "
        f"{len(disagreements)} disagreements with Nova's schemas in {recorder.judged - before[2]} answers, "
        f"{time.monotonic() - began:.0f} s"
    )
    for word, lines in (
        ("FAILED", found.failed),
        ("NOT RUN", found.not_run),
        ("ANSWER", faults),
        ("NOT NOVA'S", disagreements),
        ("NO SUCH TEST", unused),
    ):
        for line in lines:
            say(f"    {word} {line[:400]}")
    for why, number in Counter([*out.values(), *found.skipped.values()]).most_common():
        say(f"    {number} skipped: {why[:160]}")
    return found.is_well and not (faults or disagreements or unused)


def _together(parts: Sequence[outcomes.Outcomes]) -> outcomes.Outcomes:
    return outcomes.Outcomes(
        [one for part in parts for one in part.asked],
        [one for part in parts for one in part.passed],
        [one for part in parts for one in part.failed],
        {one: why for part in parts for one, why in part.skipped.items()},
    )


if __name__ == "__main__":
    sys.exit(main(lambda: run(sys.argv[1:])))
