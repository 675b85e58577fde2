# SPDX-License-Identifier: Apache-2.0
"""What decides who may: the records that the database has, never what a request says; and a part is
found below its own whole alone. Generated for every operation."""

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

#: Operations below a whole of one's own that do not look a foreign part up, and why.
NO_PART = {
    "PUT /servers/{server_id}/metadata/{key}": "makes it",
    "PUT /servers/{server_id}/tags/{tag}": "makes it",
    "PUT /images/{image_id}/metadata/{key}": "makes it",
}
#: What is refused before it is looked up: the server runs.
REFUSALS = {"DELETE /servers/{server_id}/shares/{share_id}": (409,)}
#: Parts that have the same name everywhere.
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


def nested(world: World) -> list[Operation]:
    """Those with a part below a whole, where both are some project's."""
    return [
        one
        for one in world.operations
        if len(one.kinds) == 2
        and one.kinds[1] not in SHARED
        and one.name.replace("os-volumes_boot", "servers") not in NO_PART
    ]


def test_a_part_is_found_below_its_own_whole_alone(world: World) -> None:
    """A foreign server's port, action, migration … below one's own server is not there, in the same
    words as what is nowhere, for admins too; and nothing is done to it."""
    wrong, asked = [], nested(world)
    cloud, server = world.compute.cloud, world.sites["compute"].ids["own"]["servers"]
    cloud.change(schema.servers, schema.servers.c.id == server, task_state="migrating")
    for operation in asked:
        site = world.sites[operation.service]
        before = site.database.content()
        for persona in ("manager", "admin"):
            said = [refusal(site, operation, persona, part) for part in ("foreign", "missing")]
            if (
                said[0][0] not in REFUSALS.get(operation.name, (400, 403, 404))
                or said[0] != said[1]
            ):
                wrong.append(f"{operation.service} {operation.name}: {persona}: {said}")
        if site.database.content() != before:
            wrong.append(f"{operation.service} {operation.name} has changed something")
    assert not wrong, "\n".join(wrong)
    # The embedded services have no route of a project's part below its whole.
    assert {one.service for one in asked} == {"compute"}
    assert len(asked) >= 19


def refusal(site: Site, operation: Operation, persona: str, part: str) -> tuple[int, str]:
    """Status and text for an own whole with this part, without the part's name."""
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


def claims(site: Site, owner: str) -> dict[str, Any]:
    """What a request may say of itself to look like another's."""
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


def claiming(body: Any, more: dict[str, Any]) -> Any:
    """The body with these in it, beside its key and below it."""
    if not isinstance(body, dict):
        return body
    return {
        **{
            key: {**more, **inner} if isinstance(inner, dict) else inner
            for key, inner in body.items()
        },
        **more,
    }


def test_no_body_and_no_query_opens_what_is_refused(world: World) -> None:
    """What one of those who may not is refused stays refused, whatever the request claims in query,
    body or headers. Queries are asked at the row's oldest version, which refuses no unknown
    parameter."""
    opened, asked = [], 0
    for operation in world.operations:
        row, site = access.rows()[access.name_of(operation)], world.sites[operation.service]
        refused = [
            (owner, persona)
            for (owner, persona), word in row.words.items()
            if word in ("403", "404") and owner != "missing" and persona != "admin"
        ]
        if not refused:
            continue
        owner, persona = refused[zlib.crc32(operation.name.encode()) % len(refused)]
        more = claims(site, owner)
        url = operation.url(site, owner)
        said = "&".join(
            f"{name}={value}" for name, value in more.items() if not isinstance(value, dict)
        )
        for query, body in (
            (said, operation.body(site, owner)),
            ("", claiming(operation.body(site, owner), more)),
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
            asked += 1
            if answer.status_code < 400:
                opened.append(
                    f"{operation.service} {operation.name}: {persona} on {owner}: {answer.status_code} "
                    f"{json.dumps(body)[:200]}"
                )
    assert not opened, "\n".join(opened)
    assert asked > 600


#: What keystonemiddleware says, said by a client.
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
def test_a_client_cannot_say_who_it_is(world: World, persona: str) -> None:
    """In headers of every spelling that becomes the same in WSGI."""
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


def test_a_policy_for_another_users_keys_is_not_the_querys(world: World) -> None:
    """The one target that a request names: whose keys. It is compared with the caller, who is not
    asked."""
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


def create(**more: Any) -> Any:
    return {
        "server": {"name": "x", "imageRef": IMAGE, "flavorRef": "1", "networks": "none", **more}
    }


#: What a tenant can name in a request about a server of their own: what it is, the way to it, the
#: body with its id.
NAMED: list[tuple[str, str, Any]] = [
    ("flavors", "/servers", lambda one: create(flavorRef=one)),
    ("images", "/servers", lambda one: create(imageRef=one)),
    (
        "images",
        "/servers",
        lambda one: create(
            imageRef="",
            block_device_mapping_v2=[
                {"uuid": one, "source_type": "image", "destination_type": "local", "boot_index": 0}
            ],
        ),
    ),
    ("os-keypairs", "/servers", lambda one: create(key_name=one)),
    (
        "os-server-groups",
        "/servers",
        lambda one: {**create(), "os:scheduler_hints": {"group": one}},
    ),
    ("network", "/servers", lambda one: create(networks=[{"uuid": one}])),
    ("os-interface", "/servers", lambda one: create(networks=[{"port": one}])),
    (
        "os-security-groups",
        "/servers",
        lambda one: create(networks=[{"uuid": "{network}"}], security_groups=[{"name": one}]),
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
    ("kind", "way", "body"), NAMED, ids=[f"{way} {kind}" for kind, way, _ in NAMED]
)
@pytest.mark.parametrize("persona", ["member", "manager"])
def test_what_is_foreign_cannot_be_had_by_its_id(
    world: World, kind: str, way: str, body: Any, persona: str
) -> None:
    """A private flavor, an image, a key pair … of another project is, wherever it is named, what is
    not there."""
    site = world.sites["compute"]
    path = "/v2.1" + way.replace("{own}", f"/servers/{site.ids['own']['servers']}")
    said = []
    for owner in ("foreign", "missing"):
        one = site.id_of(owner, kind)
        sent = json.dumps(body(one)).replace("{network}", site.ids["own"]["network"]).encode()
        answer = site.ask(persona, "POST", path, sent, NEWEST)
        said.append((answer.status_code, answer.text.replace(one, "IT")))
    assert said[0] == said[1]
    assert said[0][0] in (400, 404), said


def test_a_server_of_a_flavor_that_became_foreign_goes_on(world: World) -> None:
    """unshelve names no flavor and no image: what the server has is the server's."""
    site = world.sites["compute"]
    server, flavor = site.ids["own"]["servers"], site.ids["own"]["flavors"]
    path = f"/v2.1/servers/{server}/action"
    assert (
        site.ask("member", "POST", path, {"resize": {"flavorRef": flavor}}, NEWEST).status_code
        == 202
    )
    site.set_back()
    taken = {"removeTenantAccess": {"tenant": site.ids["own"]["os-quota-sets"]}}
    assert (
        site.ask("admin", "POST", f"/v2.1/flavors/{flavor}/action", taken, NEWEST).status_code
        == 200
    )
    refused = site.ask("member", "POST", path, {"resize": {"flavorRef": flavor}}, NEWEST)
    assert refused.status_code in (400, 404)
    assert site.ask("member", "POST", path, {"shelve": None}, NEWEST).status_code == 202
