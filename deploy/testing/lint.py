# SPDX-License-Identifier: Apache-2.0
"""What is checked without running the code: ``python -m deploy.testing.lint``; the ring "lint" of
deploy/test.

Style by ruff, types by mypy (strict), the floors by import-linter, the pages of docs/ and the links
between them by Sphinx, the alert rules by promtool, which also tries each on series that it is for
and on such that it is not (ALERT_TRIALS), and the systemd units by systemd itself, which also says
how much a unit leaves open to its process (0 is nothing, 10 all). Everything runs, side by side,
then it fails if anything failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deploy.environment import VENV, docs_command
from deploy.packages import PROMTOOL, ROOT
from deploy.progress import say

#: What each unit may score at most, as systemd-analyze says it: what it does score, so that
#: nothing is opened unseen. Each unit sets PrivateMounts, because systemd 252 takes an unset one
#: for "no" and 257 for "yes". Above 2 is only what cannot be lower, with the reason.
SCORES = {
    **dict.fromkeys(("agent",), 1.8),
    # Workers tell that they are ready, so systemd listens to more than one process.
    **dict.fromkeys(("api", "placement", "metadata", "image-gateway"), 1.4),
    **dict.fromkeys(
        ("conductor", "scheduler", "console", "identity", "image", "network", "network-host"), 1.2
    ),
    "bridges": 1.3,
    # Root, who makes devices and scans buses: it sees /dev and /sys, and has CAP_SYS_ADMIN.
    "volumes": 2.7,
    # What it mounts below /run/netns its successor must see, so it has the machine's own mounts,
    # and with them it can have none of the options that hide or protect files; and networks are
    # what it is there to change.
    "network-helper": 5.1,
}
ALERTS = ROOT / "deploy/monitoring/alerts.yml"
ALERT_TRIALS = ROOT / "tests/unit/deploy/alert_trials.yml"
INSTALLED = "/opt/kilonova/venv/bin/"  # where the units expect the programs


def main() -> int:
    """Run all checks; the number of those that failed."""
    programs = VENV / "bin"
    with tempfile.TemporaryDirectory() as folder:
        commands: list[list[str | Path]] = [
            [programs / "mypy"],
            [programs / "lint-imports", "--no-cache"],
            [programs / "ruff", "check", "--no-cache", "."],
            [programs / "ruff", "format", "--no-cache", "--check", "--quiet", "."],
            docs_command(Path(folder) / "site"),
            [PROMTOOL, "check", "rules", ALERTS],
            [PROMTOOL, "check", "config", "--syntax-only", ALERTS.with_name("prometheus.yml")],
            [PROMTOOL, "test", "rules", ALERT_TRIALS],
            ["systemd-analyze", "verify", *_units(Path(folder))],
            *(_scored(unit) for unit in sorted((ROOT / "deploy/systemd").glob("*.service"))),
        ]
        with ThreadPoolExecutor() as pool:
            return sum(not passes for passes in pool.map(_passes, commands))


def _scored(unit: Path) -> list[str | Path]:
    """The command that fails when a unit leaves more open than it may."""
    highest = SCORES[unit.stem.removeprefix("kilonova-")]
    return [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--no-pager",
        f"--threshold={highest * 10:.0f}",
        unit,
    ]


def _passes(command: list[str | Path]) -> bool:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NO_COLOR": "1", "SYSTEMD_LOG_LEVEL": "warning"},
    )
    name = (
        Path(command[0]).name if "security" not in command else f"score of {Path(command[-1]).name}"
    )
    say(f"{name}: {'passed' if done.returncode == 0 else 'FAILED'}")
    if done.returncode != 0:
        say(done.stdout)
    return done.returncode == 0


def _units(folder: Path) -> list[str | Path]:
    """Copy the units into ``folder``, with programs that exist: systemd checks them.

    The programs are named through a link, because the path of .venv may contain a space.
    """
    copies: list[str | Path] = []
    (folder / "bin").symlink_to(VENV / "bin")
    for unit in sorted((ROOT / "deploy/systemd").glob("*.*")):
        copy = folder / unit.name
        copy.write_text(unit.read_text().replace(INSTALLED, f"{folder}/bin/"))
        copies.append(copy)
    return copies


if __name__ == "__main__":
    sys.exit(min(1, main()))
