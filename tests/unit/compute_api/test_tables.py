# SPDX-License-Identifier: Apache-2.0
"""Every table of the API walked: routes, actions, policy rules, microversions, schemas, fields."""

from __future__ import annotations

import copy
import inspect

import jsonschema
import pytest

from common import states
from common.store.servers.servers import COLUMNS
from compute_api.compute import microversions, routes
from compute_api.compute.fields import Field, render, visible_fields
from compute_api.compute.policies import RULES
from compute_api.compute.resources import quota_sets, server_action_table, server_groups, services
from compute_api.compute.routes import ROUTES, Route
from compute_api.compute.schemas import server_actions as action_schemas
from compute_api.compute.schemas import servers as server_schemas
from compute_api.compute.views import (
    aggregates,
    flavors,
    hypervisors,
    instance_actions,
    keypairs,
    migrations,
    servers,
)
from compute_api.edge.microversions import Range
from compute_api.edge.validation import VersionedSchema

TABLES = {
    "servers": servers.ONE,
    "server names": servers.NAMES,
    "flavors": flavors.FIELDS,
    "key pairs": keypairs.FIELDS,
    "new key pairs": keypairs.NEW,
    "rebuilt": servers.REBUILT,
    "actions": instance_actions.FIELDS,
    "events": instance_actions.EVENT_FIELDS,
    "hypervisors": hypervisors.FIELDS,
    "services": services.FIELDS,
    "aggregates": aggregates.FIELDS,
    "migrations": migrations.FIELDS,
    "migrations below servers": migrations.BELOW_SERVER,
    "new aggregates": aggregates.NEW,
    "groups": server_groups.FIELDS,
    "limits": quota_sets.LIMITS,
}
NAMED = pytest.mark.parametrize(
    "route", ROUTES, ids=lambda route: f"{route.method} {route.path} {route.since}"
)


def points_of(schema: VersionedSchema) -> list[int]:
    """The versions at which it changes."""
    return [since for since, _ in schema._changes]


@NAMED
def test_a_route_is_whole(route: Route) -> None:
    assert route.policy == "" or route.policy in RULES
    assert (route.body is not None) == (route.method in ("POST", "PUT")) or "/tags/" in route.path
    assert microversions.number(route.since) <= microversions.MAX
    wanted = [name.strip("{}") for name in route.path.split("/") if name.startswith("{")]
    if route.about_server:
        wanted[wanted.index("server_id")] = "server"
    if "baremetal" not in route.path:
        assert list(inspect.signature(route.handler).parameters) == ["request", *wanted]
    assert inspect.getdoc(route.handler), "every operation says what it is"


@NAMED
def test_every_schema_of_a_route_can_be_used(route: Route) -> None:
    for versioned in (route.body, route.query):
        if versioned is not None:
            for point in (1, *points_of(versioned), microversions.MAX):
                jsonschema.Draft202012Validator.check_schema(versioned.at(point).document)


@pytest.mark.parametrize(
    "versioned",
    [
        *action_schemas.BY_KEY.values(),
        *(one for route in ROUTES for one in (route.body, route.query) if one is not None),
    ],
)
def test_a_schema_is_the_same_in_whatever_order_it_is_made(versioned: VersionedSchema) -> None:
    points = [1, *points_of(versioned), microversions.MAX]
    upwards = [copy.deepcopy(versioned._made(point).document) for point in points]
    downwards = [copy.deepcopy(versioned._made(point).document) for point in reversed(points)]
    assert upwards == downwards[::-1]


def test_no_two_routes_answer_the_same_request() -> None:
    for version in range(microversions.MIN, microversions.MAX + 1):
        seen = [(route.method, route.path) for route in ROUTES if version in route.versions]
        assert len(seen) == len(set(seen))
    gone = {(method, path) for path, methods in routes.GONE.items() for method in methods.split()}
    assert not {(route.method, route.path) for route in ROUTES} & gone


def test_operations_without_a_rule_require_one_themselves() -> None:
    own = {route.path for route in ROUTES if not route.policy}
    images = {
        "/images",
        "/images/detail",
        "/images/{image_id}",
        "/images/{image_id}/metadata",
        "/images/{image_id}/metadata/{key}",
    }
    assert own - images == {
        "/servers/{server_id}/action",
        "/flavors",
        "/flavors/detail",
        "/flavors/{flavor_id}",
        "/flavors/{flavor_id}/action",
        "/os-aggregates/{aggregate_id}/action",
        "/os-keypairs",
        "/os-keypairs/{name}",
        "/os-quota-sets/{project_id}",
        "/os-simple-tenant-usage/{project_id}",
        "/os-volumes_boot/{server_id}/action",
        "/os-quota-sets/{project_id}/detail",
        "/os-server-groups/{group_id}",
        "/os-baremetal-nodes",
        "/os-baremetal-nodes/{id}",
        "/os-baremetal-nodes/{id}/action",
    }


