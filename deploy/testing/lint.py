# SPDX-License-Identifier: Apache-2.0
"""The ring "lint" of ./deploy/test: checks that do not run the code.

``python -m deploy.testing.lint`` runs these checks:

* ruff checks the style, mypy (strict) the types, import-linter the layers.
* Sphinx checks the pages of docs/ and the links between them.
* promtool checks the alert rules. ALERT_TRIALS has series for which each rule must or must not
  fire.
* systemd checks the units, and rates the exposure of each from 0 (closed) to 10 (open).

All checks run in parallel, and the command fails if any check fails.
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

#: The highest permitted exposure of each unit, by systemd-analyze. The limit is the present score,
#: so that no change opens a unit unnoticed. Each unit sets PrivateMounts, because systemd 252 takes
#: an unset one for "no" and 257 for "yes". The reason for a score above 2 is beside that score.
SCORES = {
    **dict.fromkeys(("agent",), 1.8),
    # Workers report that they are ready, so systemd listens to more than one process.
    **dict.fromkeys(("api", "placement", "metadata", "image-gateway"), 1.4),
    **dict.fromkeys(
        ("conductor", "scheduler", "console", "identity", "image", "network", "network-host"), 1.2
    ),
    "bridges": 1.3,
    # Runs as root, makes devices and scans buses. Therefore sees /dev and /sys, and has
    # CAP_SYS_ADMIN.
    "volumes": 2.7,
    # The next process must see the mounts below /run/netns, so this unit has the machine's mount
    # namespace. No option that hides or protects files works there. The unit also needs the right
    # to change networks.
    "network-helper": 5.1,
}
ALERTS = ROOT / "deploy/monitoring/alerts.yml"
ALERT_TRIALS = ROOT / "tests/unit/deploy/alert_trials.yml"
#: The folder of the programs in the units.
INSTALLED = "/opt/kilonova/venv/bin/"


def main() -> int:
    """Run all checks and return the number of failed checks."""
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
            ["systemd-analyze", "verify", *_copy_units(Path(folder))],
            *(_score_command(unit) for unit in sorted((ROOT / "deploy/systemd").glob("*.service"))),
        ]
        with ThreadPoolExecutor() as pool:
            return sum(not has_passed for has_passed in pool.map(_run_check, commands))


def _score_command(unit: Path) -> list[str | Path]:
    """Return the command that fails if the unit's exposure is above its limit in ``SCORES``."""
    highest = SCORES[unit.stem.removeprefix("kilonova-")]
    return [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--no-pager",
        f"--threshold={highest * 10:.0f}",
        unit,
    ]


def _run_check(command: list[str | Path]) -> bool:
    """Run a check, print the result, and return True if the check passes.

    The output is printed only after a failure.
    """
    result = subprocess.run(
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
    say(f"{name}: {'passed' if result.returncode == 0 else 'FAILED'}")
    if result.returncode != 0:
        say(result.stdout)
    return result.returncode == 0


def _copy_units(folder: Path) -> list[str | Path]:
    """Copy the units into ``folder``, and return the paths of the copies.

    In the copies the programs are in .venv, because systemd checks that they exist. Their paths go
    through a symbolic link, because the path of .venv may contain a space.
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
