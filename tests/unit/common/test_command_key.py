# SPDX-License-Identifier: Apache-2.0
"""``CommandKey`` and its text form."""

from __future__ import annotations

import pytest

from common.domain.command_key import CommandKey, CommandKind


@pytest.mark.parametrize("kind", CommandKind)
def test_command_key_parsed_from_its_text_is_equal(kind: CommandKind) -> None:
    key = CommandKey(kind, "7f3c", "stop", 2)
    assert CommandKey.parse(str(key)) == key


def test_command_keys_differ_by_kind_and_attempt() -> None:
    keys = [CommandKey(kind, "a", "stop", attempt) for kind in CommandKind for attempt in (1, 2)]
    assert len({str(key) for key in keys}) == len(keys)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a/stop/1",
        "do/a/stop",
        "do/a/b/c/1",
        "fly/a/stop/1",
        *(f"do/a/stop/{attempt}" for attempt in ("", "x", "-1", "²", 10**18)),
    ],
)
def test_command_key_parse_refuses_malformed_text(text: str) -> None:
    with pytest.raises(ValueError):
        CommandKey.parse(text)
    assert CommandKey.parse_each([text, "do/a/stop/1"]).keys() == {"do/a/stop/1"}


def test_command_key_label_marks_the_undo_of_a_step() -> None:
    labels = [CommandKey(kind, "a", "stop", 1).label for kind in (CommandKind.DO, CommandKind.UNDO)]
    assert labels == ["stop", "undo-stop"]
