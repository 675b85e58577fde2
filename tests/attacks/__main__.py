# SPDX-License-Identifier: Apache-2.0
r"""``python -m tests.attacks --home /var/lib/kilonova-up``: repeat the attacks on a running cloud.

Prints "held", "BROKEN" or "not tried" with the title of each attack. The status is the number of
broken attacks, at most 100. Run this as root on the machine of the cloud. Pass the files of a cloud
under systemd:

    python -m tests.attacks --clouds clouds.yaml --control /etc/kilonova/kilonova.conf \
        --agent /etc/kilonova/agent.conf --folder /etc/kilonova --folder /var/lib/kilonova

The host of the first agent is the stolen host. The attacks create and delete servers of the admin
and a user, and stop this agent for some seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.attacks import bus, floods, machine, services
from tests.attacks.target import Attack, Outcome, Target

ATTACKS: dict[str, Attack] = {
    "permissions": bus.permissions,
    "reports": bus.reports,
    "commands": bus.commands,
    "terminal": bus.terminal,
    "hypervisors": bus.hypervisors,
    "stolen-files": machine.stolen_files,
    "local-users": machine.local_users,
    "guests": machine.guest_users,
    "listeners": machine.listeners,
    "forged-headers": services.forged_headers,
    "disguised-paths": services.disguised_paths,
    "metadata": services.metadata,
    "raw": services.raw_requests,
    "bodies": services.bodies,
    "large-bodies": services.large_bodies,
    "numbers": services.numbers,
    "long-names": services.long_names,
    "words": services.words,
    "patterns": services.patterns,
    "slow-clients": services.slow_clients,
    "busy-project": services.busy_project,
    "passwords": services.passwords,
    "floods": floods.floods,
}
MOST_STATUS, FILES = 100, 4096


def run_attacks(target: Target, names: list[str]) -> Iterator[Outcome]:
    """Run attacks and yield their outcomes.

    An unexpected exception counts as broken, because the attack may have succeeded.
    """
    for name in names:
        try:
            yield from ATTACKS[name](target)
        except Exception as problem:  # noqa: BLE001 - the next attack runs after any exception
            yield Outcome(name, f"ended by {type(problem).__name__}: {problem}"[:500])


def main(arguments: list[str], show: Callable[[str], object] = print) -> int:
    """Parse the command line, run the attacks, and return the number of broken attacks."""
    options = _parse(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, FILES)), hard))
    target, start, counts = _make_target(options), time.monotonic(), [0, 0, 0]
    for outcome in run_attacks(target, options.only or list(ATTACKS)):
        counts[2 if outcome.untried else 1 if outcome.broken else 0] += 1
        show(str(outcome))
    held, broken, untried = counts
    show(f"{held} held, {broken} broken, {untried} not tried; {time.monotonic() - start:.0f} s")
    return min(broken, MOST_STATUS)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--home", type=Path, help="the cloud's directory, of ./deploy/up or ./deploy/lab"
    )
    parser.add_argument("--control", type=Path, help="configuration file of the control plane")
    parser.add_argument(
        "--agent", type=Path, action="append", default=[], help="configuration file of an agent"
    )
    parser.add_argument("--clouds", type=Path, help="clouds.yaml with kilonova and kilonova-admin")
    parser.add_argument(
        "--folder", type=Path, action="append", default=[], help="a folder of the cloud's files"
    )
    parser.add_argument("--only", choices=ATTACKS, action="append", help="run only this attack")
    options = parser.parse_args(arguments)
    if not options.home and not (options.control and options.agent and options.clouds):
        parser.error("pass --home, or --control, --agent and --clouds")
    return options


def _make_target(options: argparse.Namespace) -> Target:
    home = options.home
    if not home:
        return Target(options.control, options.agent, options.clouds, options.folder)
    agents = sorted((home / "etc").glob("host-*.conf"), key=lambda path: path.stem)
    login = home / "ssh/kilonova"
    return Target(
        home / "etc/kilonova.conf",
        agents,
        home / "clouds.yaml",
        [home, *options.folder],
        login if login.exists() else None,
    )


if __name__ == "__main__":
    os.environ["no_proxy"] = "*"
    sys.exit(main(sys.argv[1:]))
