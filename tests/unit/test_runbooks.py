# SPDX-License-Identifier: Apache-2.0
"""Every command of the operator's pages is run by a test: typed as it stands there, or given by a
test that is named (tests/runbooks.py)."""

from __future__ import annotations

import pytest

from tests.runbooks import (
    BACKUP,
    DOCS,
    ELSEWHERE,
    HOSTS,
    OPERATE,
    TYPED,
    every_command,
    is_elsewhere,
)

ROOT = DOCS.parent


@pytest.mark.parametrize("page", [OPERATE, HOSTS])
def test_every_command_of_a_page_is_run(page: str) -> None:
    missing = [
        f"{heading}: {command}"
        for heading, command in every_command(page)
        if (page, heading) not in TYPED and not is_elsewhere(command)
    ]
    assert missing == []


def test_headings_that_are_typed_are_there() -> None:
    assert {
        (page, heading) for page in (OPERATE, HOSTS) for heading, _ in every_command(page)
    } >= TYPED


def test_commands_of_backups_are_read_by_their_own_test() -> None:
    assert "docs/backup.md" in (ROOT / "tests/e2e/failover.py").read_text()
    assert every_command(BACKUP)


@pytest.mark.parametrize("command", ELSEWHERE)
def test_the_test_that_is_named_gives_it(command: str) -> None:
    words = [word for word in command.split()[1:] if not word.isupper()]
    text = (ROOT / ELSEWHERE[command]).read_text()
    assert all(word.strip("-") in text for word in words), command
    pages = [one for page in (OPERATE, HOSTS) for _, one in every_command(page)]
    assert any(one.startswith(command) for one in pages), "no page has it any more"
