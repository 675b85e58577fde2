# SPDX-License-Identifier: Apache-2.0
"""The embedded identity service as a real process.

python-openstackclient, openstacksdk and keystonemiddleware use it unmodified. ``requests`` sends
malformed and unauthorized requests.
"""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openstack
import pytest
import requests
from keystoneauth1 import exceptions as auth_errors
from keystoneauth1 import session as auth_session
from keystoneauth1.identity import v3
from keystonemiddleware.auth_token import AuthProtocol
from oslo_config.cfg import ConfigOpts
from webob import Request, Response

from tests.standalone import Cloud, connect, running


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with running(tmp_path_factory.mktemp("standalone"), with_image=False) as running_cloud:
        yield running_cloud
    assert "status=500" not in (running_cloud.folder / "identity.log").read_text()


@pytest.fixture(scope="module")
def admin(cloud: Cloud) -> Any:
    return connect(cloud, "admin", cloud.admin_password, "admin")


class Person:
    """A user with a role in a new project."""

    def __init__(self, admin: Any, role: str = "member") -> None:
        self.name, self.password = f"user-{uuid.uuid4().hex[:8]}", "correct horse"
        self.project = admin.identity.create_project(
            name=f"project-{uuid.uuid4().hex[:8]}", domain_id="default"
        )
        self.user = admin.identity.create_user(
            name=self.name, password=self.password, domain_id="default"
        )
        self.role = admin.identity.find_role(role)
        admin.identity.assign_project_role_to_user(self.project, self.user, self.role)

    def connect(self, cloud: Cloud) -> Any:
        return connect(cloud, self.name, self.password, self.project.name)


# Real clients


def test_openstackclient_runs_identity_commands(cloud: Cloud) -> None:
    token, catalogue, projects, users, project, user, listed, services = cloud.openstack(
        "token issue -f json",
        "catalog list -f json",
        "project list -f json",
        "user list -f json",
        "project create --domain default --description d --property a=b cli -f json",
        "user create --domain default --project cli --password x --email e@example.org cli -f json",
        "role add --user cli --project cli member",
        "role list -f json",
        "service list -f json",
        "project set --name cli2 cli",
        "project delete cli2",
        "user delete cli",
    )
    assert token["project_id"] and token["user_id"]
    assert {entry["Type"] for entry in catalogue} == {"identity", "image"}
    assert {entry["Name"] for entry in projects} == {"admin", "service"}
    assert {"admin", "kilonova"} <= {entry["Name"] for entry in users}
    assert (project["name"], project["a"], user["email"]) == ("cli", "b", "e@example.org")
    assert {entry["Name"] for entry in listed} == {
        "admin",
        "manager",
        "member",
        "reader",
        "service",
    }
    assert {entry["Type"] for entry in services} == {"identity", "image"}


@pytest.mark.slice("operations")
def test_openstackclient_creates_changes_and_deletes_limits(cloud: Cloud) -> None:
    def rows_named(rows: Any, name: str) -> list[Any]:
        return [row for row in rows if row["Resource Name"] == name]

    [limit] = cloud.openstack(
        "registered limit create --service glance --region RegionOne --default-limit 10 images -f json"
    )
    assert (limit["default_limit"], limit["region_id"], limit["resource_name"]) == (
        10,
        "RegionOne",
        "images",
    )
    changed, own, defaults, limits = cloud.openstack(
        f"registered limit set --default-limit 20 --description more {limit['id']} -f json",
        "limit create --project admin --service glance --region RegionOne --resource-limit 7 images -f json",
        "registered limit list --service glance --resource-name images -f json",
        "limit list --service glance -f json",
    )
    assert (changed["default_limit"], changed["description"]) == (20, "more")
    assert rows_named(defaults, "images")[0]["Default Limit"] == 20
    assert rows_named(limits, "images")[0]["Resource Limit"] == own["resource_limit"] == 7
    less, limit_record, *_ = cloud.openstack(
        f"limit set --resource-limit -1 {own['id']} -f json",
        f"limit show {own['id']} -f json",
        f"limit delete {own['id']}",
        f"registered limit delete {limit['id']}",
    )
    assert less["resource_limit"] == limit_record["resource_limit"] == -1
    assert cloud.openstack("registered limit list -f json", "limit list -f json") == [[], []]


