# SPDX-License-Identifier: Apache-2.0
"""The contents and dependencies of the Debian packages, as deploy/debian declares them.

tests/contract/test_debian_packages.py builds, checks, installs and purges the packages.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from deploy import packages
from deploy.packaging import bundle, manual
from deploy.packaging.deb import debian_version
from deploy.progress import Failure

CODENAMES = {"12": "bookworm", "13": "trixie"}
DEBIAN = Path(__file__).resolve().parents[3] / "deploy/debian"
STANZAS = {
    stanza[1]: stanza[0]
    for stanza in re.finditer(
        r"^Package: (\S+)\n(?:.+\n)*", (DEBIAN / "control").read_text(), re.MULTILINE
    )
}


def read_dependencies(package: str) -> set[str]:
    """Return the names of the packages that a package depends on."""
    match = re.search(r"^Depends:\n((?: .+\n)+)", STANZAS[package], re.MULTILINE)
    assert match
    return {line.split()[0].rstrip(",") for line in match[1].splitlines()}


@pytest.fixture(scope="module")
def libraries_by_package() -> dict[str, list[str]]:
    return bundle.divide(distribution("kilonova"))


def test_debian_control_has_package_for_each_service_and_library_part() -> None:
    services = {f"kilonova-{name}" for name in manual.services()}
    assert STANZAS.keys() == services | bundle.EXTRAS.keys()


def test_debian_packages_contain_all_units_except_standalone_services() -> None:
    packed = {f"kilonova-{name}.service" for name in manual.services()}
    packed |= {unit for units in bundle.HELPERS.values() for unit in units}
    standalone = ("identity", "image.", "network")
    units = {unit.name for unit in (bundle.ROOT / "systemd").iterdir()}
    left = {unit for unit in units if unit.removeprefix("kilonova-").startswith(standalone)}
    assert units - left == packed
    for name in packed:
        assert bundle.UNITS_PREFIX not in bundle.unit_text(name)


def test_debian_packages_depend_on_each_other_in_same_version() -> None:
    for package, stanza in STANZAS.items():
        needed = {name for name in read_dependencies(package) if name.startswith("kilonova-")}
        expected = {"kilonova-common": set(), "kilonova-control": {"kilonova-common"}}
        default = {"kilonova-common" if package == "kilonova-agent" else "kilonova-control"}
        assert needed == expected.get(package, default)
        for name in needed:
            assert f" {name} (= ${{binary:Version}}),\n" in stanza


def test_debian_agent_and_console_packages_depend_on_their_programs() -> None:
    assert set(packages.HYPERVISOR) <= read_dependencies("kilonova-agent")
    assert set(packages.CONSOLE) <= read_dependencies("kilonova-console")


def test_debian_libraries_are_divided_once_between_packages(
    libraries_by_package: dict[str, list[str]],
) -> None:
    common, control, agent = (set(libraries_by_package[name]) for name in bundle.EXTRAS)
    assert not common & control and not common & agent and not control & agent
    assert {"oslo-messaging", "cryptography"} <= common
    assert {"sqlalchemy", "falcon", "numpy", "pymysql", "psycopg", "psycopg-binary"} <= control
    assert agent == {"libvirt-python", "os-brick", "oslo-privsep", "pycdlib", "tenacity"}
    assert not {"pytest", "python-openstackclient", "uv"} & (common | control)


def test_debian_bundle_keeps_only_files_usable_without_source_tree() -> None:
    kept = (
        "deploy/operator/main.py",
        "deploy/samples/agent.conf",
    )
    left = (
        "deploy/up",
        "deploy/requirements.txt",
        "deploy/one_machine/cloud/configuration.py",
        "deploy/one_machine/services/web.py",
    )
    assert all(map(bundle.is_kept, (*kept, "common/domain/ids.py", "compute_agent/service.py")))
    assert not any(map(bundle.is_kept, left))


def test_debian_bundle_refuses_modified_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "thing-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
    (tmp_path / "thing.py").write_text("x = 1\n")
    digest = "thing.py,sha256=v-fb7HbMj5i7bKpSvBeo7lz-LrpJ7hL6eKGR9S8KS0s,6"
    (info / "RECORD").write_text(f"{digest}\nthing-1.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match="differs from its wheel: remove .venv"):
        bundle.copy("thing", tmp_path / "to")


def test_debian_bundle_copies_library_without_tests_and_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "thing-1.dist-info"
    names = ("thing/a.py", "thing/tests/b.py", "thing/__pycache__/a.pyc", "../bin/thing")
    for name in names[:3]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    monkeypatch.syspath_prepend(str(tmp_path))
    bundle.copy("thing", tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").rglob("*") if path.is_file()] == ["a.py"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.1.0", "0.1.0-1~deb"),
        ("1.0.0rc2", "1.0.0~rc2-1~deb"),
        ("1.0.0.dev3", "1.0.0~dev3-1~deb"),
    ],
)
@pytest.mark.parametrize("release", ["12", "13"])
def test_debian_version_marks_prerelease_and_release_for_dpkg_order(
    monkeypatch: pytest.MonkeyPatch, version: str, expected: str, release: str
) -> None:
    system = {"ID": "debian", "VERSION_ID": release, "VERSION_CODENAME": CODENAMES[release]}
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: system)
    assert debian_version(version, "1") == f"{expected}{release}"


@pytest.mark.parametrize(("release", "version"), [("12", "15"), ("13", "17")])
def test_packages_for_test_have_postgresql_version_of_debian_release(
    monkeypatch: pytest.MonkeyPatch, release: str, version: str
) -> None:
    system = {"ID": "debian", "VERSION_ID": release, "VERSION_CODENAME": CODENAMES[release]}
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: system)
    assert f"postgresql-{version}" in packages.for_test()


def test_packages_for_test_refuses_unknown_release(monkeypatch: pytest.MonkeyPatch) -> None:
    system = {"PRETTY_NAME": "Debian GNU/Linux 11 (bullseye)", "VERSION_CODENAME": "bullseye"}
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: system)
    with pytest.raises(Failure, match="Debian GNU/Linux 11"):
        packages.for_test()


def test_debian_libraries_depend_on_python_of_build() -> None:
    minor = sys.version_info.minor
    assert bundle.python_dependency() == (
        f"kilonova:Python=python3 (>= 3.{minor}~), python3 (<< 3.{minor + 1}~)\n"
    )
    assert "${kilonova:Python}" in read_dependencies(bundle.COMMON)


def test_lintian_overrides_have_reasons() -> None:
    for file in DEBIAN.glob("lintian-overrides.*"):
        assert re.fullmatch(r"((#.*\n)+([^#\n].*\n)+)+", file.read_text()), file.name
