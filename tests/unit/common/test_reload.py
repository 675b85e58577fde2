# SPDX-License-Identifier: Apache-2.0
"""Reload of the configuration: options in force, options that need a restart, and refusals."""

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
    file = tmp_path / "kilonova.conf"
    file.write_text("[conductor]\nbatch = 5\n")
    config.load(str(file))
    monkeypatch.setattr(reload, "_callbacks", [])
    monkeypatch.setattr(reload, "_refused", set())
    caplog.set_level(logging.INFO)
    yield file
    config.CONF.clear()


def test_reload_logs_options_in_force_and_options_requiring_a_restart(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches: list[int] = []
    reload.takes("conductor.*", then=lambda conf: batches.append(conf.conductor.batch))
    path.write_text(
        "[DEFAULT]\ntransport_url = rabbit://x\n[conductor]\nbatch = 6\nmax_attempts = 4\n"
        "[database]\nlock_timeout = 2\n[console]\nport = 1\n"
    )
    reload.again("conductor", "conductor.max_attempts")
    assert batches == [6]
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
def test_reload_of_invalid_or_missing_file_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    calls: list[str] = []
    reload.takes("*", then=lambda conf: calls.append("taken"))
    path.write_text(broken)
    reload.again("conductor")
    [message] = caplog.messages
    assert message.startswith(f"the configuration stays as it was: {path}")
    assert (calls, config.CONF.conductor.batch) == ([], 5)
    path.unlink()
    reload.again("conductor")
    assert "stays as it was" in caplog.messages[-1]
    assert config.CONF.conductor.batch == 5


def test_reload_logs_option_refused_by_its_callback(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_reload_tries_a_refused_option_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_reload_reports_option_refused_by_one_of_two_callbacks(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(conf: object) -> None:
        raise errors.ConfigError("because")

    reload.takes("conductor.batch", then=refuse)
    reload.takes("*")
    path.write_text("[conductor]\nbatch = 7\n")
    reload.again("conductor")
    assert "in force: nothing new; refused: conductor.batch" in caplog.messages[-1]


def test_reload_sections_cover_all_option_sections() -> None:
    read = {
        *reload.OF_ALL,
        *(section for sections in reload.SECTIONS.values() for section in sections.split()),
    }
    assert read == set(config.OPTIONS)