def test_openstacksdk_creates_and_deletes_domain_region_endpoint_and_role(
    cloud: Cloud, admin: Any
) -> None:
    identity = admin.identity
    domain = identity.create_domain(name=f"domain-{uuid.uuid4().hex[:8]}")
    project = identity.create_project(name="same name", domain_id=domain.id)
    assert identity.find_project("same name", domain_id=domain.id).id == project.id
    region = identity.create_region(id="RegionTwo", description="second")
    service = identity.create_service(name="cinder", type="block-storage")
    endpoint = identity.create_endpoint(
        service_id=service.id,
        interface="public",
        region_id=region.id,
        url="http://volume/v3/$(project_id)s",
    )
    login = v3.Password(
        cloud.auth_url,
        username="admin",
        password=cloud.admin_password,
        user_domain_id="default",
        project_id=admin.current_project_id,
    )
    catalog = login.get_access(auth_session.Session()).service_catalog.catalog
    entries = {entry["type"]: entry for entry in catalog}
    assert entries["block-storage"]["endpoints"][0]["url"].endswith(admin.current_project_id)
    assert identity.update_endpoint(endpoint, is_enabled=False).is_enabled is False
    role = identity.create_role(name=f"role-{uuid.uuid4().hex[:8]}")
    identity.assign_domain_role_to_user(domain, admin.current_user_id, role)
    path = f"{cloud.auth_url}/domains/{domain.id}/users/{admin.current_user_id}/roles"
    assert [assigned["id"] for assigned in admin.session.get(path).json()["roles"]] == [role.id]
    for noun, row in (
        ("endpoint", endpoint),
        ("service", service),
        ("region", region),
        ("role", role),
    ):
        getattr(identity, f"delete_{noun}")(row, ignore_missing=False)
    with pytest.raises(openstack.exceptions.ForbiddenException, match="disabled before"):
        identity.delete_domain(domain)
    identity.update_domain(domain, is_enabled=False)
    identity.delete_domain(domain, ignore_missing=False)
    assert identity.find_project(project.id) is None


@pytest.mark.parametrize(
    "scope", [{"project_name": "admin", "project_domain_name": "Default"}, {"unscoped": True}, {}]
)
def test_token_is_exchanged_for_other_scope_with_same_expiry(
    cloud: Cloud, scope: dict[str, Any]
) -> None:
    first = v3.Password(
        cloud.auth_url, username="admin", password=cloud.admin_password, user_domain_name="Default"
    )
    access = first.get_access(auth_session.Session())
    assert access.project_id is None
    second = v3.Token(cloud.auth_url, token=access.auth_token, **scope).get_access(
        auth_session.Session()
    )
    assert (second.project_id is not None) is ("project_name" in scope)
    assert second.expires == access.expires


def test_domain_scoped_token_contains_implied_roles(cloud: Cloud, admin: Any) -> None:
    person = Person(admin, "manager")
    assert person.connect(cloud).session.auth.get_access(auth_session.Session()).role_names == [
        "manager",
        "member",
        "reader",
    ]
    admin.identity.assign_domain_role_to_user("default", person.user, person.role)
    scoped = v3.Password(
        cloud.auth_url,
        username=person.name,
        password=person.password,
        user_domain_id="default",
        domain_id="default",
    ).get_access(auth_session.Session())
    assert (scoped.domain_id, scoped.project_id) == ("default", None)
    assert scoped.role_names == ["manager", "member", "reader"]


def test_system_scoped_token_requires_system_role(cloud: Cloud, admin: Any) -> None:
    person = Person(admin, "manager")
    admin.identity.assign_system_role_to_user(person.user, person.role, "all")
    login = v3.Password(
        cloud.auth_url,
        username=person.name,
        password=person.password,
        user_domain_id="default",
        system_scope="all",
    )
    scoped = login.get_access(auth_session.Session())
    assert (scoped.system_scoped, scoped.project_id, scoped.domain_id) == (True, None, None)
    assert scoped.role_names == ["manager", "member", "reader"]
    admin.identity.unassign_system_role_from_user(person.user, person.role, "all")
    login.invalidate()
    with pytest.raises(auth_errors.Unauthorized):
        login.get_access(auth_session.Session())


def new_middleware(cloud: Cloud) -> AuthProtocol:
    def show_identity(environ: dict[str, Any], start_response: Any) -> Any:
        names = ("HTTP_X_USER_ID", "HTTP_X_PROJECT_ID", "HTTP_X_ROLES", "HTTP_X_USER_NAME")
        return Response(json={name: environ.get(name) for name in names})(environ, start_response)

    options = ConfigOpts()  # a separate object without the options of Kilonova
    options([], project="test", default_config_files=[], default_config_dirs=[])
    return AuthProtocol(
        show_identity,
        {
            "oslo_config_config": options,
            "auth_type": "password",
            "auth_url": cloud.auth_url,
            "username": "kilonova",
            "project_name": "service",
            "password": cloud.service_password,
            "user_domain_id": "default",
            "project_domain_id": "default",
            "www_authenticate_uri": cloud.auth_url,
            "token_cache_time": -1,
        },
    )


def test_keystonemiddleware_validates_token_until_revocation(cloud: Cloud, admin: Any) -> None:
    person, middleware = Person(admin), new_middleware(cloud)
    connection = person.connect(cloud)
    token = connection.session.get_token()

    def send(secret: str) -> Response:
        return Request.blank("/", headers={"X-Auth-Token": secret}).get_response(middleware)

    assert send(token).json == {
        "HTTP_X_USER_ID": person.user.id,
        "HTTP_X_PROJECT_ID": person.project.id,
        "HTTP_X_ROLES": "member,reader",
        "HTTP_X_USER_NAME": person.name,
    }
    assert send("nonsense").status_int == 401
    connection.session.delete(f"{cloud.auth_url}/auth/tokens", headers={"X-Subject-Token": token})
    assert send(token).status_int == 401


