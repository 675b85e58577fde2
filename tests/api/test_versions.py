# SPDX-License-Identifier: Apache-2.0
"""Version documents, the choice of a microversion, and the spellings of a URL."""

from __future__ import annotations

import pytest

from compute_api.compute import routes
from compute_api.compute.request import microversions
from tests.api.conftest import OTHER, PROJECT, Cloud

OURS, THEIRS = "OpenStack-API-Version", "X-OpenStack-Nova-API-Version"


def test_list_versions_needs_no_token_and_begins_with_oldest(cloud: Cloud) -> None:
    answer = cloud.call("GET", "/", root="", token=None)
    assert answer.status_code == 200
    assert [(v["id"], v["version"], v["min_version"]) for v in answer.json["versions"]] == [
        ("v2.0", "", ""),
        ("v2.1", "2.104", "2.1"),
    ]


@pytest.mark.parametrize(
    ("root", "ident", "highest"),
    [
        ("/v2.1", "v2.1", "2.104"),
        ("/v2.1/", "v2.1", "2.104"),
        ("/v2", "v2.0", ""),
        ("/v2/", "v2.0", ""),
        ("/v2.1/versions/v2.1", "v2.1", "2.104"),
    ],
)
def test_version_root_returns_document_with_and_without_slash(
    cloud: Cloud, root: str, ident: str, highest: str
) -> None:
    answer = cloud.call("GET", "", root=root, token=None)
    assert answer.status_code == 200
    assert (answer.json["version"]["id"], answer.json["version"]["version"]) == (ident, highest)
    assert answer.json["version"]["links"][0]["href"].endswith(
        "/v2/" if ident == "v2.0" else "/v2.1/"
    )


@pytest.mark.parametrize(("root", "ident"), [("/v2.1", "v2.1"), ("/v2", "v2.0")])
def test_version_document_below_project_returns_400_to_other_projects(
    cloud: Cloud, root: str, ident: str
) -> None:
    answer = cloud.call("GET", f"/{PROJECT}/", root=root)
    assert (answer.status_code, answer.json["version"]["id"]) == (200, ident)
    assert cloud.call("GET", f"/{PROJECT}/", root=root, token=None).status_code == 401
    assert cloud.call("GET", f"/{OTHER}/", root=root).status_code == 400
    assert cloud.call("GET", f"/{PROJECT}", root=root).status_code == 404
    assert cloud.call("GET", "/servers/", root=root).status_code == 404


def test_path_without_version_returns_300_with_choices(cloud: Cloud) -> None:
    answer = cloud.call("GET", "/servers", root="", token=None)
    assert answer.status_code == 300
    assert [choice["links"][0]["href"].split("/", 3)[3] for choice in answer.json["choices"]] == [
        "v2/servers",
        "v2.1/servers",
    ]


@pytest.mark.parametrize(
    "headers", [{THEIRS: "2." + "1" * 5000}, {OURS: "compute 2." + "1" * 5000}]
)
def test_microversion_of_thousands_of_digits_returns_406(
    cloud: Cloud, headers: dict[str, str]
) -> None:
    assert cloud.call("GET", "/servers", mv=None, headers=headers).status_code == 406


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        ({}, "2.1"),
        ({OURS: "compute 2.53"}, "2.53"),
        ({OURS: "compute latest"}, "2.104"),
        ({THEIRS: "2.10"}, "2.10"),
        ({THEIRS: "latest"}, "2.104"),
        ({OURS: "volume 3.1, compute 2.7"}, "2.7"),
        ({OURS: "volume 3.1"}, "2.1"),
        ({OURS: "compute 2.8", THEIRS: "2.9"}, "2.8"),
    ],
)
def test_request_chooses_microversion_by_header_and_answer_repeats_it(
    cloud: Cloud, headers: dict[str, str], version: str
) -> None:
    answer = cloud.call("GET", "/servers", mv=None, headers=headers)
    assert answer.status_code == 200
    assert answer.headers[OURS] == f"compute {version}"
    assert answer.headers[THEIRS] == version
    assert answer.headers["Vary"] == f"{OURS}, {THEIRS}"


