# SPDX-License-Identifier: Apache-2.0
"""What projects have used: os-simple-tenant-usage."""

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
    """Launched and ended, in hours of March: a tiny one from before to after it, a small one
    within, one that ended before, one that began after, one that never came up, and one of another
    project."""
    found = {}
    for name, flavor, launched, ended in (
        ("long", "1", -5, None),
        ("short", "2", 10, 34.5),
        ("before", "1", -20, -1),
        ("after", "1", 24 * 31, None),
        ("never", "1", None, None),
        ("foreign", "2", 100, 101),
    ):
        found[name] = cloud.create(
            name, token="stranger" if name == "foreign" else "user", flavorRef=flavor
        )
        gone = {"vm_state": "deleted", "deleted": 1} if ended is not None else {}
        cloud.rest(
            found[name],
            **gone,
            launched_at=None if launched is None else T0 + launched * HOUR,
            terminated_at=None if ended is None else T0 + int(ended * HOUR),
        )
    return found


def usages(
    cloud: Cloud, query: str = MARCH, mv: str = "2.1", path: str = BASE, token: str = "admin"
) -> Any:
    answer = cloud.call("GET", f"{path}?{query}", mv=mv, token=token)
    assert answer.status_code == 200, answer.text
    return answer.json


def test_the_sums_of_each_project(cloud: Cloud, fleet: dict[str, str]) -> None:
    mine, other = usages(cloud)["tenant_usages"]
    hours, short = 31 * 24, 24.5
    assert mine == {
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
def test_sums_are_the_same_however_they_are_made(
    cloud: Cloud, fleet: dict[str, str], mv: str
) -> None:
    plain, detailed = (
        usages(cloud, MARCH + more, mv)["tenant_usages"] for more in ("", "&detailed=1")
    )
    assert [{**one, "server_usages": None} for one in plain] == [
        {**one, "server_usages": None} for one in detailed
    ]


def test_the_servers_of_a_project(cloud: Cloud, fleet: dict[str, str]) -> None:
    shown = usages(cloud, path=f"{BASE}/{PROJECT}", token="user")["tenant_usage"]
    by_name = {one["name"]: one for one in shown["server_usages"]}
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


def test_a_project_that_used_nothing(cloud: Cloud, fleet: dict[str, str]) -> None:
    assert usages(
        cloud, "start=2020-01-01T00:00:00&end=2020-02-01T00:00:00", path=f"{BASE}/{PROJECT}"
    ) == {"tenant_usage": {}}


def test_without_a_period_it_is_now(cloud: Cloud, fleet: dict[str, str]) -> None:
    [mine] = usages(cloud, "")["tenant_usages"]
    assert mine["start"] == mine["stop"] and mine["total_hours"] == 0


def test_pages_of_servers(cloud: Cloud, fleet: dict[str, str]) -> None:
    seen, query = [], MARCH + "&detailed=1&limit=1"
    while query:
        body = usages(cloud, query, "2.40")
        seen += [
            server["name"]
            for project in body["tenant_usages"]
            for server in project["server_usages"]
        ]
        links = body.get("tenant_usages_links", [])
        query = links[0]["href"].partition("?")[2] if links else ""
        assert len(seen) <= 3 + bool(query), "it ends"
    assert sorted(seen) == ["foreign", "long", "short"]
    first = usages(cloud, MARCH + "&limit=1", "2.40", f"{BASE}/{PROJECT}")
    assert (
        len(first["tenant_usage"]["server_usages"]) == 1
        and "marker=" in first["tenant_usage_links"][0]["href"]
    )
    assert "tenant_usage_links" not in usages(
        cloud, MARCH + "&limit=1", "2.39", f"{BASE}/{PROJECT}"
    )


@pytest.mark.parametrize(
    ("query", "mv", "said"),
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
def test_what_is_refused(
    cloud: Cloud, fleet: dict[str, str], query: str, mv: str, said: str
) -> None:
    answer = cloud.call("GET", f"{BASE}?{query}", mv=mv, token="admin")
    assert answer.status_code == 400 and said in answer.text


@pytest.mark.parametrize("text", ["2026-03-01T00:00:00.000000", "2026-03-01 00:00:00.0"])
def test_the_ways_to_write_a_time(cloud: Cloud, fleet: dict[str, str], text: str) -> None:
    assert (
        usages(cloud, f"start={text}&end=2026-04-01T00:00:00")["tenant_usages"][0]["total_hours"]
        == 31 * 24 + 24.5
    )


def test_who_may_see_it(cloud: Cloud, fleet: dict[str, str]) -> None:
    assert cloud.call("GET", BASE).status_code == 403
    assert cloud.call("GET", f"{BASE}/{PROJECT}").status_code == 200
    assert cloud.call("GET", f"{BASE}/{PROJECT}", token="reader").status_code == 200
    assert cloud.call("GET", f"{BASE}/{OTHER}").status_code == 403
    assert cloud.call("GET", f"{BASE}/{OTHER}", token="admin").status_code == 200


def test_sums_read_no_servers(cloud: Cloud, fleet: dict[str, str]) -> None:
    """Two statements, and a row for each project and flavor."""
    statements: list[str] = []
    sa.event.listen(
        cloud.store.engine,
        "after_cursor_execute",
        lambda connection, cursor, statement, *rest: statements.append(statement),
    )
    usages(cloud)
    asked = [statement for statement in statements if "FROM servers" in statement]
    assert len(asked) == 1 and "sum(" in asked[0] and str(schema.servers.c.id) not in asked[0]


@pytest.mark.parametrize(
    ("before", "began", "ended"),
    [
        ("2026-03-15 10:00:00", "2026-02-01", "2026-03-01"),
        ("2026-03-01 00:00:00", "2026-01-01", "2026-02-01"),
        ("2026-03-01 00:00:00.5", "2026-02-01", "2026-03-01"),
        ("2026-01-02%2000%3A00%3A00", "2025-12-01", "2026-01-01"),
    ],
)
def test_no_host_audits_its_usage(cloud: Cloud, before: str, began: str, ended: str) -> None:
    shown = cloud.call("GET", f"/os-instance_usage_audit_log/{before}", token="admin").json[
        "instance_usage_audit_log"
    ]
    assert shown == {
        "period_beginning": f"{began} 00:00:00",
        "period_ending": f"{ended} 00:00:00",
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


def test_the_audits_of_the_last_month(cloud: Cloud) -> None:
    path = "/os-instance_usage_audit_log"
    last = cloud.call("GET", path, token="admin").json["instance_usage_audit_logs"]
    assert last["period_beginning"] < last["period_ending"] and last["log"] == {}
    assert cloud.call("GET", f"{path}/yesterday", token="admin").status_code == 400
    assert cloud.call("GET", path).status_code == 403
