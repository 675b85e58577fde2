# SPDX-License-Identifier: Apache-2.0
"""Consistency of the API's tables.

The tables have routes, actions, policy rules, microversions, schemas and fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import jsonschema_rs

from common.domain import states
from common.store.servers.servers import COLUMNS
from compute_api.compute import routes
from compute_api.compute.policies import RULES
from compute_api.compute.request import microversions
from compute_api.compute.resources import quota_sets, server_groups, services
from compute_api.compute.routes import ROUTES
from compute_api.compute.schemas.servers import actions as action_schemas
from compute_api.compute.schemas.servers import servers as server_schemas
from compute_api.compute.servers.actions import action_table as server_action_table
from compute_api.compute.views import aggregates, flavors, hypervisors, keypairs, migrations
from compute_api.compute.views.fields import Field, render, visible_fields
from compute_api.compute.views.servers import instance_actions, servers
from compute_api.http.microversions import Range
from compute_api.http.validation import VersionedSchema

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
SCHEMAS = {
    **{f"action {key}": schema for key, schema in action_schemas.BY_KEY.items()},
    **{
        f"{route.method} {route.path} {route.since} {part}": schema
        for route in ROUTES
        for part, schema in (("body", route.body), ("query", route.query))
        if schema is not None
    },
}


def documents(schema: VersionedSchema) -> dict[int, dict[str, Any]]:
    """Return the document at each version at which the schema changes."""
    at = {version: schema.at(version) for version in range(1, microversions.MAX + 1)}
    return {
        version: schema_at_version.document
        for version, schema_at_version in at.items()
        if schema_at_version is not at.get(version - 1)
    }


def parts_of(document: object) -> Iterator[dict[str, object] | list[object]]:
    """Yield every object and list of a document."""
    if isinstance(document, (dict, list)):
        yield document
        for part in document.values() if isinstance(document, dict) else document:
            yield from parts_of(part)


def test_routes_have_existing_policies_and_matching_handlers() -> None:
    for route in ROUTES:
        assert route.policy == "" or route.policy in RULES, route
        has_body = route.method in ("POST", "PUT")
        assert (route.body is not None) == has_body or "/tags/" in route.path, route
        assert microversions.number(route.since) <= microversions.MAX, route
        names = [name.strip("{}") for name in route.path.split("/") if name.startswith("{")]
        if route.about_server:
            names[names.index("server_id")] = "server"
        if "baremetal" not in route.path:
            parameters = list(inspect.signature(route.handler).parameters)
            assert parameters == ["request", *names], route


def test_schemas_are_valid_at_every_version() -> None:
    invalid = [
        (name, version)
        for name, schema in SCHEMAS.items()
        for version, document in documents(schema).items()
        if not jsonschema_rs.meta.is_valid(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}
        )
    ]
    assert invalid == []


def test_action_schemas_require_their_key_at_every_version() -> None:
    for key, schema in action_schemas.BY_KEY.items():
        for version, document in documents(schema).items():
            assert document["required"] == [key], version


def test_schema_versions_share_no_mutable_part() -> None:
    """Otherwise the edits of a later version would change an earlier one."""
    shared = []
    for name, schema in SCHEMAS.items():
        places: dict[int, int] = {}
        for version, document in documents(schema).items():
            for part in parts_of(document):
                if places.setdefault(id(part), version) != version:
                    shared.append((name, version, part))
    assert shared == []


def test_routes_are_unique_by_method_and_path_at_every_version() -> None:
    for version in range(microversions.MIN, microversions.MAX + 1):
        routes_of_version = [
            (route.method, route.path) for route in ROUTES if version in route.versions
        ]
        assert len(routes_of_version) == len(set(routes_of_version))
    removed = {
        (method, path) for path, methods in routes.GONE.items() for method in methods.split()
    }
    assert not {(route.method, route.path) for route in ROUTES} & removed


def test_routes_without_policy_rule_are_known_exceptions() -> None:
    paths = {route.path for route in ROUTES if not route.policy}
    images = {
        "/images",
        "/images/detail",
        "/images/{image_id}",
        "/images/{image_id}/metadata",
        "/images/{image_id}/metadata/{key}",
    }
    assert paths - images == {
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


def test_views_have_each_key_once_at_every_version() -> None:
    for name, table in TABLES.items():
        for version in range(microversions.MIN, microversions.MAX + 1):
            names = [field.name for field in table if version in Range(field.since, field.until)]
            assert len(names) == len(set(names)), f"{name} at 2.{version}"


def test_policy_rules_of_views_exist() -> None:
    for table in TABLES.values():
        assert {field.rule for field in table if field.rule} <= set(RULES)


def test_server_actions_have_schema_and_policy_rule() -> None:
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


def test_action_rows_with_same_key_differ_only_in_vm_states() -> None:
    for row in states.ACTIONS:
        same_key_rows = [
            same_key_row
            for same_key_row in states.ACTIONS
            if (same_key_row.key, same_key_row.when) == (row.key, row.when)
        ]
        assert {
            (
                same_key_row.policy,
                same_key_row.success,
                same_key_row.answer_after,
                same_key_row.immediate,
                same_key_row.query,
                same_key_row.locked,
                same_key_row.since,
                same_key_row.until,
            )
            for same_key_row in same_key_rows
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
        vm_states = [state for same_key_row in same_key_rows for state in same_key_row.vm]
        assert len(vm_states) == len(set(vm_states)), (
            "which row counts is a matter of the vm_state alone"
        )


def test_server_list_filters_are_columns_or_known_exceptions() -> None:
    filters = set(server_schemas.LIST.at(microversions.MAX).document["properties"])
    ignored = {"kernel_id", "ramdisk_id", "ip", "ip6"}
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
    assert filters - ignored - other <= set(COLUMNS)


class Row:
    a, b = 1, 2


def test_view_fields_depend_on_version_policy_rule_and_update_response() -> None:
    fields = (
        Field("a", "a"),
        Field("b", lambda row, view: row.b + view, since="2.5", until="2.6"),
        Field("secret", "a", rule="r"),
        Field("late", "b", in_updates_since="2.9"),
        Field("never", "b", in_updates_since=None),
    )

    def render_fields(version: int, *rules: str, change: bool = False) -> dict[str, int]:
        return render(visible_fields(fields, version, frozenset(rules), change), Row(), 10)

    assert render_fields(1) == {"a": 1, "late": 2, "never": 2}
    assert render_fields(5) == {"a": 1, "b": 12, "late": 2, "never": 2}
    assert render_fields(7, "r") == {"a": 1, "secret": 1, "late": 2, "never": 2}
    assert render_fields(8, change=True) == {"a": 1}
    assert render_fields(9, change=True) == {"a": 1, "late": 2}
