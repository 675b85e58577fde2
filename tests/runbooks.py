# SPDX-License-Identifier: Apache-2.0
"""The commands in the operator's pages, and the test that runs each of them.

Tests read the commands from the pages, so that the pages contain no untested command.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
OPERATE, HOSTS, BACKUP = "operate.md", "hosts.md", "backup.md"
AGGREGATES, HOST_FAILURE = "aggregates.md", "host-failure.md"
_COMMAND = re.compile(r"^    ((?:kilonova|openstack) .+?)(?:\s+#.*)?$")
#: Headings of the commands that tests/e2e/test_runbooks.py runs.
TYPED = {
    (OPERATE, "Commands"),
    (AGGREGATES, "Aggregates"),
    (AGGREGATES, "Images fetched ahead"),
    (HOSTS, "Take a host out of use"),
    (HOSTS, "Empty a host: drain"),
    (HOST_FAILURE, "A dead host: evacuate"),
    (HOST_FAILURE, "Remove the leftovers at external services"),
    (AGGREGATES, "Change inventories and traits"),
}
#: Command -> the test that runs it. These commands need more than a cloud in memory, for example
#: another machine, the broker's administrator, a lost host or a guest without a record.
ELSEWHERE = {
    "kilonova host add": "tests/e2e/test_join.py",
    "kilonova join": "tests/e2e/test_join.py",
    "kilonova host verify": "tests/e2e/test_join.py",
    "kilonova host rotate": "tests/unit/deploy/test_host_identity.py",
    "kilonova host remove": "tests/e2e/test_join.py",
    "kilonova broker": "tests/unit/deploy/test_broker_roles.py",
    "kilonova host adopt": "tests/e2e/test_database_failover.py",
    "kilonova host drain HOST": "tests/functional/test_host_commands.py",
    "kilonova host evacuate HOST": "tests/e2e/test_evacuate.py",
    "kilonova host removals": "tests/unit/deploy/test_host_removals.py",
    "kilonova cleanup retry": "tests/unit/deploy/test_cleanups.py",
    "kilonova cleanup cancel": "tests/unit/deploy/test_cleanups.py",
    "openstack compute service delete": "tests/api/test_os_hosts.py",
    "openstack compute service set --down": "tests/e2e/test_runbooks.py",
}


def every_command(page: str) -> list[tuple[str, str]]:
    """Return (heading, command) of each command line in a page, without comments."""
    commands, heading = [], ""
    for line in (DOCS / page).read_text().splitlines():
        if title := re.match(r"#+ (.+)$", line):
            heading = title[1]
        elif command := _COMMAND.match(line):
            commands.append((heading, command[1]))
    return commands


def is_elsewhere(command: str) -> bool:
    """Return True if a test in ``ELSEWHERE`` runs the command."""
    return any(command.startswith(prefix) for prefix in ELSEWHERE)


def commands_of(page: str, heading: str) -> list[str]:
    """Return the commands below a heading that a test types on a cloud in memory.

    Raises:
        LookupError: The page has no such commands below this heading.
    """
    commands = [
        command
        for at, command in every_command(page)
        if at == heading and not is_elsewhere(command)
    ]
    if not commands:
        raise LookupError(f"{page} has no commands below {heading!r}")
    return commands
