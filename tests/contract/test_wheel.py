# SPDX-License-Identifier: Apache-2.0
"""Completeness of the wheel and the source distribution.

The wheel is built from the source distribution and installed into an empty environment, and every
command runs from there. No package is downloaded. The locked dependencies come from the environment
of the tests.
"""

from __future__ import annotations

import configparser
import os
import re
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
#: The folders to copy. Environments and earlier builds are left out.
FOLDERS = (*PACKAGES, "docs", "tests", ".ci")
IGNORED = ignore_patterns("__pycache__", "*.pyc")


def read_setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


SCRIPTS = sorted(
    line.split("=")[0].strip()
    for line in read_setup_cfg()["options.entry_points"]["console_scripts"].strip().splitlines()
)


@dataclass(frozen=True)
class WheelEnvironment:
    """An environment with the wheel, outside the tree."""

    folder: Path
    wheel: Path
    source: Path

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, without access to the tree."""
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
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WheelEnvironment]:
    folder = tmp_path_factory.mktemp("installed")
    tree = folder / "tree"
    for name in FOLDERS:
        copytree(ROOT / name, tree / name, ignore=IGNORED)
    for path in ROOT.iterdir():
        if path.is_file():
            copy(path, tree)
    source = _build("build_sdist", tree, folder / "made")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked")
    [unpacked] = (folder / "unpacked").iterdir()
    wheel = _build("build_wheel", unpacked, folder / "made")
    environment_folder = folder / "environment"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", environment_folder], check=True, timeout=120
    )
    packages = next(environment_folder.glob("lib/python*/site-packages"))
    (packages / "locked.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", environment_folder, "install", "--quiet"),
            *("--no-deps", "--no-index", "--disable-pip-version-check", "--ignore-installed"),
            wheel,
        ],
        check=True,
        timeout=120,
    )
    return WheelEnvironment(environment_folder, wheel, source)


def _build(hook: str, tree: Path, folder: Path) -> Path:
    """Build a distribution in this folder and return its file."""
    folder.mkdir(exist_ok=True)
    process = subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(folder)],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return next(folder.glob("*.whl" if hook == "build_wheel" else "*.tar.gz"))


def list_files(*folders: str) -> set[str]:
    """Return every file of these folders except files of tools."""
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_wheel_holds_every_file_of_the_packages(environment: WheelEnvironment) -> None:
    with zipfile.ZipFile(environment.wheel) as wheel:
        names = set(wheel.namelist())
    assert list_files(*PACKAGES) - names == set()
    assert {name.split("/")[0] for name in names} == {
        *PACKAGES,
        f"kilonova-{__version__}.dist-info",
    }


def test_source_distribution_holds_packages_tests_and_documents(
    environment: WheelEnvironment,
) -> None:
    with tarfile.open(environment.source) as source:
        names = {member.name.partition("/")[2] for member in source if member.isfile()}
    assert list_files(*PACKAGES, "docs", "tests") - names == set()
    assert {"README.md", "LICENSE", "CHANGELOG.md", "ruff.toml", "tox.ini", ".ci/run"} <= names


@pytest.mark.slice("operations")
@pytest.mark.parametrize("script", SCRIPTS)
def test_commands_of_the_wheel_print_help_and_version(
    environment: WheelEnvironment, script: str
) -> None:
    for argument in ("--help", "--version"):
        process = environment.run(script, argument)
        assert (process.returncode, process.stderr) == (0, ""), (argument, process)
        assert script in process.stdout
    assert process.stdout == f"{script} {__version__}\n"


def test_commands_of_wheel_load_without_source_tree(environment: WheelEnvironment) -> None:
    process = environment.run("python", "-c", LOAD, *PACKAGES)
    assert (process.returncode, process.stderr) == (0, "")
    paths = process.stdout.splitlines()
    assert len(paths) > 100
    assert [path for path in paths if str(environment.folder) not in path] == []
    assert [
        script for script in SCRIPTS if not (environment.folder / "bin" / script).exists()
    ] == []


@pytest.mark.slice("operations")
def test_wheel_prints_sample_configuration_and_upgrades_database(
    environment: WheelEnvironment, tmp_path: Path
) -> None:
    sample = environment.run("kilonova", "config", "sample")
    assert sample.stdout == (ROOT / "deploy/samples/kilonova.conf").read_text()
    path = tmp_path / "kilonova.conf"
    path.write_text(f"[database]\nurl = sqlite:///{tmp_path}/kilonova.db\n")
    newest = max((ROOT / "common/store/upgrades/versions").glob("[0-9]*.py")).name[:4]
    for command, output in (
        ("upgrade", f"database at version {newest}, was empty\n"),
        ("upgrade", f"database at version {newest} already\n"),
        (
            "version",
            f"the database has version {newest} and serves code from version [0-9]{{4}}, "
            f"this code needs {newest}\n",
        ),
    ):
        process = environment.run("kilonova", "database", command, KILONOVA_CONF=str(path))
        assert process.returncode == 0, process.stderr
        assert re.fullmatch(output, process.stdout)
