# SPDX-License-Identifier: Apache-2.0
"""Files of the Debian packages that debhelper does not create.

These are a virtual environment in /usr/lib/kilonova, divided into three packages, and the files of
each service.

    python -m deploy.packaging.bundle debian  # in the unpacked source, writes debian/PACKAGE/…

Run it with the environment that deploy/requirements.txt defines. Libraries are copied from there
file by file, unchanged since their wheels were installed. Kilonova itself is built from the source.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, EntryPoint, PackagePath, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.packages import ROOT as REPOSITORY
from deploy.packaging import completion, manual

ROOT = REPOSITORY / "deploy"
NAME, VERSION = "kilonova", f"{sys.version_info.major}.{sys.version_info.minor}"
PREFIX, LIBRARIES = Path("usr/lib/kilonova"), Path(f"lib/python{VERSION}/site-packages")
UNITS_PREFIX, CONFIGURATION = "/opt/kilonova/venv", Path("etc/kilonova")
COMMON, CONTROL, AGENT = "kilonova-common", "kilonova-control", "kilonova-agent"
#: Package -> extras with the distributions in it. The distributions of ``COMMON`` are only there.
EXTRAS: dict[str, tuple[str, ...]] = {
    COMMON: (),
    CONTROL: ("api", "conductor", "postgresql", "mysql", "unified-limits"),
    AGENT: ("agent",),
}
#: Folders of the wheel that only work in the source tree: clouds, images, packages.
LEFT_OUT = (
    "deploy/debian/",
    "deploy/images/",
    "deploy/one_machine/",
    "deploy/packaging/",
    "deploy/site/",
    "deploy/testing/",
)
#: Units of helpers that a package's service starts.
HELPERS = {
    AGENT: tuple(
        f"kilonova-{name}.{kind}"
        for name in ("bridges", "volumes")
        for kind in ("service", "socket")
    )
}
MODES = {True: 0o755, False: 0o644}


def find_needed(top: Distribution, extras: Iterable[str]) -> set[str]:
    """Return the names of the distributions that Kilonova needs with these extras.

    Indirect requirements are included. Kilonova itself is left out. Names are canonical.

    Args:
        top: The distribution of Kilonova.
        extras: Extras of Kilonova.

    Raises:
        PackageNotFoundError: A requirement is not installed.
    """
    extras_by_name: dict[str, frozenset[str]] = {}
    waiting = [(canonicalize_name(NAME), frozenset(extras))]
    while waiting:
        name, wanted_extras = waiting.pop()
        if name in extras_by_name and wanted_extras <= extras_by_name[name]:
            continue
        extras_by_name[name] = wanted_extras | extras_by_name.get(name, frozenset())
        for line in (top if name == NAME else distribution(name)).requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in {"", *wanted_extras}
            ):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return set(extras_by_name) - {NAME}


def divide(top: Distribution) -> dict[str, list[str]]:
    """Return Debian package -> sorted names of the Python distributions in the package.

    Distributions in ``COMMON`` are left out of the other packages.

    Args:
        top: The distribution of Kilonova.
    """
    of = {package: find_needed(top, extras) for package, extras in EXTRAS.items()}
    return {
        package: sorted(names - (of[COMMON] if package != COMMON else set()))
        for package, names in of.items()
    }


def copy(name: str, to: Path) -> None:
    """Copy the files of the installed distribution ``name`` into the folder ``to``.

    Programs, bytecode, and folders with the name tests are left out.

    Raises:
        SystemExit: A file was changed since the installation.
    """
    for file in distribution(name).files or ():
        if {"..", "__pycache__", "tests"} & {*file.parts}:
            continue
        if not is_unchanged(file):
            raise SystemExit(
                f"{file} of {name} differs from its wheel: remove .venv, then build again"
            )
        target = to / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.locate(), target)


def is_unchanged(file: PackagePath) -> bool:
    """Return True if the installed file has the digest in the list RECORD of its wheel.

    Also True for a file without a digest there, such as RECORD itself.
    """
    if file.hash is None:
        return True
    digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value


def build(folder: Path) -> Path:
    """Build the working directory's wheel into ``folder``, and return the wheel's path."""
    code = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, folder], check=True, stdin=subprocess.DEVNULL, timeout=300
    )
    return next(folder.glob(f"{NAME}-*.whl"))


def is_kept(name: str) -> bool:
    """Return True if the Debian packages contain this file of Kilonova's wheel.

    They contain neither the folders in ``LEFT_OUT``, nor files directly in deploy/ that are no
    Python modules.

    Args:
        name: Path of the file in the wheel.
    """
    is_program = name.count("/") == 1 and name.startswith("deploy/") and not name.endswith(".py")
    return not is_program and not name.startswith(LEFT_OUT)


def packages(debian: Path) -> list[str]:
    """Return the names of the packages in the file ``control`` of the folder ``debian``."""
    return re.findall(r"^Package: (\S+)$", (debian / "control").read_text(), re.MULTILINE)


def overrides(package: str) -> str:
    """Return the text of this package's lintian overrides.

    Packages in ``EXTRAS`` have the file for libraries, and all others the file for services.
    """
    kind = "libraries" if package in EXTRAS else "services"
    return (ROOT / f"debian/lintian-overrides.{kind}").read_text()


def environment(folder: Path) -> None:
    """Create an empty virtual environment in ``folder`` with Debian's interpreter."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {VERSION}\n"
    )
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(f"/usr/bin/python{VERSION}")


