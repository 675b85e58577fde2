# SPDX-License-Identifier: Apache-2.0
"""A document or a time in the database that is damaged takes no list with it, and no other row."""

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
def full(cloud: Cloud) -> Cloud:
    """A cloud with a row of everything."""
    server = cloud.create()
    cloud.rest(server, launched_at=1)
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


def test_damaged_column_takes_no_list_with_it(full: Cloud) -> None:
    database = Database(Path(full.store.url.database or ""))
    database.keep()
    before, changed = _counts(full), {}
    for table, column in DAMAGES:
        with full.store.begin() as tx:
            tx.execute(sa.text(f"UPDATE {table} SET {column} = '[1,2'"))
        after = _counts(full)
        if column == "launched_at":  # what is not known to have run has no usage
            after |= {key: count for key, count in before.items() if "usage" in key[0]}
        if after != before:
            changed[table, column] = set(after.items()) - set(before.items())
        database.set_back()
    database.close()
    assert changed == {}


def _counts(cloud: Cloud) -> dict[tuple[str, str, str], int]:
    """Return how many items each list has, by path, version and caller."""
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
def test_update_of_damaged_aggregate_keeps_the_damage(
    full: Cloud, method: str, path: str, body: dict[str, object]
) -> None:
    """A document that is written anew without its filter_tenant_id would open its hosts to all."""
    with full.store.begin() as tx:
        tx.execute(sa.text("UPDATE aggregates SET meta = '{\"filter_tenant_id' WHERE id = 1"))
    answer = full.call(method, path, body, token="admin")
    assert answer.status_code == 409 and "damaged" in answer.text
    remove = {"remove_host": {"host": "host1"}}
    assert full.call("POST", "/os-aggregates/1/action", remove, token="admin").status_code == 200
    assert full.call("DELETE", "/os-aggregates/1", token="admin").status_code == 200


def test_doctor_names_each_damaged_document_and_goes_on(full: Cloud) -> None:
    with full.store.begin() as tx:
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
    found = {(one.kind, one.subject.partition("/")[0]) for one in full.store.read(doctor.check)}
    tables = ("aggregates", "flavors", "hosts", "migrations", "server_groups", "servers")
    assert {("document", table) for table in tables} <= found
    assert "task-state" in {kind for kind, _ in found}


def test_list_of_live_migrations_bears_damaged_progress(full: Cloud) -> None:
    [server] = full.rows(schema.servers)
    with full.store.begin() as tx:
        tx.execute(sa.text("UPDATE migrations SET progress = '[1,2'"))
    answer = full.call("GET", f"/servers/{server.id}/migrations", token="admin", mv="2.80")
    assert answer.status_code == 200 and len(answer.json["migrations"]) == 1
