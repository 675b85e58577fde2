# SPDX-License-Identifier: Apache-2.0
"""Reload of the configuration: options in force, options that need a restart, and refusals."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.domain import errors
from common.service import config, reload
from tests.log_lines import logged_fields

READ_AGAIN = "the configuration was read again"
STAYS = "the configuration stays as it was, because the file is invalid"


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
    assert logged_fields(caplog, READ_AGAIN) == [
        {
            "in_force": "conductor.batch",
            "needs_restart": "database.lock_timeout, conductor.max_attempts, DEFAULT.transport_url",
        }
    ]
    caplog.clear()
    reload.again("conductor")
    assert logged_fields(caplog, READ_AGAIN) == [{}] and len(caplog.records) == 1


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
    [fields] = logged_fields(caplog, STAYS)
    assert str(fields["problem"]).startswith(str(path)) and len(caplog.records) == 1
    assert (calls, config.CONF.conductor.batch) == ([], 5)
    path.unlink()
    reload.again("conductor")
    assert caplog.messages[-1] == STAYS
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
        "options stay as they were, because the new values are refused",
        READ_AGAIN,
    ]
    assert logged_fields(caplog, caplog.messages[0]) == [
        {"options": "conductor.*", "problem": "because"}
    ]
    assert logged_fields(caplog, READ_AGAIN) == [{"refused": "conductor.batch"}]


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
    assert logged_fields(caplog, READ_AGAIN) == [
        {"in_force": "conductor.max_attempts", "refused": "conductor.batch"},
        {"refused": "conductor.batch"},
        {"in_force": "conductor.batch"},
        {},
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
    assert caplog.messages[-1] == READ_AGAIN
    assert logged_fields(caplog, READ_AGAIN) == [{"refused": "conductor.batch"}]


def test_reload_sections_cover_all_option_sections() -> None:
    read = {
        *reload.OF_ALL,
        *(section for sections in reload.SECTIONS.values() for section in sections.split()),
    }
    assert read == set(config.OPTIONS)
