# SPDX-License-Identifier: Apache-2.0
"""/servers/{id}/shares: shown, attached, detached; and every refusal."""

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
    """A shared file system service with the shares that a test puts into it."""

    def __init__(self) -> None:
        self.there, self.asked = True, 0
        self.held = {one: Share(one, "available", "NFS", LOCATION) for one in (SHARE, OTHER)}

    def has_service(self) -> bool:
        return self.there

    def share(self, token: str, share_id: str) -> Share:
        self.asked += 1
        if share_id not in self.held or token == "stranger":
            raise errors.NotFound(f"Share {share_id} could not be found.")
        return self.held[share_id]


@pytest.fixture
def shares() -> Shares:
    return Shares()


@pytest.fixture
def sharing(make_cloud: Callable[..., Cloud], shares: Shares) -> Cloud:
    """A cloud with that service, whose host can give shares to guests."""
    cloud = make_cloud()
    cloud.services.shares = shares
    cloud.change(schema.hosts, schema.hosts.c.name == "host1", traits=TRAITS)
    return cloud


@pytest.fixture
def server(sharing: Cloud) -> str:
    found = sharing.create(mv="2.37")
    sharing.rest(found, "stopped", power_state=4)
    return found


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


def done(cloud: Cloud, server: str, status: str = "inactive", **values: Any) -> None:
    """The conductor has attached what was asked for."""
    cloud.change(schema.share_mappings, schema.share_mappings.c.server_id == server, status=status)
    cloud.rest(server, **{"vm_state": "stopped", "power_state": 4, **values})


def begun(cloud: Cloud, name: str) -> list[Any]:
    return [action for action in cloud.rows(schema.actions) if action.name == name]


def test_a_share_is_being_attached(sharing: Cloud, server: str) -> None:
    answer = attach(sharing, server)
    shown = {"share_id": SHARE, "status": "attaching", "tag": SHARE}
    assert (answer.status_code, answer.json) == (201, {"share": shown})
    [action], [row] = begun(sharing, "attach_share"), sharing.rows(schema.share_mappings)
    assert action.args["share"] == {
        "share_id": SHARE,
        "tag": SHARE,
        "protocol": "NFS",
        "export_location": LOCATION,
        "uuid": row.uuid,
        "access_to": "192.0.2.1",
    }
    assert sharing.wakeup.woken and [one.shares for one in sharing.rows(schema.servers)] == [1]
    path = f"/servers/{server}/shares"
    assert sharing.call("GET", path, mv="2.97", token="reader").json == {"shares": [shown]}
    assert sharing.call("GET", f"{path}/{SHARE}", mv="2.97", token="reader").json == {
        "share": shown
    }
    assert sharing.call("GET", f"{path}/{SHARE}", mv="2.97", token="admin").json == {
        "share": {**shown, "uuid": row.uuid, "export_location": LOCATION}
    }


def test_the_host_may_have_another_address_for_shares(sharing: Cloud, server: str) -> None:
    sharing.change(
        schema.hosts, schema.hosts.c.name == "host1", facts={"share_address": "198.51.100.7"}
    )
    assert attach(sharing, server, tag="data").json["share"]["tag"] == "data"
    assert begun(sharing, "attach_share")[0].args["share"]["access_to"] == "198.51.100.7"


@pytest.mark.parametrize(
    ("kept", "power", "shown"),
    [
        ("inactive", 4, "inactive"),
        ("inactive", 1, "active"),
        ("inactive", 3, "active"),
        ("error", 1, "error"),
        ("detaching", 1, "detaching"),
    ],
)
def test_a_share_is_active_while_its_guest_runs(
    sharing: Cloud, server: str, kept: str, power: int, shown: str
) -> None:
    attach(sharing, server)
    done(sharing, server, kept, power_state=power)
    assert (
        sharing.call("GET", f"/servers/{server}/shares/{SHARE}", mv="2.97").json["share"]["status"]
        == shown
    )


