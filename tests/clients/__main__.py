# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test clients [SUITE ...]``: the functional suites of clients from PyPI, unchanged.

The cloud has three hosts of the memory driver. For each suite the command prints the numbers of
passed, failed and skipped tests, and the reasons of skips. An answer of 500 or above, or different
from Nova's schemas, also fails the suite. docs/clients.md explains each skip.
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

#: Names that are no parts of each other, because a suite searches for a host by name.
HOSTS = ("one", "two", "three")
#: Timeout of a test in seconds. The default of openstacksdk is for unit tests.
LIMIT = 600
PACKAGES = next((CLIENTS / "lib").glob("python3*/site-packages"), CLIENTS)


class Runner:
    """Runs the test programs of the suites in a folder, where the clients find clouds.yaml."""

    def __init__(self, folder: Path, proxy: str) -> None:
        self.folder = folder
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("OS_") and name.lower() not in ("http_proxy", "no_proxy")
        }
        self._environ = {
            **inherited,
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
        self._check(self._run_stestr("init"))

    def list_tests(self, part: str) -> list[str]:
        """Return the ids of all tests in a folder below the installed packages."""
        return self._check(self._run_stestr("list", part=part)).split()

    def run(self, part: str, ids: Sequence[str], workers: int) -> outcomes.Outcomes:
        """Run tests of a folder and return the outcomes. The output is stored as a log."""
        name = part.replace("/", ".")
        list_file, log = self.folder / f"{name}.ids", self.folder / f"{name}.log"
        list_file.write_text("\n".join(ids) + "\n")
        with log.open("w") as stream:
            self._run_stestr(
                "run",
                "--load-list",
                str(list_file),
                "--concurrency",
                str(workers),
                part=part,
                output=stream,
            )
        return outcomes.read(ids, log.read_text(errors="replace").splitlines())

    @staticmethod
    def _check(process: subprocess.CompletedProcess[str]) -> str:
        """Return the output of a process.

        Raises:
            Failure: The process failed.
        """
        if process.returncode != 0:
            command, output = " ".join(process.args), process.stdout[-2000:]
            raise Failure(
                f"{command} ended with {process.returncode}: {output}",
                "This is a bug. Please report it.",
            )
        return process.stdout

    def _run_stestr(
        self, *words: str, part: str = "", output: int | IO[str] = subprocess.PIPE
    ) -> subprocess.CompletedProcess[str]:
        paths = ["--test-path", str(PACKAGES / part), "--top-dir", str(PACKAGES)] if part else []
        # Tests of one class may use the same names. For example, two tests of openstackclient
        # create a flavor "qaz".
        return subprocess.run(
            [str(CLIENTS / "bin/stestr"), "--parallel-class", *paths, *words],
            cwd=self.folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


@contextmanager
def cloud() -> Iterator[Live]:
    """Yield a cloud of three hosts in memory with networks and volumes, and remove the cloud."""
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
            # Delete the user's servers, because a host with a server cannot join another zone.
            clear(live.rest())
            yield live
        finally:
            live.down("--purge")


def run(arguments: Sequence[str]) -> int:
    """Parse the command line, run the suites, and return 0 if no test and no answer failed."""
    parser = argparse.ArgumentParser(
        prog="./deploy/test clients", description=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument("suite", nargs="*", help=", ".join(suite.name for suite in SUITES))
    names = parser.parse_args(arguments).suite
    unknown = {*names} - {suite.name for suite in SUITES}
    if unknown:
        raise Failure(
            f"There is no suite {', '.join(sorted(unknown))}.",
            f"Pass names from: {' '.join(suite.name for suite in SUITES)}.",
        )
    folder, is_ok = Path(tempfile.mkdtemp(prefix="kn-clients-log-", dir="/tmp")), True
    with cloud() as live, Recorder(live.cloud.api_url) as recorder:
        wiring.create_devstack_names(live.seed, folder)
        runner = Runner(folder, recorder.url)
        for suite in SUITES:
            if not names or suite.name in names:
                is_ok = _run_suite(runner, suite, live, recorder) and is_ok
        live.assert_healthy()
    if is_ok:
        shutil.rmtree(folder)
        return 0
    (folder / "clouds.yaml").unlink()
    say(f"\nFAILED. The output of the suites is in {folder}.")
    return 1


def _run_suite(runner: Runner, suite: Suite, live: Live, recorder: Recorder) -> bool:
    """Run a suite, print the outcomes, and return True if no test and no answer failed."""
    start, before = (
        time.monotonic(),
        (len(recorder.faults), len(recorder.disagreements), recorder.judged),
    )
    parts, left_out, all_ids = list[outcomes.Outcomes](), dict[str, str](), list[str]()
    if suite.needs_server:
        wiring.create_server(live.seed)
    for part in suite.folders:
        ids = runner.list_tests(part)
        chosen, reasons = suite.select(ids)
        left_out.update(reasons)
        all_ids += ids
        parts.append(runner.run(part, chosen, suite.workers))
    result, faults = _merge(parts), recorder.faults[before[0] :]
    unused = suite.find_unused(all_ids)
    disagreements = recorder.disagreements[before[1] :]
    say(
        f"{suite.name}: {len(result.passed)} passed, "
        f"{len(result.failed) + len(result.not_run)} failed, "
        f"{len(result.skipped) + len(left_out)} skipped, {len(faults)} answers of 500 or above, "
        f"{len(disagreements)} differences from Nova's schemas in "
        f"{recorder.judged - before[2]} answers, {time.monotonic() - start:.0f} s"
    )
    for word, lines in (
        ("FAILED", result.failed),
        ("NOT RUN", result.not_run),
        ("ANSWER", faults),
        ("NOT NOVA'S", disagreements),
        ("NO SUCH TEST", unused),
    ):
        for line in lines:
            say(f"    {word} {line[:400]}")
    for reason, number in Counter([*left_out.values(), *result.skipped.values()]).most_common():
        say(f"    {number} skipped: {reason[:160]}")
    return result.is_ok and not (faults or disagreements or unused)


def _merge(parts: Sequence[outcomes.Outcomes]) -> outcomes.Outcomes:
    return outcomes.Outcomes(
        [test for part in parts for test in part.requested],
        [test for part in parts for test in part.passed],
        [test for part in parts for test in part.failed],
        {test: reason for part in parts for test, reason in part.skipped.items()},
    )


if __name__ == "__main__":
    sys.exit(main(lambda: run(sys.argv[1:])))
