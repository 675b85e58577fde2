# SPDX-License-Identifier: Apache-2.0
"""A command that cannot work says what is missing, before it listens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standalone import ROOT


@pytest.mark.parametrize(
    ("command", "said"),
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
def test_a_start_that_cannot_work_says_what_to_do(
    tmp_path: Path, command: list[str], said: str
) -> None:
    name, *rest = [word.format(folder=tmp_path) for word in command]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KILONOVA_")}
    done = subprocess.run(
        [sys.executable, "-m", f"deploy.standalone.{name}", *rest],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        timeout=20,
        check=False,
    )
    assert done.returncode != 0
    assert said in done.stderr
