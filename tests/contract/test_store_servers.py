# SPDX-License-Identifier: Apache-2.0
"""Servers, flavors, key pairs, quotas and idempotency keys on SQLite, PostgreSQL and MariaDB.

The tests use the API's ``Creator``, which commits several creates in one transaction.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids
from common.domain.models import Flavor
from common.domain.wire import to_wire
from common.store import schema
from common.store.engine import Store
from common.store.servers import servers
from common.store.servers.servers import ServerFilters
from common.store.tenants import flavors, keypairs, quotas, server_groups
from compute_api.compute.request.creation import Created, Creation, Creator
from compute_api.compute.request.dependencies import ApiSettings
from compute_api.compute.request.quota import UnifiedLimits, UnregisteredLimits
from tests.api.conftest import Cloud
from tests.api.test_keypairs import SSH
from tests.waiting import slowdown

LIMITS = {"instances": 10, "cores": 20, "ram": 51200, "server_group_members": 10}


def creation(
    name: str = "vm",
    project: str = "p",
    key: str | None = None,
    group: str | None = None,
    **columns: Any,
) -> Creation:
    """Return a create request for a server with one VCPU and 64 MiB."""

    def rows(count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        server, action = ids.new(), ids.new()
        common = {"project_id": project, "user_id": "u"}
        return [
            {
                **common,
                "id": server,
                "name": name,
                "hostname": name,
                "vm_state": "building",
                "action": action,
                "flavor": {"id": "1"},
                "flavor_id": "1",
                "vcpus": 1,
                "memory_mb": 64,
                "disk_gb": 1,
                "meta": {"å": "☃"},
                "tags": ['a"b', "x_y"],
                "scheduler_hints": {},
                "security_groups": [],
                "reservation_id": "r",
                **columns,
            }
        ], [
            {
                **common,
                "id": action,
                "server_id": server,
                "request_id": "req",
                "name": "create",
                "workflow": "create",
                "fence": 1,
            }
        ]

    return Creation(project, "u", 1, 64, 1, 1, "r", rows, key, "digest", group=group)


def list_names(store: Store, **filters: Any) -> list[str]:
    return [row.name for row in store.read(lambda tx: servers.page(tx, ServerFilters(**filters)))]


def test_server_row_is_read_as_written_and_only_in_its_project(store: Store) -> None:
    created = Creator(store, LIMITS).create(creation(description=None, config_drive=True))
    row = store.read(lambda tx: servers.show(tx, created.server_id, "p"))
    assert (servers.loads(row.meta), servers.loads(row.tags)) == ({"å": "☃"}, ['a"b', "x_y"])
    assert (row.config_drive, row.locked, row.deleted, row.image) == (True, False, 0, None)
    assert abs(row.created_at - store.now()) < 60_000_000
    with pytest.raises(errors.NotFound):
        store.read(lambda tx: servers.show(tx, created.server_id, "q"))


@pytest.mark.parametrize(
    ("filters", "expected_names"),
    [
        ({"filters": {"name": "^v.$"}}, "v2 v1"),
        ({"filters": {"name": "1"}}, "v1"),
        ({"filters": {"name": "100%"}}, ""),
        ({"filters": {"launch_index": "2"}}, "v2"),
        ({"filters": {"config_drive": True}}, "v1"),
        ({"filters": {"launch_index": "99999999999999999999"}}, ""),
        ({"filters": {"vm_state": ["active", "error"]}}, "v2"),
        ({"filters": {"kernel_id": "x"}}, ""),
        ({"states": [("active", (), ("rebooting",))]}, "v2"),
        ({"states": [("building", ("scheduling",), ())]}, "v1"),
        ({"states": []}, ""),
        ({"deleted": True}, "gone"),
        ({"deleted": None}, "gone other v2 v1"),
        ({"project_id": "p"}, "v2 v1"),
        ({"tags": {"tags": ['a"b']}}, "other v2 v1"),
        ({"tags": {"tags": ["xxy"]}}, ""),
        ({"tags": {"tags": ["X_Y"]}}, ""),
        ({"tags": {"tags-any": ["X_Y", 'A"b']}}, ""),
        ({"tags": {"not-tags": ["X_Y"]}}, "other v2 v1"),
        ({"filters": {"name": "OTHER"}}, ""),
        ({"filters": {"name": "^OTHER"}}, ""),
        ({"tags": {"not-tags-any": ["x_y"]}}, ""),
        ({"changed_before": 0}, ""),
        ({"sort": [("task_state", False), ("display_name", False)]}, "other v2 v1"),
        ({"sort": [("launched_at", True), ("display_name", True)]}, "v1 v2 other"),
    ],
    ids=str,
)
def test_server_filters_and_sorts_agree_on_all_databases(
    store: Store, filters: dict[str, Any], expected_names: str
) -> None:
    creator = Creator(store, LIMITS)
    created = [
        creator.create(
            creation(
                "v1", task_state="scheduling", launch_index=1, config_drive=True, launched_at=5
            )
        ),
        creator.create(creation("v2", vm_state="active", launch_index=2, launched_at=3)),
        creator.create(creation("other", "q")),
        creator.create(creation("gone", "q", deleted=1)),
    ]
    # A clock of milliseconds could give several servers the same time.
    with store.begin() as tx:
        for number, server in enumerate(created):
            tx.execute(
                sa.update(schema.servers)
                .where(schema.servers.c.id == server.server_id)
                .values(created_at=number)
            )
    assert list_names(store, **filters) == expected_names.split()


@pytest.mark.parametrize(
    ("pattern", "expected_name"),
    [
        ("(a+)+$", "aa"),
        ("^w", "web-1"),
        ("[[:digit:]]$", "web-1"),
        ("(web|db)-[0-9]{1,3}", "web-1"),
        (r"a{2}", "aa"),
        (r"w.b\-", "web-1"),
        ("☃+$", "☃"),
        (".*.*.*.*.*.*1", "web-1"),
    ],
)
def test_name_pattern_matches_alike_on_all_databases(
    store: Store, pattern: str, expected_name: str
) -> None:
    for name in ("web-1", "aa", "☃"):
        Creator(store, LIMITS).create(creation(name))
    assert list_names(store, filters={"name": pattern}) == [expected_name]
    assert list_names(store, filters={"ip": "^192.*1$"}) == []


def test_name_pattern_with_named_group_raises_bad_request_if_unsupported(store: Store) -> None:
    Creator(store, LIMITS).create(creation("vm"))
    try:
        assert list_names(store, filters={"name": "(?P<x>v)"}) == ["vm"]
    except errors.BadRequest as problem:
        assert "regular expression" in problem.text


@pytest.mark.parametrize("pattern", ["(", "(?=v)", r"(v)\1", "(?:(?:(?:^){60000}){60000}){60000}"])
def test_invalid_display_name_pattern_raises_bad_request(store: Store, pattern: str) -> None:
    with pytest.raises(errors.BadRequest, match="display_name"):
        list_names(store, filters={"display_name": pattern})


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(.*a){20}$",
        "(a|aa)*$",
        "([a-b]{1,255}){3}" * 15,
        "a{1000}" * 36,
        "(?:a?){90}" * 25,
        ".*" * 127,
    ],
)
def test_worst_case_name_pattern_is_matched_or_refused_within_a_second(
    store: Store, pattern: str
) -> None:
    """The names are the worst case. MariaDB's own engine would need seconds for twenty of them."""
    for _ in range(20):
        Creator(store, {**LIMITS, "instances": 20}).create(creation("a" * 254 + "!", hostname="a"))

    def seconds() -> float:
        """Return the duration of the list request on an idle machine."""
        start = time.monotonic()
        # PostgreSQL refuses repetition counts above 255.
        with contextlib.suppress(errors.BadRequest):
            list_names(store, filters={"name": pattern})
        return (time.monotonic() - start) / slowdown()

    assert any(seconds() < 1 for _ in range(3))