@pytest.mark.parametrize("name", TABLES)
def test_a_view_never_has_a_key_twice(name: str) -> None:
    for version in range(microversions.MIN, microversions.MAX + 1):
        shown = [field.name for field in TABLES[name] if version in Range(field.since, field.until)]
        assert len(shown) == len(set(shown)), f"2.{version}"


def test_every_rule_of_a_view_exists() -> None:
    for table in TABLES.values():
        assert {field.rule for field in table if field.rule} <= set(RULES)


def test_every_action_that_can_be_asked_has_its_body_and_rule() -> None:
    rows = [
        row
        for row in states.ACTIONS
        if row.key
        not in (
            "create",
            "delete",
            "softDelete",
            "diagnostics",
            "attach_interface",
            "detach_interface",
            "attach_share",
            "detach_share",
            "attach_volume",
            "detach_volume",
            "extend_volume",
            "swap_volume",
            "volume_snapshot_create",
            "volume_snapshot_delete",
        )
    ]
    assert {row.key for row in rows} == set(action_schemas.BY_KEY)
    assert {row.policy for row in states.ACTIONS} <= set(RULES)
    assert {row.query for row in rows if row.query} == set(server_action_table.QUERIES)
    assert set(server_action_table.PREPARERS) <= set(action_schemas.BY_KEY)


def test_rows_of_one_body_are_answered_alike() -> None:
    for row in states.ACTIONS:
        alike = [
            other for other in states.ACTIONS if (other.key, other.when) == (row.key, row.when)
        ]
        assert {
            (
                other.policy,
                other.success,
                other.answer_after,
                other.immediate,
                other.query,
                other.locked,
                other.since,
                other.until,
            )
            for other in alike
        } == {
            (
                row.policy,
                row.success,
                row.answer_after,
                row.immediate,
                row.query,
                row.locked,
                row.since,
                row.until,
            )
        }
        taken = [state for other in alike for state in other.vm]
        assert len(taken) == len(set(taken)), "which row counts is a matter of the vm_state alone"


@pytest.mark.parametrize("key", sorted(action_schemas.BY_KEY))
def test_every_schema_of_an_action_can_be_used(key: str) -> None:
    versioned = action_schemas.BY_KEY[key]
    for point in (1, *points_of(versioned), microversions.MAX):
        document = versioned.at(point).document
        jsonschema.Draft202012Validator.check_schema(document)
        assert document["required"] == [key]


def test_every_filter_of_servers_is_a_column_or_filters_nothing() -> None:
    known = set(server_schemas.LIST.at(microversions.MAX).document["properties"])
    nothing = {"kernel_id", "ramdisk_id", "ip", "ip6"}
    other = {
        "limit",
        "marker",
        "sort_key",
        "sort_dir",
        "all_tenants",
        "soft_deleted",
        "deleted",
        "status",
        "tags",
        "tags-any",
        "not-tags",
        "not-tags-any",
        "changes-since",
        "changes-before",
        "block_device_mapping",
        "services",
        "metadata",
        "system_metadata",
        "info_cache",
        "security_groups",
        "pci_devices",
    }
    assert known - nothing - other <= set(COLUMNS)


class Row:
    a, b = 1, 2


def test_a_view_is_cut_by_version_rule_and_kind_of_answer() -> None:
    fields = (
        Field("a", "a"),
        Field("b", lambda row, view: row.b + view, since="2.5", until="2.6"),
        Field("secret", "a", rule="r"),
        Field("late", "b", in_updates_since="2.9"),
        Field("never", "b", in_updates_since=None),
    )

    def shown(version: int, *rules: str, change: bool = False) -> dict[str, int]:
        return render(visible_fields(fields, version, frozenset(rules), change), Row(), 10)

    assert shown(1) == {"a": 1, "late": 2, "never": 2}
    assert shown(5) == {"a": 1, "b": 12, "late": 2, "never": 2}
    assert shown(7, "r") == {"a": 1, "secret": 1, "late": 2, "never": 2}
    assert shown(8, change=True) == {"a": 1}
    assert shown(9, change=True) == {"a": 1, "late": 2}
