# SPDX-License-Identifier: Apache-2.0
"""The image gateway before the standalone image service, as real processes: what a host can do with
what it is sent, and what somebody can who has stolen it."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openstack
import pytest

from common.clients.identity import IdentityClient
from common.clients.image import ImageClient
from common.domain import errors
from common.domain.models import Access
from common.security.image_tickets import LIFETIME, Tickets
from common.security.vault import Vault
from common.service import config
from compute_agent.image_access import ImageGatewayAccess
from compute_api.compute.service import image_client
from conductor.steps.service_clients import ImageService
from tests.contract.image_gateway_rig import HOST, KEY, Process, ask, running
from tests.standalone import Cloud
from tests.waiting import await_true

CONTENT = bytes(range(256)) * 8192  # 2 MiB


@pytest.fixture(scope="module")
def cloud(standalone_cloud: Cloud) -> Cloud:
    return standalone_cloud


@pytest.fixture(scope="module")
def gateway(cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with running(tmp_path_factory.mktemp("gateway"), cloud) as process:
        yield process


@pytest.fixture(scope="module")
def admin(cloud: Cloud) -> Any:
    return openstack.connect(
        load_yaml_config=False,
        load_envvars=False,
        region_name="RegionOne",
        auth={
            "auth_url": cloud.auth_url,
            "username": "admin",
            "password": cloud.admin_password,
            "project_name": "admin",
            "user_domain_id": "default",
            "project_domain_id": "default",
        },
    )


@pytest.fixture(scope="module")
def service(admin: Any) -> ImageClient:
    return ImageClient(admin.session.get_endpoint(service_type="image"))


def make(admin: Any, service: ImageClient, content: bytes | None = CONTENT) -> str:
    """A private image of another project; without content it waits for its bytes."""
    image, token = str(uuid.uuid4()), admin.session.get_token()
    service.create(
        {
            "id": image,
            "name": "private",
            "owner": uuid.uuid4().hex,
            "disk_format": "raw",
            "container_format": "bare",
            "visibility": "private",
        },
        token,
    )
    if content is not None:
        service.upload(image, token, [content])
    return image


def status(admin: Any, service: ImageClient, image: str) -> str:
    return service.show(image, admin.session.get_token()).status


def test_a_host_reads_the_image_of_its_command(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    image = make(admin, service)
    access = gateway.to_read(image)
    assert b"".join(ImageGatewayAccess().download(access, image)) == CONTENT
    answer = ask("GET", f"{access.url}/v2/images/{image}/file", access.token)
    assert (answer.headers["Content-Length"], "Transfer-Encoding" in answer.headers) == (
        str(len(CONTENT)),
        False,
    )
    record = ask("GET", f"{access.url}/v2/images/{image}", access.token).json()
    assert (record["status"], record["size"], record["os_hash_value"]) == (
        "active",
        len(CONTENT),
        hashlib.sha512(CONTENT).hexdigest(),
    )
    assert not {"owner", "name", "locations", "direct_url"} & set(record)


def test_a_host_stores_the_image_of_its_command(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    image = make(admin, service, None)
    access = gateway.to_write(image)
    ImageGatewayAccess().upload(access, image, iter([CONTENT, CONTENT]))
    found = service.show(image, admin.session.get_token())
    assert (found.status, found.ref.hash_value) == (
        "active",
        hashlib.sha512(CONTENT * 2).hexdigest(),
    )
    # its answer was lost; the bytes are there
    ImageGatewayAccess().upload(access, image, iter([CONTENT] * 3))


def test_what_a_host_is_sent_opens_nothing_else(
    gateway: Process, cloud: Cloud, admin: Any, service: ImageClient
) -> None:
    """All that a host's token opened before there was a gateway, and more, asked at each neighbour
    in turn."""
    image, other, waits = make(admin, service), make(admin, service), make(admin, service, None)
    read, write = gateway.to_read(image).token, gateway.to_write(waits).token
    here, tried = f"{gateway.url}/v2/images", []
    for token in (read, write):
        tried += [
            (401, ask("GET", f"{here}/{other}", token)),
            (401, ask("GET", f"{here}/{other}/file", token)),
            (401, ask("PUT", f"{here}/{other}/file", token, data=b"x")),
        ]
        for url in (
            f"{cloud.auth_url}/users",
            f"{cloud.auth_url}/projects",
            f"{cloud.auth_url}/auth/tokens",
            f"{cloud.image_url}/v2/images",
            f"{cloud.image_url}/v2/images/{image}",
            f"{cloud.image_url}/v2/images/{image}/file",
        ):
            tried.append((401, ask("GET", url, token)))
        for method, path in (
            ("GET", ""),
            ("POST", ""),
            ("GET", "?owner=all"),
            ("DELETE", f"/{image}"),
            ("PATCH", f"/{image}"),
            ("PUT", f"/{image}"),
            ("POST", f"/{image}/file"),
            ("DELETE", f"/{image}/file"),
            ("HEAD", f"/{image}/file"),
            ("OPTIONS", f"/{image}"),
            ("GET", f"/{image}/members"),
            ("GET", f"/{image}/file/"),
            ("GET", f"/{image}/"),
            ("GET", f"/{image}%2F..%2F{other}"),
            ("GET", f"/{image}/../{other}/x"),
        ):
            tried.append((404, ask(method, f"{here}{path}", token)))
        tried += [
            (404, ask("GET", f"{gateway.url}{path}", token))
            for path in ("/", "/v2", "/v3/users", "/servers")
        ]
    tried += [
        (401, ask("PUT", f"{here}/{image}/file", read, data=b"x")),
        (401, ask("GET", f"{here}/{waits}/file", write)),
        (401, ask("GET", f"{here}/{image}/file", write)),
    ]
    assert [
        (answer.request.method, answer.url, answer.status_code)
        for wanted, answer in tried
        if answer.status_code != wanted
    ] == []
    assert not any(CONTENT[:100] in answer.content for _, answer in tried)
    assert (status(admin, service, waits), status(admin, service, image)) == ("queued", "active")


def test_tickets_that_are_old_or_forged_open_nothing(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    image = make(admin, service)
    url = f"{gateway.url}/v2/images/{image}/file"
    old = Tickets(Vault(KEY), lambda: time.time() - LIFETIME - 1).make(HOST, [image])
    forged = Tickets(Vault("a guess")).make(HOST, [image])
    good = gateway.to_read(image).token
    for token in (
        old,
        forged,
        good[:-1],
        "",
        "é".encode().decode("latin-1"),
        admin.session.get_token(),
    ):
        assert ask("GET", url, token).status_code == 401
    assert ask("GET", url, good).status_code == 200
    for token in (old, forged):  # the command is sent again, with a new ticket
        with pytest.raises(errors.Unavailable, match="ticket"):
            list(ImageGatewayAccess().download(Access(gateway.url, token), image))
        with pytest.raises(errors.Unavailable, match="ticket"):
            ImageGatewayAccess().upload(Access(gateway.url, token), image, iter([b"x"]))


def test_the_log_says_who_was_refused_and_no_ticket(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    image, other = make(admin, service), make(admin, service)
    tickets = [gateway.to_read(image).token, gateway.to_write(other).token]
    for token in tickets:
        ask("GET", f"{gateway.url}/v2/images/{other}/file", token)
        ask("GET", f"{gateway.url}/{token}?token={token}", token)
    said = gateway.log()
    assert f"refused GET of image {other} to host '{HOST}'" in said
    assert not any(token in said or token.partition(".")[2] in said for token in tickets)


def test_an_upload_that_breaks_off_leaves_no_image(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    class Cancelled(Exception):
        """What a verb that is cancelled raises."""

    def chunks() -> Iterator[bytes]:
        yield from [CONTENT] * 2
        raise Cancelled

    image = make(admin, service, None)
    for _ in range(4):  # nobody else's images wait for a host that breaks off
        with pytest.raises(Cancelled):
            ImageGatewayAccess().upload(gateway.to_write(image), image, chunks())

    def takes_bytes() -> bool:  # once the last of those that broke off has been given up
        with suppress(errors.Conflict):
            ImageGatewayAccess().upload(gateway.to_write(image), image, iter([CONTENT]))
            return True
        return False

    await_true(takes_bytes, 20, lambda: status(admin, service, image))
    assert status(admin, service, image) == "active"


def test_refusals_of_the_image_service_reach_the_host(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    """Also when it refuses in the middle of an image that is larger than what any buffer holds."""
    full, large, gone = make(admin, service), make(admin, service, None), str(uuid.uuid4())
    write, size = gateway.to_write(full), len(CONTENT)
    answer = ask(
        "PUT", f"{gateway.url}/v2/images/{full}/file", write.token, data=iter([CONTENT] * 32)
    )
    assert answer.status_code == 409, answer.text
    with pytest.raises(errors.TooLarge, match="at most 8388608"):  # what this image service takes
        ImageGatewayAccess().upload(
            gateway.to_write(large), large, iter([CONTENT] * (8_388_608 // size + 1))
        )
    with pytest.raises(errors.NotFound):
        list(ImageGatewayAccess().download(gateway.to_read(gone), gone))
    with pytest.raises(errors.NotFound):
        ImageGatewayAccess().upload(gateway.to_write(gone), gone, iter([CONTENT]))
    with pytest.raises(errors.NotFound):
        list(ImageGatewayAccess().download(gateway.to_read(large), large))  # it has no bytes yet


@pytest.fixture(scope="module")
def lesser(cloud: Cloud, admin: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A gateway whose own user may validate tokens and no more."""
    project = admin.identity.find_project("service")
    user = admin.identity.create_user(
        name="lesser", password="secret", default_project_id=project.id
    )
    for role in ("service", "reader"):
        admin.identity.assign_project_role_to_user(project, user, admin.identity.find_role(role))
    with running(
        tmp_path_factory.mktemp("lesser"), cloud, user="lesser", password="secret"
    ) as process:
        yield process