@pytest.mark.parametrize(
    "sort",
    [
        (),
        (("task_state", False),),
        (("launched_at", True),),
        (("locked", True),),
        (("display_name", False), ("vm_state", True)),
    ],
)
def test_server_pages_hold_every_row_once_with_null_sort_keys(store: Store, sort: Any) -> None:
    creator = Creator(store, LIMITS)
    for number in range(7):
        creator.create(
            creation(
                f"s{number % 3}",
                task_state=[None, "a", "b"][number % 3],
                launched_at=[None, 5][number % 2],
            )
        )
    all_ids = [row.id for row in store.read(lambda tx: servers.page(tx, ServerFilters(sort=sort)))]
    paged_ids: list[str] = []
    while True:
        page = ServerFilters(sort=sort, limit=2, marker=paged_ids[-1] if paged_ids else None)
        rows = store.read(lambda tx, page=page: servers.page(tx, page))  # type: ignore[misc]
        if not rows:
            break
        paged_ids += [row.id for row in rows]
    assert paged_ids == all_ids
    assert len(set(paged_ids)) == 7


def test_parallel_creates_in_two_processes_respect_project_quota(store: Store) -> None:
    """Two creators represent two processes. Only a lock on the project's row orders them."""
    creators = [Creator(store, LIMITS), Creator(store, LIMITS)]

    def create(number: int) -> Created | errors.Problem:
        try:
            return creators[number % 2].create(creation(f"s{number}", "pq"[number // 2 % 2]))
        except errors.Problem as problem:
            return problem

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(create, range(48)))
    assert sum(isinstance(outcome, Created) for outcome in outcomes) == 20
    assert sum(isinstance(outcome, errors.OverQuota) for outcome in outcomes) == 28
    for project in "pq":
        usage = store.read(lambda tx, project=project: quotas.usage(tx, project))  # type: ignore[misc]
        assert (usage[""].instances, usage["u"].cores, usage[""].ram) == (10, 10, 640)


def test_parallel_creates_respect_unified_limits(store: Store) -> None:
    """The limits include a custom resource class."""
    limits = UnifiedLimits(
        {"servers": 99, "class:VCPU": 40, "class:CUSTOM_GOLD": 20}, UnregisteredLimits()
    )
    flavor = to_wire(Flavor("1", "gold", 1, 64, 1, extra_specs={"resources:CUSTOM_GOLD": "2"}))
    creators = [Creator(store, LIMITS), Creator(store, LIMITS)]

    def create(number: int) -> Created | errors.Problem:
        try:
            return creators[number % 2].create(
                replace(
                    creation(f"s{number}", flavor=flavor),
                    limits=lambda tx: limits,
                    classes={"VCPU": 1, "MEMORY_MB": 64, "DISK_GB": 1, "CUSTOM_GOLD": 2},
                )
            )
        except errors.Problem as problem:
            return problem

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(create, range(32)))
    assert sum(isinstance(outcome, Created) for outcome in outcomes) == 10
    assert sum(isinstance(outcome, errors.OverQuota) for outcome in outcomes) == 22
    assert store.read(lambda tx: limits.read_usage(tx, "p")) == {
        "": {
            "servers": 10,
            "class:VCPU": 10,
            "class:MEMORY_MB": 640,
            "class:DISK_GB": 10,
            "class:CUSTOM_GOLD": 20,
        }
    }


def test_parallel_keypair_creates_respect_quota_of_user(store: Store) -> None:
    """The requests come from two projects."""
    cloud = Cloud(store.url, quota={**ApiSettings().quota, "key_pairs": 1})
    inserted, may_continue = threading.Event(), threading.Event()

    def pause_insert(_: Any, __: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("INSERT INTO keypairs") and not inserted.is_set():
            inserted.set()
            assert may_continue.wait(20)

    sa.event.listen(cloud.store.engine, "after_cursor_execute", pause_insert)

    def create(name: str, token: str) -> int:
        body = {"keypair": {"name": name, "type": "ssh", "public_key": SSH, "user_id": "u1"}}
        return int(cloud.call("POST", "/os-keypairs", body, mv="2.10", token=token).status_code)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(create, "one", "user")
        assert inserted.wait(20)
        second = pool.submit(create, "two", "admin")
        # The second create waits for the user's row, on SQLite for a write transaction.
        with pytest.raises(NotYet):
            second.result(timeout=0.5)
        may_continue.set()
        assert (first.result(timeout=20), second.result(timeout=20)) == (201, 403)
    cloud.store.close()


def test_parallel_creates_with_one_idempotency_key_create_one_server(store: Store) -> None:
    creators = [Creator(store, LIMITS), Creator(store, LIMITS)]
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda number: creators[number % 2].create(creation(key="k")), range(8))
        )
    assert len({result.server_id for result in results}) == 1
    assert sorted(result.repeated for result in results) == [False] + [True] * 7
    assert len(list_names(store)) == 1


