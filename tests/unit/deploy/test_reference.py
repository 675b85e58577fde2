# SPDX-License-Identifier: Apache-2.0
"""The tables that the site generates from code: each is complete, and a page includes it."""

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


def read_rows(text: str) -> list[list[str]]:
    """Return the cells of each row of a Markdown table, without the head."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("| `")
    ]


def test_reference_tables_are_in_one_page_each() -> None:
    text = "".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    table_names = re.findall(r"^<!-- table: (\w+) -->$", text, re.MULTILINE)
    assert sorted(table_names) == sorted(reference.TABLES)


@pytest.mark.parametrize("name", reference.TABLES)
def test_reference_table_rows_have_as_many_cells_as_head(name: str) -> None:
    cells = 0
    for line in reference.TABLES[name]().splitlines():
        if not line.startswith("| `") and line.startswith("| ") and "---" not in line:
            cells = len(re.split(r"(?<!\\)\|", line))
        if line.startswith("|"):
            assert len(re.split(r"(?<!\\)\|", line)) == cells, line


def test_reference_operations_equal_routes() -> None:
    table = read_rows(reference.api())
    assert sorted(row[0] for row in table if len(row) == 4) == sorted(
        f"`{route.method} {route.path}`" for route in ROUTES
    )
    assert [row[0] for row in table if len(row) == 2] == [f"`{path}`" for path in sorted(GONE)]


def test_reference_operation_has_versions_rule_and_status() -> None:
    table = {row[0]: row[1:] for row in read_rows(reference.api())}
    assert table["`GET /servers/{server_id}`"] == ["all", "`os_compute_api:servers:show`", "200"]
    assert table["`GET /servers/{server_id}/topology`"][0] == f"2.78 to {HISTORY[-1][0]}"
    assert table["`GET /os-floating-ip-pools`"][0] == "2.1 to 2.35"
    assert table["`GET /images`"][1] == "depends on the request"


def test_reference_actions_equal_state_table() -> None:
    table = read_rows(reference.actions())
    assert len(table) == len(states.ACTIONS)
    assert {row[0].strip("`").split()[0] for row in table} == {row.key for row in states.ACTIONS}
    assert [
        "`pause`",
        "all",
        "`os_compute_api:os-pause-server:pause`",
        "active",
        "paused",
        "202",
    ] in table


def test_reference_configuration_has_every_option_with_default() -> None:
    text = reference.configuration()
    sections = dict(
        re.findall(r"^## \[(\w+)\]\n\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    assert sections.keys() == OPTIONS.keys()
    for group, options in OPTIONS.items():
        assert [row[0] for row in read_rows(sections[group])] == [
            f"`{option.dest}`" for option in options
        ]
    api = {row[0]: row[1:] for row in read_rows(sections["api"])}
    assert api["`port`"][:2] == ["port", "`8774`"]
    assert api["`workers`"] == ["integer", "`1`", "Number of API processes. Allowed: 1 to 64."]
    assert read_rows(sections["database"])[0][1].endswith("(secret)")


def test_reference_filters_have_description() -> None:
    table = {row[0].strip("`"): row[1:] for row in read_rows(reference.filters_table())}
    assert table.keys() == filters.BUILT_IN.keys()
    assert [name for name, cells in table.items() if not cells[0]] == []
    assert table["ComputeFilter"] == [
        "Require a compute service that is up and not forced down.",
        "yes",
        "",
    ]
    assert table["ImagePropertiesFilter"][2] == "yes"


def test_reference_weighers_have_multiplier() -> None:
    table = {row[0].strip("`"): row[1:] for row in read_rows(reference.weighers_table())}
    assert table.keys() == weighers.BUILT_IN.keys()
    assert [name for name, cells in table.items() if not cells[2]] == []
    assert table["IoOpsWeigher"][:2] == ["`io_ops_weight_multiplier`", "-1"]
    assert table["MetricsWeigher"][0] == "`metrics_weight_multiplier`"
