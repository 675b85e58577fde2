# SPDX-License-Identifier: Apache-2.0
"""The virtual environment .venv, installed from a lock with hashes.

The commands in deploy/ use this module. A stamp file with the digest of the lock and of setup.cfg
marks a complete .venv, which is then left as it is. The locks ``RUNTIME`` and ``TEST`` have the
same versions, so an environment of ``TEST`` also serves ./deploy/up.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.packages import ROOT
from deploy.progress import run

VENV = ROOT / ".venv"
PYTHON = VENV / "bin/python"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
RUNTIME = ROOT / "deploy/requirements.txt"
TEST = ROOT / "deploy/requirements-test.txt"
INSTALLER = ROOT / "deploy/requirements-installer.txt"
#: The placement service's own tests as data, apart from Python's packages: the service never runs.
ORACLE, ORACLE_PIN = VENV / "placement-tests", ROOT / "deploy/requirements-placement-tests.txt"
#: Tempest, with separate packages.
TEMPEST, TEMPEST_LOCK = VENV / "tempest", ROOT / "deploy/requirements-tempest.txt"
#: Clients with their own functional test suites, and the packages that these need.
CLIENTS, CLIENTS_LOCK = VENV / "clients", ROOT / "deploy/requirements-clients.txt"
#: Sphinx, which builds the site of docs/.
DOCS, DOCS_LOCK = VENV / "docs", ROOT / "deploy/requirements-docs.txt"
#: Nova, in a separate environment. Tests compare our schemas of requests and responses with
#: Nova's.
NOVA, NOVA_LOCK = VENV / "nova", ROOT / "deploy/requirements-nova-tests.txt"
NOVA_PYTHON, NOVA_SCHEMAS, NOVA_READER = (
    NOVA / "bin/python",
    NOVA / "schemas.json",
    ROOT / "tests/nova/reader.py",
)
#: Cinder, for tests of the client of the volume service.
CINDER, CINDER_LOCK = VENV / "cinder", ROOT / "deploy/requirements-cinder.txt"
#: Ceilometer, whose discovery reads the metadata of guests.
CEILOMETER, CEILOMETER_LOCK = VENV / "ceilometer", ROOT / "deploy/requirements-ceilometer.txt"
#: Samples of Nova's notifications, as data, from Nova's source.
SAMPLES, SAMPLES_PIN = VENV / "nova-samples", ROOT / "deploy/requirements-nova-samples.txt"
ADVICE = "Check the network and the proxy (HTTPS_PROXY, PIP_INDEX_URL), then run this again."


def make(lock: Path, log: Path) -> str:
    """Install Kilonova and the packages of the lock into .venv, unless .venv is complete.

    An environment of ``TEST`` counts as complete for every lock.

    Args:
        lock: The file of requirements with hashes.
        log: The file that gets the programs' output.

    Returns:
        A note for the operator.

    Raises:
        Failure: .venv cannot be created, or a package cannot be downloaded or built.
    """
    if any(_stamp(path).exists() for path in {lock, TEST}):
        return "up to date"
    # An upgrade of the system replaces the Python of an older environment.
    if not PYTHON.exists() or not (VENV / f"lib/python{VERSION}/site-packages/pip").exists():
        run(
            [sys.executable, "-m", "venv", "--clear", VENV],
            "Install the Debian package python3-venv.",
            log=log,
        )
    run(
        [
            PYTHON,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--require-hashes",
            "--requirement",
            INSTALLER,
        ],
        ADVICE,
        log=log,
    )
    install, variables = _installer("--compile-bytecode")
    run([*install, "--require-hashes", "--requirement", lock], ADVICE, log=log, env=variables)
    run([*install, "--no-deps", "--no-build-isolation", "--editable", ROOT], ADVICE, log=log)
    for old in VENV.glob(".lock-*"):
        old.unlink()
    _stamp(lock).touch()
    return f"made from {lock.name}"


def make_oracle(log: Path) -> str:
    """Fetch the placement service's own tests unless present, and return a note for the operator.

    Raises:
        Failure: The package cannot be downloaded.
    """
    pin = ORACLE_PIN.read_text()
    stamp = ORACLE / ".pin"
    if stamp.exists() and stamp.read_text() == pin:
        return "up to date"
    install, variables = _installer("--no-deps", "--target", ORACLE)
    run([*install, "--require-hashes", "--requirement", ORACLE_PIN], ADVICE, log=log, env=variables)
    stamp.write_text(pin)
    return f"made from {ORACLE_PIN.name}"


def make_tempest(log: Path) -> str:
    """Make the environment of Tempest unless complete, and return a note.

    Raises:
        Failure: The environment cannot be made, or a package cannot be downloaded or built.
    """
    return _make_once(TEMPEST, TEMPEST_LOCK, log)


def make_clients(log: Path) -> str:
    """Make the environment of the clients' test suites unless complete, and return a note.

    Raises:
        Failure: A package cannot be downloaded or built.
    """
    return _make_once(CLIENTS, CLIENTS_LOCK, log)


def make_cinder(log: Path) -> str:
    """Make the environment of Cinder unless complete, and return a note.

    Raises:
        Failure: A package cannot be downloaded or built.
    """
    return _make_once(CINDER, CINDER_LOCK, log)


def make_ceilometer(log: Path) -> str:
    """Make the environment of Ceilometer unless complete, and return a note.

    Raises:
        Failure: A package cannot be downloaded or built.
    """
    return _make_once(CEILOMETER, CEILOMETER_LOCK, log)


def has_ceilometer() -> bool:
    """Return True if the environment with the Ceilometer of the present lock is complete."""
    return _lock_stamp(CEILOMETER, CEILOMETER_LOCK).exists()


def make_docs(log: Path) -> str:
    """Make the environment of Sphinx unless complete, and return a note.

    Raises:
        Failure: The environment cannot be made, or a package cannot be downloaded or built.
    """
    return _make_once(DOCS, DOCS_LOCK, log)


def docs_command(folder: Path) -> list[str | Path]:
    """Return the command that builds the site of docs/ into ``folder``, and fails on warnings."""
    options = ("--quiet", "--fail-on-warning", "--keep-going", "--fresh-env", "--write-all")
    return [DOCS / "bin/sphinx-build", *options, ROOT / "docs", folder]


def has_tempest() -> bool:
    """Return True if the environment with the Tempest of the present lock is complete."""
    return _lock_stamp(TEMPEST, TEMPEST_LOCK).exists()


def make_nova(log: Path) -> str:
    """Install Nova in a separate environment and store its schemas as JSON, unless present.

    Returns:
        A note for the operator.

    Raises:
        Failure: A package cannot be downloaded or built, or Nova's schemas cannot be read.
    """
    if has_nova_schemas():
        return "up to date"
    _make_environment(NOVA, NOVA_LOCK, log)
    run(
        [NOVA_PYTHON, "-W", "ignore", NOVA_READER, NOVA_SCHEMAS],
        "Report this: Nova's schemas are not as expected.",
        log=log,
    )
    _nova_stamp().touch()
    return f"made from {NOVA_LOCK.name}"


def has_nova_schemas() -> bool:
    """Return True if ``make_nova`` has stored the schemas with this lock and this reader."""
    return _nova_stamp().exists()


def _nova_stamp() -> Path:
    return NOVA / f".made-{_digest(NOVA_LOCK, NOVA_READER)}"


def make_samples(log: Path) -> str:
    """Fetch the samples of Nova's notifications unless present, and return a note.

    Raises:
        Failure: The package cannot be downloaded.
    """
    if has_samples():
        return "up to date"
    with TemporaryDirectory() as folder:
        run(
            [
                PYTHON,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--no-binary",
                ":all:",
                "--no-build-isolation",
                "--require-hashes",
                "--requirement",
                SAMPLES_PIN,
                "--dest",
                folder,
            ],
            ADVICE,
            log=log,
        )
        shutil.rmtree(SAMPLES, ignore_errors=True)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as source:
            for member in source:
                _, separator, name = member.name.partition("/doc/notification_samples/")
                if separator and (file := source.extractfile(member)):
                    (SAMPLES / name).parent.mkdir(parents=True, exist_ok=True)
                    (SAMPLES / name).write_bytes(file.read())
    (SAMPLES / ".pin").write_text(SAMPLES_PIN.read_text())
    return f"made from {SAMPLES_PIN.name}"


def has_samples() -> bool:
    """Return True if ``make_samples`` has stored the samples of the pinned package."""
    stamp = SAMPLES / ".pin"
    return stamp.exists() and stamp.read_text() == SAMPLES_PIN.read_text()


def _make_once(folder: Path, lock: Path, log: Path) -> str:
    stamp = _lock_stamp(folder, lock)
    if stamp.exists():
        return "up to date"
    _make_environment(folder, lock, log)
    stamp.touch()
    return f"made from {lock.name}"


def _lock_stamp(folder: Path, lock: Path) -> Path:
    return folder / f".made-{_digest(lock)}"


def _make_environment(folder: Path, lock: Path, log: Path) -> None:
    """Replace ``folder`` by a virtual environment with exactly the packages of the lock."""
    run(
        [VENV / "bin/uv", "venv", "--quiet", "--clear", "--python", PYTHON, folder], ADVICE, log=log
    )
    install, variables = _installer(
        "--require-hashes", "--requirement", lock, python=folder / "bin/python"
    )
    run(install, ADVICE, log=log, env=variables)


def _installer(
    *options: str | Path, python: Path = PYTHON
) -> tuple[list[str | Path], dict[str, str]]:
    """Return uv's command that installs packages with these options, and variables to add.

    The packages go into the environment of ``python``, unless an option names another place.
    """
    index = os.environ.get("PIP_INDEX_URL")
    # Trust the machine's authorities, for networks with an authority of their own.
    variables = {"UV_NATIVE_TLS": "true"}
    if index and "UV_INDEX_URL" not in os.environ:
        variables["UV_INDEX_URL"] = index
    return [VENV / "bin/uv", "pip", "install", "--python", python, "--quiet", *options], variables


def _stamp(lock: Path) -> Path:
    return VENV / f".lock-{VERSION}-{_digest(lock, ROOT / 'setup.cfg')}"


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:32]
