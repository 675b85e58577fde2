# SPDX-License-Identifier: Apache-2.0
"""/servers/{id}/shares: list, show, attach and detach, with all refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.clients.shares import Share
from common.domain import errors
from common.store import schema
from tests.api.conftest import Cloud

SHARE, OTHER = "e8debdc0-447a-4376-a10a-4cd9122d7986", "3cdf5132-64f2-4584-876a-bd296ae7eabd"
LOCATION = "10.0.0.50:/mnt/foo"
TRAITS = ["COMPUTE_STORAGE_VIRTIO_FS", "COMPUTE_MEM_BACKING_FILE"]


class Shares:
    """A shared file system service in memory with the shares of a test."""

    def __init__(self) -> None:
        self.has_endpoint, self.queries = True, 0
        self.by_id = {share: Share(share, "available", "NFS", LOCATION) for share in (SHARE, OTHER)}

    def has_service(self) -> bool:
        return self.has_endpoint

    def share(self, token: str, share_id: str) -> Share:
        self.queries += 1
        if share_id not in self.by_id or token == "stranger":
            raise errors.NotFound(f"Share {share_id} could not be found.")
        return self.by_id[share_id]


@pytest.fixture
def shares() -> Shares:
    return Shares()


@pytest.fixture
def cloud_with_shares(make_cloud: Callable[..., Cloud], shares: Shares) -> Cloud:
    """Return a cloud with this service and a host that can give shares to guests."""
    cloud = make_cloud()
    cloud.services.shares = shares
    cloud.change(schema.hosts, schema.hosts.c.name == "host1", traits=TRAITS)
    return cloud


@pytest.fixture
def server(cloud_with_shares: Cloud) -> str:
    server_id = cloud_with_shares.create(mv="2.37")
    cloud_with_shares.set_state(server_id, "stopped", power_state=4)
    return server_id


def attach(
    cloud: Cloud,
    server: str,
    share: str = SHARE,
    token: str = "user",
    mv: str = "2.97",
    **more: Any,
) -> Any:
    return cloud.call(
        "POST",
        f"/servers/{server}/shares",
        {"share": {"share_id": share, **more}},
        mv=mv,
        token=token,
    )


def finish_attachment(cloud: Cloud, server: str, status: str = "inactive", **values: Any) -> None:
    """Bring the share's mapping to a status, as a conductor does."""
    cloud.change(schema.share_mappings, schema.share_mappings.c.server_id == server, status=status)
    cloud.set_state(server, **{"vm_state": "stopped", "power_state": 4, **values})


def find_actions(cloud: Cloud, name: str) -> list[Any]:
    return [action for action in cloud.rows(schema.actions) if action.name == name]


def test_attach_share_begins_action_and_shows_attachment(
    cloud_with_shares: Cloud, server: str
) -> None:
    answer = attach(cloud_with_shares, server)
    attachment = {"share_id": SHARE, "status": "attaching", "tag": SHARE}
    assert (answer.status_code, answer.json) == (201, {"share": attachment})
    [action], [row] = (
        find_actions(cloud_with_shares, "attach_share"),
        cloud_with_shares.rows(schema.share_mappings),
    )
    assert action.args["share"] == {
        "share_id": SHARE,
        "tag": SHARE,
        "protocol": "NFS",
        "export_location": LOCATION,
        "uuid": row.uuid,
        "access_to": "192.0.2.1",
    }
    assert cloud_with_shares.wakeup.count and [
        server_row.shares for server_row in cloud_with_shares.rows(schema.servers)
    ] == [1]
    path = f"/servers/{server}/shares"
    assert cloud_with_shares.call("GET", path, mv="2.97", token="reader").json == {
        "shares": [attachment]
    }
    assert cloud_with_shares.call("GET", f"{path}/{SHARE}", mv="2.97", token="reader").json == {
        "share": attachment
    }
    assert cloud_with_shares.call("GET", f"{path}/{SHARE}", mv="2.97", token="admin").json == {
        "share": {**attachment, "uuid": row.uuid, "export_location": LOCATION}
    }


