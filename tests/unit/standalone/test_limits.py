# SPDX-License-Identifier: Apache-2.0
"""Registered limits and limits of the embedded identity service: bodies, permissions, refusals."""

from typing import Any

import pytest

PROJECT = {"project": {"name": "admin", "domain": {"id": "default"}}}
OWN = {"project": {"name": "service", "domain": {"id": "default"}}}


@pytest.fixture
def service(identity: Any) -> str:
    """Return the id of a service that only this test uses."""
    response = identity.request(
        "POST", "/v3/services", json={"service": {"type": "compute", "name": "c"}}
    )
    return str(response.json["service"]["id"])


def post(identity: Any, plural: str, *bodies: Any, **options: Any) -> Any:
    return identity.request("POST", f"/v3/{plural}", json={plural: list(bodies)}, **options)


def new_registered_limit(service: str, name: str = "servers", **more: Any) -> dict[str, Any]:
    return {"service_id": service, "resource_name": name, "default_limit": 10, **more}


def new_limit(
    identity: Any, service: str, name: str = "servers", project: str = "admin", **more: Any
) -> dict[str, Any]:
    project_id = identity.request("GET", f"/v3/projects?name={project}").json["projects"][0]["id"]
    return {
        "service_id": service,
        "resource_name": name,
        "resource_limit": 5,
        "project_id": project_id,
        **more,
    }


def test_registered_limit_is_created_listed_changed_and_deleted(
    identity: Any, service: str
) -> None:
    response = post(
        identity,
        "registered_limits",
        new_registered_limit(service),
        new_registered_limit(
            service, "class:VCPU", default_limit=-1, region_id="RegionOne", description="d"
        ),
    )
    assert response.status_code == 201 and set(response.json) == {"registered_limits"}
    first, second = response.json["registered_limits"]
    path = f"/v3/registered_limits/{first['id']}"
    assert first == {
        "id": first["id"],
        "service_id": service,
        "region_id": None,
        "resource_name": "servers",
        "default_limit": 10,
        "description": None,
        "links": {"self": "http://falconframework.org" + path},
    }
    assert (second["default_limit"], second["region_id"], second["description"]) == (
        -1,
        "RegionOne",
        "d",
    )
    assert identity.request("GET", path).json == {"registered_limit": first}
    listed = identity.request("GET", f"/v3/registered_limits?service_id={service}").json
    assert listed["registered_limits"] == [second, first] and set(listed["links"]) == {
        "self",
        "next",
        "previous",
    }
    for query, expected in (("region_id=RegionOne", [second]), ("resource_name=servers", [first])):
        answer = identity.request("GET", f"/v3/registered_limits?service_id={service}&{query}")
        assert answer.json["registered_limits"] == expected
    changed = identity.request(
        "PATCH", path, json={"registered_limit": {"default_limit": 0, "resource_name": "s"}}
    )
    assert changed.json == {"registered_limit": {**first, "default_limit": 0, "resource_name": "s"}}
    assert identity.request("GET", path).json == changed.json
    assert identity.request("DELETE", path).status_code == 204
    for method in ("GET", "DELETE"):
        assert identity.request(method, path).status_code == 404


def test_limit_is_created_listed_changed_and_deleted(identity: Any, service: str) -> None:
    reference = post(identity, "registered_limits", new_registered_limit(service)).json[
        "registered_limits"
    ][0]
    body = new_limit(identity, service)
    response = post(identity, "limits", body)
    assert response.status_code == 201
    [first] = response.json["limits"]
    path = f"/v3/limits/{first['id']}"
    assert first == {
        **body,
        "id": first["id"],
        "region_id": None,
        "domain_id": None,
        "description": None,
        "links": {"self": "http://falconframework.org" + path},
    }
    assert identity.request("GET", path).json == {"limit": first}
    [of_domain] = post(
        identity,
        "limits",
        {**new_limit(identity, service), "project_id": None, "domain_id": "default"},
    ).json["limits"]
    listed = identity.request(
        "GET", f"/v3/limits?service_id={service}&project_id={body['project_id']}"
    ).json
    assert listed["limits"] == [first]
    by_domain = identity.request("GET", f"/v3/limits?service_id={service}&domain_id=default").json
    assert by_domain["limits"] == [of_domain]
    for changes in ({"resource_limit": -1}, {"description": "x"}, {}):
        first |= changes
        assert identity.request("PATCH", path, json={"limit": changes}).json == {"limit": first}
    reference_path = f"/v3/registered_limits/{reference['id']}"
    assert identity.request("DELETE", reference_path).status_code == 403
    for change, status in (({"resource_name": "other"}, 403), ({"default_limit": 11}, 200)):
        answer = identity.request("PATCH", reference_path, json={"registered_limit": change})
        assert answer.status_code == status
    for row in (first, of_domain):
        assert identity.request("DELETE", f"/v3/limits/{row['id']}").status_code == 204
    assert identity.request("GET", path).status_code == 404
    assert identity.request("DELETE", reference_path).status_code == 204


