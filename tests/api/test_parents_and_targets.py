# SPDX-License-Identifier: Apache-2.0
"""Access is decided by records of the database and not by claims of a request.

A nested record is found only below its own parent. The tests are generated for every operation.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import pytest

from common.store import schema
from tests.surface import access
from tests.surface.bodies import IMAGE
from tests.surface.operations import Operation
from tests.surface.site import Site
from tests.surface.world import World

#: Operations below an own parent that do not look up a foreign nested record, with the reason.
NO_PART = {
    "PUT /servers/{server_id}/metadata/{key}": "makes it",
    "PUT /servers/{server_id}/tags/{tag}": "makes it",
    "PUT /images/{image_id}/metadata/{key}": "makes it",
}
#: Operations that are refused before the lookup, because the server runs.
REFUSALS = {"DELETE /servers/{server_id}/shares/{share_id}": (409,)}
#: Nested records with the same name below every parent.
SHARED = (
    "bindings",
    "members",
    "schemas",
    "actions",
    "os-extra_specs",
    "inventories",
    "roles",
    "users",
)


def nested_operations(world: World) -> list[Operation]:
    """Return the operations with a nested record below a parent, both of a project."""
    return [
        operation
        for operation in world.operations
        if len(operation.kinds) == 2
        and operation.kinds[1] not in SHARED
        and operation.name.replace("os-volumes_boot", "servers") not in NO_PART
    ]


def test_nested_record_of_other_parent_is_refused_like_missing_record(world: World) -> None:
    """A foreign server's port or migration below an own server is refused like a missing one.

    The refusal is the same for admins, and no record changes.
    """
    differences, operations = [], nested_operations(world)
    cloud, server = world.compute.cloud, world.sites["compute"].ids["own"]["servers"]
    cloud.change(schema.servers, schema.servers.c.id == server, task_state="migrating")
    for operation in operations:
        site = world.sites[operation.service]
        before = site.database.content()
        for persona in ("manager", "admin"):
            refusals = [
                refusal_of(site, operation, persona, part) for part in ("foreign", "missing")
            ]
            if (
                refusals[0][0] not in REFUSALS.get(operation.name, (400, 403, 404))
                or refusals[0] != refusals[1]
            ):
                differences.append(f"{operation.service} {operation.name}: {persona}: {refusals}")
        if site.database.content() != before:
            differences.append(f"{operation.service} {operation.name} has changed something")
    assert not differences, "\n".join(differences)
    # The embedded services have no route of a project's part below its whole.
    assert {operation.service for operation in operations} == {"compute"}
    assert len(operations) >= 19


def refusal_of(site: Site, operation: Operation, persona: str, part: str) -> tuple[int, str]:
    """Return status and text for an own parent with this nested record, without the record's id."""
    answer = site.ask(
        persona,
        operation.method,
        operation.url(site, "own", part),
        operation.body(site),
        operation.headers(site),
    )
    text = re.sub(rf"\b{re.escape(site.id_of(part, operation.kinds[1]))}\b", "PART", answer.text)
    for name in ("X-Openstack-Request-Id", "X-Compute-Request-Id"):
        text = text.replace(answer.headers.get(name, "PART"), "")
    return answer.status_code, text


def false_claims(site: Site, owner: str) -> dict[str, Any]:
    """Return fields that make a request look like the request of another project's admin."""
    project, user = (
        site.ids[owner].get("os-quota-sets") or site.ids[owner].get("projects", ""),
        "admin",
    )
    return {
        "project_id": project,
        "tenant_id": project,
        "user_id": user,
        "owner": project,
        "is_admin": True,
        "roles": ["admin"],
        "role": "admin",
        "all_tenants": "1",
        "all_projects": "1",
        "target": {"project_id": project},
        "context": {"is_admin": True},
        "_admin": True,
        "system_scope": "all",
    }