def test_idempotency_keys_are_case_sensitive(store: Store) -> None:
    creator, keys = Creator(store, LIMITS), ("deploy-web", "Deploy-Web", "DEPLOY-WEB")
    server_ids = {key: creator.create(creation(key=key)).server_id for key in keys}
    assert len(set(server_ids.values())) == len(keys)
    for key in keys:
        repetition = creator.create(creation(key=key))
        assert repetition.repeated and repetition.server_id == server_ids[key]


def test_create_in_group_adds_member_and_group_delete_removes_membership(store: Store) -> None:
    group = store.write(
        lambda tx: server_groups.create(
            tx, {"project_id": "p", "user_id": "u", "name": "g", "policy": "affinity", "rules": {}}
        )
    ).id
    created = Creator(store, LIMITS).create(creation(group=group))
    assert store.read(lambda tx: server_groups.members(tx, [group])) == {group: [created.server_id]}
    assert store.read(lambda tx: servers.show(tx, created.server_id)).group_id == group
    assert store.read(lambda tx: server_groups.page(tx, "q", 10)) == []
    store.write(lambda tx: server_groups.delete(tx, group))
    assert store.read(lambda tx: servers.show(tx, created.server_id)).group_id is None


def test_parallel_metadata_changes_keep_every_key(store: Store) -> None:
    created = Creator(store, LIMITS).create(creation(meta={}))
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda number: store.write(
                    lambda tx: servers.change_json(
                        tx, created.server_id, "meta", lambda old: {**old, str(number): "x"}
                    )
                ),
                range(16),
            )
        )
    row = store.read(lambda tx: servers.show(tx, created.server_id))
    assert len(servers.loads(row.meta)) == 16


