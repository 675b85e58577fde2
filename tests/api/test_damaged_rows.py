# SPDX-License-Identifier: Apache-2.0
"""A damaged document or time in the database hides no other row, and every list still works."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain import ids
from common.store import schema
from deploy.operator import doctor
from tests.api.conftest import PROJECT, Cloud
from tests.surface.site import Database

LISTS = [
    ("/os-aggregates", "2.41"),
    ("/os-availability-zone", "2.1"),
    ("/os-availability-zone/detail", "2.1"),
    ("/os-hypervisors/detail", "2.87"),
    ("/os-hypervisors/detail", "2.103"),
    ("/os-services", "2.53"),
    ("/os-migrations", "2.80"),
    ("/os-server-groups", "2.64"),
    ("/flavors/detail", "2.61"),
    ("/os-keypairs", "2.92"),
    ("/servers/detail", "2.103"),
    ("/limits", "2.1"),
    ("/os-simple-tenant-usage", "2.40"),
]
DAMAGES = [
    ("aggregates", "meta"),
    ("aggregates", "created_at"),
    ("flavors", "extra_specs"),
    ("flavors", "created_at"),
    ("migrations", "old_flavor"),
    ("migrations", "new_flavor"),
    ("migrations", "progress"),
    ("migrations", "created_at"),
    ("server_groups", "rules"),
    ("hosts", "cpu_info"),
    ("hosts", "facts"),
    ("hosts", "traits"),
    ("hosts", "numa_nodes"),
    ("keypairs", "created_at"),
    ("servers", "flavor"),
    ("servers", "created_at"),
    ("servers", "launched_at"),
    ("heartbeats", "seen_at"),
]


@pytest.fixture
def full_cloud(cloud: Cloud) -> Cloud:
    """Return a cloud with at least one row in every listed table."""
    server = cloud.create()
    cloud.set_state(server, launched_at=1)
    group = {"server_group": {"name": "g", "policy": "affinity"}}
    for path, body, token in (
        ("/os-aggregates", {"aggregate": {"name": "a"}}, "admin"),
        ("/os-aggregates", {"aggregate": {"name": "b"}}, "admin"),
        ("/os-server-groups", group, "user"),
        ("/os-keypairs", {"keypair": {"name": "k"}}, "user"),
    ):
        assert cloud.call("POST", path, body, token=token, mv="2.64").status_code < 300
    body = {"add_host": {"host": "host1"}}
    assert cloud.call("POST", "/os-aggregates/1/action", body, token="admin").status_code == 200
    [action] = cloud.rows(schema.actions)
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.migrations),
            {
                "uuid": ids.new(),
                "server_id": server,
                "action_id": action.id,
                "project_id": PROJECT,
                "user_id": "u1",
                "type": "live-migration",
                "status": "running",
                "source_host": "host1",
                "dest_host": "host1",
                "old_flavor": {"id": "1"},
                "new_flavor": {"id": "2"},
                "was": "active",
                "created_at": 0,
                "updated_at": 0,
            },
        )
    return cloud


def test_lists_keep_all_items_when_a_column_is_damaged(full_cloud: Cloud) -> None:
    database = Database(Path(full_cloud.store.url.database or ""))
    database.save()
    before, differences = _count_items(full_cloud), {}
    for table, column in DAMAGES:
        with full_cloud.store.begin() as tx:
            tx.execute(sa.text(f"UPDATE {table} SET {column} = '[1,2'"))
        after = _count_items(full_cloud)
        # A server without a launch time has no usage.
        if column == "launched_at":
            after |= {key: count for key, count in before.items() if "usage" in key[0]}
        if after != before:
            differences[table, column] = set(after.items()) - set(before.items())
        database.reset()
    database.close()
    assert differences == {}


def _count_items(cloud: Cloud) -> dict[tuple[str, str, str], int]:
    """Return the number of items in each list, by path, microversion and caller."""
    counts = {}
    for path, mv in LISTS:
        for token in ("user", "admin"):
            headers = {"X-Auth-Token": token, "OpenStack-API-Version": f"compute {mv}"}
            answer = cloud.client.simulate_get("/v2.1" + path, headers=headers)
            assert answer.status_code in (200, 403), (path, mv, token, answer.text)
            [items, *_] = answer.json.values()
            counts[path, mv, token] = len(items)
    return counts


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/os-aggregates/1", {"aggregate": {"name": "c"}}),
        ("POST", "/os-aggregates/1/action", {"set_metadata": {"metadata": {"ssd": "true"}}}),
    ],
)
def test_aggregate_update_returns_409_when_metadata_is_damaged(
    full_cloud: Cloud, method: str, path: str, body: dict[str, object]
) -> None:
    """New metadata without filter_tenant_id would open the hosts to all projects.

    The host can still be removed and the aggregate deleted.
    """
    with full_cloud.store.begin() as tx:
        tx.execute(sa.text("UPDATE aggregates SET meta = '{\"filter_tenant_id' WHERE id = 1"))
    answer = full_cloud.call(method, path, body, token="admin")
    assert answer.status_code == 409 and "damaged" in answer.text
    remove = {"remove_host": {"host": "host1"}}
    assert (
        full_cloud.call("POST", "/os-aggregates/1/action", remove, token="admin").status_code == 200
    )
    assert full_cloud.call("DELETE", "/os-aggregates/1", token="admin").status_code == 200


def test_doctor_check_reports_damaged_json_columns_and_other_findings(full_cloud: Cloud) -> None:
    with full_cloud.store.begin() as tx:
        for table, column in (
            ("aggregates", "meta"),
            ("flavors", "extra_specs"),
            ("hosts", "facts"),
            ("migrations", "old_flavor"),
            ("server_groups", "rules"),
            ("servers", "image"),
        ):
            tx.execute(sa.text(f"UPDATE {table} SET {column} = '[1,2'"))
        tx.execute(sa.insert(schema.aggregate_hosts).values(aggregate_id=9, host="host9"))
        tx.execute(sa.update(schema.servers).values(task_state="pausing"))
    findings = {
        (finding.kind, finding.subject.partition("/")[0])
        for finding in full_cloud.store.read(doctor.check)
    }
    tables = ("aggregates", "flavors", "hosts", "migrations", "server_groups", "servers")
    assert {("document", table) for table in tables} <= findings
    assert "task-state" in {kind for kind, _ in findings}


def test_list_server_migrations_includes_migration_with_damaged_progress(full_cloud: Cloud) -> None:
    [server] = full_cloud.rows(schema.servers)
    with full_cloud.store.begin() as tx:
        tx.execute(sa.text("UPDATE migrations SET progress = '[1,2'"))
    answer = full_cloud.call("GET", f"/servers/{server.id}/migrations", token="admin", mv="2.80")
    assert answer.status_code == 200 and len(answer.json["migrations"]) == 1
