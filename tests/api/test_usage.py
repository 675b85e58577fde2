# SPDX-License-Identifier: Apache-2.0
"""Usage of projects: os-simple-tenant-usage and os-instance_usage_audit_log."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from common.domain.clock import SECOND, parse
from common.store import schema
from tests.api.conftest import OTHER, PROJECT, Cloud

T0 = parse("2026-03-01T00:00:00")
HOUR = 3600 * SECOND
MARCH = "start=2026-03-01T00:00:00&end=2026-04-01T00:00:00"
BASE = "/os-simple-tenant-usage"


@pytest.fixture
def fleet(cloud: Cloud) -> dict[str, str]:
    """Return the ids of servers by name, launched and terminated at hours relative to March.

    "long" runs before, during and after March, and "short" within. "before" ended earlier, "after"
    began later, and "never" was not launched. "foreign" belongs to another project.
    """
    server_ids = {}
    for name, flavor, launched, terminated in (
        ("long", "1", -5, None),
        ("short", "2", 10, 34.5),
        ("before", "1", -20, -1),
        ("after", "1", 24 * 31, None),
        ("never", "1", None, None),
        ("foreign", "2", 100, 101),
    ):
        server_ids[name] = cloud.create(
            name, token="stranger" if name == "foreign" else "user", flavorRef=flavor
        )
        deletion = {"vm_state": "deleted", "deleted": 1} if terminated is not None else {}
        cloud.set_state(
            server_ids[name],
            **deletion,
            launched_at=None if launched is None else T0 + launched * HOUR,
            terminated_at=None if terminated is None else T0 + int(terminated * HOUR),
        )
    return server_ids


def get_usages(
    cloud: Cloud, query: str = MARCH, mv: str = "2.1", path: str = BASE, token: str = "admin"
) -> Any:
    answer = cloud.call("GET", f"{path}?{query}", mv=mv, token=token)
    assert answer.status_code == 200, answer.text
    return answer.json


def test_list_usage_returns_sums_of_each_project(cloud: Cloud, fleet: dict[str, str]) -> None:
    own, other = get_usages(cloud)["tenant_usages"]
    hours, short = 31 * 24, 24.5
    assert own == {
        "tenant_id": PROJECT,
        "start": "2026-03-01T00:00:00.000000",
        "stop": "2026-04-01T00:00:00.000000",
        "total_hours": hours + short,
        "total_vcpus_usage": hours + short,
        "total_memory_mb_usage": hours * 512 + short * 2048,
        "total_local_gb_usage": hours * 1 + short * 20,
    }
    assert (other["tenant_id"], other["total_hours"], other["total_local_gb_usage"]) == (
        OTHER,
        1,
        20,
    )


@pytest.mark.parametrize("mv", ["2.1", "2.39", "2.40", "2.104"])
def test_list_usage_returns_same_sums_with_and_without_details(
    cloud: Cloud, fleet: dict[str, str], mv: str
) -> None:
    plain, detailed = (
        get_usages(cloud, MARCH + more, mv)["tenant_usages"] for more in ("", "&detailed=1")
    )
    assert [{**project, "server_usages": None} for project in plain] == [
        {**project, "server_usages": None} for project in detailed
    ]


def test_show_usage_lists_servers_of_project(cloud: Cloud, fleet: dict[str, str]) -> None:
    usage = get_usages(cloud, path=f"{BASE}/{PROJECT}", token="user")["tenant_usage"]
    by_name = {server["name"]: server for server in usage["server_usages"]}
    assert set(by_name) == {"long", "short"}
    assert by_name["short"] == {
        "instance_id": fleet["short"],
        "name": "short",
        "tenant_id": PROJECT,
        "flavor": "m1.small",
        "hours": 24.5,
        "vcpus": 1,
        "memory_mb": 2048,
        "local_gb": 20,
        "started_at": "2026-03-01T10:00:00.000000",
        "ended_at": "2026-03-02T10:30:00.000000",
        "state": "terminated",
        "uptime": int(24.5 * 3600),
    }
    long = by_name["long"]
    assert (long["hours"], long["ended_at"], long["state"]) == (31 * 24, None, "active") and long[
        "uptime"
    ] > 36 * 3600


def test_show_usage_of_period_without_servers_is_empty(cloud: Cloud, fleet: dict[str, str]) -> None:
    assert get_usages(
        cloud, "start=2020-01-01T00:00:00&end=2020-02-01T00:00:00", path=f"{BASE}/{PROJECT}"
    ) == {"tenant_usage": {}}


def test_list_usage_without_start_and_end_returns_zero_hours(
    cloud: Cloud, fleet: dict[str, str]
) -> None:
    [usage] = get_usages(cloud, "")["tenant_usages"]
    assert usage["start"] == usage["stop"] and usage["total_hours"] == 0


def test_list_and_show_usage_page_by_server_from_2_40(cloud: Cloud, fleet: dict[str, str]) -> None:
    names, query = [], MARCH + "&detailed=1&limit=1"
    while query:
        body = get_usages(cloud, query, "2.40")
        names += [
            server["name"]
            for project in body["tenant_usages"]
            for server in project["server_usages"]
        ]
        links = body.get("tenant_usages_links", [])
        query = links[0]["href"].partition("?")[2] if links else ""
        assert len(names) <= 3 + bool(query), "the paging ends"
    assert sorted(names) == ["foreign", "long", "short"]
    first = get_usages(cloud, MARCH + "&limit=1", "2.40", f"{BASE}/{PROJECT}")
    assert (
        len(first["tenant_usage"]["server_usages"]) == 1
        and "marker=" in first["tenant_usage_links"][0]["href"]
    )
    assert "tenant_usage_links" not in get_usages(
        cloud, MARCH + "&limit=1", "2.39", f"{BASE}/{PROJECT}"
    )


@pytest.mark.parametrize("name", ["long", "short"])
def test_usage_pages_hold_all_other_servers_when_times_of_one_are_damaged(
    cloud: Cloud, fleet: dict[str, str], name: str
) -> None:
    damaged = schema.servers.c.id == fleet[name]
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.servers).where(damaged).values(terminated_at=sa.text("'[1,2'")))
    names, query = [], MARCH + "&detailed=1&limit=1"
    while query:
        body = get_usages(cloud, query, "2.40")
        [server] = [
            server for usage in body["tenant_usages"] for server in usage["server_usages"]
        ] or [{"name": ""}]
        names.append(server["name"])
        links = body.get("tenant_usages_links", [])
        query = links[0]["href"].partition("?")[2] if links else ""
    assert sorted(names) == sorted({"", "foreign", "long", "short"} - {name})


@pytest.mark.parametrize(
    ("query", "mv", "message"),
    [
        ("start=yesterday", "2.1", "Invalid datetime string: yesterday"),
        (
            "start=2026-03-02T00:00:00&end=2026-03-01T00:00:00",
            "2.1",
            "cannot occur after the end time",
        ),
        (
            "start=2026-03-01T00:00:00&end=2026-03-01T00:00:00",
            "2.1",
            "cannot occur after the end time",
        ),
        ("end=2020-03-01T00:00:00", "2.1", "cannot occur after the end time"),
        ("marker=9c5d0e5e-0000-4000-8000-000000000000", "2.40", "not found"),
        ("limit=-1", "2.40", "limit"),
        ("other=1", "2.75", "other"),
    ],
)
def test_list_usage_with_invalid_query_returns_400(
    cloud: Cloud, fleet: dict[str, str], query: str, mv: str, message: str
) -> None:
    answer = cloud.call("GET", f"{BASE}?{query}", mv=mv, token="admin")
    assert answer.status_code == 400 and message in answer.text


@pytest.mark.parametrize("text", ["2026-03-01T00:00:00.000000", "2026-03-01 00:00:00.0"])
def test_list_usage_accepts_start_with_fraction_and_with_t_or_space(
    cloud: Cloud, fleet: dict[str, str], text: str
) -> None:
    assert (
        get_usages(cloud, f"start={text}&end=2026-04-01T00:00:00")["tenant_usages"][0][
            "total_hours"
        ]
        == 31 * 24 + 24.5
    )


def test_usage_of_other_projects_returns_403_except_to_admin(
    cloud: Cloud, fleet: dict[str, str]
) -> None:
    assert cloud.call("GET", BASE).status_code == 403
    assert cloud.call("GET", f"{BASE}/{PROJECT}").status_code == 200
    assert cloud.call("GET", f"{BASE}/{PROJECT}", token="reader").status_code == 200
    assert cloud.call("GET", f"{BASE}/{OTHER}").status_code == 403
    assert cloud.call("GET", f"{BASE}/{OTHER}", token="admin").status_code == 200


def test_list_usage_sums_in_one_statement_without_server_rows(
    cloud: Cloud, fleet: dict[str, str]
) -> None:
    """The database returns one row per project and flavor."""
    statements: list[str] = []
    sa.event.listen(
        cloud.store.engine,
        "after_cursor_execute",
        lambda connection, cursor, statement, *rest: statements.append(statement),
    )
    get_usages(cloud)
    queries = [statement for statement in statements if "FROM servers" in statement]
    assert len(queries) == 1 and "sum(" in queries[0] and str(schema.servers.c.id) not in queries[0]


@pytest.mark.parametrize(
    ("before", "beginning", "end"),
    [
        ("2026-03-15 10:00:00", "2026-02-01", "2026-03-01"),
        ("2026-03-01 00:00:00", "2026-01-01", "2026-02-01"),
        ("2026-03-01 00:00:00.5", "2026-02-01", "2026-03-01"),
        ("2026-01-02%2000%3A00%3A00", "2025-12-01", "2026-01-01"),
    ],
)
def test_usage_audit_log_shows_empty_period_before_the_requested_time(
    cloud: Cloud, before: str, beginning: str, end: str
) -> None:
    log = cloud.call("GET", f"/os-instance_usage_audit_log/{before}", token="admin").json[
        "instance_usage_audit_log"
    ]
    assert log == {
        "period_beginning": f"{beginning} 00:00:00",
        "period_ending": f"{end} 00:00:00",
        "num_hosts": 0,
        "num_hosts_done": 0,
        "num_hosts_running": 0,
        "num_hosts_not_run": 0,
        "hosts_not_run": [],
        "total_instances": 0,
        "total_errors": 0,
        "overall_status": "ALL hosts done. 0 errors.",
        "log": {},
    }


def test_usage_audit_log_of_last_month_returns_403_except_to_admin(cloud: Cloud) -> None:
    path = "/os-instance_usage_audit_log"
    log = cloud.call("GET", path, token="admin").json["instance_usage_audit_logs"]
    assert log["period_beginning"] < log["period_ending"] and log["log"] == {}
    assert cloud.call("GET", path).status_code == 403


@pytest.mark.parametrize("before", ["yesterday", "0001-01-15 00:00:00"])
def test_usage_audit_log_before_invalid_or_too_early_time_returns_400(
    cloud: Cloud, before: str
) -> None:
    answer = cloud.call("GET", f"/os-instance_usage_audit_log/{before}", token="admin")
    assert answer.status_code == 400 and "Invalid timestamp" in answer.text
