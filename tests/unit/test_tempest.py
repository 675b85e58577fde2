# SPDX-License-Identifier: Apache-2.0
"""The groups of Tempest's tests, its options, and the outcomes read from its output."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.progress import Failure
from tests.tempest import configure, outcomes
from tests.tempest.groups import GROUPS, LISTS, NOT_RUN, USUAL, read_lists, sort_into_groups
from tests.tempest.known import KnownFailure

API = "tempest.api.compute."
ONE, TWO = (
    API + "servers.test_x.ServersNegativeTest.test_one",
    API + "servers.test_x.ServersNegativeTest.test_two",
)
OTHER = API + "test_y.Other.test_three"


def test_tempest_outcomes_are_read_and_negative_tests_counted() -> None:
    result = outcomes.read(
        [ONE + "[id-1,negative]", TWO, OTHER],
        [
            f"{{0}} {ONE} [0.010s] ... ok",
            "noise ... ok",
            f"{{1}} {TWO} [1.5s] ... FAILED",
            f"{{1}} {OTHER} ... SKIPPED: Volume service not enabled.",
        ],
    )
    assert (result.passed, result.failed, result.skipped) == (
        [ONE],
        [TWO],
        {OTHER: "Volume service not enabled."},
    )
    assert result.line() == "1/3 passed (1 of them negative), 1 failed, 1 skipped"
    assert result.reasons() == {"Volume service not enabled.": 1}
    assert not result.is_ok


def test_tempest_outcome_of_class_setup_applies_to_its_tests() -> None:
    name = ONE.rsplit(".", 1)[0]
    result = outcomes.read(
        [ONE, TWO, OTHER],
        [f"{{0}} setUpClass ({name}) [0.000000s] ... FAILED", f"{{0}} {OTHER} [0.1s] ... ok"],
    )
    assert (result.failed, result.passed) == ([ONE, TWO], [OTHER])
    skipped = outcomes.read([ONE, TWO], [f"{{0}} setUpClass ({name}) ... SKIPPED: no: why"])
    assert skipped.skipped == {ONE: "no: why", TWO: "no: why"}
    assert skipped.is_ok


def test_tempest_test_without_an_outcome_counts_as_not_run() -> None:
    result = outcomes.read([ONE, TWO], [f"{{0}} {ONE} [0.010s] ... ok"])
    assert result.not_run == [TWO]
    assert not result.is_ok
    assert "1 not run" in result.line()


def test_tempest_failed_class_teardown_fails_its_tests() -> None:
    result = outcomes.read(
        [ONE],
        [
            f"{{0}} {ONE} [0.010s] ... ok",
            f"{{0}} tearDownClass ({ONE.rsplit('.', 1)[0]}) [0.000000s] ... FAILED",
        ],
    )
    assert (result.passed, result.failed) == ([], [ONE])


KNOWN = (
    KnownFailure(r"ServersNegativeTest\.test_(one|two)$", "'rxtx_factor'", "Tempest is older"),
)


def test_tempest_expected_failure_is_recognised_by_its_error() -> None:
    result = outcomes.read(
        [ONE, TWO],
        [
            f"{{0}} {ONE} [0.010s] ... FAILED",
            "",
            "    KeyError: 'rxtx_factor'",
            f"{{1}} {TWO} [0.010s] ... FAILED",
            "    KeyError: 'id'",
        ],
    )
    result.accept_known(KNOWN)
    assert (result.failed, result.known, result.not_run) == ([TWO], {ONE: "Tempest is older"}, [])
    assert "1 failed, 0 skipped, 1 failed as foreseen" in result.line() and not result.is_ok


def test_tempest_expected_class_failure_is_recognised_by_its_error() -> None:
    result = outcomes.read(
        [ONE, TWO],
        [
            f"{{0}} setUpClass ({ONE.rsplit('.', 1)[0]}) [0.0s] ... FAILED",
            "    KeyError: 'rxtx_factor'",
        ],
    )
    result.accept_known(KNOWN)
    assert [*result.known] == [ONE, TWO] and result.is_ok


def test_tempest_pass_of_an_expected_failure_is_reported_stale() -> None:
    result = outcomes.read([ONE], [f"{{0}} {ONE} [0.010s] ... ok"])
    result.accept_known(KNOWN)
    assert result.stale == [ONE] and not result.is_ok
    result.accept_known(())
    assert result.is_ok


def test_tempest_groups_file_has_defined_groups_and_unique_tests() -> None:
    lists = read_lists()
    assert set(lists.values()) == {NOT_RUN, *(group.name for group in GROUPS)}
    lines = [line for line in LISTS.read_text().splitlines() if line.startswith(" ")]
    assert len(lists) == len(lines)


def test_tempest_ids_are_sorted_into_the_groups_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "groups.txt"
    class_name = ONE.rpartition(".")[0]
    path.write_text(f"# comment\n[C]\n{class_name}\n  test_one\n[X]\n{class_name}\n  test_two\n")
    foreign = "tempest.api.volume.test_x.Volumes.test_y"
    groups = sort_into_groups([ONE + "[id-1]", TWO, foreign], read_lists(path))
    assert {name: ids for name, ids in groups.items() if ids} == {"C": [ONE + "[id-1]"]}


def test_tempest_compute_test_without_a_group_is_refused_with_its_name() -> None:
    with pytest.raises(Failure, match=re.escape(f"does not list {OTHER}")):
        sort_into_groups([ONE, OTHER + "[id-1]"], {ONE: "C"})


def test_tempest_options_without_different_host_leave_out_its_filter() -> None:
    cloud = configure.Cloud(
        "",
        dict.fromkeys(("username", "password", "project_name"), ""),
        "",
        "",
        "",
        "",
        "",
        ("one", "two"),
        has_guests=True,
        unified=False,
        shared_type=None,
    )
    options = configure.options(cloud, Path("/folder"), "2.1", without_different_host=True)[
        "compute-feature-enabled"
    ]
    assert str(options["scheduler_enabled_filters"]).endswith(",SameHostFilter")


def test_tempest_usual_groups_are_those_without_volumes() -> None:
    assert {group.name for group in GROUPS if not group.volumes} == {*USUAL}


def test_tempest_options_enable_cinder_only_with_a_volume_type() -> None:
    cloud_without_volumes = configure.Cloud(
        "",
        dict.fromkeys(("username", "password", "project_name"), ""),
        *([""] * 5),
        ("one",),
        has_guests=False,
        unified=False,
        shared_type=None,
    )
    for cloud, has_volumes in (
        (cloud_without_volumes, False),
        (replace(cloud_without_volumes, shared_type="shared"), True),
    ):
        options = configure.options(cloud, Path("/folder"), "2.1")
        assert options["service_available"]["cinder"] is has_volumes
    assert options["volume"]["volume_type_multiattach"] == "shared"


@pytest.mark.parametrize("hosts", [("one",), ("one", "two"), ("one", "two", "three")])
def test_tempest_options_name_migration_hosts_only_with_two_or_more_hosts(
    hosts: tuple[str, ...],
) -> None:
    cloud = configure.Cloud(
        "http://identity",
        {name: name for name in ("username", "password", "project_name")},
        "image",
        "image-2",
        "flavor",
        "flavor-2",
        "public",
        hosts,
        has_guests=True,
        unified=False,
        shared_type=None,
    )
    options = configure.options(cloud, Path("/folder"), "2.1")
    assert str(options["compute-feature-enabled"]["scheduler_enabled_filters"]).endswith(
        ",DifferentHostFilter"
    )
    assert options["compute"]["min_compute_nodes"] == len(hosts)
    assert [options["compute"].get(f"migration_{end}_host") for end in ("source", "dest")] == (
        ["one", "two"] if len(hosts) > 1 else [None, None]
    )
