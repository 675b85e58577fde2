# SPDX-License-Identifier: Apache-2.0
"""Aggregates of hosts, their availability zones, and the images that their hosts cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from common.clients.image import Image
from common.domain import ids
from common.domain.models import ImageRef
from common.domain.service_binaries import Binary
from common.store import schema
from common.store.hosts import services
from common.store.servers import guests
from tests.api.conftest import IMAGE, Cloud

KEYS = {
    "id",
    "name",
    "availability_zone",
    "created_at",
    "updated_at",
    "deleted",
    "deleted_at",
    "hosts",
    "metadata",
}


class Admin:
    """Shortcuts for an admin's requests."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def call(
        self, method: str, path: str, body: Any = None, status: int = 200, mv: str = "2.1"
    ) -> Any:
        answer = self.cloud.call(method, "/os-aggregates" + path, body, mv=mv, token="admin")
        assert answer.status_code == status, answer.text
        return answer.json if answer.content else None

    def create(self, name: str = "rack", zone: str | None = None, *hosts: str) -> int:
        aggregate = self.call("POST", "", {"aggregate": {"name": name, "availability_zone": zone}})[
            "aggregate"
        ]
        for host in hosts:
            self.act(aggregate["id"], add_host={"host": host})
        return int(aggregate["id"])

    def act(self, number: int | str, status: int = 200, mv: str = "2.1", **body: Any) -> Any:
        return self.call("POST", f"/{number}/action", body, status, mv)

    def show(self, number: int) -> Any:
        return self.call("GET", f"/{number}")["aggregate"]

    def ratio(self, host: str, resource_class: str) -> float:
        stock, providers = schema.inventories, schema.providers
        ratio = self.cloud.store.read(
            lambda tx: tx.scalar(
                sa.select(stock.c.allocation_ratio)
                .join(providers, providers.c.id == stock.c.provider_id)
                .where(providers.c.host == host, stock.c.resource_class == resource_class)
            )
        )
        assert ratio is not None
        return float(ratio)


@pytest.fixture
def admin(cloud: Cloud) -> Admin:
    cloud.add_host("host2")
    return Admin(cloud)


def assert_message_contains(answer: Any, text: str) -> None:
    [fault] = answer.values()
    assert text in fault["message"]


# --- shapes ---
@pytest.mark.parametrize(
    ("mv", "uuid"), [("2.1", False), ("2.40", False), ("2.41", True), ("2.104", True)]
)
def test_aggregate_has_the_fields_of_each_microversion(admin: Admin, mv: str, uuid: bool) -> None:
    keys = KEYS | {"uuid"} if uuid else KEYS
    aggregate = admin.call(
        "POST", "", {"aggregate": {"name": "rack", "availability_zone": "az1"}}, mv=mv
    )["aggregate"]
    assert set(aggregate) == keys - {"hosts", "metadata"}
    assert (aggregate["name"], aggregate["availability_zone"], aggregate["updated_at"]) == (
        "rack",
        "az1",
        None,
    )
    number = aggregate["id"]
    for body in (
        {"add_host": {"host": "host1"}},
        {"set_metadata": {"metadata": {"ssd": "true"}}},
        {"remove_host": {"host": "host1"}},
    ):
        updated = admin.act(number, mv=mv, **body)["aggregate"]
        assert set(updated) == keys
    renamed = admin.call("PUT", f"/{number}", {"aggregate": {"name": " row "}}, mv=mv)["aggregate"]
    assert (set(renamed), renamed["name"]) == (keys, "row")
    assert renamed["metadata"] == {"availability_zone": "az1", "ssd": "true"}
    assert renamed["updated_at"] is not None
    assert admin.call("GET", "", mv=mv)["aggregates"] == [
        admin.call("GET", f"/{number}", mv=mv)["aggregate"]
    ]
    assert admin.call("DELETE", f"/{number}", mv=mv) is None
    assert admin.call("GET", "")["aggregates"] == []


def test_aggregate_set_metadata_adds_changes_and_removes_keys(admin: Admin) -> None:
    number = admin.create()
    admin.act(number, set_metadata={"metadata": {"a": "1", "b": "2"}})
    updated = admin.act(number, set_metadata={"metadata": {"b": "3", "a": None, "unknown": None}})[
        "aggregate"
    ]
    assert updated["metadata"] == {"b": "3"}


