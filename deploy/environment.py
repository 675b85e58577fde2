# SPDX-License-Identifier: Apache-2.0
"""The virtual environment .venv, made from the hashed lock.

Used by deploy/commands. A stamp with the digest of the lock and of setup.cfg says that .venv is as
it should be; then nothing is done. Both locks agree on every version, so the larger one also serves
./deploy/up.
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
#: The placement service's own tests as data, beside what Python imports: its program is never run.
ORACLE, ORACLE_PIN = VENV / "placement-tests", ROOT / "deploy/requirements-placement-tests.txt"
#: Tempest, a program of its own with packages of its own.
TEMPEST, TEMPEST_LOCK = VENV / "tempest", ROOT / "deploy/requirements-tempest.txt"
#: Clients with their own functional suites, and what these need beside them.
CLIENTS, CLIENTS_LOCK = VENV / "clients", ROOT / "deploy/requirements-clients.txt"
#: Sphinx, which makes the site of docs/.
DOCS, DOCS_LOCK = VENV / "docs", ROOT / "deploy/requirements-docs.txt"
#: Nova itself, in an environment of its own: its schemas of requests and responses are what ours
#: are compared with.
NOVA, NOVA_LOCK = VENV / "nova", ROOT / "deploy/requirements-nova-tests.txt"
NOVA_PYTHON, NOVA_SCHEMAS, NOVA_READER = (
    NOVA / "bin/python",
    NOVA / "schemas.json",
    ROOT / "tests/nova/reader.py",
)
#: Cinder itself, which the client of volumes is tried against.
CINDER, CINDER_LOCK = VENV / "cinder", ROOT / "deploy/requirements-cinder.txt"
#: Ceilometer itself, whose discovery reads the metadata of guests.
CEILOMETER, CEILOMETER_LOCK = VENV / "ceilometer", ROOT / "deploy/requirements-ceilometer.txt"
#: Samples of Nova's notifications, as data, out of its source.
SAMPLES, SAMPLES_PIN = VENV / "nova-samples", ROOT / "deploy/requirements-nova-samples.txt"
ADVICE = "Check the network and the proxy (HTTPS_PROXY, PIP_INDEX_URL), then run this again."


def make(lock: Path, log: Path) -> str:
    """Bring .venv up to the lock; returns a note.

    Raises:
        Failure: a package could not be downloaded or built.
    """
    if any(_stamp(one).exists() for one in {lock, TEST}):
        return "up to date"
    # An upgrade of the system replaces the Python that an older environment was made with.
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
    install, more = _installer("--compile-bytecode")
    run([*install, "--require-hashes", "--requirement", lock], ADVICE, log=log, env=more)
    run([*install, "--no-deps", "--no-build-isolation", "--editable", ROOT], ADVICE, log=log)
    for old in VENV.glob(".lock-*"):
        old.unlink()
    _stamp(lock).touch()
    return f"made from {lock.name}"


def make_oracle(log: Path) -> str:
    """Fetch the placement service's own tests; returns a note.

    Raises:
        Failure: the package could not be downloaded.
    """
    pin = ORACLE_PIN.read_text()
    stamp = ORACLE / ".pin"
    if stamp.exists() and stamp.read_text() == pin:
        return "up to date"
    install, more = _installer("--no-deps", "--target", ORACLE)
    run([*install, "--require-hashes", "--requirement", ORACLE_PIN], ADVICE, log=log, env=more)
    stamp.write_text(pin)
    return f"made from {ORACLE_PIN.name}"


def make_tempest(log: Path) -> str:
    """An environment for Tempest; returns a note.

    Raises:
        Failure: a package could not be downloaded.
    """
    return _make_once(TEMPEST, TEMPEST_LOCK, log)


def make_clients(log: Path) -> str:
    """An environment for the clients' suites; returns a note.

    Raises:
        Failure: a package could not be downloaded.
    """
    return _make_once(CLIENTS, CLIENTS_LOCK, log)


def make_cinder(log: Path) -> str:
    """An environment for Cinder; returns a note.

    Raises:
        Failure: a package could not be downloaded.
    """
    return _make_once(CINDER, CINDER_LOCK, log)


def make_ceilometer(log: Path) -> str:
    """Make the environment of Ceilometer and return a note.

    Raises:
        Failure: a package could not be downloaded.
    """
    return _make_once(CEILOMETER, CEILOMETER_LOCK, log)


def has_ceilometer() -> bool:
    """Return True if the environment has the Ceilometer of the lock."""
    return _stamp_apart(CEILOMETER, CEILOMETER_LOCK).exists()


def make_docs(log: Path) -> str:
    """An environment for Sphinx; returns a note.

    Raises:
        Failure: a package could not be downloaded.
    """
    return _make_once(DOCS, DOCS_LOCK, log)


def docs_command(folder: Path) -> list[str | Path]:
    """The command that makes the site in this folder, and fails at any warning."""
    options = ("--quiet", "--fail-on-warning", "--keep-going", "--fresh-env", "--write-all")
    return [DOCS / "bin/sphinx-build", *options, ROOT / "docs", folder]


def tempest_is_there() -> bool:
    """Is it the one of the lock?"""
    return _stamp_apart(TEMPEST, TEMPEST_LOCK).exists()


def make_nova(log: Path) -> str:
    """Install Nova beside everything else, and let it write down its schemas; returns a note.

    Raises:
        Failure: a package could not be downloaded or built.
    """
    if nova_is_there():
        return "up to date"
    _make_apart(NOVA, NOVA_LOCK, log)
    run(
        [NOVA_PYTHON, "-W", "ignore", NOVA_READER, NOVA_SCHEMAS],
        "Report this: Nova's schemas are not as expected.",
        log=log,
    )
    _nova_stamp().touch()
    return f"made from {NOVA_LOCK.name}"


def nova_is_there() -> bool:
    """Are Nova's schemas those of the lock?"""
    return _nova_stamp().exists()


