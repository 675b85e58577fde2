# SPDX-License-Identifier: Apache-2.0
"""A machine that allows less: what ``up`` says of it, and that tests which need more are skipped
with its reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.one_machine import preflight
from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.machine import abilities as machine
from deploy.one_machine.machine.abilities import FOR_GUESTS, FOR_HOSTS, FOR_NETWORKS, Ability
from deploy.packages import ROOT
from deploy.progress import Failure

#: Tests that need namespaces, mounts and bridges by each of the fixtures that make them.
NEEDY = (
    "tests/unit/deploy/test_underlay.py::test_hosts_reach_each_other_and_what_is_broken_is_mended",
    "tests/unit/compute_agent/test_images.py::test_image_fetch_on_full_disk_fails_retryably_and_leaves_no_file[announced]",
    "tests/contract/test_network_host.py",
    "tests/contract/test_network_host_leases.py",
    "tests/contract/test_network_moves.py",
    "tests/contract/test_virt_actions.py::test_pause_is_repeatable_and_ended_by_start_reboot_or_stop[qemu]",
    "tests/contract/test_virt_moves.py::test_offered_parts_contain_exactly_the_announced_bytes[qemu]",
    "tests/e2e/test_network.py",
    "tests/e2e/test_lab.py",
)
PLAIN = "tests/unit/deploy/test_underlay.py::test_addresses_of_one_cloud_are_together"


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> set[Ability]:
    """The abilities of the machine, all of them at first."""
    found = set(Ability)
    monkeypatch.setattr(
        machine,
        "_lack",
        lambda ability: (
            None if ability in found else machine.Lack(f"No {ability.name}.", "Get it.")
        ),
    )
    return found


@pytest.mark.parametrize(
    ("lacking", "works", "does_not"),
    [
        (Ability.NAMESPACES, ["KILONOVA_DRIVER=memory"], "KILONOVA_NETWORKS=no"),
        (Ability.MOUNTS, ["KILONOVA_DRIVER=memory"], "KILONOVA_NETWORKS=no"),
        (Ability.BRIDGES, ["KILONOVA_NETWORKS=no", "KILONOVA_DRIVER=memory"], ""),
        (Ability.TAPS, ["KILONOVA_NETWORKS=no", "KILONOVA_DRIVER=memory"], ""),
    ],
)
def test_up_names_the_settings_that_work_where_something_is_lacking(
    tmp_path: Path, allowed: set[Ability], lacking: Ability, works: list[str], does_not: str
) -> None:
    cloud = Cloud(tmp_path)
    preflight.check_abilities(cloud)
    allowed.remove(lacking)
    with pytest.raises(Failure, match=f"No {lacking.name}.") as caught:
        preflight.check_abilities(cloud)
    assert [word for word in works if word not in caught.value.todo] == []
    assert not does_not or does_not not in caught.value.todo
    settings = {
        "KILONOVA_DRIVER=memory": replace(cloud, driver="memory", networks=True),
        "KILONOVA_NETWORKS=no": replace(cloud, networks=False),
    }
    for setting in works:
        preflight.check_abilities(settings[setting])


def test_lab_has_no_setting_that_would_do_without(tmp_path: Path, allowed: set[Ability]) -> None:
    allowed.remove(Ability.BRIDGES)
    with pytest.raises(Failure) as caught:
        preflight.check_abilities(Cloud(tmp_path, hosts=("a", "b"), apart=True))
    assert caught.value.todo == "Get it."


def test_first_lack_is_told_and_none_where_nothing_is_lacking(allowed: set[Ability]) -> None:
    assert machine.lack_of(*FOR_NETWORKS) is None
    allowed -= {Ability.BRIDGES, Ability.TAPS}
    assert machine.lack_of(*FOR_GUESTS) is None
    lack = machine.lack_of(*FOR_NETWORKS)
    assert lack is not None and lack.what == "No BRIDGES."
    assert machine.lack_of(*FOR_HOSTS) == lack


def without_privileges(command: Sequence[str]) -> list[str]:
    """The command as a root that may neither make namespaces nor mount nor change networks, as in
    most containers."""
    if machine.lack_of(Ability.NAMESPACES) is not None:
        return list(command)  # this one may not either
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (package util-linux) is not installed")
    return [
        "setpriv",
        "--bounding-set",
        "-sys_admin,-net_admin",
        "--inh-caps",
        "-sys_admin,-net_admin",
        *command,
    ]


@pytest.mark.slice("operations")
def test_unprivileged_machine_skips_with_its_reason_and_fails_nothing(tmp_path: Path) -> None:
    pytest.importorskip("libvirt")  # Files of the ring contract import it.
    report = tmp_path / "report.xml"
    done = subprocess.run(
        without_privileges(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--junitxml={report}",
                f"--basetemp={tmp_path / 'base'}",
                PLAIN,
                *NEEDY,
            ]
        ),
        cwd=ROOT,
        env={**os.environ, "KILONOVA_TEST": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {
        f"{case.get('classname')}::{case.get('name')}": [
            (child.tag, child.get("message") or "") for child in case
        ]
        for case in cases
    }
    assert done.returncode == 0, done.stdout[-3000:]
    passed = [name for name, found in outcomes.items() if not found]
    skipped = {name: found[0] for name, found in outcomes.items() if found}
    assert passed == ["tests.unit.deploy.test_underlay::test_addresses_of_one_cloud_are_together"]
    assert {tag for tag, _ in skipped.values()} == {"skipped"}
    reason = "This is not root." if os.geteuid() else "cannot be made here"
    assert all(reason in why for _, why in skipped.values()), skipped
    asked = {name.split("::")[0].replace("/", ".").removesuffix(".py") for name in NEEDY}
    assert {name.split("::")[0] for name in skipped} == asked
