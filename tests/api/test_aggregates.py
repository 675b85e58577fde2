# SPDX-License-Identifier: Apache-2.0
"""Aggregates: groups of hosts that admins make, the zones among them, and images that their hosts
fetch ahead."""

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

    def ask(
        self, method: str, path: str, body: Any = None, status: int = 200, mv: str = "2.1"
    ) -> Any:
        answer = self.cloud.call(method, "/os-aggregates" + path, body, mv=mv, token="admin")
        assert answer.status_code == status, answer.text
        return answer.json if answer.content else None

    def make(self, name: str = "rack", zone: str | None = None, *hosts: str) -> int:
        made = self.ask("POST", "", {"aggregate": {"name": name, "availability_zone": zone}})[
            "aggregate"
        ]
        for host in hosts:
            self.act(made["id"], add_host={"host": host})
        return int(made["id"])

    def act(self, number: int | str, status: int = 200, mv: str = "2.1", **body: Any) -> Any:
        return self.ask("POST", f"/{number}/action", body, status, mv)

    def show(self, number: int) -> Any:
        return self.ask("GET", f"/{number}")["aggregate"]

    def ratio(self, host: str, resource_class: str) -> float:
        stock, providers = schema.inventories, schema.providers
        found = self.cloud.store.read(
            lambda tx: tx.scalar(
                sa.select(stock.c.allocation_ratio)
                .join(providers, providers.c.id == stock.c.provider_id)
                .where(providers.c.host == host, stock.c.resource_class == resource_class)
            )
        )
        assert found is not None
        return float(found)


@pytest.fixture
def admin(cloud: Cloud) -> Admin:
    cloud.add_host("host2")
    return Admin(cloud)


def says(answer: Any, text: str) -> None:
    [fault] = answer.values()
    assert text in fault["message"]


# --- shapes ---
@pytest.mark.parametrize(
    ("mv", "uuid"), [("2.1", False), ("2.40", False), ("2.41", True), ("2.104", True)]
)
def test_an_aggregate_at_each_version(admin: Admin, mv: str, uuid: bool) -> None:
    keys = KEYS | {"uuid"} if uuid else KEYS
    made = admin.ask(
        "POST", "", {"aggregate": {"name": "rack", "availability_zone": "az1"}}, mv=mv
    )["aggregate"]
    assert set(made) == keys - {"hosts", "metadata"}
    assert (made["name"], made["availability_zone"], made["updated_at"]) == ("rack", "az1", None)
    number = made["id"]
    for body in (
        {"add_host": {"host": "host1"}},
        {"set_metadata": {"metadata": {"ssd": "true"}}},
        {"remove_host": {"host": "host1"}},
    ):
        changed = admin.act(number, mv=mv, **body)["aggregate"]
        assert set(changed) == keys
    renamed = admin.ask("PUT", f"/{number}", {"aggregate": {"name": " row "}}, mv=mv)["aggregate"]
    assert (set(renamed), renamed["name"]) == (keys, "row")
    assert renamed["metadata"] == {"availability_zone": "az1", "ssd": "true"}
    assert renamed["updated_at"] is not None
    assert admin.ask("GET", "", mv=mv)["aggregates"] == [
        admin.ask("GET", f"/{number}", mv=mv)["aggregate"]
    ]
    assert admin.ask("DELETE", f"/{number}", mv=mv) is None
    assert admin.ask("GET", "")["aggregates"] == []


def test_metadata_is_added_changed_and_taken_out(admin: Admin) -> None:
    number = admin.make()
    admin.act(number, set_metadata={"metadata": {"a": "1", "b": "2"}})
    changed = admin.act(number, set_metadata={"metadata": {"b": "3", "a": None, "unknown": None}})[
        "aggregate"
    ]
    assert changed["metadata"] == {"b": "3"}