# Validity of tokens


@pytest.mark.parametrize(
    "change",
    [
        "disable user",
        "disable project",
        "take the role",
        "delete user",
        "delete project",
        "admin sets password",
    ],
)
def test_token_is_invalid_after_user_project_or_role_changes(
    cloud: Cloud, admin: Any, change: str
) -> None:
    person = Person(admin)
    token = person.connect(cloud).session.get_token()
    identity, headers = admin.identity, {"X-Auth-Token": token}
    assert (
        requests.get(f"{cloud.auth_url}/auth/projects", headers=headers, timeout=20).status_code
        == 200
    )
    if change == "disable user":
        identity.update_user(person.user, is_enabled=False)
    elif change == "disable project":
        identity.update_project(person.project, is_enabled=False)
    elif change == "take the role":
        identity.unassign_project_role_from_user(person.project, person.user, person.role)
    elif change == "delete user":
        identity.delete_user(person.user, ignore_missing=False)
    elif change == "delete project":
        identity.delete_project(person.project, ignore_missing=False)
    else:
        identity.update_user(person.user, password="another")
    assert (
        requests.get(f"{cloud.auth_url}/auth/projects", headers=headers, timeout=20).status_code
        == 401
    )
    validation = admin.session.get(
        f"{cloud.auth_url}/auth/tokens", headers={"X-Subject-Token": token}, raise_exc=False
    )
    assert validation.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/projects", None),
        ("GET", "/users", None),
        ("POST", "/projects", {"project": {"name": "mine"}}),
        ("PATCH", "/users/{user}", {"user": {"name": "x"}}),
        ("PUT", "/projects/{project}/users/{user}/roles/{admin_role}", None),
        ("GET", "/users/{other}", None),
        ("GET", "/users/{other}/projects", None),
        ("POST", "/roles", {"role": {"name": "root"}}),
    ],
)
def test_identity_admin_request_of_member_returns_403(
    cloud: Cloud, admin: Any, method: str, path: str, body: Any
) -> None:
    person = Person(admin)
    url = cloud.auth_url + path.format(
        user=person.user.id,
        project=person.project.id,
        other=admin.current_user_id,
        admin_role=admin.identity.find_role("admin").id,
    )
    headers = {"X-Auth-Token": person.connect(cloud).session.get_token()}
    assert requests.request(method, url, json=body, headers=headers, timeout=20).status_code == 403
    assert requests.request(method, url, json=body, timeout=20).status_code == 401
    own = requests.get(
        f"{cloud.auth_url}/users/{person.user.id}", headers=headers, timeout=20
    ).json()["user"]
    assert own["name"] == person.name
    assert not {"password", "password_hash"} & own.keys()


# Hostile input


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'"\\ud800"', 400),
        (b"[" * 100_000, 400),
        (b"[]", 400),
        (b"{}", 400),
        (b'{"auth": "' + b"x" * 300_000 + b'"}', 413),
    ],
)
def test_login_with_malformed_body_returns_400_and_with_large_body_413(
    cloud: Cloud, raw: bytes, status: int
) -> None:
    for body in (raw, iter([raw])):  # with a length, and chunked
        answer = requests.post(f"{cloud.auth_url}/auth/tokens", data=body, timeout=20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)


@pytest.mark.parametrize(
    "path",
    [
        "/projects/../../etc/passwd",
        "/projects/%2e%2e%2fetc",
        "/projects/%00",
        "/nothing",
        "/users/'%20OR%201=1--",
        "/projects/" + "x" * 2000,
        "/projects/%ff%0a",
    ],
)
def test_identity_request_with_hostile_or_unknown_path_returns_404(
    cloud: Cloud, admin: Any, path: str
) -> None:
    with requests.Session() as session:
        prepared = requests.Request(
            "GET", cloud.auth_url, headers={"X-Auth-Token": admin.session.get_token()}
        ).prepare()
        prepared.url = cloud.auth_url + path
        assert session.send(prepared, timeout=20).status_code == 404


def test_concurrent_logins_all_return_tokens(cloud: Cloud) -> None:
    def login(_: int) -> str:
        auth = v3.Password(
            cloud.auth_url,
            username="admin",
            password=cloud.admin_password,
            user_domain_id="default",
            project_name="admin",
            project_domain_id="default",
        )
        return str(auth.get_access(auth_session.Session()).auth_token)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(login, range(40)))) == 40


def test_identity_bootstrap_is_repeatable_and_writes_no_secret_to_files(
    cloud: Cloud, admin: Any
) -> None:
    before = [project.id for project in admin.identity.projects()]
    cloud.bootstrap()
    assert [project.id for project in admin.identity.projects()] == before
    token = admin.session.get_token()
    assert (cloud.folder / "identity.db").stat().st_mode & 0o077 == 0
    for path in cloud.folder.glob("identity*"):
        content = path.read_bytes()
        for secret in (token, cloud.admin_password, cloud.service_password):
            assert secret.encode() not in content