def _nova_stamp() -> Path:
    return NOVA / f".made-{_digest(NOVA_LOCK, NOVA_READER)}"


def make_samples(log: Path) -> str:
    """Fetch the samples of Nova's notifications; returns a note.

    Raises:
        Failure: the package could not be downloaded.
    """
    if samples_are_there():
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
                _, there, name = member.name.partition("/doc/notification_samples/")
                if there and (file := source.extractfile(member)):
                    (SAMPLES / name).parent.mkdir(parents=True, exist_ok=True)
                    (SAMPLES / name).write_bytes(file.read())
    (SAMPLES / ".pin").write_text(SAMPLES_PIN.read_text())
    return f"made from {SAMPLES_PIN.name}"


def samples_are_there() -> bool:
    """Are they those that are pinned?"""
    stamp = SAMPLES / ".pin"
    return stamp.exists() and stamp.read_text() == SAMPLES_PIN.read_text()


def _make_once(folder: Path, lock: Path, log: Path) -> str:
    stamp = _stamp_apart(folder, lock)
    if stamp.exists():
        return "up to date"
    _make_apart(folder, lock, log)
    stamp.touch()
    return f"made from {lock.name}"


def _stamp_apart(folder: Path, lock: Path) -> Path:
    return folder / f".made-{_digest(lock)}"


def _make_apart(folder: Path, lock: Path, log: Path) -> None:
    """An environment of its own, with what the lock says and nothing else."""
    run(
        [VENV / "bin/uv", "venv", "--quiet", "--clear", "--python", PYTHON, folder], ADVICE, log=log
    )
    install, more = _installer(
        "--require-hashes", "--requirement", lock, python=folder / "bin/python"
    )
    run(install, ADVICE, log=log, env=more)


def _installer(
    *options: str | Path, python: Path = PYTHON
) -> tuple[list[str | Path], dict[str, str]]:
    """The command that installs packages, and what it needs in the environment."""
    index = os.environ.get("PIP_INDEX_URL")
    # trust what the machine trusts, for networks with an authority of their own
    more = {"UV_NATIVE_TLS": "true"}
    if index and "UV_INDEX_URL" not in os.environ:
        more["UV_INDEX_URL"] = index
    return [VENV / "bin/uv", "pip", "install", "--python", python, "--quiet", *options], more


def _stamp(lock: Path) -> Path:
    return VENV / f".lock-{VERSION}-{_digest(lock, ROOT / 'setup.cfg')}"


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:32]