@pytest.mark.parametrize("vm_state", ["stopped", "error"])
def test_a_share_is_being_detached(sharing: Cloud, server: str, vm_state: str) -> None:
    attach(sharing, server)
    done(sharing, server, vm_state=vm_state)
    answer = sharing.call("DELETE", f"/servers/{server}/shares/{SHARE}", mv="2.97")
    assert (answer.status_code, answer.text) == (200, "")
    [action], [row] = begun(sharing, "detach_share"), sharing.rows(schema.share_mappings)
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
def test_a_server_that_may_run_keeps_its_shares(
    sharing: Cloud, shares: Shares, server: str, vm_state: str, method: str, status: int
) -> None:
    attach(sharing, server)
    done(sharing, server, vm_state=vm_state)
    shares.asked = 0
    body = {"share": {"share_id": OTHER}} if method == "POST" else None
    path = f"/servers/{server}/shares" + ("" if body else f"/{SHARE}")
    answer = sharing.call(method, path, body, mv="2.97")
    assert (answer.status_code, shares.asked) == (status, 0)
    assert f"while it is in vm_state {vm_state}" in answer.json["conflictingRequest"]["message"]


def test_a_server_has_a_share_and_a_tag_once(sharing: Cloud, server: str) -> None:
    attach(sharing, server, tag="data")
    done(sharing, server)
    for share, tag in ((SHARE, "other"), (OTHER, "data")):
        answer = attach(sharing, server, share, tag=tag)
        assert (
            answer.status_code == 409
            and "already associated" in answer.json["conflictingRequest"]["message"]
        )
    assert attach(sharing, server, OTHER).status_code == 201


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"status": "creating"}, "is in 'creating' instead of 'available' status"),
        ({"export_location": None}, "export location is missing"),
        ({"protocol": "CIFS"}, "protocol CIFS is not supported"),
    ],
)
def test_a_share_that_no_host_could_mount(
    sharing: Cloud, shares: Shares, server: str, changed: dict[str, Any], says: str
) -> None:
    facts = {
        "id": SHARE,
        "status": "available",
        "protocol": "NFS",
        "export_location": LOCATION,
        **changed,
    }
    shares.held[SHARE] = Share(**facts)
    answer = attach(sharing, server)
    assert answer.status_code == 409 and says in answer.json["conflictingRequest"]["message"]
    assert sharing.rows(schema.share_mappings) == []


def test_what_is_not_there_is_not_found(sharing: Cloud, shares: Shares, server: str) -> None:
    shares.held.clear()
    assert attach(sharing, server).status_code == 404
    for method in ("GET", "DELETE"):
        assert (
            sharing.call(method, f"/servers/{server}/shares/{SHARE}", mv="2.97").status_code == 404
        )
    assert sharing.call("GET", f"/servers/{server}/shares", mv="2.97").json == {"shares": []}
    assert sharing.call("GET", f"/servers/{server}/shares", mv="2.96").status_code == 404


@pytest.mark.parametrize("missing", TRAITS)
def test_a_host_that_cannot_says_what_it_lacks(sharing: Cloud, server: str, missing: str) -> None:
    sharing.change(
        schema.hosts,
        schema.hosts.c.name == "host1",
        traits=[one for one in TRAITS if one != missing],
    )
    answer = attach(sharing, server)
    assert answer.status_code == 409 and missing in answer.json["conflictingRequest"]["message"]


def test_a_cloud_without_the_service(sharing: Cloud, shares: Shares, server: str) -> None:
    shares.there = False
    assert (
        "no shared file system service" in attach(sharing, server).json["notImplemented"]["message"]
    )
    assert sharing.call("GET", f"/servers/{server}/shares", mv="2.97").json == {"shares": []}


@pytest.mark.parametrize(("token", "status"), [("reader", 403), ("stranger", 404), ("admin", 201)])
def test_who_may_attach(sharing: Cloud, server: str, token: str, status: int) -> None:
    assert attach(sharing, server, token=token).status_code == status


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
def test_bodies_that_say_nothing(sharing: Cloud, server: str, body: dict[str, Any]) -> None:
    answer = sharing.call("POST", f"/servers/{server}/shares", {"share": body}, mv="2.97")
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
def test_what_cannot_be_done_with_shares(
    sharing: Cloud, server: str, vm_state: str, action: dict[str, Any]
) -> None:
    attach(sharing, server)
    done(sharing, server, vm_state=vm_state)
    sharing.change(
        schema.services, schema.services.c.host == "host1", forced_down="evacuate" in action
    )
    answer = sharing.call("POST", f"/servers/{server}/action", action, mv="2.97", token="admin")
    assert answer.status_code == 409 and "while it has shares; detach them first" in answer.text, (
        answer.text
    )
