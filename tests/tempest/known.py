# SPDX-License-Identifier: Apache-2.0
"""Tests of Tempest that no cloud passes at the latest microversion, because Tempest itself does not
know it.

A row holds for tests of these names that fail with these words; any other failure of theirs counts.
A row whose tests pass fails the run, so that it is removed with the version of Tempest that mends
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """``tests``: expression for the ids; ``said``: for what is printed below the failure; ``why``:
    for readers."""

    tests: str
    said: str
    why: str


LATEST = (
    Known(
        r"test_flavors\.FlavorsAdminTestJSON\.test_create_(flavor_verify_entry_in_list_details|"
        r"list_flavor_without_extra_data)$|\.FlavorsExtraSpecs(Negative)?TestJSON\.",
        r"'rxtx_factor'",
        "Tempest sends and expects rxtx_factor, which flavors have had only before 2.102",
    ),
    Known(
        r"HypervisorAdmin(TestJSON\.test_get_hypervisor_(list_details|show_details|uptime)|V228Test\.|"
        r"V253TestBase\.)|\.AggregatesAdminTest(JSON|V241)\.",
        r"Additional properties are not allowed \('uptime' was unexpected\)",
        "Tempest has no schema for hypervisors of 2.88, where uptime is a part of them",
    ),
    Known(
        r"test_get_hypervisor_(stats|uptime_with_non_admin_user|stats_with_non_admin_user)$",
        r"404, 'message': \"API version '[\d.]+' is not supported on this method",
        "Tempest asks for a hypervisor's uptime and statistics, which have routes only before 2.88",
    ),
    Known(
        r"KeyPairsV22TestJSON\.test_keypairsv22_create_list_show_with_type$",
        r"'public_key' is a required property",
        "Tempest lets the service make a key, which it does only before 2.92",
    ),
    Known(
        r"ServerTagsTestJSON\.",
        r"v2_100\.servers' has no attribute '\w+_tags?'",
        "Tempest's schemas of servers at 2.100 have lost those of tags",
    ),
    Known(
        r"\.test_(resize_server_revert|rebuild_server|stable_device_rescue_disk_virtio)_with_volume_attached$|"
        r"ServerRescueNegativeTestJSON\.test_rescued_vm_detach_volume$|"
        r"\.(AttachSCSIVolumeTestJSON|AttachVolume(Shelve)?TestJSON|AttachVolumeNegativeTest)\.|"
        r"\.AttachVolumeMultiAttachTest\.test_(list_get|resize)_|VolumesAssistedSnapshotsTest\.|"
        r"\.test_delete_server_while_in_attached_volume$|\.Test(InstancesWithCinderVolumes|"
        r"MinimumBasicScenario|StampPattern|ServerVolumeAttach(mentScenario|ScenarioOldVersion))\.",
        r"Expecting value: line 1 column 1 \(char 0\)",
        "Tempest reads a body where a volume is attached, which has none from 2.101 on",
    ),
    Known(
        r"\.AttachVolumeMultiAttachTest\.",
        r"AttachVolumeMultiAttachTest:tearDownClass\) Failed to delete volume",
        "Tempest deletes volumes that it has not detached, since it could not read that body",
    ),
)


def reason(rows: tuple[Known, ...], test: str, said: str) -> str | None:
    """Why this test fails with these words; None: it should not."""
    return next(
        (row.why for row in rows if re.search(row.tests, test) and re.search(row.said, said)), None
    )


def stale(rows: tuple[Known, ...], passed: list[str]) -> list[str]:
    """Tests that passed although a row says that they fail."""
    return [test for test in passed if any(re.search(row.tests, test) for row in rows)]
