# SPDX-License-Identifier: Apache-2.0
"""Start of the embedded services: a command without necessary input exits with a hint."""

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Restore the umask, which the commands set for their process."""
    before = os.umask(0)
    os.umask(before)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["identity", "serve", "--db", "{folder}/new.db"], "run the command bootstrap first"),
        (["identity", "bootstrap", "--db", "{folder}/new.db"], "set KILONOVA_ADMIN_PASSWORD"),
        (["identity", "bootstrap", "--db", "{folder}/new.db", "--endpoint", "image"], "TYPE=URL"),
        (
            ["image", "serve", "--data", "{folder}", "--auth-url", "x"],
            "set KILONOVA_SERVICE_PASSWORD",
        ),
    ],
)
def test_embedded_service_start_exits_with_hint_when_input_is_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    message: str,
) -> None:
    name, *rest = [word.format(folder=tmp_path) for word in command]
    monkeypatch.setattr(sys, "argv", [name, *rest])
    for variable in ("KILONOVA_ADMIN_PASSWORD", "KILONOVA_SERVICE_PASSWORD"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(SystemExit) as end:
        import_module(f"deploy.one_machine.services.{name}.__main__").main()
    # A text is printed by Python, and the status is then 1.
    assert end.value.code
    assert message in f"{end.value.code}{capsys.readouterr().err}"
