# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test install [--keep]``: Kilonova beside the real neighbours, on booted Debian 12
machines.

A machine gets Keystone, Glance and Neutron of Debian's packages; the contract suites of our clients
then ask those in place of the standalone services. Prints how long each part took; its status is 0
when all holds. With ``--keep`` the machines stay up, to be looked into, until Ctrl-C.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deploy.packages import ROOT
from deploy.progress import Failure, main, say, steps
from tests.install import machines, neighbours
from tests.install.machines import Machine
from tests.standalone import REAL_CLOUD

TREES = ROOT / "build/install"
#: Suites that a real neighbour passes as the standalone one does.
SUITES = ("test_image_client.py", "test_revoked_tokens.py")


@contextmanager
def network() -> Iterator[None]:
    """The machines' bridge, for as long as this lasts."""
    machines.make_network()
    try:
        yield
    finally:
        machines.remove_network()


class Story:
    """The machines of this run, and what is done with them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._booted: dict[str, Machine] = {}

    def boot(self, name: str) -> Machine:
        """A new machine; it ends with the run."""
        machine = machines.boot(self._folder, machines.debian(TREES), name)
        self._stack.callback(machine.stop)
        self._booted[name] = machine
        return machine

    def with_neighbours(self) -> None:
        """A machine with the services that a cloud has before Kilonova comes."""
        neighbours.install(self.boot("cloud"))

    def suites(self) -> None:
        """The contract suites, against the machine's services."""
        environ = {**os.environ, REAL_CLOUD: f"{neighbours.CLOUD} {neighbours.PASSWORD}"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [str(ROOT / "tests/contract" / name) for name in SUITES]
        if subprocess.run(command, env=environ, cwd=ROOT, check=False).returncode:
            raise Failure("A suite does not hold against the real services.", "See above.")


def run(arguments: Sequence[str]) -> int:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(prog="./deploy/test install", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the machines up at the end")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="kn-install-", dir="/tmp"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(network())
        story = Story(folder, stack)
        try:
            steps(
                [
                    ("Keystone, Glance and Neutron", story.with_neighbours),
                    ("contract suites of identity and images", story.suites),
                ]
            )
        finally:
            if options.keep:
                say(f"The machines stay up until Ctrl-C; their trees are in {folder}.")
                _wait_for_interrupt()
    return 0


def _wait_for_interrupt() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    sys.exit(main(lambda: run(sys.argv[1:])))
