# SPDX-License-Identifier: Apache-2.0
"""How Tempest's tests are sorted into groups, and what it prints is read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.progress import Failure
from tests.tempest import configure, outcomes
from tests.tempest.groups import GROUPS, LISTS, NOT_RUN, USUAL, read_lists, sorted_into
from tests.tempest.known import Known

API = "tempest.api.compute."
ONE, TWO = (
    API + "servers.test_x.ServersNegativeTest.test_one",
    API + "servers.test_x.ServersNegativeTest.test_two",
)
OTHER = API + "test_y.Other.test_three"


def test_each_outcome_is_read_and_negative_ones_are_counted() -> None:
    found = outcomes.read(
        [ONE + "[id-1,negative]", TWO, OTHER],
        [
            f"{{0}} {ONE} [0.010s] ... ok",
            "noise ... ok",
            f"{{1}} {TWO} [1.5s] ... FAILED",
            f"{{1}} {OTHER} ... SKIPPED: Volume service not enabled.",
        ],
    )
    assert (found.passed, found.failed, found.skipped) == (
        [ONE],
        [TWO],
        {OTHER: "Volume service not enabled."},
    )
    assert found.line() == "1/3 passed (1 of them negative), 1 failed, 1 skipped"
    assert found.reasons() == {"Volume service not enabled.": 1}
    assert not found.is_well


def test_what_a_class_says_of_its_setup_holds_for_its_tests() -> None:
    name = ONE.rsplit(".", 1)[0]
    found = outcomes.read(
        [ONE, TWO, OTHER],
        [f"{{0}} setUpClass ({name}) [0.000000s] ... FAILED", f"{{0}} {OTHER} [0.1s] ... ok"],
    )
    assert (found.failed, found.passed) == ([ONE, TWO], [OTHER])
    skipped = outcomes.read([ONE, TWO], [f"{{0}} setUpClass ({name}) ... SKIPPED: no: why"])
    assert skipped.skipped == {ONE: "no: why", TWO: "no: why"}
    assert skipped.is_well


def test_a_test_of_which_nothing_is_said_did_not_run() -> None:
    found = outcomes.read([ONE, TWO], [f"{{0}} {ONE} [0.010s] ... ok"])
    assert found.not_run == [TWO]
    assert not found.is_well
    assert "1 not run" in found.line()


def test_a_class_that_cannot_be_torn_down_has_failed() -> None:
    found = outcomes.read(
        [ONE],
        [
            f"{{0}} {ONE} [0.010s] ... ok",
            f"{{0}} tearDownClass ({ONE.rsplit('.', 1)[0]}) [0.000000s] ... FAILED",
        ],
    )
    assert (found.passed, found.failed) == ([], [ONE])


KNOWN = (Known(r"ServersNegativeTest\.test_(one|two)$", "'rxtx_factor'", "Tempest is older"),)


def test_failure_that_is_foreseen_is_known_by_its_words() -> None:
    found = outcomes.read(
        [ONE, TWO],
        [
            f"{{0}} {ONE} [0.010s] ... FAILED",
            "",
            "    KeyError: 'rxtx_factor'",
            f"{{1}} {TWO} [0.010s] ... FAILED",
            "    KeyError: 'id'",
        ],
    )
    found.foresee(KNOWN)
    assert (found.failed, found.known, found.not_run) == ([TWO], {ONE: "Tempest is older"}, [])
    assert "1 failed, 0 skipped, 1 failed as foreseen" in found.line() and not found.is_well


def test_failure_of_a_class_is_known_by_its_words() -> None:
    found = outcomes.read(
        [ONE, TWO],
        [
            f"{{0}} setUpClass ({ONE.rsplit('.', 1)[0]}) [0.0s] ... FAILED",
            "    KeyError: 'rxtx_factor'",
        ],
    )
    found.foresee(KNOWN)
    assert [*found.known] == [ONE, TWO] and found.is_well


def test_test_that_passes_though_it_is_known_to_fail_is_told() -> None:
    found = outcomes.read([ONE], [f"{{0}} {ONE} [0.010s] ... ok"])
    found.foresee(KNOWN)
    assert found.stale == [ONE] and not found.is_well
    found.foresee(())
    assert found.is_well


def test_groups_file_names_known_groups_and_each_test_once() -> None:
    lists = read_lists()
    assert set(lists.values()) == {NOT_RUN, *(group.name for group in GROUPS)}
    lines = [line for line in LISTS.read_text().splitlines() if line.startswith(" ")]
    assert len(lists) == len(lines)


def test_ids_are_sorted_into_groups_of_file(tmp_path: Path) -> None:
    path = tmp_path / "groups.txt"
    class_name = ONE.rpartition(".")[0]
    path.write_text(f"# comment\n[C]\n{class_name}\n  test_one\n[X]\n{class_name}\n  test_two\n")
    foreign = "tempest.api.volume.test_x.Volumes.test_y"
    groups = sorted_into([ONE + "[id-1]", TWO, foreign], read_lists(path))
    assert {name: ids for name, ids in groups.items() if ids} == {"C": [ONE + "[id-1]"]}


def test_compute_test_that_no_list_names_is_refused_by_name() -> None:
    with pytest.raises(Failure, match=re.escape(f"does not list {OTHER}")):
        sorted_into([ONE, OTHER + "[id-1]"], {ONE: "C"})


def test_what_keeps_strangers_apart_is_not_asked_of_hints() -> None:
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
    told = configure.options(cloud, Path("/folder"), "2.1", strangers=True)[
        "compute-feature-enabled"
    ]
    assert str(told["scheduler_enabled_filters"]).endswith(",SameHostFilter")


def test_every_group_but_the_volumes_is_usual() -> None:
    assert {group.name for group in GROUPS if not group.volumes} == {*USUAL}


def test_volumes_are_looked_for_where_there_are_any() -> None:
    without = configure.Cloud(
        "",
        dict.fromkeys(("username", "password", "project_name"), ""),
        *([""] * 5),
        ("one",),
        has_guests=False,
        unified=False,
        shared_type=None,
    )
    for cloud, there in ((without, False), (replace(without, shared_type="shared"), True)):
        told = configure.options(cloud, Path("/folder"), "2.1")
        assert told["service_available"]["cinder"] is there
    assert told["volume"]["volume_type_multiattach"] == "shared"


@pytest.mark.parametrize("hosts", [("one",), ("one", "two"), ("one", "two", "three")])
def test_servers_move_between_two_hosts_that_are_named(hosts: tuple[str, ...]) -> None:
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
    told = configure.options(cloud, Path("/folder"), "2.1")
    assert str(told["compute-feature-enabled"]["scheduler_enabled_filters"]).endswith(
        ",DifferentHostFilter"
    )
    assert told["compute"]["min_compute_nodes"] == len(hosts)
    assert [told["compute"].get(f"migration_{end}_host") for end in ("source", "dest")] == (
        ["one", "two"] if len(hosts) > 1 else [None, None]
    )
