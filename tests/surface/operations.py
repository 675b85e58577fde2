# SPDX-License-Identifier: Apache-2.0
"""The operations of all services, from their routing tables, with valid paths, headers and bodies.

The bodies are the simplest that the schemas allow. tests/surface/bodies.py has the bodies of
operations that need more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from falcon import inspect

from common.domain import states
from compute_api.compute import routes
from compute_api.compute.request import microversions
from compute_api.compute.schemas import aggregates
from compute_api.compute.servers.actions.actions import schemas as action_schemas
from compute_api.placement import microversions as placement_versions
from compute_api.placement import routes as placement_routes
from deploy.one_machine.services.identity.resources import RESOURCES
from deploy.one_machine.services.image import schema as image_schema
from deploy.one_machine.services.network.app import RESOURCES as NETWORK_RESOURCES
from tests.nova import samples
from tests.surface.bodies import BODIES, QUERIES
from tests.surface.site import Site

PARAMETER = re.compile(r"\{(\w+)\}")
#: Path of an embedded service's resource -> the fields of its bodies.
FIELDS: dict[str, tuple[str, ...]] = {
    path: tuple(fields)
    for root, fields_by_resource in (
        ("/v2.0", {noun.plural: noun.attributes for noun in NETWORK_RESOURCES}),
        ("/v3", {kind.plural: kind.fields for kind in RESOURCES.values()}),
        ("/v2", {"images": image_schema.images.c.keys()}),
    )
    for plural, fields in fields_by_resource.items()
    for path in (f"{root}/{plural}", f"{root}/{plural}/{{key}}")
}
FLAVOR_ACTIONS = ("addTenantAccess", "removeTenantAccess")


@dataclass(frozen=True)
class Operation:
    """An operation at one version.

    Attributes:
        key: Key of the body that selects the operation, for example of an action.
        schema: Schema of the body, if any.
        query: Schema of the query, if any.
        success: The success status, or 0 if the routing table does not define the status.
        is_older: True if a newer row has the same title.
        fields: Fields of the body if there is no schema.
        since: First version of the row.
    """

    service: str
    method: str
    path: str
    key: str = ""
    version: str = ""
    schema: Any = None
    query: Any = None
    success: int = 0
    is_older: bool = False
    fields: tuple[str, ...] = ()
    since: str = ""

    @property
    def title(self) -> str:
        return f"{self.method} {self.path}" + (f" {self.key}" if self.key else "")

    @property
    def name(self) -> str:
        """The title, with the version unless this is the newest row."""
        return self.title + (f" @{self.version}" if self.is_older else "")

    @property
    def kinds(self) -> list[str]:
        """The kind of each path parameter: the part of the path before the parameter."""
        parts = self.path.split("/")
        return [parts[at - 1] for at, part in enumerate(parts) if PARAMETER.fullmatch(part)]

    def url(self, site: Site, *owners: str) -> str:
        """Return the path to records of these owners, one owner for each parameter.

        The last owner counts for further parameters. For "missing" alone, only the first record is
        missing.
        """
        if owners == ("missing",):
            owners = ("missing", "own")
        record_ids = iter(
            [
                site.id_of(owners[min(at, len(owners) - 1)], kind)
                for at, kind in enumerate(self.kinds)
            ]
        )
        root = "/v2.1" if self.service == "compute" else ""
        return (
            root
            + PARAMETER.sub(lambda _: next(record_ids), self.path)
            + QUERIES.get(self.title, "")
        )

    def headers(self, site: Site) -> dict[str, str]:
        """Return the headers that the operation requires besides a token."""
        if self.service in ("compute", "placement"):
            return {"OpenStack-API-Version": f"{self.service} {self.version}"}
        if self.service == "image" and self.method == "PATCH":
            return {"Content-Type": "application/openstack-images-v2.1-json-patch"}
        if self.path == "/v3/auth/tokens":
            return {"X-Subject-Token": site.tokens["member"]}
        return {"Content-Type": "application/octet-stream"} if self.path.endswith("/file") else {}

    def body(self, site: Site, owner: str = "own") -> Any:
        """Return a body with which the operation succeeds on records of this owner."""
        title = self.title.replace("/os-volumes_boot", "/servers")
        if title in BODIES:
            records = {**site.ids["own"], **site.ids.get(owner, {})}
            return BODIES[title](records) if callable(BODIES[title]) else BODIES[title]
        return None if self.schema is None else samples.simplest(self.schema) or {}


def compute() -> Iterator[Operation]:
    """Yield each row at its newest version, and one operation for each key of an action."""
    for route in routes.ROUTES:
        version = route.until or microversions.text(microversions.MAX)
        number = microversions.number(version)
        query = None if route.query is None else route.query.at(number).document
        if route.path.endswith(
            ("/servers/{server_id}/action", "/os-volumes_boot/{server_id}/action")
        ):
            yield from _actions(route)
        elif route.path == "/os-aggregates/{aggregate_id}/action":
            for key, body in aggregates.BY_KEY.items():
                yield Operation(
                    "compute",
                    "POST",
                    route.path,
                    key,
                    version,
                    body.at(number).document,
                    success=200,
                )
        elif route.path == "/flavors/{flavor_id}/action":
            for key in FLAVOR_ACTIONS:
                yield Operation("compute", "POST", route.path, key, version, success=200)
        else:
            yield Operation(
                "compute",
                route.method,
                route.path,
                "",
                version,
                None if route.body is None else route.body.at(number).document,
                query,
                route.success,
                since=route.since,
            )


def _actions(route: routes.Route) -> Iterator[Operation]:
    for key, schema in action_schemas.BY_KEY.items():
        rows = [row for row in states.ACTIONS if row.key == key]
        version = min(
            (row.until or microversions.text(microversions.MAX) for row in rows),
            key=microversions.number,
        )
        version = min(version, route.until or version, key=microversions.number)
        yield Operation(
            "compute",
            "POST",
            route.path,
            key,
            version,
            schema.at(microversions.number(version)).document,
            success=rows[0].success,
        )


def mark_older(operations: Iterable[Operation]) -> list[Operation]:
    """Return the operations, with ``is_older`` set in rows with a newer row of the same title."""
    rows = list(operations)
    newest = {operation.title: at for at, operation in enumerate(rows)}
    return [
        operation if newest[operation.title] == at else replace(operation, is_older=True)
        for at, operation in enumerate(rows)
    ]


def placement() -> Iterator[Operation]:
    """Yield each row at its newest version."""
    for route in placement_routes.ROUTES:
        version = route.until or placement_versions.text(placement_versions.MAX)
        number = microversions.number(version)
        body = None if route.body is None else route.body.at(number).document
        yield Operation(
            "placement",
            route.method,
            route.path,
            "",
            version,
            body,
            route.query.at(number).document,
            route.success,
        )


def standalone(service: str, application: Any) -> Iterator[Operation]:
    """Yield the operations from falcon's list of an application's routes."""
    for route in inspect.inspect_routes(application):
        for method in route.methods:
            if not method.internal:
                yield Operation(
                    service, method.method, route.path, fields=FIELDS.get(route.path, ())
                )