def test_create_limit_returns_400_if_invalid_409_if_taken_403_if_unregistered(
    identity: Any, service: str
) -> None:
    registered_limit = new_registered_limit(service)
    assert post(identity, "registered_limits", registered_limit).status_code == 201
    assert (
        post(
            identity, "registered_limits", new_registered_limit(service, "new"), registered_limit
        ).status_code
        == 409
    )
    listed = identity.request("GET", f"/v3/registered_limits?service_id={service}").json[
        "registered_limits"
    ]
    assert [row["resource_name"] for row in listed] == ["servers"], "all of a request, or nothing"
    for wrong in (
        {**registered_limit, "service_id": "none"},
        {**registered_limit, "region_id": "none"},
        {**registered_limit, "default_limit": -2},
        {**registered_limit, "default_limit": "1"},
        {**registered_limit, "colour": 1},
        {"service_id": service},
        [],
    ):
        assert post(identity, "registered_limits", wrong).status_code == 400, wrong
    own = new_limit(identity, service)
    assert post(identity, "limits", {**own, "resource_name": "other"}).status_code == 403
    assert post(identity, "limits", {**own, "region_id": "RegionOne"}).status_code == 403
    for wrong in (
        {**own, "project_id": "none"},
        {**own, "domain_id": "default"},
        {**own, "project_id": None},
        {**own, "resource_limit": 2**31},
    ):
        assert post(identity, "limits", wrong).status_code == 400, wrong
    assert post(identity, "limits", own).status_code == 201
    assert post(identity, "limits", own).status_code == 409
    for plural in ("limits", "registered_limits"):
        assert post(identity, plural).status_code == 400
        assert identity.request("POST", f"/v3/{plural}", json={plural: {}}).status_code == 400


def test_limits_are_shown_to_own_project_and_written_by_admin_only(
    identity: Any, service: str
) -> None:
    post(identity, "registered_limits", new_registered_limit(service))
    response = post(
        identity,
        "limits",
        new_limit(identity, service),
        new_limit(identity, service, project="service"),
    )
    mine, others = (f"/v3/limits/{row['id']}" for row in response.json["limits"])
    user = identity.request(
        "POST", "/v3/users", json={"user": {"name": "limited", "password": "limited"}}
    ).json["user"]
    project = identity.request("GET", "/v3/projects?name=admin").json["projects"][0]["id"]
    member = identity.request("GET", "/v3/roles?name=member").json["roles"][0]["id"]
    identity.request("PUT", f"/v3/projects/{project}/users/{user['id']}/roles/{member}")
    token = identity.login(PROJECT, name="limited", password="limited").headers["X-Subject-Token"]
    assert identity.request("GET", mine, token=token).status_code == 200
    foreign, missing = (
        identity.request("GET", path, token=token) for path in (others, f"/v3/limits/{'0' * 32}")
    )
    assert foreign.status_code == missing.status_code == 404
    assert foreign.text.replace(response.json["limits"][1]["id"], "0" * 32) == missing.text
    path = f"/v3/limits?service_id={service}"
    assert [
        row["project_id"] for row in identity.request("GET", path, token=token).json["limits"]
    ] == [project]
    registered_path = f"/v3/registered_limits?service_id={service}"
    assert len(identity.request("GET", registered_path, token=token).json["registered_limits"]) == 1
    assert identity.request("GET", "/v3/limits/model", token=token).json["model"]["name"] == "flat"
    assert post(identity, "limits", new_limit(identity, service), token=token).status_code == 403
    assert (
        post(
            identity, "registered_limits", new_registered_limit(service, "x"), token=token
        ).status_code
        == 403
    )
    for method in ("PATCH", "DELETE"):
        assert identity.request(method, mine, token=token, json={"limit": {}}).status_code == 403
    services = identity.login({"system": {"all": True}}, name="kilonova").headers["X-Subject-Token"]
    assert len(identity.request("GET", path, token=services).json["limits"]) == 2
    assert identity.request("GET", f"/v3/services/{service}", token=services).status_code == 200
    assert identity.request("GET", f"/v3/services/{service}", token=token).status_code == 403
    assert post(identity, "limits", new_limit(identity, service), token=services).status_code == 403


def test_limits_are_deleted_with_their_project_or_service(identity: Any, service: str) -> None:
    post(identity, "registered_limits", new_registered_limit(service))
    identity.request("POST", "/v3/projects", json={"project": {"name": "leaving"}})
    body = new_limit(identity, service, project="leaving")
    assert post(identity, "limits", body).status_code == 201
    assert identity.request("DELETE", f"/v3/projects/{body['project_id']}").status_code == 204
    assert identity.request("GET", f"/v3/limits?service_id={service}").json["limits"] == []
    assert identity.request("DELETE", f"/v3/services/{service}").status_code == 204
    path = f"/v3/registered_limits?service_id={service}"
    assert identity.request("GET", path).json["registered_limits"] == []
