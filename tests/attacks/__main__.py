# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.attacks --home /var/lib/kilonova-up``: repeat the attacks on a cloud that runs.

Prints for each what it tried, and held, BROKEN or not tried; the status is how many are broken (100
at most). As root, on the machine of the cloud. A cloud under systemd is named by its files:

    python -m tests.attacks --clouds clouds.yaml --control /etc/kilonova/kilonova.conf \\
        --agent /etc/kilonova/agent.conf --folder /etc/kilonova --folder /var/lib/kilonova

The first agent's host is taken as the stolen one. It makes servers of the admin and a user, which
it deletes, and stops that agent for some seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.attacks import bus, doors, floods, machine
from tests.attacks.target import Attack, Outcome, Target

ATTACKS: dict[str, Attack] = {
    "permissions": bus.permissions,
    "reports": bus.reports,
    "commands": bus.commands,
    "terminal": bus.terminal,
    "hypervisors": bus.hypervisors,
    "stolen-files": machine.stolen_files,
    "local-users": machine.local_users,
    "guests": machine.guests_are_confined,
    "listeners": machine.listeners,
    "forged-headers": doors.forged_headers,
    "disguised-paths": doors.disguised_paths,
    "metadata": doors.metadata,
    "raw": doors.raw_requests,
    "bodies": doors.bodies,
    "large-bodies": doors.large_bodies,
    "numbers": doors.numbers,
    "long-names": doors.long_names,
    "words": doors.words,
    "patterns": doors.patterns,
    "slow-clients": doors.slow_clients,
    "busy-project": doors.busy_project,
    "passwords": doors.passwords,
    "floods": floods.floods,
}
MOST_STATUS, FILES = 100, 4096


def attacked(target: Target, names: list[str]) -> Iterator[Outcome]:
    """The outcomes of these attacks. What nobody foresaw is broken, too: nobody knows that it
    held."""
    for name in names:
        try:
            yield from ATTACKS[name](target)
        except Exception as problem:  # noqa: BLE001 - whatever it is, the next attack is tried
            yield Outcome(name, f"ended by {type(problem).__name__}: {problem}"[:500])


def main(arguments: list[str], said: Callable[[str], object] = print) -> int:
    """Parse the command line, attack, and count what is broken."""
    options = _parsed(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, FILES)), hard))
    target, begun, counts = _target(options), time.monotonic(), [0, 0, 0]
    for outcome in attacked(target, options.only or list(ATTACKS)):
        counts[2 if outcome.untried else 1 if outcome.broken else 0] += 1
        said(str(outcome))
    held, broken, untried = counts
    said(f"{held} held, {broken} broken, {untried} not tried; {time.monotonic() - begun:.0f} s")
    return min(broken, MOST_STATUS)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--home", type=Path, help="of ./deploy/up or ./deploy/lab")
    parser.add_argument("--control", type=Path, help="the control plane's configuration")
    parser.add_argument("--agent", type=Path, action="append", default=[], help="an agent's")
    parser.add_argument("--clouds", type=Path, help="clouds.yaml with kilonova and kilonova-admin")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="what it keeps")
    parser.add_argument("--only", choices=ATTACKS, action="append", help="not all of them")
    options = parser.parse_args(arguments)
    if not options.home and not (options.control and options.agent and options.clouds):
        parser.error("say --home, or --control, --agent and --clouds")
    return options


def _target(options: argparse.Namespace) -> Target:
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
