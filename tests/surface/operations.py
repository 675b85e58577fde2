# SPDX-License-Identifier: Apache-2.0
"""Every operation of every service, from the tables that serve them: how it is asked for so that it
would be done.

The bodies come from our schemas, as simple as these let them be; what more it takes stands in
tests/surface/bodies.py.
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
#: What the standalone services' tables say of bodies, by the path of what they are about.
FIELDS: dict[str, tuple[str, ...]] = {
    path: tuple(fields)
    for root, found in (
        ("/v2.0", {noun.plural: noun.attributes for noun in NETWORK_RESOURCES}),
        ("/v3", {kind.plural: kind.fields for kind in RESOURCES.values()}),
        ("/v2", {"images": image_schema.images.c.keys()}),
    )
    for plural, fields in found.items()
    for path in (f"{root}/{plural}", f"{root}/{plural}/{{key}}")
}
FLAVOR_ACTIONS = ("addTenantAccess", "removeTenantAccess")


@dataclass(frozen=True)
class Operation:
    """One of them at one version. key: of the body, where that chooses. schema, query: what these
    may hold, if known;
    success: the status when all is well, 0 where the table does not say. is_older: a newer row has
    the same title.
    fields: what a body may hold where there is no schema. since: its
    row's first version."""

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
        """Its title, with the version where that is not its newest row."""
        return self.title + (f" @{self.version}" if self.is_older else "")

    @property
    def kinds(self) -> list[str]:
        """What each parameter of the path is, by the part of the path before it."""
        parts = self.path.split("/")
        return [parts[at - 1] for at, part in enumerate(parts) if PARAMETER.fullmatch(part)]

    def url(self, site: Site, *owners: str) -> str:
        """The path to records of these owners, one for each parameter; the last one's for the rest.
        Of what is missing only the first is."""
        if owners == ("missing",):
            owners = ("missing", "own")
        found = iter(
            [
                site.id_of(owners[min(at, len(owners) - 1)], kind)
                for at, kind in enumerate(self.kinds)
            ]
        )
        root = "/v2.1" if self.service == "compute" else ""
        return root + PARAMETER.sub(lambda _: next(found), self.path) + QUERIES.get(self.title, "")

    def headers(self, site: Site) -> dict[str, str]:
        """What it takes beside a token."""
        if self.service in ("compute", "placement"):
            return {"OpenStack-API-Version": f"{self.service} {self.version}"}
        if self.service == "image" and self.method == "PATCH":
            return {"Content-Type": "application/openstack-images-v2.1-json-patch"}
        if self.path == "/v3/auth/tokens":
            return {"X-Subject-Token": site.tokens["member"]}
        return {"Content-Type": "application/octet-stream"} if self.path.endswith("/file") else {}

    def body(self, site: Site, owner: str = "own") -> Any:
        """What makes it succeed on records of this owner."""
        title = self.title.replace("/os-volumes_boot", "/servers")
        if title in BODIES:
            known = {**site.ids["own"], **site.ids.get(owner, {})}
            return BODIES[title](known) if callable(BODIES[title]) else BODIES[title]
        return None if self.schema is None else samples.simplest(self.schema) or {}


def compute() -> Iterator[Operation]:
    """Each row at the newest version that it has; of actions one for each key."""
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


def told_apart(found: Iterable[Operation]) -> list[Operation]:
    """Where several rows have one title, all but the newest say so."""
    rows = list(found)
    newest = {one.title: at for at, one in enumerate(rows)}
    return [
        one if newest[one.title] == at else replace(one, is_older=True)
        for at, one in enumerate(rows)
    ]


def placement() -> Iterator[Operation]:
    """Each row at the newest version that it has."""
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
    """What falcon's own list of an application's routes says."""
    for route in inspect.inspect_routes(application):
        for method in route.methods:
            if not method.internal:
                yield Operation(
                    service, method.method, route.path, fields=FIELDS.get(route.path, ())
                )