def test_aggregate_add_host_and_remove_host_change_its_hosts(admin: Admin) -> None:
    number, other = admin.create("rack"), admin.create("row")
    for aggregate in (number, other):
        assert admin.act(aggregate, add_host={"host": "host1"})["aggregate"]["hosts"] == ["host1"]
    assert admin.act(number, add_host={"host": "host2"})["aggregate"]["hosts"] == ["host1", "host2"]
    assert_message_contains(
        admin.act(number, 409, add_host={"host": "host1"}),
        f"Aggregate {number} already has host host1.",
    )
    assert_message_contains(
        admin.act(number, 404, add_host={"host": "nowhere"}),
        "Compute host nowhere could not be found.",
    )
    admin.cloud.store.write(lambda tx: services.enrol(tx, "ctl", Binary.CONDUCTOR))
    admin.act(number, 404, add_host={"host": "ctl"})
    assert_message_contains(
        admin.call("DELETE", f"/{number}", status=400), "Host aggregate is not empty"
    )
    for host in ("host1", "host2"):
        admin.act(number, remove_host={"host": host})
    assert_message_contains(
        admin.act(number, 404, remove_host={"host": "host1"}),
        f"Cannot remove host host1 in aggregate {number}",
    )
    admin.call("DELETE", f"/{number}")
    assert admin.show(other)["hosts"] == ["host1"]


# --- wrong input ---
def test_create_aggregate_returns_400_for_invalid_body_409_for_taken_name(admin: Admin) -> None:
    admin.create("rack")
    good = {"name": "row"}
    for fields in (
        {},
        {"name": ""},
        {"name": " row"},
        {"name": "x" * 256},
        {"name": 7},
        {**good, "colour": "red"},
        {**good, "availability_zone": ""},
        {**good, "availability_zone": "az:1"},
        {**good, "availability_zone": "z" * 256},
        {"availability_zone": "az1"},
    ):
        admin.call("POST", "", {"aggregate": fields}, 400)
    assert_message_contains(
        admin.call("POST", "", {"aggregate": {**good, "availability_zone": "az:1"}}, 400), "no ':'"
    )
    admin.call("POST", "", {"aggregate": {"name": "rack"}}, 409)
    admin.call("POST", "", {"aggregate": good, "more": 1}, 400)
    assert [row["name"] for row in admin.call("GET", "")["aggregates"]] == ["rack"]


def test_aggregate_update_and_actions_with_invalid_body_return_400(admin: Admin) -> None:
    number = admin.create("rack")
    admin.create("row")
    path = f"/{number}"
    for body in (
        {},
        {"name": ""},
        {"colour": "red"},
        {"availability_zone": ""},
        {"availability_zone": "a:b"},
    ):
        admin.call("PUT", path, {"aggregate": body}, 400)
    assert_message_contains(
        admin.call("PUT", path, {"aggregate": {"name": "row"}}, 409),
        "Aggregate row already exists.",
    )
    assert_message_contains(
        admin.call("PUT", path, {"aggregate": {"availability_zone": None}}, 400),
        "does not support empty named",
    )
    for meta in (
        {"availability_zone": None},
        {"availability_zone": ""},
        {"availability_zone": "a:b"},
        {"availability_zone": " az"},
        {"k": "x" * 256},
        {"x" * 256: "v"},
        {"k": 7},
        {"k#": "v"},
    ):
        admin.act(number, 400, set_metadata={"metadata": meta})
    for action in (
        {"add_host": {}},
        {"add_host": {"host": ""}},
        {"add_host": {"host": "a/b"}},
        {"set_metadata": {}},
        {"add_host": {"host": "host1", "more": 1}},
        {"explode": {}},
        {},
        {"add_host": {"host": "host1"}, "remove_host": {"host": "host1"}},
    ):
        admin.act(number, 400, **action)
    assert (admin.show(number)["metadata"], admin.show(number)["hosts"]) == ({}, [])


