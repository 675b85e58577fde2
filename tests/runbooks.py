# SPDX-License-Identifier: Apache-2.0
"""The commands of the operator's pages, and where each is run: what a test types is read from the
page, so that a page says nothing that was never tried."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
OPERATE, HOSTS, BACKUP = "operate.md", "hosts.md", "backup.md"
AGGREGATES, HOST_FAILURE = "aggregates.md", "host-failure.md"
_COMMAND = re.compile(r"^    ((?:kilonova|openstack) .+?)(?:\s+#.*)?$")
#: Headings whose commands tests/e2e/test_runbooks.py types.
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
#: Commands that need something that a cloud in memory has not (another machine, a broker's
#: administrator, a lost host, a guest without a record), and the test that gives them.
ELSEWHERE = {
    "kilonova host add": "tests/e2e/test_join.py",
    "kilonova join": "tests/e2e/test_join.py",
    "kilonova host prove": "tests/e2e/test_join.py",
    "kilonova host rotate": "tests/unit/deploy/test_host_identity.py",
    "kilonova host remove": "tests/e2e/test_join.py",
    "kilonova broker": "tests/unit/deploy/test_broker_roles.py",
    "kilonova host adopt": "tests/e2e/test_database_failover.py",
    "kilonova host drain HOST": "tests/functional/test_host_commands.py",
    "kilonova host evacuate HOST": "tests/e2e/test_evacuate.py",
    "kilonova host debts": "tests/unit/deploy/test_debts.py",
    "kilonova cleanup retry": "tests/unit/deploy/test_cleanups.py",
    "kilonova cleanup drop": "tests/unit/deploy/test_cleanups.py",
    "openstack compute service delete": "tests/api/test_os_hosts.py",
    "openstack compute service set --down": "tests/e2e/test_runbooks.py",
}


def every_command(page: str) -> list[tuple[str, str]]:
    """(heading, command) of each line that is one, without its comment."""
    found, heading = [], ""
    for line in (DOCS / page).read_text().splitlines():
        if title := re.match(r"#+ (.+)$", line):
            heading = title[1]
        elif command := _COMMAND.match(line):
            found.append((heading, command[1]))
    return found


def is_elsewhere(command: str) -> bool:
    """Does another test give it?"""
    return any(command.startswith(one) for one in ELSEWHERE)


def commands_of(page: str, heading: str) -> list[str]:
    """A chapter's that are typed on a cloud in memory. Raises LookupError: there are none."""
    found = [
        command
        for at, command in every_command(page)
        if at == heading and not is_elsewhere(command)
    ]
    if not found:
        raise LookupError(f"{page} has no commands below {heading!r}")
    return found
