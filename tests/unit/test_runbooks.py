# SPDX-License-Identifier: Apache-2.0
"""Commands in the operator's pages have a test.

The test types the command from the page, or ``tests.runbooks`` names another test.
"""

from __future__ import annotations

from tests.runbooks import (
    AGGREGATES,
    BACKUP,
    DOCS,
    ELSEWHERE,
    HOST_FAILURE,
    HOSTS,
    OPERATE,
    TYPED,
    every_command,
    is_elsewhere,
)

ROOT = DOCS.parent
COMMANDS = [
    (page, *command)
    for page in (OPERATE, HOSTS, HOST_FAILURE, AGGREGATES)
    for command in every_command(page)
]


def test_documented_commands_have_a_test() -> None:
    assert [
        f"{page}, {heading}: {command}"
        for page, heading, command in COMMANDS
        if (page, heading) not in TYPED and not is_elsewhere(command)
    ] == []


def test_headings_listed_for_tested_commands_exist_in_the_pages() -> None:
    assert {(page, heading) for page, heading, _ in COMMANDS} >= TYPED


def test_backup_commands_are_read_by_the_failover_test() -> None:
    assert "docs/backup.md" in (ROOT / "tests/e2e/failover.py").read_text()
    assert every_command(BACKUP)


def test_tests_listed_for_documented_commands_contain_their_words() -> None:
    missing = []
    for command, test in ELSEWHERE.items():
        words = [word.strip("-") for word in command.split()[1:] if not word.isupper()]
        text = (ROOT / test).read_text()
        missing += [f"{test} has no {word} of {command}" for word in words if word not in text]
        if not any(documented.startswith(command) for _, _, documented in COMMANDS):
            missing.append(f"no page has {command}")
    assert missing == []