def test_hosts_that_join_and_leave(admin: Admin) -> None:
    number, other = admin.make("rack"), admin.make("row")
    for aggregate in (number, other):
        assert admin.act(aggregate, add_host={"host": "host1"})["aggregate"]["hosts"] == ["host1"]
    assert admin.act(number, add_host={"host": "host2"})["aggregate"]["hosts"] == ["host1", "host2"]
    says(
        admin.act(number, 409, add_host={"host": "host1"}),
        f"Aggregate {number} already has host host1.",
    )
    says(
        admin.act(number, 404, add_host={"host": "nowhere"}),
        "Compute host nowhere could not be found.",
    )
    admin.cloud.store.write(lambda tx: services.enrol(tx, "ctl", Binary.CONDUCTOR))
    admin.act(number, 404, add_host={"host": "ctl"})
    says(admin.ask("DELETE", f"/{number}", status=400), "Host aggregate is not empty")
    for host in ("host1", "host2"):
        admin.act(number, remove_host={"host": host})
    says(
        admin.act(number, 404, remove_host={"host": "host1"}),
        f"Cannot remove host host1 in aggregate {number}",
    )
    admin.ask("DELETE", f"/{number}")
    assert admin.show(other)["hosts"] == ["host1"]


# --- wrong input ---
def test_what_is_not_an_aggregate_is_refused(admin: Admin) -> None:
    admin.make("rack")
    good = {"name": "row"}
    for given in (
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
        admin.ask("POST", "", {"aggregate": given}, 400)
    says(admin.ask("POST", "", {"aggregate": {**good, "availability_zone": "az:1"}}, 400), "no ':'")
    admin.ask("POST", "", {"aggregate": {"name": "rack"}}, 409)
    admin.ask("POST", "", {"aggregate": good, "more": 1}, 400)
    assert [row["name"] for row in admin.ask("GET", "")["aggregates"]] == ["rack"]


def test_a_change_that_cannot_be_is_refused(admin: Admin) -> None:
    number = admin.make("rack")
    admin.make("row")
    path = f"/{number}"
    for body in (
        {},
        {"name": ""},
        {"colour": "red"},
        {"availability_zone": ""},
        {"availability_zone": "a:b"},
    ):
        admin.ask("PUT", path, {"aggregate": body}, 400)
    says(
        admin.ask("PUT", path, {"aggregate": {"name": "row"}}, 409), "Aggregate row already exists."
    )
    says(
        admin.ask("PUT", path, {"aggregate": {"availability_zone": None}}, 400),
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


def test_below_the_legacy_root_unknown_keys_are_dropped(admin: Admin) -> None:
    def ask(path: str, body: Any) -> Any:
        answer = admin.cloud.call(
            "POST", "/os-aggregates" + path, body, mv=None, token="admin", root="/v2"
        )
        assert answer.status_code == 200, answer.text
        return answer.json["aggregate"]

    made = ask("", {"aggregate": {"name": "rack", "colour": "red"}})
    assert ask(f"/{made['id']}/action", {"add_host": {"host": "host1", "colour": "red"}})[
        "hosts"
    ] == ["host1"]


@pytest.mark.parametrize(
    ("ident", "status"), [("x", 400), ("-1", 404), ("-x", 400), ("1" * 30, 400), ("99", 404)]
)
def test_what_names_no_aggregate(admin: Admin, ident: str, status: int) -> None:
    path = f"/{ident}"
    admin.ask("GET", path, status=status)
    admin.ask("PUT", path, {"aggregate": {"name": "x"}}, status)
    admin.ask("DELETE", path, status=status)
    for body in (
        {"add_host": {"host": "host1"}},
        {"remove_host": {"host": "host1"}},
        {"set_metadata": {"metadata": {}}},
    ):
        admin.act(ident, status, **body)
    admin.ask("POST", path + "/images", {"cache": [{"id": IMAGE}]}, status, "2.81")


@pytest.mark.parametrize("token", ["user", "manager", "reader", "service"])
def test_aggregates_are_for_admins(admin: Admin, token: str) -> None:
    number = admin.make("rack", None, "host1")
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
def test_a_host_is_in_one_zone(admin: Admin) -> None:
    first, second, plain = (
        admin.make("a", "az1", "host1"),
        admin.make("b", "az2"),
        admin.make("c", None, "host1"),
    )
    says(
        admin.act(second, 409, add_host={"host": "host1"}),
        "One or more hosts already in availability zone(s) ['az1']",
    )
    for refused in (
        admin.ask(
            "PUT", f"/{plain}", {"aggregate": {"availability_zone": "az2", "name": "new"}}, 400
        ),
        admin.act(plain, 400, set_metadata={"metadata": {"availability_zone": "az2", "more": "x"}}),
    ):
        says(refused, "One or more hosts already in availability zone(s) ['az1']")
    assert (admin.show(plain)["name"], admin.show(plain)["metadata"]) == ("c", {})
    admin.ask("PUT", f"/{plain}", {"aggregate": {"availability_zone": "az1"}})
    admin.act(first, 400, set_metadata={"metadata": {"availability_zone": "az2"}})
    admin.act(plain, remove_host={"host": "host1"})
    assert (
        admin.act(first, set_metadata={"metadata": {"availability_zone": "az2"}})["aggregate"][
            "availability_zone"
        ]
        == "az2"
    )
    admin.act(second, add_host={"host": "host1"})


def _server_on_host1(cloud: Cloud) -> None:
    cloud.rest(cloud.create())


def _guest_on_host1(cloud: Cloud) -> None:
    """Claimed, and nothing more yet."""
    cloud.store.write(
        lambda tx: guests.add(tx, [{"server_id": ids.new(), "host": "host1", "fence": 1}])
    )


@pytest.mark.parametrize("put_one", [_server_on_host1, _guest_on_host1])
def test_a_host_does_not_change_its_zone_under_servers(
    admin: Admin, put_one: Callable[[Cloud], None]
) -> None:
    home, other = admin.make("a", "az1", "host1"), admin.make("b", "az2")
    plain, same = admin.make("c", None, "host1"), admin.make("d", "az1")
    put_one(admin.cloud)
    contain = "One or more hosts contain instances in this zone"
    says(admin.act(home, 409, remove_host={"host": "host1"}), contain)
    says(admin.act(home, 400, set_metadata={"metadata": {"availability_zone": "az9"}}), contain)
    says(admin.ask("PUT", f"/{home}", {"aggregate": {"availability_zone": "az9"}}, 400), contain)
    # what leaves its zone as it is can be done
    admin.act(plain, set_metadata={"metadata": {"ssd": "true"}})
    admin.act(plain, remove_host={"host": "host1"})
    admin.act(same, add_host={"host": "host1"})
    admin.act(home, remove_host={"host": "host1"})
    says(admin.act(same, 409, remove_host={"host": "host1"}), contain)
    # another host of the zone goes where it likes
    admin.act(other, add_host={"host": "host2"})
    admin.act(other, remove_host={"host": "host2"})


def test_host_with_servers_cannot_leave_the_default_zone(admin: Admin) -> None:
    zone, default, plain = (
        admin.make("a", "az1"),
        admin.make("b", "nova"),
        admin.make("c", None, "host1"),
    )
    _server_on_host1(admin.cloud)
    admin.act(zone, 409, add_host={"host": "host1"})
    admin.act(plain, 400, set_metadata={"metadata": {"availability_zone": "az1"}})
    admin.act(default, add_host={"host": "host1"})
    admin.act(default, remove_host={"host": "host1"})


def test_guest_to_be_removed_does_not_hold_a_host_in_its_zone(admin: Admin) -> None:
    home = admin.make("a", "az1", "host1")
    _guest_on_host1(admin.cloud)
    admin.cloud.change(schema.guests, schema.guests.c.host == "host1", wanted="absent")
    admin.act(home, remove_host={"host": "host1"})


def test_zones_are_those_of_aggregates(make_cloud: Callable[..., Cloud]) -> None:
    admin = Admin(make_cloud(default_zone="home"))
    admin.make("a", "az1", "host1")
    admin.cloud.add_host("host2")
    found = admin.cloud.call("GET", "/os-availability-zone").json["availabilityZoneInfo"]
    assert [zone["zoneName"] for zone in found] == ["az1", "home"]


# --- what schedulers and claims see ---
def test_ratios_of_an_aggregate_are_those_of_its_hosts(admin: Admin) -> None:
    number, tight = admin.make("a", None, "host1"), admin.make("b")
    before = admin.ratio("host1", "VCPU")
    admin.act(
        number,
        set_metadata={"metadata": {"cpu_allocation_ratio": "8", "ram_allocation_ratio": "lots"}},
    )
    assert (admin.ratio("host1", "VCPU"), admin.ratio("host2", "VCPU")) == (8, before)
    assert admin.ratio("host1", "MEMORY_MB") == 1
    admin.act(tight, set_metadata={"metadata": {"cpu_allocation_ratio": "2"}})
    admin.act(tight, add_host={"host": "host1"})
    assert admin.ratio("host1", "VCPU") == 2  # the smallest of several
    admin.act(tight, remove_host={"host": "host1"})
    assert admin.ratio("host1", "VCPU") == 8
    admin.act(number, set_metadata={"metadata": {"cpu_allocation_ratio": None}})
    assert admin.ratio("host1", "VCPU") == before


def test_every_change_can_be_seen_by_its_time(admin: Admin) -> None:
    number = admin.make("a", "az1")
    aggregates, seen = schema.aggregates, 0

    def moved() -> bool:
        nonlocal seen
        [row] = admin.cloud.store.read(
            lambda tx: tx.execute(sa.select(aggregates.c.updated_at)).all()
        )
        before, seen = seen, row.updated_at
        return bool(seen > before)

    for body in (
        {"add_host": {"host": "host1"}},
        {"set_metadata": {"metadata": {"a": "b"}}},
        {"remove_host": {"host": "host1"}},
    ):
        admin.act(number, **body)
        assert moved(), body
    admin.ask("PUT", f"/{number}", {"aggregate": {"name": "z"}})
    assert moved()


# --- images ---
def cached(cloud: Cloud) -> list[tuple[str, str]]:
    return sorted((row.host, row.image_id) for row in cloud.rows(schema.host_images))


def test_images_that_the_hosts_of_an_aggregate_shall_fetch(admin: Admin) -> None:
    number, other = admin.make("a", None, "host1", "host2"), ids.new()
    admin.cloud.images.images[other] = Image(ImageRef(other, "raw", 5))
    body = {"cache": [{"id": IMAGE}, {"id": other}]}
    assert admin.ask("POST", f"/{number}/images", body, 202, "2.81") is None
    everywhere = sorted((host, image) for host in ("host1", "host2") for image in (IMAGE, other))
    assert cached(admin.cloud) == everywhere
    assert {
        row.image["size"] for row in admin.cloud.rows(schema.host_images) if row.image_id == other
    } == {5}
    admin.cloud.change(schema.host_images, sa.true(), sent_at=1, error="broken")
    admin.ask("POST", f"/{number}/images", {"cache": [{"id": IMAGE}]}, 202, "2.104")
    assert cached(admin.cloud) == everywhere
    assert {
        row.image_id: (row.sent_at, row.error) for row in admin.cloud.rows(schema.host_images)
    } == {IMAGE: (None, None), other: (1, "broken")}  # what is asked again is told again


def test_images_that_cannot_be_fetched_are_refused(admin: Admin) -> None:
    number, queued, unknown = admin.make("a", None, "host1"), ids.new(), ids.new()
    admin.cloud.images.images[queued] = Image(ImageRef(queued, "raw"), status="queued")
    path = f"/{number}/images"
    says(admin.ask("POST", path, {"cache": [{"id": IMAGE}, {"id": unknown}]}, 400, "2.81"), unknown)
    says(admin.ask("POST", path, {"cache": [{"id": queued}]}, 400, "2.81"), queued)
    says(
        admin.ask("POST", path, {"cache": [{"id": IMAGE}, {"id": IMAGE}]}, 400, "2.81"),
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
        admin.ask("POST", path, body, 400, "2.81")
    admin.ask("POST", path, {"cache": [{"id": IMAGE}]}, 404, "2.80")
    admin.cloud.images.down = True
    admin.ask("POST", path, {"cache": [{"id": IMAGE}]}, 503, "2.81")
    assert cached(admin.cloud) == []


def test_an_aggregate_without_hosts_has_nobody_to_fetch(admin: Admin) -> None:
    admin.ask("POST", f"/{admin.make()}/images", {"cache": [{"id": IMAGE}]}, 202, "2.81")
    assert cached(admin.cloud) == []


def test_digits_of_other_scripts_are_no_number(admin: Admin) -> None:
    assert admin.make() == 1
    says(admin.ask("GET", "/%D9%A1", status=400), "give its number")
    refused = admin.cloud.call("DELETE", "/os-services/%D9%A1", token="admin")
    assert refused.status_code == 400, refused.text
    assert admin.cloud.call("GET", "/os-hypervisors/%D9%A1", token="admin").status_code == 404
