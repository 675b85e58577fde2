# SPDX-License-Identifier: Apache-2.0
"""The wheel and the source distribution hold everything: the wheel is built from the source
distribution, installed into an empty environment, and every command is run from there.

Nothing is downloaded: the locked dependencies are those of the environment that runs the tests.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

from common import __version__

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "compute_api", "conductor", "scheduler", "compute_agent", "deploy")
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
#: Load the function of each command, and print the files of all modules of the given packages.
LOAD = """
import sys
from importlib.metadata import distribution
for command in distribution("kilonova").entry_points.select(group="console_scripts"):
    command.load()
for name, module in list(sys.modules.items()):
    if name.split(".")[0] in sys.argv[1:]:
        print(module.__file__)
"""
#: Beside the tree's folders nothing is copied: no environment, and nothing that was built before.
FOLDERS = (*PACKAGES, "docs", "tests", ".ci")
IGNORED = ignore_patterns("__pycache__", "*.pyc")


def setup() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg")
    return found


SCRIPTS = sorted(
    line.split("=")[0].strip()
    for line in setup()["options.entry_points"]["console_scripts"].strip().splitlines()
)


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, far from the tree."""

    folder: Path
    wheel: Path
    source: Path

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """One of its programs, which finds nothing of the tree."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "KILONOVA"))
        }
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**clean, **more},
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("installed")
    tree = folder / "tree"
    for name in FOLDERS:
        copytree(ROOT / name, tree / name, ignore=IGNORED)
    for path in ROOT.iterdir():
        if path.is_file():
            copy(path, tree)
    source = _built("build_sdist", tree, folder / "made")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked")
    [unpacked] = (folder / "unpacked").iterdir()
    wheel = _built("build_wheel", unpacked, folder / "made")
    where = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", where], check=True, timeout=120)
    packages = next(where.glob("lib/python*/site-packages"))
    (packages / "locked.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", where, "install", "--quiet"),
            *("--no-deps", "--no-index", "--disable-pip-version-check", "--ignore-installed"),
            wheel,
        ],
        check=True,
        timeout=120,
    )
    return Installed(where, wheel, source)


def _built(what: str, tree: Path, folder: Path) -> Path:
    """The file that setuptools made; it builds in the folder where it is called."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(folder)],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl" if what == "build_wheel" else "*.tar.gz"))


def files(*folders: str) -> set[str]:
    """Every file of the tree that is somebody's work, not a tool's."""
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_wheel_holds_every_file_of_the_packages(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        held = set(wheel.namelist())
    assert files(*PACKAGES) - held == set()
    assert {name.split("/")[0] for name in held} == {
        *PACKAGES,
        f"kilonova-{__version__}.dist-info",
    }


def test_source_distribution_holds_what_tests_and_documents_need(installed: Installed) -> None:
    with tarfile.open(installed.source) as source:
        held = {member.name.partition("/")[2] for member in source if member.isfile()}
    assert files(*PACKAGES, "docs", "tests") - held == set()
    assert {"README.md", "LICENSE", "CHANGELOG.md", "ruff.toml", "tox.ini", ".ci/run"} <= held


@pytest.mark.slice("operations")
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_runs_from_the_wheel(installed: Installed, script: str) -> None:
    for argument in ("--help", "--version"):
        done = installed.run(script, argument)
        assert (done.returncode, done.stderr) == (0, ""), (argument, done)
        assert script in done.stdout
    assert done.stdout == f"{script} {__version__}\n"


def test_commands_of_the_wheel_load_without_the_tree(installed: Installed) -> None:
    loaded = installed.run("python", "-c", LOAD, *PACKAGES)
    assert (loaded.returncode, loaded.stderr) == (0, "")
    paths = loaded.stdout.splitlines()
    assert len(paths) > 100
    assert [path for path in paths if str(installed.folder) not in path] == []
    assert [script for script in SCRIPTS if not (installed.folder / "bin" / script).exists()] == []


@pytest.mark.slice("operations")
def test_database_and_sample_of_the_wheel(installed: Installed, tmp_path: Path) -> None:
    sample = installed.run("kilonova", "config", "sample")
    assert sample.stdout == (ROOT / "deploy/samples/kilonova.conf").read_text()
    path = tmp_path / "kilonova.conf"
    path.write_text(f"[database]\nurl = sqlite:///{tmp_path}/kilonova.db\n")
    newest = max((ROOT / "common/store/upgrades/versions").glob("[0-9]*.py")).name[:4]
    for command, said in (
        ("upgrade", f"database at version {newest}, was empty\n"),
        ("upgrade", f"database at version {newest} already\n"),
        ("version", f"the database has {newest}, this code needs {newest}\n"),
    ):
        done = installed.run("kilonova", "database", command, KILONOVA_CONF=str(path))
        assert (done.returncode, done.stdout) == (0, said), done.stderr
