# SPDX-License-Identifier: Apache-2.0
"""Flavors, their access lists and their extra specs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import PROJECT, Cloud

FLAVOR = {
    "id",
    "name",
    "links",
    "ram",
    "disk",
    "vcpus",
    "swap",
    "OS-FLV-EXT-DATA:ephemeral",
    "os-flavor-access:is_public",
}
OLD = {"OS-FLV-DISABLED:disabled", "rxtx_factor"}


@pytest.mark.parametrize(
    ("mv", "keys", "swap"),
    [
        ("2.1", FLAVOR | OLD, ""),
        ("2.54", FLAVOR | OLD, ""),
        ("2.55", FLAVOR | OLD | {"description"}, ""),
        ("2.60", FLAVOR | OLD | {"description"}, ""),
        ("2.61", FLAVOR | OLD | {"description", "extra_specs"}, ""),
        ("2.75", FLAVOR | OLD | {"description", "extra_specs"}, 0),
        ("2.101", FLAVOR | OLD | {"description", "extra_specs"}, 0),
        ("2.102", FLAVOR | {"description", "extra_specs"}, 0),
    ],
)
def test_flavor_has_the_fields_of_each_microversion(
    cloud: Cloud, mv: str, keys: set[str], swap: Any
) -> None:
    for flavor in (
        cloud.call("GET", "/flavors/1", mv=mv).json["flavor"],
        cloud.call("GET", "/flavors/detail", mv=mv).json["flavors"][0],
    ):
        assert set(flavor) == keys
        assert (flavor["id"], flavor["name"], flavor["ram"], flavor["swap"]) == (
            "1",
            "m1.tiny",
            512,
            swap,
        )
    brief = cloud.call("GET", "/flavors", mv=mv).json["flavors"][0]
    assert set(brief) == {"id", "name", "links"} | (keys & {"description"})


def create_flavor(cloud: Cloud, mv: str = "2.55", status: int = 200, **more: Any) -> Any:
    body = {"flavor": {"name": "f1", "ram": 128, "vcpus": "2", "disk": 0, **more}}
    answer = cloud.call("POST", "/flavors", body, mv=mv, token="admin")
    assert answer.status_code == status, answer.text
    return answer.json


def test_flavor_is_created_updated_and_deleted_by_admin_only(cloud: Cloud) -> None:
    flavor = create_flavor(cloud, description="d", swap="256", **{"OS-FLV-EXT-DATA:ephemeral": 3})[
        "flavor"
    ]
    assert (
        flavor["vcpus"],
        flavor["swap"],
        flavor["OS-FLV-EXT-DATA:ephemeral"],
        flavor["description"],
    ) == (2, 256, 3, "d")
    path = f"/flavors/{flavor['id']}"
    body = {"flavor": {"description": None}}
    assert (
        cloud.call("PUT", path, body, mv="2.55", token="admin").json["flavor"]["description"]
        is None
    )
    assert cloud.call("PUT", path, body, mv="2.55").status_code == 403
    assert (
        cloud.call("DELETE", path).status_code,
        cloud.call("DELETE", path, token="admin").status_code,
    ) == (403, 202)
    assert (
        cloud.call("GET", path).json["itemNotFound"]["message"]
        == f"Flavor {flavor['id']} could not be found."
    )
    assert cloud.call("DELETE", path, token="admin").status_code == 404


def test_create_flavor_returns_409_for_taken_id_or_name_400_if_invalid(cloud: Cloud) -> None:
    create_flavor(cloud, id="x")
    assert create_flavor(cloud, status=409, id="x", name="other")["conflictingRequest"][
        "message"
    ] == ("Flavor with ID x already exists.")
    assert (
        create_flavor(cloud, status=409, id="y")["conflictingRequest"]["message"]
        == "Flavor with name f1 already exists."
    )
    for fields in (
        {"ram": 0},
        {"vcpus": "x"},
        {"disk": -1},
        {"ram": 2**31},
        {"id": "a/b"},
        {"id": " a"},
        {"id": "a "},
        {"name": " "},
    ):
        create_flavor(cloud, status=400, **fields)
    create_flavor(cloud, "2.102", 400, name="f2", rxtx_factor=1.0)
    create_flavor(cloud, "2.54", 400, name="f2", description="d")


def test_list_flavors_filters_sorts_and_pages(cloud: Cloud) -> None:
    create_flavor(cloud, id="0", name="big", ram=9999, disk=99)

    def list_ids(query: str, mv: str = "2.1", token: str = "user") -> list[str]:
        return [
            flavor["id"]
            for flavor in cloud.call("GET", "/flavors" + query, mv=mv, token=token).json["flavors"]
        ]

    assert list_ids("") == ["0", "1", "2"]
    assert list_ids("?minRam=2048") == ["0", "2"]
    assert list_ids("?minDisk=20&minRam=1") == ["0", "2"]
    assert list_ids("?sort_key=memory_mb&sort_dir=desc") == ["0", "2", "1"]
    assert list_ids("?limit=1&marker=0") == ["1"]
    assert list_ids("?name=m1", "2.102") == ["1", "2"]
    assert list_ids("?name=m1", "2.74") == ["0", "1", "2"]
    page = cloud.call("GET", "/flavors/detail?limit=2").json
    assert page["flavors_links"][0]["href"].endswith("/v2.1/flavors/detail?limit=2&marker=1")


def test_private_flavor_is_visible_to_projects_with_access_only(cloud: Cloud) -> None:
    create_flavor(cloud, id="p", **{"os-flavor-access:is_public": False})
    assert cloud.call("GET", "/flavors/p").status_code == 404
    body = {"server": {"name": "a", "imageRef": next(iter(cloud.images.images)), "flavorRef": "p"}}
    assert cloud.call("POST", "/servers", body).status_code == 400

    def change_access(
        name: str, tenant: str, mv: str = "2.7", token: str = "admin", flavor: str = "p"
    ) -> Any:
        return cloud.call(
            "POST", f"/flavors/{flavor}/action", {name: {"tenant": tenant}}, mv=mv, token=token
        )

    assert change_access("addTenantAccess", PROJECT).json == {
        "flavor_access": [{"flavor_id": "p", "tenant_id": PROJECT}]
    }
    assert change_access("addTenantAccess", PROJECT).status_code == 409
    assert cloud.call("GET", "/flavors/p").status_code == 200
    assert cloud.call("GET", "/flavors/p", token="stranger").status_code == 404
    assert "p" in [flavor["id"] for flavor in cloud.call("GET", "/flavors").json["flavors"]]
    assert "p" not in [
        flavor["id"] for flavor in cloud.call("GET", "/flavors", token="admin").json["flavors"]
    ]
    for query, count in (("None", 3), ("false", 1), ("true", 2)):
        assert (
            len(cloud.call("GET", f"/flavors?is_public={query}", token="admin").json["flavors"])
            == count
        )
    assert cloud.call("GET", "/flavors?is_public=maybe", token="admin").status_code == 400
    assert (
        cloud.call("GET", "/flavors/p/os-flavor-access", token="admin").json["flavor_access"][0][
            "tenant_id"
        ]
        == PROJECT
    )
    assert cloud.call("GET", "/flavors/1/os-flavor-access", token="admin").status_code == 404
    assert change_access("removeTenantAccess", PROJECT, token="user").status_code == 403
    assert change_access("removeTenantAccess", PROJECT).json == {"flavor_access": []}
    assert change_access("removeTenantAccess", PROJECT).status_code == 404
    assert change_access("addTenantAccess", PROJECT, "2.7", flavor="1").json["conflictingRequest"][
        "message"
    ] == ("Can not add access to a public flavor.")
    assert change_access("addTenantAccess", PROJECT, "2.6", flavor="1").status_code == 200


def test_flavor_extra_specs_are_changed_by_admins_and_copied_to_servers(cloud: Cloud) -> None:
    path = "/flavors/1/os-extra_specs"
    specs = {"hw:cpu_policy": "shared", "n": "1"}
    assert cloud.call("POST", path, {"extra_specs": specs}, token="admin").json == {
        "extra_specs": specs
    }
    assert cloud.call("GET", path).json == {"extra_specs": specs}
    assert cloud.call("GET", path + "/n").json == {"n": "1"}
    assert cloud.call("PUT", path + "/n", {"n": "2"}, token="admin").json == {"n": "2"}
    assert cloud.call("PUT", path + "/n", {"m": "2"}, token="admin").status_code == 400
    assert cloud.call("DELETE", path + "/n", token="admin").status_code == 200
    assert cloud.call("DELETE", path + "/n", token="admin").json["itemNotFound"]["message"] == (
        "Flavor 1 has no extra specs with key n."
    )
    assert cloud.call("GET", path + "/n").status_code == 404
    assert cloud.call("POST", path, {"extra_specs": specs}).status_code == 403
    assert cloud.call("POST", path, {"extra_specs": {"a/b": "1"}}, token="admin").status_code == 400
    server = cloud.create()
    copied_specs = cloud.call("GET", f"/servers/{server}", mv="2.47").json["server"]["flavor"][
        "extra_specs"
    ]
    assert copied_specs == {"hw:cpu_policy": "shared"}, "frozen into the server"


def test_flavor_extra_specs_are_validated_from_2_86(cloud: Cloud) -> None:
    path = "/flavors/1/os-extra_specs"

    def statuses(specs: dict[str, str], mv: str) -> list[int]:
        (key, value), *_ = specs.items()
        return [
            cloud.call("POST", path, {"extra_specs": specs}, mv=mv, token="admin").status_code,
            cloud.call("PUT", f"{path}/{key}", {key: value}, mv=mv, token="admin").status_code,
        ]

    for specs in (
        {"hw:cpu_polcy": "shared"},
        {"hw:cpu_policy": "own"},
        {"resources:VCPU": "x"},
        {"os:x": "1"},
    ):
        assert statuses(specs, "2.85") == [200, 200]
        assert statuses(specs, "2.86") == [400, 400]
    for specs in (
        {"hw:cpu_policy": "shared"},
        {"mine:x": "1"},
        {"x": "1"},
        {"trait:CUSTOM_A": "required"},
    ):
        assert statuses(specs, "2.86") == [200, 200]
    for mv in ("2.1", "2.104"):
        assert statuses({"kilonova:devices": "x=10de:1db4:1"}, mv) == [400, 400], (
            "what only Kilonova writes"
        )
    text = cloud.call(
        "POST", path, {"extra_specs": {"hw:cpu_polcy": "x"}}, mv="2.86", token="admin"
    ).json
    assert "hw:cpu_polcy" in text["badRequest"]["message"]


def test_create_server_with_unsupported_extra_specs_returns_400(cloud: Cloud) -> None:
    def create(specs: dict[str, str]) -> Any:
        for key in cloud.call("GET", "/flavors/1/os-extra_specs").json["extra_specs"]:
            cloud.call("DELETE", f"/flavors/1/os-extra_specs/{key}", token="admin")
        cloud.call("POST", "/flavors/1/os-extra_specs", {"extra_specs": specs}, token="admin")
        body = {
            "server": {"name": "a", "imageRef": next(iter(cloud.images.images)), "flavorRef": "1"}
        }
        return cloud.call("POST", "/servers", body)

    for specs in (
        {"hw:mem_encryption": "true"},
        {"hw:cpu_polcy": "x"},
        {"resources1:VCPU": "1"},
        {"pci_passthrough:alias": "gpu:1"},
        {"hw:numa_nodes": "7"},
        {"resources:VGPU": "1"},
    ):
        answer = create(specs)
        assert (
            answer.status_code == 400 and next(iter(specs)) in answer.json["badRequest"]["message"]
        )
    assert create({"hw:mem_encryption": "false", "quota:cpu_shares": "1024"}).status_code == 202


@pytest.mark.parametrize(
    "fields", [{"ram": "9999999999"}, {"ram": "0"}, {"vcpus": "2147483648"}, {"disk": "-1"}]
)
def test_create_flavor_with_out_of_range_number_as_text_returns_400(
    cloud: Cloud, fields: dict[str, str]
) -> None:
    assert next(iter(fields)) in create_flavor(cloud, status=400, **fields)["badRequest"]["message"]