def python_dependency() -> str:
    """Return the line of debian/*.substvars that requires this interpreter's minor version."""
    following = f"{sys.version_info.major}.{sys.version_info.minor + 1}"
    return f"kilonova:Python=python3 (>= {VERSION}~), python3 (<< {following}~)\n"


def script(entry: EntryPoint) -> str:
    """Return the text of an entry point's program, which imports only the entry point's module."""
    return (
        f"#!/{PREFIX}/bin/python\nimport sys\n\nfrom {entry.module} import {entry.attr}\n\n"
        f'if __name__ == "__main__":\n    sys.exit({entry.attr}())\n'
    )


def write(path: Path, text: str, *, program: bool = False) -> None:
    """Write a file with mode 0755 for a program, else 0644, and create missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(MODES[program])


def program(debian: Path, entry: EntryPoint) -> None:
    """Write an entry point's program and its link in /usr/bin into the folder of its package.

    The program ``kilonova`` is in ``COMMON``. Other programs are in the package of their name. The
    unit of a service is written into the folder ``debian``.
    """
    package = debian / (COMMON if entry.name == NAME else entry.name)
    write(package / PREFIX / "bin" / entry.name, script(entry), program=True)
    link = package / "usr/bin" / entry.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"../lib/kilonova/bin/{entry.name}")
    unit = ROOT / "systemd" / f"{entry.name}.service"
    if unit.exists():
        write(debian / unit.name, unit_text(unit.name))


def unit_text(name: str) -> str:
    """Return the text of a unit in deploy/systemd with the paths of the packages' programs."""
    return (ROOT / "systemd" / name).read_text().replace(UNITS_PREFIX, f"/{PREFIX}")


def pages(debian: Path) -> None:
    """Write man pages and shell completions into the folders of the packages."""
    for name, text in manual.pages().items():
        stem, section = name.rsplit(".", 1)
        package = debian / (stem if section == "8" else COMMON)
        write(package / "usr/share/man" / f"man{section}" / name, text)
    shells = debian / COMMON / "usr/share"
    write(shells / "bash-completion/completions/kilonova", completion.write_completion("bash"))
    write(shells / "zsh/vendor-completions/_kilonova", completion.write_completion("zsh"))


def configuration(debian: Path) -> None:
    """Write the packages' sysusers.d and tmpfiles.d files, a kilonova.conf, and examples.

    kilonova.conf is a sample with mode 0640, which the operator fills in.
    """
    for kind, suffix in (("sysusers.d", "sysusers"), ("tmpfiles.d", "tmpfiles")):
        for file in (ROOT / kind).glob("kilonova-*.conf"):
            if file.stem in EXTRAS:
                shutil.copyfile(file, debian / f"{file.stem}.{suffix}")
    target = debian / CONTROL / CONFIGURATION / "kilonova.conf"
    write(target, (ROOT / "samples/controller.conf").read_text())
    target.chmod(0o640)
    for package, folder, names in (
        (CONTROL, "samples", ("kilonova.conf", "fencing-pacemaker", "pacemaker-forced-down")),
        (CONTROL, "monitoring", ("alerts.yml", "dashboard.json", "prometheus.yml")),
        (AGENT, "samples", ("agent.conf",)),
    ):
        for name in names:
            text = (ROOT / folder / name).read_text()
            write(debian / package / f"usr/share/doc/{package}/examples" / name, text)


def main(arguments: Sequence[str]) -> int:
    """Write the files of all Debian packages into their folders, and return 0.

    Args:
        arguments: The path of the folder debian.

    Raises:
        SystemExit: A file of a library was changed since the installation.
    """
    debian = Path(arguments[0]).resolve()
    libraries = debian / COMMON / PREFIX / LIBRARIES
    environment(debian / COMMON / PREFIX)
    write(debian / f"{COMMON}.substvars", python_dependency())
    with zipfile.ZipFile(build(debian / "wheel")) as wheel:
        wheel.extractall(libraries, [name for name in wheel.namelist() if is_kept(name)])
    top = PathDistribution(next(libraries.glob(f"{NAME}-*.dist-info")))
    for package, names in divide(top).items():
        for name in names:
            copy(name, debian / package / PREFIX / LIBRARIES)
    for entry in top.entry_points.select(group="console_scripts"):
        program(debian, entry)
    pages(debian)
    configuration(debian)
    for package, units in HELPERS.items():
        for unit in units:
            write(debian / f"{package}.{unit}", unit_text(unit))
    for package in packages(debian):
        write(debian / f"{package}.lintian-overrides", overrides(package))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