def test_attach_share_uses_share_address_of_host(cloud_with_shares: Cloud, server: str) -> None:
    cloud_with_shares.change(
        schema.hosts, schema.hosts.c.name == "host1", facts={"share_address": "198.51.100.7"}
    )
    assert attach(cloud_with_shares, server, tag="data").json["share"]["tag"] == "data"
    assert (
        find_actions(cloud_with_shares, "attach_share")[0].args["share"]["access_to"]
        == "198.51.100.7"
    )


@pytest.mark.parametrize(
    ("status", "power", "expected"),
    [
        ("inactive", 4, "inactive"),
        ("inactive", 1, "active"),
        ("inactive", 3, "active"),
        ("error", 1, "error"),
        ("detaching", 1, "detaching"),
    ],
)
def test_show_share_shows_inactive_attachment_as_active_while_guest_runs(
    cloud_with_shares: Cloud, server: str, status: str, power: int, expected: str
) -> None:
    attach(cloud_with_shares, server)
    finish_attachment(cloud_with_shares, server, status, power_state=power)
    assert (
        cloud_with_shares.call("GET", f"/servers/{server}/shares/{SHARE}", mv="2.97").json["share"][
            "status"
        ]
        == expected
    )


@pytest.mark.parametrize("vm_state", ["stopped", "error"])
def test_detach_share_begins_action_for_stopped_or_error_server(
    cloud_with_shares: Cloud, server: str, vm_state: str
) -> None:
    attach(cloud_with_shares, server)
    finish_attachment(cloud_with_shares, server, vm_state=vm_state)
    answer = cloud_with_shares.call("DELETE", f"/servers/{server}/shares/{SHARE}", mv="2.97")
    assert (answer.status_code, answer.text) == (200, "")
    [action], [row] = (
        find_actions(cloud_with_shares, "detach_share"),
        cloud_with_shares.rows(schema.share_mappings),
    )
    assert (action.args["share"]["uuid"], action.args["share"]["was"], row.status) == (
        row.uuid,
        "inactive",
        "detaching",
    )


@pytest.mark.parametrize(
    ("vm_state", "method", "status"),
    [
        ("active", "POST", 409),
        ("error", "POST", 409),
        ("active", "DELETE", 409),
        ("paused", "DELETE", 409),
    ],
)
def test_attach_and_detach_share_in_wrong_state_return_409_without_lookup(
    cloud_with_shares: Cloud, shares: Shares, server: str, vm_state: str, method: str, status: int
) -> None:
    attach(cloud_with_shares, server)
    finish_attachment(cloud_with_shares, server, vm_state=vm_state)
    shares.queries = 0
    body = {"share": {"share_id": OTHER}} if method == "POST" else None
    path = f"/servers/{server}/shares" + ("" if body else f"/{SHARE}")
    answer = cloud_with_shares.call(method, path, body, mv="2.97")
    assert (answer.status_code, shares.queries) == (status, 0)
    assert f"while it is in vm_state {vm_state}" in answer.json["conflictingRequest"]["message"]


def test_attach_share_with_taken_share_or_tag_returns_409(
    cloud_with_shares: Cloud, server: str
) -> None:
    attach(cloud_with_shares, server, tag="data")
    finish_attachment(cloud_with_shares, server)
    for share, tag in ((SHARE, "other"), (OTHER, "data")):
        answer = attach(cloud_with_shares, server, share, tag=tag)
        assert (
            answer.status_code == 409
            and "already associated" in answer.json["conflictingRequest"]["message"]
        )
    assert attach(cloud_with_shares, server, OTHER).status_code == 201


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "creating"}, "is in 'creating' instead of 'available' status"),
        ({"export_location": None}, "export location is missing"),
        ({"protocol": "CIFS"}, "protocol CIFS is not supported"),
    ],
)
def test_attach_unusable_share_returns_409(
    cloud_with_shares: Cloud, shares: Shares, server: str, changes: dict[str, Any], message: str
) -> None:
    facts = {
        "id": SHARE,
        "status": "available",
        "protocol": "NFS",
        "export_location": LOCATION,
        **changes,
    }
    shares.by_id[SHARE] = Share(**facts)
    answer = attach(cloud_with_shares, server)
    assert answer.status_code == 409 and message in answer.json["conflictingRequest"]["message"]
    assert cloud_with_shares.rows(schema.share_mappings) == []


