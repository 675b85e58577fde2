# SPDX-License-Identifier: Apache-2.0
"""The Debian packages: installed, upgraded, removed and purged on a booted machine.

The tests depend on each other and run in the order of the file.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import __version__
from deploy.operator.commands import COMMANDS
from deploy.packaging import manual
from deploy.packaging.bundle import AGENT, COMMON, CONTROL
from deploy.packaging.deb import debian_version
from deploy.progress import run
from tests.install.machines import Machine, machine

SERVICES = [f"kilonova-{name}" for name in manual.services()]
ALL_PACKAGES = sorted({COMMON, CONTROL, *SERVICES})
CONFIGURATION, RUNNING = "/etc/kilonova/kilonova.conf", "kilonova-placement"
#: The configuration that a placement service needs to start.
CONFIGURATION_TEXT = """# an operator's
[DEFAULT]
transport_url = rabbit://kilonova:x@127.0.0.1:5672/
[database]
url = sqlite:////var/lib/kilonova/kilonova.db
[identity]
auth_url = http://127.0.0.1:5000/v3
password = x
"""
pytestmark = pytest.mark.timeout(3600)
#: A script that sends the agent's first request to the helper for volumes.
HELPER_SCRIPT = """
from compute_agent.privileged.volume_helper import VolumeHelper
found = VolumeHelper().ask({"verb": "host", "host": "here", "ip": "127.0.0.1"})
print(found["host"], found["os_type"])
"""
IMPORT_SCRIPT = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"


@pytest.fixture(scope="module")
def debian(
    tmp_path_factory: pytest.TempPathFactory, bridge: None, packages: list[Path]
) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("debian"), "debian") as new_machine:
        (new_machine.root / "packages").mkdir()
        for package in packages:
            shutil.copy(package, new_machine.root / "packages")
        new_machine.apt("update")
        yield new_machine


def read_versions(debian: Machine) -> dict[str, str]:
    """Return the version of each installed package of Kilonova."""
    form = "${Package} ${Version} ${db:Status-Status}\n"
    output = debian.run("dpkg-query", "--show", f"--showformat={form}", "kilonova*", check=False)
    fields = (line.split() for line in output.splitlines() if line.endswith(" installed"))
    return {name: version for name, version, _ in fields}


def read_main_pid(debian: Machine) -> str:
    return debian.run("systemctl", "show", "--property=MainPID", "--value", RUNNING).strip()


def build_newer_packages(packages: list[Path], folder: Path) -> None:
    """Build the same packages with a later revision in ``folder``."""
    for package in packages:
        tree = folder / "tree"
        run(["dpkg-deb", "--raw-extract", package, tree], "Make room on the disk.")
        control = tree / "DEBIAN/control"
        control.write_text(control.read_text().replace("-1~deb", "-2~deb"))
        name = package.name.replace("-1~deb", "-2~deb")
        run(["dpkg-deb", "-Znone", "--build", tree, folder / name], "Make room on the disk.")
        shutil.rmtree(tree)


def test_debian_packages_install_without_starting_services(debian: Machine) -> None:
    debian.run("sh", "-c", "apt-get -qy --no-install-recommends install /packages/*.deb")
    assert sorted(read_versions(debian)) == ALL_PACKAGES
    for name in SERVICES:
        assert debian.run("systemctl", "is-enabled", name, check=False).strip() == "disabled"
        assert debian.run("systemctl", "is-active", name, check=False).strip() == "inactive"


@pytest.mark.parametrize("name", [*SERVICES, "kilonova-bridges", "kilonova-volumes"])
def test_debian_unit_passes_systemd_analyze_verify(debian: Machine, name: str) -> None:
    assert debian.run("systemd-analyze", "verify", f"/lib/systemd/system/{name}.service") == ""


def test_debian_packages_create_users_and_file_modes(debian: Machine) -> None:
    def read_rights(path: str) -> str:
        return debian.run("stat", "--format=%a %U %G", path).strip()

    assert read_rights("/etc/kilonova") == "711 root root"
    assert read_rights(CONFIGURATION) == "640 root kilonova"
    groups = debian.run("id", "--name", "--groups", "kilonova-agent").split()
    assert set(groups) == {"kilonova-agent", "libvirt", "kvm", "libvirt-qemu"}


def test_debian_programs_start_and_import_their_modules(debian: Machine) -> None:
    assert debian.run("kilonova", "--version") == f"kilonova {__version__}\n"
    for name in SERVICES:
        assert debian.run(name, "--version") == f"{name} {__version__}\n"
    modules = sorted({module for module, _, _ in COMMANDS.values()})
    assert debian.run("/usr/lib/kilonova/bin/python", "-c", IMPORT_SCRIPT, *modules) == ""


def test_debian_packages_contain_man_pages_and_completion(debian: Machine) -> None:
    for name in manual.pages():
        assert (debian.root / f"usr/share/man/man{name[-1]}/{name}.gz").exists()
    code = (
        "source /usr/share/bash-completion/completions/kilonova; "
        "COMP_WORDS=(kilonova host dr); COMP_CWORD=2; _kilonova; echo ${COMPREPLY[*]}"
    )
    assert debian.run("bash", "-c", code) == "drain\n"


def test_debian_volume_helper_serves_only_the_agent_and_restarts(debian: Machine) -> None:
    """The socket starts the helper at the first request, and again after the helper is killed."""
    unit, socket = "kilonova-volumes", "/run/kilonova-volumes.socket"

    def run_helper_script(user: str, check: bool = True) -> str:
        python = "/usr/lib/kilonova/bin/python"
        return debian.run("runuser", "-u", user, "--", python, "-c", HELPER_SCRIPT, check=check)

    debian.run("systemctl", "start", f"{unit}.socket")
    assert debian.run("stat", "--format=%a %U", socket) == "600 kilonova-agent\n"
    assert debian.run("systemctl", "is-active", unit, check=False) == "inactive\n"
    for _ in range(2):
        assert run_helper_script("kilonova-agent") == "here linux\n"
        assert debian.run("systemctl", "is-active", unit) == "active\n"
        debian.run("systemctl", "kill", "--signal=KILL", unit)
    for other in ("nobody", "kilonova"):
        assert "PermissionError" in run_helper_script(other, check=False)
    debian.run("systemctl", "stop", f"{unit}.socket", unit)


def test_debian_placement_service_is_active_after_configuration(debian: Machine) -> None:
    (debian.root / CONFIGURATION[1:]).write_text(CONFIGURATION_TEXT)
    debian.run("runuser", "-u", "kilonova", "--", "kilonova", "database", "upgrade")
    debian.run("systemctl", "enable", "--now", RUNNING)
    assert debian.run("systemctl", "is-active", RUNNING) == "active\n"


def test_debian_upgrade_restarts_running_service_and_keeps_configuration(
    debian: Machine, packages: list[Path]
) -> None:
    before = read_main_pid(debian)
    (debian.root / "newer").mkdir()
    build_newer_packages(packages, debian.root / "newer")
    debian.run("sh", "-c", "apt-get -qy install /newer/*.deb")
    assert {version.partition("-")[2] for version in read_versions(debian).values()} == {
        debian_version("", "2")[1:]
    }
    assert read_main_pid(debian) not in (before, "0")
    assert debian.run("systemctl", "is-active", RUNNING) == "active\n"
    assert (debian.root / CONFIGURATION[1:]).read_text() == CONFIGURATION_TEXT
    assert debian.run("systemctl", "is-enabled", "kilonova-api", check=False) == "disabled\n"


def test_debian_remove_keeps_configuration_and_deletes_programs(debian: Machine) -> None:
    debian.apt("remove", *ALL_PACKAGES)
    assert read_versions(debian) == {}
    assert (debian.root / CONFIGURATION[1:]).read_text() == CONFIGURATION_TEXT
    assert not (debian.root / "usr/lib/kilonova").exists()
    assert debian.run("systemctl", "list-units", "--no-legend", "kilonova-*") == ""


def test_debian_purge_keeps_only_disks_of_guests(debian: Machine) -> None:
    state = debian.root / "var/lib/kilonova-agent"
    (state / "instances/a-guest").mkdir(parents=True)
    (state / "host.key").touch()
    (debian.root / "etc/kilonova/agent.conf").touch()
    output = debian.apt("purge", *ALL_PACKAGES)
    assert "disks of guests stay in /var/lib/kilonova-agent/instances" in output
    assert {path.name for path in state.iterdir()} == {"instances"}
    shutil.rmtree(state)
    remaining_files = debian.run(
        *("find", "/", "-xdev", "-name", "*kilonova*"),
        *("-not", "-path", "/packages/*", "-not", "-path", "/newer/*"),
        *("-not", "-path", "/run/*", "-not", "-path", "/tmp/*"),
    )
    assert remaining_files == ""


def test_debian_purge_of_host_without_guests_removes_all_files(debian: Machine) -> None:
    debian.run("sh", "-c", f"apt-get -qy install /packages/{COMMON}_*.deb /packages/{AGENT}_*.deb")
    state = debian.root / "var/lib/kilonova-agent"
    (state / "instances").mkdir(parents=True)
    (state / "agent.db").touch()
    debian.apt("purge", COMMON, AGENT)
    assert not state.exists()
    assert re.findall(r"^kilonova\S*", debian.run("dpkg-query", "--list"), re.MULTILINE) == []