@pytest.mark.parametrize(
    ("requested", "status", "kind", "text"),
    [
        (
            "2.105",
            406,
            "computeFault",
            "Version 2.105 is not supported by the API. Minimum is 2.1 and maximum is 2.104.",
        ),
        (
            "3.1",
            406,
            "computeFault",
            "Version 3.1 is not supported by the API. Minimum is 2.1 and maximum is 2.104.",
        ),
        (
            "2.0",
            406,
            "computeFault",
            "Version 2.0 is not supported by the API. Minimum is 2.1 and maximum is 2.104.",
        ),
        (
            "newest",
            400,
            "badRequest",
            "API Version String newest is of invalid format. Must be of format MajorNum.MinorNum.",
        ),
        (
            "2.01",
            400,
            "badRequest",
            "API Version String 2.01 is of invalid format. Must be of format MajorNum.MinorNum.",
        ),
    ],
)
def test_unsupported_microversion_returns_406_and_malformed_one_400(
    cloud: Cloud, requested: str, status: int, kind: str, text: str
) -> None:
    answer = cloud.call("GET", "/servers", mv=requested)
    assert answer.status_code == status
    assert answer.json == {kind: {"code": status, "message": text}}


def test_every_microversion_can_be_chosen(cloud: Cloud) -> None:
    assert [version for version, _ in microversions.HISTORY] == [
        f"2.{number}" for number in range(1, 105)
    ]
    for version, _ in microversions.HISTORY:
        assert cloud.call("GET", "/servers", mv=version).headers[THEIRS] == version


def test_response_has_request_id_headers(cloud: Cloud) -> None:
    for token, path in (("user", "/servers"), (None, "/servers"), ("user", "/nothing")):
        answer = cloud.call("GET", path, token=token)
        assert answer.headers["X-Compute-Request-Id"].startswith("req-")
        assert answer.headers["X-Openstack-Request-Id"] == answer.headers["X-Compute-Request-Id"]


def test_project_id_of_url_is_in_links(cloud: Cloud) -> None:
    server = cloud.create()
    answer = cloud.call("GET", f"/{PROJECT}/servers/{server}")
    assert answer.status_code == 200
    assert [link["href"].split("/", 3)[3] for link in answer.json["server"]["links"]] == [
        f"v2.1/{PROJECT}/servers/{server}",
        f"{PROJECT}/servers/{server}",
    ]


def test_foreign_project_id_in_url_returns_400(cloud: Cloud) -> None:
    answer = cloud.call("GET", f"/{OTHER}/servers")
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"] == (
        f"Malformed request URL: URL's project_id '{OTHER}' doesn't match Context's project_id '{PROJECT}'"
    )


def test_v2_root_ignores_microversion_and_drops_unknown_keys(cloud: Cloud) -> None:
    body = {"flavor": {"name": "f", "ram": 1, "vcpus": 1, "disk": 1, "colour": "red"}}
    strict_answer = cloud.call("POST", "/flavors", body, token="admin")
    v2_answer = cloud.call("POST", "/flavors", body, token="admin", root="/v2", mv="2.100")
    assert (strict_answer.status_code, v2_answer.status_code) == (400, 200)
    assert "OpenStack-API-Version" not in v2_answer.headers
    assert v2_answer.json["flavor"]["swap"] == "", "the answer has the format of 2.1"
    assert v2_answer.json["flavor"]["links"][0]["href"].split("/")[3] == "v2"


@pytest.mark.parametrize(
    ("method", "path", "mv", "status", "kind"),
    [
        ("GET", "/nonsense", "2.1", 404, "itemNotFound"),
        ("GET", "/p/nonsense", "2.1", 404, "itemNotFound"),
        ("PATCH", "/servers", "2.1", 405, "badMethod"),
        ("DELETE", "/servers", "2.1", 405, "badMethod"),
        ("GET", "/servers/%00", "2.1", 404, "itemNotFound"),
        ("GET", "/servers?name=%00", "2.1", 400, "badRequest"),
        ("PUT", "/flavors/1", "2.54", 404, "itemNotFound"),
        ("GET", "/os-hypervisors/statistics", "2.88", 404, "itemNotFound"),
    ],
)
def test_unknown_path_or_version_returns_404_method_405_and_nul_query_400(
    cloud: Cloud, method: str, path: str, mv: str, status: int, kind: str
) -> None:
    answer = cloud.call(method, path, mv=mv, token="admin")
    assert answer.status_code == status
    assert answer.json[kind]["code"] == status


def test_route_outside_its_microversions_returns_404_with_requested_one(cloud: Cloud) -> None:
    answer = cloud.call(
        "PUT", "/flavors/1", {"flavor": {"description": "x"}}, mv="2.54", token="admin"
    )
    assert answer.json == {
        "itemNotFound": {
            "code": 404,
            "message": "API version '2.54' is not supported on this method.",
        }
    }


@pytest.mark.parametrize("mv", ["2.1", "2.104"])
def test_removed_operations_return_410_at_every_microversion(cloud: Cloud, mv: str) -> None:
    for path, methods in routes.GONE.items():
        for method in methods.split():
            answer = cloud.call(method, path.replace("{", "").replace("}", ""), mv=mv)
            assert answer.status_code == 410, (method, path)
            assert answer.json["computeFault"]["code"] == 410
