# SPDX-License-Identifier: Apache-2.0
"""Preloaded commands of the tests have the same output and exit status as the scripts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploy.packages import ROOT
from tests.e2e import preloaded
from tests.e2e.live import PROGRAMS

#: Variables with the address of a port without a service.
NOWHERE = {
    "OS_AUTH_URL": "http://127.0.0.1:9/v3",
    "OS_USERNAME": "nobody",
    "OS_PASSWORD": "wrong",
    "OS_PROJECT_NAME": "none",
    "OS_USER_DOMAIN_ID": "default",
    "OS_PROJECT_DOMAIN_ID": "default",
    "PYTHONWARNINGS": "ignore",
    "KILONOVA_CONF": "/nonexistent.conf",
    "no_proxy": "127.0.0.1",
}


@pytest.mark.parametrize(
    ("command", "text", "status", "output", "complaint"),
    [
        (
            "openstack",
            "resource provider list\nhelp trait show\nnothing\n",
            1,
            "usage: trait show",
            "127.0.0.1",
        ),
        ("openstack flavour list", "", 2, "not an openstack command", ""),
        ("kilonova doctor", "", 1, "", "/nonexistent.conf"),
        ("kilonova explain --help", "", 0, "--flavor", ""),
    ],
)
def test_preloaded_command_has_output_and_status_of_its_script(
    command: str, text: str, status: int, output: str, complaint: str
) -> None:
    name, *words = command.split()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OS_", "KILONOVA_"))
    }
    environment |= NOWHERE
    script = subprocess.run(
        [str(PROGRAMS / name), *words],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert script.returncode == status and output in script.stdout and complaint in script.stderr, (
        script
    )
    result = preloaded.run(PROGRAMS / name, *words, text=text, seconds=120, environment=environment)
    assert (result.returncode, result.stdout, result.stderr) == (
        script.returncode,
        script.stdout,
        script.stderr,
    )


def test_preloaded_commands_are_independent_of_each_other(tmp_path: Path) -> None:
    """A command sees neither the environment nor the configuration of an earlier command."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "KILONOVA_CONF": "/first.conf",
    }
    first = preloaded.run(
        PROGRAMS / "kilonova", "config", "check", text="", seconds=120, environment=environment
    )
    del environment["KILONOVA_CONF"]
    second = preloaded.run(
        PROGRAMS / "kilonova", "config", "check", text="", seconds=120, environment=environment
    )
    assert "/first.conf" in first.stdout + first.stderr
    assert "/first.conf" not in second.stdout + second.stderr


def test_preloaded_command_beyond_its_seconds_raises_timeout_expired() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        preloaded.run(
            PROGRAMS / "kilonova",
            "config",
            "sample",
            text="",
            seconds=0,
            environment=dict(os.environ),
        )