def test_attach_show_and_detach_unknown_share_return_404(
    cloud_with_shares: Cloud, shares: Shares, server: str
) -> None:
    shares.by_id.clear()
    assert attach(cloud_with_shares, server).status_code == 404
    for method in ("GET", "DELETE"):
        assert (
            cloud_with_shares.call(
                method, f"/servers/{server}/shares/{SHARE}", mv="2.97"
            ).status_code
            == 404
        )
    assert cloud_with_shares.call("GET", f"/servers/{server}/shares", mv="2.97").json == {
        "shares": []
    }
    assert cloud_with_shares.call("GET", f"/servers/{server}/shares", mv="2.96").status_code == 404


@pytest.mark.parametrize("missing", TRAITS)
def test_attach_share_returns_409_with_missing_trait_of_host(
    cloud_with_shares: Cloud, server: str, missing: str
) -> None:
    cloud_with_shares.change(
        schema.hosts,
        schema.hosts.c.name == "host1",
        traits=[trait for trait in TRAITS if trait != missing],
    )
    answer = attach(cloud_with_shares, server)
    assert answer.status_code == 409 and missing in answer.json["conflictingRequest"]["message"]


def test_attach_share_without_share_service_returns_501(
    cloud_with_shares: Cloud, shares: Shares, server: str
) -> None:
    shares.has_endpoint = False
    assert (
        "no shared file system service"
        in attach(cloud_with_shares, server).json["notImplemented"]["message"]
    )
    assert cloud_with_shares.call("GET", f"/servers/{server}/shares", mv="2.97").json == {
        "shares": []
    }


@pytest.mark.parametrize(("token", "status"), [("reader", 403), ("stranger", 404), ("admin", 201)])
def test_attach_share_returns_403_to_readers_and_404_to_strangers(
    cloud_with_shares: Cloud, server: str, token: str, status: int
) -> None:
    assert attach(cloud_with_shares, server, token=token).status_code == status


@pytest.mark.parametrize(
    "body",
    [
        {"share_id": "x"},
        {},
        {"share_id": SHARE, "tag": ""},
        {"share_id": SHARE, "tag": "a b"},
        {"share_id": SHARE, "x": 1},
    ],
)
def test_attach_share_with_invalid_body_returns_400(
    cloud_with_shares: Cloud, server: str, body: dict[str, Any]
) -> None:
    answer = cloud_with_shares.call("POST", f"/servers/{server}/shares", {"share": body}, mv="2.97")
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("vm_state", "action"),
    [
        ("active", {"suspend": None}),
        ("stopped", {"rebuild": {"imageRef": "70a599e0-31e7-49b7-b260-868f441e862b"}}),
        ("stopped", {"shelve": None}),
        ("stopped", {"resize": {"flavorRef": "2"}}),
        ("stopped", {"migrate": None}),
        ("active", {"os-migrateLive": {"host": None, "block_migration": "auto"}}),
        ("stopped", {"evacuate": {}}),
    ],
)
def test_suspend_rebuild_shelve_and_moves_of_server_with_shares_return_409(
    cloud_with_shares: Cloud, server: str, vm_state: str, action: dict[str, Any]
) -> None:
    attach(cloud_with_shares, server)
    finish_attachment(cloud_with_shares, server, vm_state=vm_state)
    cloud_with_shares.change(
        schema.services, schema.services.c.host == "host1", forced_down="evacuate" in action
    )
    answer = cloud_with_shares.call(
        "POST", f"/servers/{server}/action", action, mv="2.97", token="admin"
    )
    assert answer.status_code == 409 and "while it has shares; detach them first" in answer.text, (
        answer.text
    )