def test_aggregate_requests_below_v2_root_accept_unknown_body_keys(admin: Admin) -> None:
    def post(path: str, body: Any) -> Any:
        answer = admin.cloud.call(
            "POST", "/os-aggregates" + path, body, mv=None, token="admin", root="/v2"
        )
        assert answer.status_code == 200, answer.text
        return answer.json["aggregate"]

    aggregate = post("", {"aggregate": {"name": "rack", "colour": "red"}})
    assert post(f"/{aggregate['id']}/action", {"add_host": {"host": "host1", "colour": "red"}})[
        "hosts"
    ] == ["host1"]


@pytest.mark.parametrize(
    ("ident", "status"), [("x", 400), ("-1", 404), ("-x", 400), ("1" * 30, 400), ("99", 404)]
)
def test_aggregate_requests_return_400_for_malformed_404_for_unknown_id(
    admin: Admin, ident: str, status: int
) -> None:
    path = f"/{ident}"
    admin.call("GET", path, status=status)
    admin.call("PUT", path, {"aggregate": {"name": "x"}}, status)
    admin.call("DELETE", path, status=status)
    for body in (
        {"add_host": {"host": "host1"}},
        {"remove_host": {"host": "host1"}},
        {"set_metadata": {"metadata": {}}},
    ):
        admin.act(ident, status, **body)
    admin.call("POST", path + "/images", {"cache": [{"id": IMAGE}]}, status, "2.81")


@pytest.mark.parametrize("token", ["user", "manager", "reader", "service"])
def test_aggregate_operations_return_403_to_non_admins(admin: Admin, token: str) -> None:
    number = admin.create("rack", None, "host1")
    bodies: list[tuple[str, str, Any]] = [
        ("GET", "", None),
        ("POST", "", {"aggregate": {"name": "x"}}),
        ("GET", f"/{number}", None),
        ("PUT", f"/{number}", {"aggregate": {"name": "x"}}),
        ("DELETE", f"/{number}", None),
        ("POST", f"/{number}/images", {"cache": [{"id": IMAGE}]}),
        *(
            ("POST", f"/{number}/action", body)
            for body in (
                {"add_host": {"host": "host2"}},
                {"remove_host": {"host": "host1"}},
                {"set_metadata": {"metadata": {}}},
            )
        ),
    ]
    for method, path, body in bodies:
        answer = admin.cloud.call(method, "/os-aggregates" + path, body, mv="2.81", token=token)
        assert answer.status_code == 403, (method, path)


# --- zones ---
def test_aggregates_refuse_second_availability_zone_for_host(admin: Admin) -> None:
    first, second, plain = (
        admin.create("a", "az1", "host1"),
        admin.create("b", "az2"),
        admin.create("c", None, "host1"),
    )
    assert_message_contains(
        admin.act(second, 409, add_host={"host": "host1"}),
        "One or more hosts already in availability zone(s) ['az1']",
    )
    for answer in (
        admin.call(
            "PUT", f"/{plain}", {"aggregate": {"availability_zone": "az2", "name": "new"}}, 400
        ),
        admin.act(plain, 400, set_metadata={"metadata": {"availability_zone": "az2", "more": "x"}}),
    ):
        assert_message_contains(answer, "One or more hosts already in availability zone(s) ['az1']")
    assert (admin.show(plain)["name"], admin.show(plain)["metadata"]) == ("c", {})
    admin.call("PUT", f"/{plain}", {"aggregate": {"availability_zone": "az1"}})
    admin.act(first, 400, set_metadata={"metadata": {"availability_zone": "az2"}})
    admin.act(plain, remove_host={"host": "host1"})
    assert (
        admin.act(first, set_metadata={"metadata": {"availability_zone": "az2"}})["aggregate"][
            "availability_zone"
        ]
        == "az2"
    )
    admin.act(second, add_host={"host": "host1"})


def _put_server_on_host1(cloud: Cloud) -> None:
    cloud.set_state(cloud.create())


def _put_guest_on_host1(cloud: Cloud) -> None:
    """Record a claimed guest on host1 that has no server record yet."""
    cloud.store.write(
        lambda tx: guests.add(tx, [{"server_id": ids.new(), "host": "host1", "fence": 1}])
    )


