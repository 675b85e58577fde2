# SPDX-License-Identifier: Apache-2.0
"""The configuration is read again: what is taken over, what needs a restart, what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.domain import errors
from common.service import config, reload


@pytest.fixture
def path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Path]:
    made = tmp_path / "kilonova.conf"
    made.write_text("[conductor]\nbatch = 5\n")
    config.load(str(made))
    monkeypatch.setattr(reload, "_callbacks", [])
    monkeypatch.setattr(reload, "_refused", set())
    caplog.set_level(logging.INFO)
    yield made
    config.CONF.clear()


def test_one_line_says_what_is_in_force_and_what_needs_a_restart(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    reload.takes("conductor.*", then=lambda conf: seen.append(conf.conductor.batch))
    path.write_text(
        "[DEFAULT]\ntransport_url = rabbit://x\n[conductor]\nbatch = 6\nmax_attempts = 4\n"
        "[database]\nlock_timeout = 2\n[console]\nport = 1\n"
    )
    reload.again("conductor", "conductor.max_attempts")
    assert seen == [6]
    assert caplog.messages == [
        "the configuration was read again; in force: conductor.batch; after a restart: "
        "database.lock_timeout, conductor.max_attempts, DEFAULT.transport_url"
    ]
    caplog.clear()
    reload.again("conductor")
    assert caplog.messages == [
        "the configuration was read again; in force: nothing new; after a restart: nothing more"
    ]


@pytest.mark.parametrize(
    "broken", ["[conductor]\nbatch = many\n", "[condctor]\nbatch = 6\n", "batch"]
)
def test_a_wrong_file_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    seen: list[str] = []
    reload.takes("*", then=lambda conf: seen.append("taken"))
    path.write_text(broken)
    reload.again("conductor")
    [said] = caplog.messages
    assert said.startswith(f"the configuration stays as it was: {path}")
    assert (seen, config.CONF.conductor.batch) == ([], 5)
    path.unlink()
    reload.again("conductor")
    assert "stays as it was" in caplog.messages[-1]
    assert config.CONF.conductor.batch == 5


def test_what_cannot_be_taken_over_is_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(conf: object) -> None:
        raise errors.ConfigError("because")

    reload.takes("conductor.*", then=refuse)
    path.write_text("[conductor]\nbatch = 7\n")
    reload.again("conductor")
    assert caplog.messages == [
        "conductor.* stays as it was: because",
        "the configuration was read again; in force: nothing new; refused: conductor.batch; "
        "after a restart: nothing more",
    ]


def test_refused_option_is_tried_again_at_the_next_reload(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = [errors.ConfigError("because"), errors.ConfigError("because")]

    def take_over(conf: object) -> None:
        if refusals:
            raise refusals.pop()

    reload.takes("conductor.batch", then=take_over)
    reload.takes("conductor.max_attempts")
    path.write_text("[conductor]\nbatch = 7\nmax_attempts = 4\n")
    for _ in range(4):
        reload.again("conductor")
    assert [line for line in caplog.messages if line.startswith("the configuration")] == [
        "the configuration was read again; in force: conductor.max_attempts; "
        "refused: conductor.batch; after a restart: nothing more",
        "the configuration was read again; in force: nothing new; refused: conductor.batch; "
        "after a restart: nothing more",
        "the configuration was read again; in force: conductor.batch; "
        "after a restart: nothing more",
        "the configuration was read again; in force: nothing new; after a restart: nothing more",
    ]


def test_option_that_one_of_two_parts_refuses_is_reported_refused(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(conf: object) -> None:
        raise errors.ConfigError("because")

    reload.takes("conductor.batch", then=refuse)
    reload.takes("*")
    path.write_text("[conductor]\nbatch = 7\n")
    reload.again("conductor")
    assert "in force: nothing new; refused: conductor.batch" in caplog.messages[-1]


def test_every_section_is_read_by_somebody() -> None:
    read = {
        *reload.OF_ALL,
        *(section for sections in reload.SECTIONS.values() for section in sections.split()),
    }
    assert read == set(config.OPTIONS)
