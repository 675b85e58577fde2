# SPDX-License-Identifier: Apache-2.0
"""The Debian packages as an operator has them: built, judged by lintian, and installed, upgraded,
removed and purged on a booted machine of this release. The tests are one story, in their order."""

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
EVERY = sorted({COMMON, CONTROL, *SERVICES})
CONFIGURATION, RUNNING = "/etc/kilonova/kilonova.conf", "kilonova-placement"
#: What a placement service needs to run: nobody asks it anything here.
CONFIGURED = """# an operator's
[DEFAULT]
transport_url = rabbit://kilonova:x@127.0.0.1:5672/
[database]
url = sqlite:////var/lib/kilonova/kilonova.db
[identity]
auth_url = http://127.0.0.1:5000/v3
password = x
"""
pytestmark = pytest.mark.timeout(3600)
#: What the agent asks of the helper for volumes first.
ASKS = """
from compute_agent.privileged.volume_helper import VolumeHelper
found = VolumeHelper().ask({"verb": "host", "host": "here", "ip": "127.0.0.1"})
print(found["host"], found["os_type"])
"""
IMPORTED = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"


@pytest.fixture(scope="module")
def debian(
    tmp_path_factory: pytest.TempPathFactory, bridge: None, packages: list[Path]
) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("debian"), "debian") as booted:
        (booted.root / "packages").mkdir()
        for package in packages:
            shutil.copy(package, booted.root / "packages")
        booted.apt("update")
        yield booted


def versions(debian: Machine) -> dict[str, str]:
    """The installed packages of ours, and the version of each."""
    form = "${Package} ${Version} ${db:Status-Status}\n"
    said = debian.run("dpkg-query", "--show", f"--showformat={form}", "kilonova*", check=False)
    found = (line.split() for line in said.splitlines() if line.endswith(" installed"))
    return {name: version for name, version, _ in found}


def process(debian: Machine) -> str:
    return debian.run("systemctl", "show", "--property=MainPID", "--value", RUNNING).strip()


def newer(packages: list[Path], folder: Path) -> None:
    """The same packages of a later revision, in a folder."""
    for package in packages:
        tree = folder / "tree"
        run(["dpkg-deb", "--raw-extract", package, tree], "Make room on the disk.")
        control = tree / "DEBIAN/control"
        control.write_text(control.read_text().replace("-1~deb", "-2~deb"))
        name = package.name.replace("-1~deb", "-2~deb")
        run(["dpkg-deb", "-Znone", "--build", tree, folder / name], "Make room on the disk.")
        shutil.rmtree(tree)


def test_everything_installs_and_starts_nothing(debian: Machine) -> None:
    debian.run("sh", "-c", "apt-get -qy --no-install-recommends install /packages/*.deb")
    assert sorted(versions(debian)) == EVERY
    for name in SERVICES:
        assert debian.run("systemctl", "is-enabled", name, check=False).strip() == "disabled"
        assert debian.run("systemctl", "is-active", name, check=False).strip() == "inactive"


@pytest.mark.parametrize("name", [*SERVICES, "kilonova-bridges", "kilonova-volumes"])
def test_unit_is_one_that_systemd_understands(debian: Machine, name: str) -> None:
    assert debian.run("systemd-analyze", "verify", f"/lib/systemd/system/{name}.service") == ""


def test_users_and_rights_are_made(debian: Machine) -> None:
    def rights(path: str) -> str:
        return debian.run("stat", "--format=%a %U %G", path).strip()

    assert rights("/etc/kilonova") == "711 root root"
    assert rights(CONFIGURATION) == "640 root kilonova"
    groups = debian.run("id", "--name", "--groups", "kilonova-agent").split()
    assert set(groups) == {"kilonova-agent", "libvirt", "kvm", "libvirt-qemu"}


def test_every_command_finds_all_that_it_needs(debian: Machine) -> None:
    assert debian.run("kilonova", "--version") == f"kilonova {__version__}\n"
    for name in SERVICES:
        assert debian.run(name, "--version") == f"{name} {__version__}\n"
    modules = sorted({module for module, _, _ in COMMANDS.values()})
    assert debian.run("/usr/lib/kilonova/bin/python", "-c", IMPORTED, *modules) == ""