@pytest.mark.parametrize("put_guest", [_put_server_on_host1, _put_guest_on_host1])
def test_aggregate_change_is_refused_when_servers_would_change_zone(
    admin: Admin, put_guest: Callable[[Cloud], None]
) -> None:
    home, other = admin.create("a", "az1", "host1"), admin.create("b", "az2")
    plain, same = admin.create("c", None, "host1"), admin.create("d", "az1")
    put_guest(admin.cloud)
    contain = "One or more hosts contain instances in this zone"
    assert_message_contains(admin.act(home, 409, remove_host={"host": "host1"}), contain)
    assert_message_contains(
        admin.act(home, 400, set_metadata={"metadata": {"availability_zone": "az9"}}), contain
    )
    assert_message_contains(
        admin.call("PUT", f"/{home}", {"aggregate": {"availability_zone": "az9"}}, 400), contain
    )
    # Changes that leave the zone of host1 as it is are accepted.
    admin.act(plain, set_metadata={"metadata": {"ssd": "true"}})
    admin.act(plain, remove_host={"host": "host1"})
    admin.act(same, add_host={"host": "host1"})
    admin.act(home, remove_host={"host": "host1"})
    assert_message_contains(admin.act(same, 409, remove_host={"host": "host1"}), contain)
    # A host without servers may change its zone.
    admin.act(other, add_host={"host": "host2"})
    admin.act(other, remove_host={"host": "host2"})


def test_aggregate_with_zone_refuses_host_with_servers_in_default_zone(admin: Admin) -> None:
    zone, default, plain = (
        admin.create("a", "az1"),
        admin.create("b", "nova"),
        admin.create("c", None, "host1"),
    )
    _put_server_on_host1(admin.cloud)
    admin.act(zone, 409, add_host={"host": "host1"})
    admin.act(plain, 400, set_metadata={"metadata": {"availability_zone": "az1"}})
    admin.act(default, add_host={"host": "host1"})
    admin.act(default, remove_host={"host": "host1"})


def test_aggregate_remove_host_ignores_guests_pending_removal(admin: Admin) -> None:
    home = admin.create("a", "az1", "host1")
    _put_guest_on_host1(admin.cloud)
    admin.cloud.change(schema.guests, schema.guests.c.host == "host1", wanted="absent")
    admin.act(home, remove_host={"host": "host1"})


def test_availability_zones_are_those_of_aggregates_and_the_default(
    make_cloud: Callable[..., Cloud],
) -> None:
    admin = Admin(make_cloud(default_zone="home"))
    admin.create("a", "az1", "host1")
    admin.cloud.add_host("host2")
    zones = admin.cloud.call("GET", "/os-availability-zone").json["availabilityZoneInfo"]
    assert [zone["zoneName"] for zone in zones] == ["az1", "home"]


# --- allocation ratios and change times ---
def test_aggregate_allocation_ratio_applies_to_inventories_of_hosts(admin: Admin) -> None:
    number, tight = admin.create("a", None, "host1"), admin.create("b")
    before = admin.ratio("host1", "VCPU")
    admin.act(
        number,
        set_metadata={"metadata": {"cpu_allocation_ratio": "8", "ram_allocation_ratio": "lots"}},
    )
    assert (admin.ratio("host1", "VCPU"), admin.ratio("host2", "VCPU")) == (8, before)
    assert admin.ratio("host1", "MEMORY_MB") == 1
    admin.act(tight, set_metadata={"metadata": {"cpu_allocation_ratio": "2"}})
    admin.act(tight, add_host={"host": "host1"})
    # The smallest ratio of several aggregates applies.
    assert admin.ratio("host1", "VCPU") == 2
    admin.act(tight, remove_host={"host": "host1"})
    assert admin.ratio("host1", "VCPU") == 8
    admin.act(number, set_metadata={"metadata": {"cpu_allocation_ratio": None}})
    assert admin.ratio("host1", "VCPU") == before


