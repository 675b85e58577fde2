# SPDX-License-Identifier: Apache-2.0
"""Tests of Tempest that fail on any cloud at the latest microversion, which Tempest does not know.

An entry covers tests by name that fail with a certain error. Any other failure of these tests
counts. If a test of an entry passes, for example after an upgrade of Tempest, the run fails until
the entry is removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFailure:
    """An expected failure of tests.

    Attributes:
        tests: Regular expression for the ids of the tests.
        error: Regular expression for the output below a failure.
        reason: Reason of the failure.
    """

    tests: str
    error: str
    reason: str


LATEST = (
    KnownFailure(
        r"test_flavors\.FlavorsAdminTestJSON\.test_create_(flavor_verify_entry_in_list_details|"
        r"list_flavor_without_extra_data)$|\.FlavorsExtraSpecs(Negative)?TestJSON\.",
        r"'rxtx_factor'",
        "Tempest sends and expects rxtx_factor, which flavors have only before 2.102",
    ),
    KnownFailure(
        r"HypervisorAdmin(TestJSON\.test_get_hypervisor_(list_details|show_details|uptime)|V228Test\.|"
        r"V253TestBase\.)|\.AggregatesAdminTest(JSON|V241)\.",
        r"Additional properties are not allowed \('uptime' was unexpected\)",
        "Tempest has no schema for hypervisors of 2.88, which include the uptime",
    ),
    KnownFailure(
        r"test_get_hypervisor_(stats|uptime_with_non_admin_user|stats_with_non_admin_user)$",
        r"404, 'message': \"API version '[\d.]+' is not supported on this method",
        "Tempest requests a hypervisor's uptime and statistics, which have routes only before 2.88",
    ),
    KnownFailure(
        r"KeyPairsV22TestJSON\.test_keypairsv22_create_list_show_with_type$",
        r"'public_key' is a required property",
        "Tempest lets the service generate a key, which is possible only before 2.92",
    ),
    KnownFailure(
        r"ServerTagsTestJSON\.",
        r"v2_100\.servers' has no attribute '\w+_tags?'",
        "Tempest's schemas of servers at 2.100 lack the schemas of tags",
    ),
    KnownFailure(
        r"\.test_(resize_server_revert|rebuild_server|stable_device_rescue_disk_virtio)_with_volume_attached$|"
        r"ServerRescueNegativeTestJSON\.test_rescued_vm_detach_volume$|"
        r"\.(AttachSCSIVolumeTestJSON|AttachVolume(Shelve)?TestJSON|AttachVolumeNegativeTest)\.|"
        r"\.AttachVolumeMultiAttachTest\.test_(list_get|resize)_|VolumesAssistedSnapshotsTest\.|"
        r"\.test_delete_server_while_in_attached_volume$|\.Test(InstancesWithCinderVolumes|"
        r"MinimumBasicScenario|StampPattern|ServerVolumeAttach(mentScenario|ScenarioOldVersion))\.",
        r"Expecting value: line 1 column 1 \(char 0\)",
        "Tempest reads the body of an attach of a volume, which is empty since 2.101",
    ),
    KnownFailure(
        r"\.AttachVolumeMultiAttachTest\.",
        r"AttachVolumeMultiAttachTest:tearDownClass\) Failed to delete volume",
        "Tempest deletes volumes without a detach, because Tempest could not read this body",
    ),
)


def find_reason(entries: Sequence[KnownFailure], test: str, error: str) -> str | None:
    """Return the reason of a known failure, or None for an unknown failure."""
    return next(
        (
            entry.reason
            for entry in entries
            if re.search(entry.tests, test) and re.search(entry.error, error)
        ),
        None,
    )


def list_stale(entries: Sequence[KnownFailure], passed: list[str]) -> list[str]:
    """Return the passed tests of entries."""
    return [test for test in passed if any(re.search(entry.tests, test) for entry in entries)]
