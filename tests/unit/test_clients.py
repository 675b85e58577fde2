# SPDX-License-Identifier: Apache-2.0
"""Selection of tests from the suites of OpenStack's clients."""

from __future__ import annotations

import pytest

from tests.clients.suites import NOVACLIENT, OPENSTACKCLIENT, OPENSTACKSDK, SUITES, Suite

NOVA, SDK = "novaclient.tests.functional.v2.", "openstack.tests.functional."
CLI = "openstackclient.tests.functional."


def test_suite_select_leaves_out_tests_by_first_matching_reason() -> None:
    suite = Suite("one", ("one/tests",), left_out={r"Volume": "none", r"test_b$": "why not"})
    assert suite.select(["A.test_a", "A.test_b", "Volume.test_b", "A.test_bc"]) == (
        ["A.test_a", "A.test_bc"],
        {"A.test_b": "why not", "Volume.test_b": "none"},
    ), "the first matching reason counts"


def test_suite_select_with_only_pattern_drops_tests_of_other_services() -> None:
    suite = Suite("one", ("one/tests",), only=r"\.compute\.", left_out={r"test_b": "why not"})
    assert suite.select(["a.compute.test_a", "a.dns.test_a", "a.dns.test_b"]) == (
        ["a.compute.test_a"],
        {},
    )


def test_client_suite_reports_unused_exclusion_pattern() -> None:
    suite = Suite("one", ("one/tests",), left_out={r"test_gone": "none", r"test_a": "none"})
    assert suite.find_unused(["A.test_a", "A.test_b"]) == ["test_gone"]


@pytest.mark.parametrize(
    ("suite", "test", "runs"),
    [
        (
            NOVACLIENT,
            NOVA + "test_device_tagging.TestBlockDeviceTaggingCLI."
            "test_boot_server_with_tagged_block_devices",
            True,
        ),
        (
            NOVACLIENT,
            NOVA + "test_device_tagging.TestNICDeviceTaggingCLIError."
            "test_boot_server_with_tagged_nic_devices_with_error",
            True,
        ),
        (
            NOVACLIENT,
            NOVA + "legacy.test_servers.TestServersBootNovaClient.test_boot_server_with_legacy_bdm",
            True,
        ),
        (
            NOVACLIENT,
            NOVA + "test_servers.TestServersBootNovaClient.test_boot_server_with_net_name",
            True,
        ),
        (NOVACLIENT, NOVA + "test_resize.TestServersResize.test_resize_up_confirm", True),
        (
            OPENSTACKCLIENT,
            CLI + "compute.v2.test_server.ServerTests.test_server_boot_with_bdm_image",
            True,
        ),
        (
            OPENSTACKCLIENT,
            CLI + "compute.v2.test_server.ServerTests.test_server_create_with_none_network",
            True,
        ),
        (
            NOVACLIENT,
            NOVA + "test_resize.TestServersResize.test_resize_down_revert",
            False,
        ),
        (OPENSTACKSDK, SDK + "cloud.test_dns.TestZone.test_zones", False),
        (OPENSTACKSDK, SDK + "cloud.test_compute.TestCompute.test_list_all_servers", True),
    ],
)
def test_client_suites_run_server_tests_but_not_resize_down_or_dns_tests(
    suite: Suite, test: str, runs: bool
) -> None:
    assert (test in suite.select([test])[0]) == runs


def test_suite_names_are_unique() -> None:
    assert len({suite.name for suite in SUITES}) == len(SUITES)
