# SPDX-License-Identifier: Apache-2.0
"""Nova's schemas judge every answer of this ring in ``Cloud.call``.

These tests check that the schemas find errors, and that the known differences exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.store.servers import guests
from tests.api.conftest import IMAGE, OTHER, PROJECT, Cloud
from tests.api.networks import Networks
from tests.api.volumes import VOLUME, add_volume_service
from tests.nova import known, schemas

SHOW = "/v2.1/servers/70a599e0-31e7-49b7-b260-868f441e862b"


@pytest.fixture(autouse=True)
def nova() -> None:
    schemas.require()


class Consoles:
    """A host that opens every requested console."""

    def query(
        self, host: str, verb: str, arguments: dict[str, Any], timeout: float = 10
    ) -> dict[str, Any]:
        return {"host": "192.0.2.7", "port": 41234, "secret": "s" * 43}


Differences = Iterator[set[tuple[str, str]]]


def differences(
    cloud: Cloud, method: str, path: str, body: Any = None, mv: int = 104, token: str = "admin"
) -> set[tuple[str, str]]:
    """Return the operation and the places in this answer that differ from Nova's schema."""
    answer = cloud.call(method, path, body, mv=f"2.{mv}", token=token)
    return {
        (operation, place)
        for operation, place, _ in schemas.find_problems(
            method,
            "/v2.1" + path,
            body,
            mv,
            answer.status_code,
            answer.json if answer.text else None,
        )
    }


def events_and_tags(cloud: Cloud, networks: Networks, server: str) -> Differences:
    event = {"name": "network-changed", "server_uuid": "deadbeef-dead-dead-dead-deaddeadbeef"}
    yield differences(cloud, "POST", "/os-server-external-events", {"events": [event]})
    yield differences(cloud, "PUT", f"/servers/{server}/tags/red")


def addresses(cloud: Cloud, networks: Networks, server: str) -> Differences:
    red = networks.add_network("red", PROJECT)
    public = networks.add_network("public", OTHER, "172.24.4.0/29", external=True)
    networks.add_router(public, red)
    networks.add_port(red, PROJECT, "10.0.0.9", device_id=server)
    networks.create("user", "floatingips", {"floating_network_id": public})
    for action in ("addFloatingIp", "removeFloatingIp"):
        yield differences(
            cloud,
            "POST",
            f"/servers/{server}/action",
            {action: {"address": "172.24.4.2"}},
            43,
            "user",
        )
    yield differences(
        cloud, "POST", f"/servers/{server}/os-interface", {"interfaceAttachment": {"net_id": red}}
    )


def console_token(cloud: Cloud, networks: Networks, server: str) -> Differences:
    cloud.store.write(
        lambda tx: guests.add(tx, [{"server_id": server, "host": "host1", "fence": 1}])
    )
    url = cloud.call(
        "POST",
        f"/servers/{server}/remote-consoles",
        {"remote_console": {"protocol": "serial", "type": "serial"}},
        mv="2.6",
    ).json["remote_console"]["url"]
    cloud.services.agents = Consoles()
    yield differences(cloud, "GET", "/os-console-auth-tokens/" + url.rpartition("token=")[2], mv=31)


def policies_of_later_versions(cloud: Cloud, networks: Networks, server: str) -> Differences:
    group = cloud.call(
        "POST",
        "/os-server-groups",
        {"server_group": {"name": "g", "policies": ["soft-affinity"]}},
        mv="2.15",
        token="admin",
    ).json["server_group"]["id"]
    yield differences(cloud, "GET", f"/os-server-groups/{group}", mv=1)
    yield differences(cloud, "GET", "/os-server-groups", mv=14)


def volumes_at_once(cloud: Cloud, networks: Networks, server: str) -> Differences:
    add_volume_service(cloud)
    body = {"volumeAttachment": {"volumeId": VOLUME}}
    cloud.set_state(server)
    yield differences(cloud, "POST", f"/servers/{server}/os-volume_attachments", body, 101)


CASES = (
    events_and_tags,
    addresses,
    console_token,
    policies_of_later_versions,
    volumes_at_once,
)


def test_nova_schemas_find_every_known_difference(
    networked_cloud: Cloud, networks: Networks
) -> None:
    server = networked_cloud.create(mv="2.37")
    networked_cloud.set_state(server)
    assert set().union(
        *(difference for case in CASES for difference in case(networked_cloud, networks, server))
    ) == set(known.ANSWERS)


def test_nova_schemas_refuse_changed_answer(cloud: Cloud) -> None:
    server = cloud.call("GET", f"/servers/{cloud.create()}", mv="2.104").json["server"]
    schemas.judge("GET", SHOW, None, 104, 200, {"server": server})
    for changed in (
        {**server, "colour": "red"},
        {**server, "id": "7"},
        {**server, "created": "yesterday"},
        {key: value for key, value in server.items() if key != "status"},
    ):
        with pytest.raises(pytest.fail.Exception):
            schemas.judge("GET", SHOW, None, 104, 200, {"server": changed})


def test_nova_schemas_find_other_difference_beside_known_one(cloud: Cloud) -> None:
    cloud.call(
        "POST",
        "/os-server-groups",
        {"server_group": {"name": "g", "policies": ["soft-affinity"]}},
        mv="2.15",
    )
    answer = cloud.call("GET", "/os-server-groups", mv="2.14").json
    schemas.judge("GET", "/v2.1/os-server-groups", None, 14, 200, answer)
    with pytest.raises(pytest.fail.Exception):
        schemas.judge("GET", "/v2.1/os-server-groups", None, 14, 200, {**answer, "colour": "red"})


@pytest.mark.parametrize(
    ("method", "path", "body", "version", "status", "answer"),
    [
        # These two are not served by this version.
        ("GET", "/v2.1/images", None, 36, 200, {"images": []}),
        ("GET", "/v2.1/os-agents", None, 1, 200, {"agents": []}),
        ("GET", "/v2.1/servers/detail/more", None, 1, 200, None),
        # Nova answers 204.
        ("DELETE", SHOW, None, 1, 202, None),
        # The answer has a body from 2.45.
        (
            "POST",
            f"{SHOW}/action",
            {"createImage": {"name": "i"}},
            45,
            202,
            None,
        ),
        ("POST", f"{SHOW}/action", {"destroy": None}, 1, 202, None),
    ],
)
def test_nova_schemas_refuse_answer_of_wrong_version_status_or_operation(
    method: str, path: str, body: Any, version: int, status: int, answer: Any
) -> None:
    with pytest.raises(pytest.fail.Exception):
        schemas.judge(method, path, body, version, status, answer)


@pytest.mark.parametrize(
    ("method", "path", "body", "version", "status", "answer"),
    [
        ("GET", "/v2.1/images", None, 35, 200, {"images": []}),
        ("DELETE", SHOW, None, 1, 204, None),
        ("GET", f"/v2.1/{PROJECT}/servers", None, 1, 200, {"servers": []}),
        ("GET", "/v2/servers/", None, 1, 404, {}),
        ("POST", f"{SHOW}/action", {"createImage": {"name": "i"}}, 45, 202, {"image_id": IMAGE}),
    ],
)
def test_nova_schemas_accept_answers_of_nova(
    method: str, path: str, body: Any, version: int, status: int, answer: Any
) -> None:
    schemas.judge(method, path, body, version, status, answer)