def test_quota_limits_of_project_user_and_class_are_set_and_deleted(store: Store) -> None:
    for value in (5, 6):
        store.write(lambda tx, value=value: quotas.put(tx, "p", "", {"cores": value}))  # type: ignore[misc]
    store.write(lambda tx: quotas.put(tx, "p", "u", {"cores": 2}))
    store.write(lambda tx: quotas.put(tx, quotas.CLASS, "", {"ram": -1}))
    limits = store.read(lambda tx: quotas.limits(tx, "p", LIMITS))
    assert (
        limits.of("cores"),
        limits.of("cores", "u"),
        limits.of("ram"),
        limits.of("instances"),
    ) == (6, 2, -1, 10)
    store.write(lambda tx: quotas.forget(tx, "p", "u"))
    assert store.read(lambda tx: quotas.limits(tx, "p", LIMITS)).of("cores", "u") == 6


def test_flavors_and_keypairs_are_created_listed_and_unique(store: Store) -> None:
    values = {
        "name": "f",
        "vcpus": 1,
        "memory_mb": 1,
        "root_gb": 0,
        "is_public": True,
        "rxtx_factor": 1.0,
    }
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda number: _create_flavor(store, values, number), range(4)))
    assert sorted(outcomes) == ["Conflict"] * 3 + ["Row"], "a name is taken once"
    private = store.write(
        lambda tx: flavors.create(tx, {**values, "flavorid": "x", "name": "g", "is_public": False})
    )

    def flavor_names(project: str | None) -> list[str]:
        return [
            row.name
            for row in store.read(lambda tx: flavors.page(tx, project_id=project, sort_key="name"))
        ]

    assert (flavor_names(None), flavor_names("p")) == (["f", "g"], ["f"])
    store.write(lambda tx: flavors.grant(tx, private, "p"))
    assert flavor_names("p") == ["f", "g"]
    store.write(lambda tx: flavors.set_extra_specs(tx, "x", {"a": "1"}))
    assert store.read(lambda tx: flavors.show(tx, "x")).extra_specs == {"a": "1"}
    assert [
        row.name
        for row in store.read(lambda tx: flavors.page(tx, project_id=None, name="^g", marker=None))
    ] == ["g"]
    store.write(lambda tx: flavors.delete(tx, "x"))
    assert flavor_names("p") == ["f"]
    key = {"user_id": "u", "name": "k", "type": "ssh", "fingerprint": "f", "public_key": "p"}
    store.write(lambda tx: keypairs.create(tx, key))
    with pytest.raises(errors.Conflict):
        store.write(lambda tx: keypairs.create(tx, key))
    assert store.read(lambda tx: keypairs.count(tx, "u")) == 1


def _create_flavor(store: Store, values: dict[str, Any], number: int) -> str:
    try:
        return type(
            store.write(lambda tx: flavors.create(tx, {**values, "flavorid": str(number)}))
        ).__name__
    except errors.Conflict:
        return "Conflict"
