# SPDX-License-Identifier: Apache-2.0
"""The Debian packages: what goes into which, and that deploy/debian has all of it.

They are built, judged by lintian, installed and purged in tests/contract/test_debian_packages.py.
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


def depends(package: str) -> set[str]:
    """The names of the packages that one depends on."""
    found = re.search(r"^Depends:\n((?: .+\n)+)", STANZAS[package], re.MULTILINE)
    assert found
    return {line.split()[0].rstrip(",") for line in found[1].splitlines()}


@pytest.fixture(scope="module")
def divided() -> dict[str, list[str]]:
    return bundle.divide(distribution("kilonova"))


def test_every_service_and_every_part_of_the_libraries_is_a_package() -> None:
    services = {f"kilonova-{name}" for name in manual.services()}
    assert STANZAS.keys() == services | bundle.EXTRAS.keys()


def test_every_unit_but_the_standalone_services_is_in_a_package() -> None:
    packed = {f"kilonova-{name}.service" for name in manual.services()}
    packed |= {unit for units in bundle.HELPERS.values() for unit in units}
    standalone = ("identity", "image.", "network")
    units = {unit.name for unit in (bundle.ROOT / "systemd").iterdir()}
    left = {unit for unit in units if unit.removeprefix("kilonova-").startswith(standalone)}
    assert units - left == packed
    for name in packed:
        assert bundle.UNITS_PREFIX not in bundle.unit_text(name)


def test_what_a_package_needs_of_the_others_has_its_own_version() -> None:
    for package, stanza in STANZAS.items():
        needed = {name for name in depends(package) if name.startswith("kilonova-")}
        expected = {"kilonova-common": set(), "kilonova-control": {"kilonova-common"}}
        default = {"kilonova-common" if package == "kilonova-agent" else "kilonova-control"}
        assert needed == expected.get(package, default)
        for name in needed:
            assert f" {name} (= ${{binary:Version}}),\n" in stanza


def test_agent_brings_what_a_hypervisor_is() -> None:
    assert set(packages.HYPERVISOR) <= depends("kilonova-agent")
    assert set(packages.CONSOLE) <= depends("kilonova-console")


def test_libraries_are_where_they_are_needed_and_once(divided: dict[str, list[str]]) -> None:
    common, control, agent = (set(divided[name]) for name in bundle.EXTRAS)
    assert not common & control and not common & agent and not control & agent
    assert {"oslo-messaging", "cryptography"} <= common
    assert {"sqlalchemy", "falcon", "numpy", "pymysql", "psycopg", "psycopg-binary"} <= control
    assert agent == {"libvirt-python", "os-brick", "oslo-privsep", "pycdlib", "tenacity"}
    assert not {"pytest", "python-openstackclient", "uv"} & (common | control)


def test_only_what_works_without_the_tree_is_packed() -> None:
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


def test_library_that_was_changed_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "thing-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
    (tmp_path / "thing.py").write_text("x = 1\n")
    digest = "thing.py,sha256=v-fb7HbMj5i7bKpSvBeo7lz-LrpJ7hL6eKGR9S8KS0s,6"
    (info / "RECORD").write_text(f"{digest}\nthing-1.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match="was changed: remove .venv"):
        bundle.copy("thing", tmp_path / "to")


def test_library_is_packed_without_tests_and_programs(
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
def test_version_is_as_dpkg_orders_them(
    monkeypatch: pytest.MonkeyPatch, version: str, expected: str, release: str
) -> None:
    system = {"ID": "debian", "VERSION_ID": release, "VERSION_CODENAME": CODENAMES[release]}
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: system)
    assert debian_version(version, "1") == f"{expected}{release}"


@pytest.mark.parametrize(("release", "version"), [("12", "15"), ("13", "17")])
def test_packages_are_those_of_the_release(
    monkeypatch: pytest.MonkeyPatch, release: str, version: str
) -> None:
    system = {"ID": "debian", "VERSION_ID": release, "VERSION_CODENAME": CODENAMES[release]}
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: system)
    assert f"postgresql-{version}" in packages.for_test()


def test_release_without_known_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    system = {"PRETTY_NAME": "Debian GNU/Linux 11 (bullseye)", "VERSION_CODENAME": "bullseye"}
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: system)
    with pytest.raises(Failure, match="Debian GNU/Linux 11"):
        packages.for_test()


def test_libraries_depend_on_the_python_that_they_are_built_for() -> None:
    minor = sys.version_info.minor
    assert bundle.python_dependency() == (
        f"kilonova:Python=python3 (>= 3.{minor}~), python3 (<< 3.{minor + 1}~)\n"
    )
    assert "${kilonova:Python}" in depends(bundle.COMMON)


def test_overrides_of_lintian_have_reasons() -> None:
    for file in DEBIAN.glob("lintian-overrides.*"):
        assert re.fullmatch(r"((#.*\n)+([^#\n].*\n)+)+", file.read_text()), file.name
