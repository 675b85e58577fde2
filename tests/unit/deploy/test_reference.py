# SPDX-License-Identifier: Apache-2.0
"""What the site says from tables has all of each table, and stands in a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.domain import states
from common.service.config import OPTIONS
from compute_api.compute.request.microversions import HISTORY
from compute_api.compute.routes import GONE, ROUTES
from deploy.site import reference
from scheduler import filters, weighers

DOCS = Path(__file__).resolve().parents[3] / "docs"


def rows(text: str) -> list[list[str]]:
    """The cells of each line of a table that is no head."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("| `")
    ]


def test_each_table_stands_in_one_page() -> None:
    text = "".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    found = re.findall(r"^<!-- table: (\w+) -->$", text, re.MULTILINE)
    assert sorted(found) == sorted(reference.TABLES)


@pytest.mark.parametrize("name", reference.TABLES)
def test_every_line_of_a_table_has_as_many_cells_as_its_head(name: str) -> None:
    cells = 0
    for line in reference.TABLES[name]().splitlines():
        if not line.startswith("| `") and line.startswith("| ") and "---" not in line:
            cells = len(re.split(r"(?<!\\)\|", line))
        if line.startswith("|"):
            assert len(re.split(r"(?<!\\)\|", line)) == cells, line


def test_operations_are_the_routes() -> None:
    told = rows(reference.api())
    assert sorted(row[0] for row in told if len(row) == 4) == sorted(
        f"`{route.method} {route.path}`" for route in ROUTES
    )
    assert [row[0] for row in told if len(row) == 2] == [f"`{path}`" for path in sorted(GONE)]


def test_an_operation_has_its_versions_and_its_rule() -> None:
    told = {row[0]: row[1:] for row in rows(reference.api())}
    assert told["`GET /servers/{server_id}`"] == ["all", "`os_compute_api:servers:show`", "200"]
    assert told["`GET /servers/{server_id}/topology`"][0] == f"2.78 to {HISTORY[-1][0]}"
    assert told["`GET /os-floating-ip-pools`"][0] == "2.1 to 2.35"
    assert told["`GET /images`"][1] == "what is asked for decides"


def test_actions_are_those_of_the_states() -> None:
    told = rows(reference.actions())
    assert len(told) == len(states.ACTIONS)
    assert {row[0].strip("`").split()[0] for row in told} == {row.key for row in states.ACTIONS}
    assert [
        "`pause`",
        "all",
        "`os_compute_api:os-pause-server:pause`",
        "active",
        "paused",
        "202",
    ] in told


def test_every_option_is_there_with_its_default() -> None:
    text = reference.configuration()
    sections = dict(
        re.findall(r"^## \[(\w+)\]\n\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    assert sections.keys() == OPTIONS.keys()
    for group, options in OPTIONS.items():
        assert [row[0] for row in rows(sections[group])] == [f"`{one.dest}`" for one in options]
    api = {row[0]: row[1:] for row in rows(sections["api"])}
    assert api["`port`"][:2] == ["port", "`8774`"]
    assert api["`workers`"] == ["integer", "`1`", "Processes of the API. Allowed: 1 to 64."]
    assert rows(sections["database"])[0][1].endswith("(secret)")


def test_every_filter_says_what_it_does() -> None:
    told = {row[0].strip("`"): row[1:] for row in rows(reference.filters_table())}
    assert told.keys() == filters.BUILT_IN.keys()
    assert [name for name, cells in told.items() if not cells[0]] == []
    assert told["ComputeFilter"] == [
        "Require a compute service that is up and not forced down.",
        "yes",
        "",
    ]
    assert told["ImagePropertiesFilter"][2] == "yes"


def test_every_weigher_has_its_multiplier() -> None:
    told = {row[0].strip("`"): row[1:] for row in rows(reference.weighers_table())}
    assert told.keys() == weighers.BUILT_IN.keys()
    assert [name for name, cells in told.items() if not cells[2]] == []
    assert told["IoOpsWeigher"][:2] == ["`io_ops_weight_multiplier`", "-1"]
    assert told["MetricsWeigher"][0] == "`metrics_weight_multiplier`"