def test_aggregate_updated_at_rises_with_every_change(admin: Admin) -> None:
    number = admin.create("a", "az1")
    aggregates, updated_at = schema.aggregates, 0

    def has_risen() -> bool:
        nonlocal updated_at
        [row] = admin.cloud.store.read(
            lambda tx: tx.execute(sa.select(aggregates.c.updated_at)).all()
        )
        before, updated_at = updated_at, row.updated_at
        return bool(updated_at > before)

    for body in (
        {"add_host": {"host": "host1"}},
        {"set_metadata": {"metadata": {"a": "b"}}},
        {"remove_host": {"host": "host1"}},
    ):
        admin.act(number, **body)
        assert has_risen(), body
    admin.call("PUT", f"/{number}", {"aggregate": {"name": "z"}})
    assert has_risen()


# --- images ---
def cached_images(cloud: Cloud) -> list[tuple[str, str]]:
    return sorted((row.host, row.image_id) for row in cloud.rows(schema.host_images))


def test_aggregate_cache_images_records_images_for_each_host(admin: Admin) -> None:
    number, other = admin.create("a", None, "host1", "host2"), ids.new()
    admin.cloud.images.images[other] = Image(ImageRef(other, "raw", 5))
    body = {"cache": [{"id": IMAGE}, {"id": other}]}
    assert admin.call("POST", f"/{number}/images", body, 202, "2.81") is None
    everywhere = sorted((host, image) for host in ("host1", "host2") for image in (IMAGE, other))
    assert cached_images(admin.cloud) == everywhere
    assert {
        row.image["size"] for row in admin.cloud.rows(schema.host_images) if row.image_id == other
    } == {5}
    # A repeated request sends the image to the hosts again.
    admin.cloud.change(schema.host_images, sa.true(), sent_at=1, error="broken")
    admin.call("POST", f"/{number}/images", {"cache": [{"id": IMAGE}]}, 202, "2.104")
    assert cached_images(admin.cloud) == everywhere
    assert {
        row.image_id: (row.sent_at, row.error) for row in admin.cloud.rows(schema.host_images)
    } == {IMAGE: (None, None), other: (1, "broken")}


def test_aggregate_cache_images_returns_400_for_unusable_image_or_body(admin: Admin) -> None:
    number, queued, unknown = admin.create("a", None, "host1"), ids.new(), ids.new()
    admin.cloud.images.images[queued] = Image(ImageRef(queued, "raw"), status="queued")
    path = f"/{number}/images"
    assert_message_contains(
        admin.call("POST", path, {"cache": [{"id": IMAGE}, {"id": unknown}]}, 400, "2.81"), unknown
    )
    assert_message_contains(
        admin.call("POST", path, {"cache": [{"id": queued}]}, 400, "2.81"), queued
    )
    assert_message_contains(
        admin.call("POST", path, {"cache": [{"id": IMAGE}, {"id": IMAGE}]}, 400, "2.81"),
        "Duplicate images",
    )
    for body in (
        {},
        {"cache": []},
        {"cache": [{"id": "x"}]},
        {"cache": [{}]},
        {"cache": [{"id": IMAGE, "more": 1}]},
        {"cache": [IMAGE]},
        {"cache": [{"id": IMAGE}], "more": 1},
    ):
        admin.call("POST", path, body, 400, "2.81")
    admin.call("POST", path, {"cache": [{"id": IMAGE}]}, 404, "2.80")
    admin.cloud.images.down = True
    admin.call("POST", path, {"cache": [{"id": IMAGE}]}, 503, "2.81")
    assert cached_images(admin.cloud) == []


def test_aggregate_cache_images_without_hosts_records_no_image(admin: Admin) -> None:
    admin.call("POST", f"/{admin.create()}/images", {"cache": [{"id": IMAGE}]}, 202, "2.81")
    assert cached_images(admin.cloud) == []


def test_aggregate_service_hypervisor_ids_of_non_ascii_digits_are_refused(admin: Admin) -> None:
    assert admin.create() == 1
    assert_message_contains(admin.call("GET", "/%D9%A1", status=400), "it must be a number")
    answer = admin.cloud.call("DELETE", "/os-services/%D9%A1", token="admin")
    assert answer.status_code == 400, answer.text
    assert admin.cloud.call("GET", "/os-hypervisors/%D9%A1", token="admin").status_code == 404