def add_claims(body: Any, claims: dict[str, Any]) -> Any:
    """Return the body with the claims added beside its key and below it."""
    if not isinstance(body, dict):
        return body
    return {
        **{
            key: {**claims, **inner} if isinstance(inner, dict) else inner
            for key, inner in body.items()
        },
        **claims,
    }


def test_refused_request_stays_refused_with_forged_ownership_fields(world: World) -> None:
    """The claims are in the query, the body and the headers.

    Requests with a query have the oldest microversion, which does not refuse unknown parameters.
    """
    accepted, count = [], 0
    for operation in world.operations:
        row, site = access.rows()[access.name_of(operation)], world.sites[operation.service]
        refusals = [
            (owner, persona)
            for (owner, persona), word in row.words.items()
            if word in ("403", "404") and owner != "missing" and persona != "admin"
        ]
        if not refusals:
            continue
        owner, persona = refusals[zlib.crc32(operation.name.encode()) % len(refusals)]
        claims = false_claims(site, owner)
        url = operation.url(site, owner)
        claims_query = "&".join(
            f"{name}={value}" for name, value in claims.items() if not isinstance(value, dict)
        )
        for query, body in (
            (claims_query, operation.body(site, owner)),
            ("", add_claims(operation.body(site, owner), claims)),
        ):
            older = (
                {"OpenStack-API-Version": f"compute {operation.since}"}
                if query and operation.since
                else {}
            )
            answer = site.ask(
                persona,
                operation.method,
                url + (("&" if "?" in url else "?") + query if query else ""),
                body,
                operation.headers(site) | IDENTITY | older,
            )
            count += 1
            if answer.status_code < 400:
                accepted.append(
                    f"{operation.service} {operation.name}: {persona} on {owner}: {answer.status_code} "
                    f"{json.dumps(body)[:200]}"
                )
    assert not accepted, "\n".join(accepted)
    assert count > 600


#: The headers of keystonemiddleware, sent by a client.
IDENTITY = {
    "X-Roles": "admin",
    "X-Project-Id": "admin",
    "X-User-Id": "admin",
    "X-Is-Admin-Project": "True",
    "X-Identity-Status": "Confirmed",
    "X-Service-Roles": "admin,service",
    "X-Tenant-Id": "admin",
    "X-Service-Identity-Status": "Confirmed",
    "OpenStack-System-Scope": "all",
    "X-Role": "admin",
}


@pytest.mark.parametrize("persona", ["none", "reader"])
def test_identity_headers_of_client_are_ignored_in_every_spelling(
    world: World, persona: str
) -> None:
    """All spellings become the same WSGI variable."""
    for spelling in (str, str.upper, str.lower):
        headers = {spelling(name): value for name, value in IDENTITY.items()}
        for service, path in (
            ("compute", "/v2.1/os-services"),
            ("placement", "/resource_providers"),
            ("network", "/v2.0/agents"),
            ("identity", "/v3/users"),
            ("image", f"/v2/images/{world.sites['image'].ids['foreign']['images']}"),
        ):
            answer = world.sites[service].ask(persona, "GET", path, None, headers)
            assert answer.status_code in ((401,) if persona == "none" else (403, 404)), (
                service,
                answer.text,
            )


def test_keypairs_of_user_in_query_are_for_this_user_only(world: World) -> None:
    """The user id is the only policy target that a request contains."""
    site = world.sites["compute"]
    owner = world.users["member"]
    for path in (
        f"/v2.1/os-keypairs?user_id={owner}",
        f"/v2.1/os-keypairs/own?user_id={owner}",
        f"/v2.1/os-keypairs/own?user_id={world.users['other']}&user_id={owner}",
    ):
        assert site.ask("other", "GET", path, None, NEWEST).status_code == 403, path
        assert site.ask("member", "GET", path, None, NEWEST).status_code == 200, path


NEWEST = {"OpenStack-API-Version": "compute 2.103"}


def create_body(**more: Any) -> Any:
    return {
        "server": {"name": "x", "imageRef": IMAGE, "flavorRef": "1", "networks": "none", **more}
    }


