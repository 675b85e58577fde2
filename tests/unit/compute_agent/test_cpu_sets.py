# SPDX-License-Identifier: Apache-2.0
"""Parsing of the CPU sets in the agent's configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.domain.errors import ConfigError
from compute_agent.virt.cpu_sets import CpuSets, listed, parse, read_cpu_sets


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", {0}),
        ("0-3", {0, 1, 2, 3}),
        ("0-3,^2", {0, 1, 3}),
        ("^2,0-3", {0, 1, 3}),
        (" 8 , 2-4,^3-4 ", {2, 8}),
        ("5,5,4-6", {4, 5, 6}),
    ],
)
def test_cpu_set_parses_ranges_and_exclusions(text: str, cpus: set[int]) -> None:
    assert parse(text, "cpu_shared_set") == cpus


@pytest.mark.parametrize(
    "text", ["x", "3-1", "-1", "1-", "1,,2", "^1", "0-1,^0-5", "1 2", "999999"]
)
def test_malformed_cpu_set_error_names_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\[agent\] cpu_dedicated_set: "):
        read_cpu_sets("", text)


@pytest.mark.parametrize(
    ("shared", "dedicated", "split"),
    [
        ("", "", ([0, 1, 2, 3], [])),
        ("1-2", "", ([1, 2], [])),
        ("", "1-2", ([], [1, 2])),
        ("0", "2-3", ([0], [2, 3])),
    ],
)
def test_cpu_sets_split_host_cpus_into_shared_and_dedicated(
    shared: str, dedicated: str, split: tuple[list[int], list[int]]
) -> None:
    assert read_cpu_sets(shared, dedicated, range(4)).split({3, 1, 0, 2}) == split


def test_cpu_sets_refuse_overlap_and_cpus_missing_on_host() -> None:
    with pytest.raises(ConfigError, match="both name 2-3"):
        read_cpu_sets("0-3", "2-5")
    with pytest.raises(ConfigError, match="no CPU 4-5"):
        read_cpu_sets("0-3", "4-5", range(4))
    assert read_cpu_sets("", "") == CpuSets()


@given(st.frozensets(st.integers(0, 99), min_size=1))
def test_listed_cpus_parse_to_same_set(cpus: frozenset[int]) -> None:
    assert parse(listed(cpus), "cpu_shared_set") == cpus
