# SPDX-License-Identifier: Apache-2.0
"""Machines that lack an ability, such as network namespaces.

The tests cover the failure of ``up``, and the reason with which tests are skipped.
"""

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

#: Tests that need namespaces, mounts or bridges. Each fixture that creates these is used at least
#: once.
NEEDY = (
    "tests/unit/deploy/test_underlay.py::test_underlay_connects_hosts_and_repairs_deleted_namespace",
    "tests/unit/compute_agent/test_images.py::test_image_fetch_on_full_disk_fails_retryably_and_leaves_no_file[announced]",
    "tests/contract/test_network_host.py",
    "tests/contract/test_network_host_leases.py",
    "tests/contract/test_network_moves.py",
    "tests/contract/test_virt_actions.py::test_pause_is_repeatable_and_ended_by_start_reboot_or_stop[qemu]",
    "tests/contract/test_virt_moves.py::test_cold_migration_offer_contains_exactly_the_announced_bytes[qemu]",
    "tests/e2e/test_network.py",
    "tests/e2e/test_lab.py",
)
PLAIN = "tests/unit/deploy/test_underlay.py::test_underlay_addresses_of_cloud_end_before_those_of_next_cloud"


@pytest.fixture
def machine_abilities(monkeypatch: pytest.MonkeyPatch) -> set[Ability]:
    """Return the abilities of the machine. A test removes those that the machine lacks."""
    remaining = set(Ability)
    monkeypatch.setattr(
        machine,
        "_find_lack",
        lambda ability: (
            None if ability in remaining else machine.Lack(f"No {ability.name}.", "Get it.")
        ),
    )
    return remaining


@pytest.mark.parametrize(
    ("lacking", "works", "does_not"),
    [
        (Ability.NAMESPACES, ["KILONOVA_DRIVER=memory"], "KILONOVA_NETWORKS=no"),
        (Ability.MOUNTS, ["KILONOVA_DRIVER=memory"], "KILONOVA_NETWORKS=no"),
        (Ability.BRIDGES, ["KILONOVA_NETWORKS=no", "KILONOVA_DRIVER=memory"], ""),
        (Ability.TAPS, ["KILONOVA_NETWORKS=no", "KILONOVA_DRIVER=memory"], ""),
    ],
)
def test_up_on_machine_lacking_ability_names_working_settings(
    tmp_path: Path,
    machine_abilities: set[Ability],
    lacking: Ability,
    works: list[str],
    does_not: str,
) -> None:
    cloud = Cloud(tmp_path)
    preflight.check_abilities(cloud)
    machine_abilities.remove(lacking)
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


def test_lab_on_machine_lacking_ability_names_no_setting(
    tmp_path: Path, machine_abilities: set[Ability]
) -> None:
    machine_abilities.remove(Ability.BRIDGES)
    with pytest.raises(Failure) as caught:
        preflight.check_abilities(Cloud(tmp_path, hosts=("a", "b"), apart=True))
    assert caught.value.todo == "Get it."


def test_lack_of_returns_first_missing_ability_or_none(machine_abilities: set[Ability]) -> None:
    assert machine.lack_of(*FOR_NETWORKS) is None
    machine_abilities -= {Ability.BRIDGES, Ability.TAPS}
    assert machine.lack_of(*FOR_GUESTS) is None
    lack = machine.lack_of(*FOR_NETWORKS)
    assert lack is not None and lack.what == "No BRIDGES."
    assert machine.lack_of(*FOR_HOSTS) == lack


def drop_privileges(command: Sequence[str]) -> list[str]:
    """Return a command that runs as root without CAP_SYS_ADMIN and CAP_NET_ADMIN.

    In most containers root lacks these capabilities, so namespaces, mounts and networks are
    unavailable.
    """
    if machine.lack_of(Ability.NAMESPACES) is not None:
        # This machine lacks the capabilities already.
        return list(command)
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
def test_suite_on_unprivileged_machine_skips_with_reason_and_passes(tmp_path: Path) -> None:
    pytest.importorskip("libvirt")  # Files of the ring contract import it.
    report = tmp_path / "report.xml"
    done = subprocess.run(
        drop_privileges(
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
    passed = [name for name, reports in outcomes.items() if not reports]
    skipped = {name: reports[0] for name, reports in outcomes.items() if reports}
    assert passed == [
        "tests.unit.deploy.test_underlay::test_underlay_addresses_of_cloud_end_before_those_of_next_cloud"
    ]
    assert {tag for tag, _ in skipped.values()} == {"skipped"}
    reason = "This process does not run as root." if os.geteuid() else "cannot be made here"
    assert all(reason in why for _, why in skipped.values()), skipped
    expected_files = {name.split("::")[0].replace("/", ".").removesuffix(".py") for name in NEEDY}
    assert {name.split("::")[0] for name in skipped} == expected_files