#: Records that a tenant can name in a request about an own server: kind, path, and the body with
#: the record's id.
NAMED: list[tuple[str, str, Any]] = [
    ("flavors", "/servers", lambda one: create_body(flavorRef=one)),
    ("images", "/servers", lambda one: create_body(imageRef=one)),
    (
        "images",
        "/servers",
        lambda one: create_body(
            imageRef="",
            block_device_mapping_v2=[
                {"uuid": one, "source_type": "image", "destination_type": "local", "boot_index": 0}
            ],
        ),
    ),
    ("os-keypairs", "/servers", lambda one: create_body(key_name=one)),
    (
        "os-server-groups",
        "/servers",
        lambda one: {**create_body(), "os:scheduler_hints": {"group": one}},
    ),
    ("network", "/servers", lambda one: create_body(networks=[{"uuid": one}])),
    ("os-interface", "/servers", lambda one: create_body(networks=[{"port": one}])),
    (
        "os-security-groups",
        "/servers",
        lambda one: create_body(networks=[{"uuid": "{network}"}], security_groups=[{"name": one}]),
    ),
    ("flavors", "{own}/action", lambda one: {"resize": {"flavorRef": one}}),
    ("images", "{own}/action", lambda one: {"rebuild": {"imageRef": one}}),
    ("os-keypairs", "{own}/action", lambda one: {"rebuild": {"imageRef": IMAGE, "key_name": one}}),
    ("images", "{own}/action", lambda one: {"rescue": {"rescue_image_ref": one}}),
    ("os-security-groups", "{own}/action", lambda one: {"addSecurityGroup": {"name": one}}),
    ("network", "{own}/os-interface", lambda one: {"interfaceAttachment": {"net_id": one}}),
    ("os-interface", "{own}/os-interface", lambda one: {"interfaceAttachment": {"port_id": one}}),
]


@pytest.mark.parametrize(
    ("kind", "path", "body"), NAMED, ids=[f"{path} {kind}" for kind, path, _ in NAMED]
)
@pytest.mark.parametrize("persona", ["member", "manager"])
def test_record_of_another_project_in_request_is_refused_like_missing_one(
    world: World, kind: str, path: str, body: Any, persona: str
) -> None:
    """For example, a private flavor, an image or a key pair of another project."""
    site = world.sites["compute"]
    url = "/v2.1" + path.replace("{own}", f"/servers/{site.ids['own']['servers']}")
    refusals = []
    for owner in ("foreign", "missing"):
        record_id = site.id_of(owner, kind)
        content = (
            json.dumps(body(record_id)).replace("{network}", site.ids["own"]["network"]).encode()
        )
        answer = site.ask(persona, "POST", url, content, NEWEST)
        refusals.append((answer.status_code, answer.text.replace(record_id, "IT")))
    assert refusals[0] == refusals[1]
    assert refusals[0][0] in (400, 404), refusals


def test_resize_to_flavor_without_access_is_refused_and_shelve_accepted(world: World) -> None:
    """A shelve names neither flavor nor image, so the tenant needs no access to them."""
    site = world.sites["compute"]
    server, flavor = site.ids["own"]["servers"], site.ids["own"]["flavors"]
    path = f"/v2.1/servers/{server}/action"
    assert (
        site.ask("member", "POST", path, {"resize": {"flavorRef": flavor}}, NEWEST).status_code
        == 202
    )
    site.reset()
    removal = {"removeTenantAccess": {"tenant": site.ids["own"]["os-quota-sets"]}}
    assert (
        site.ask("admin", "POST", f"/v2.1/flavors/{flavor}/action", removal, NEWEST).status_code
        == 200
    )
    answer = site.ask("member", "POST", path, {"resize": {"flavorRef": flavor}}, NEWEST)
    assert answer.status_code in (400, 404)
    assert site.ask("member", "POST", path, {"shelve": None}, NEWEST).status_code == 202