def test_pages_and_completion_are_there(debian: Machine) -> None:
    for name in manual.pages():
        assert (debian.root / f"usr/share/man/man{name[-1]}/{name}.gz").exists()
    code = (
        "source /usr/share/bash-completion/completions/kilonova; "
        "COMP_WORDS=(kilonova host dr); COMP_CWORD=2; _kilonova; echo ${COMPREPLY[*]}"
    )
    assert debian.run("bash", "-c", code) == "drain\n"


def test_volumes_are_connected_for_the_agent_alone(debian: Machine) -> None:
    """The socket starts the unit at the first question; a helper that was killed is back."""
    unit, socket = "kilonova-volumes", "/run/kilonova-volumes.socket"

    def ask(user: str, check: bool = True) -> str:
        python = "/usr/lib/kilonova/bin/python"
        return debian.run("runuser", "-u", user, "--", python, "-c", ASKS, check=check)

    debian.run("systemctl", "start", f"{unit}.socket")
    assert debian.run("stat", "--format=%a %U", socket) == "600 kilonova-agent\n"
    assert debian.run("systemctl", "is-active", unit, check=False) == "inactive\n"
    for _ in range(2):
        assert ask("kilonova-agent") == "here linux\n"
        assert debian.run("systemctl", "is-active", unit) == "active\n"
        debian.run("systemctl", "kill", "--signal=KILL", unit)
    for other in ("nobody", "kilonova"):
        assert "PermissionError" in ask(other, check=False)
    debian.run("systemctl", "stop", f"{unit}.socket", unit)


def test_service_that_is_configured_runs(debian: Machine) -> None:
    (debian.root / CONFIGURATION[1:]).write_text(CONFIGURED)
    debian.run("runuser", "-u", "kilonova", "--", "kilonova", "database", "upgrade")
    debian.run("systemctl", "enable", "--now", RUNNING)
    assert debian.run("systemctl", "is-active", RUNNING) == "active\n"


def test_upgrade_restarts_what_runs_and_keeps_what_was_written(
    debian: Machine, packages: list[Path]
) -> None:
    before = process(debian)
    (debian.root / "newer").mkdir()
    newer(packages, debian.root / "newer")
    debian.run("sh", "-c", "apt-get -qy install /newer/*.deb")
    assert {version.partition("-")[2] for version in versions(debian).values()} == {
        debian_version("", "2")[1:]
    }
    assert process(debian) not in (before, "0")
    assert debian.run("systemctl", "is-active", RUNNING) == "active\n"
    assert (debian.root / CONFIGURATION[1:]).read_text() == CONFIGURED
    assert debian.run("systemctl", "is-enabled", "kilonova-api", check=False) == "disabled\n"


def test_removal_leaves_what_was_written_and_no_program(debian: Machine) -> None:
    debian.apt("remove", *EVERY)
    assert versions(debian) == {}
    assert (debian.root / CONFIGURATION[1:]).read_text() == CONFIGURED
    assert not (debian.root / "usr/lib/kilonova").exists()
    assert debian.run("systemctl", "list-units", "--no-legend", "kilonova-*") == ""


def test_purge_leaves_disks_of_guests_and_nothing_else(debian: Machine) -> None:
    state = debian.root / "var/lib/kilonova-agent"
    (state / "instances/a-guest").mkdir(parents=True)
    (state / "host.key").touch()
    (debian.root / "etc/kilonova/agent.conf").touch()
    said = debian.apt("purge", *EVERY)
    assert "disks of guests stay in /var/lib/kilonova-agent/instances" in said
    assert {path.name for path in state.iterdir()} == {"instances"}
    shutil.rmtree(state)
    left = debian.run(
        *("find", "/", "-xdev", "-name", "*kilonova*"),
        *("-not", "-path", "/packages/*", "-not", "-path", "/newer/*"),
        *("-not", "-path", "/run/*", "-not", "-path", "/tmp/*"),
    )
    assert left == ""


def test_purge_of_a_host_without_guests_leaves_nothing(debian: Machine) -> None:
    debian.run("sh", "-c", f"apt-get -qy install /packages/{COMMON}_*.deb /packages/{AGENT}_*.deb")
    state = debian.root / "var/lib/kilonova-agent"
    (state / "instances").mkdir(parents=True)
    (state / "agent.db").touch()
    debian.apt("purge", COMMON, AGENT)
    assert not state.exists()
    assert re.findall(r"^kilonova\S*", debian.run("dpkg-query", "--list"), re.MULTILINE) == []