NAMED = r"lesser of project service \(reader, service\), needs the role admin"


def test_a_missing_role_is_told_from_a_missing_image(
    lesser: Process, gateway: Process, admin: Any, service: ImageClient
) -> None:
    image = make(admin, service)
    with pytest.raises(errors.NotFound, match=f"could not be found.*{NAMED}"):
        ImageService(IdentityClient(config.load(str(lesser.conf)))).show(image)
    with pytest.raises(errors.Forbidden, match=NAMED):
        ImageService(IdentityClient(config.load(str(lesser.conf)))).create(
            {
                "id": str(uuid.uuid4()),
                "name": "snap",
                "owner": "p" * 32,
                "disk_format": "raw",
                "container_format": "bare",
                "visibility": "private",
            }
        )
    answer = ask("GET", f"{lesser.url}/v2/images/{image}/file", lesser.to_read(image).token)
    assert answer.status_code == 404 and "needs the role admin" in answer.text
    with pytest.raises(errors.NotFound) as gone:
        ImageService(IdentityClient(config.load(str(gateway.conf)))).show(str(uuid.uuid4()))
    assert "role" not in gone.value.text


def test_an_image_that_hosts_will_not_get_is_refused_at_once(
    lesser: Process, gateway: Process, admin: Any, service: ImageClient
) -> None:
    """What the API does with each image that a tenant names."""
    image, token = make(admin, service), admin.session.get_token()
    with pytest.raises(errors.Forbidden, match=NAMED):
        _api(lesser).show(image, token)
    assert _api(gateway).show(image, token).visibility == "private"
    service.change(image, {"visibility": "public"}, token)
    assert _api(lesser).show(image, token).ref.id == image
    with pytest.raises(errors.BadRequest, match="Can not find requested image"):
        _api(lesser).show(str(uuid.uuid4()), token)
    service.delete(image, token)  # All tests of the shared cloud would see a public image.


def _api(process: Process) -> ImageClient:
    conf = config.load(str(process.conf))
    found: ImageClient = image_client(IdentityClient(conf))
    return found
