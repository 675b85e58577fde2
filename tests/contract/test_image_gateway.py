# SPDX-License-Identifier: Apache-2.0
"""The image gateway before the embedded image service, both as real processes.

The tests use a host's ticket for the right image and, as a thief would, for everything else.
"""

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
from tests.contract.image_gateway_rig import HOST, KEY, Process, running, send_request
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


def create_image(admin: Any, service: ImageClient, content: bytes | None = CONTENT) -> str:
    """Create a private image of another project. Without content the image stays queued."""
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


def image_status(admin: Any, service: ImageClient, image: str) -> str:
    return service.show(image, admin.session.get_token()).status


def test_image_gateway_lets_host_download_image_of_its_ticket(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    image = create_image(admin, service)
    access = gateway.read_access(image)
    assert b"".join(ImageGatewayAccess().download(access, image)) == CONTENT
    answer = send_request("GET", f"{access.url}/v2/images/{image}/file", access.token)
    assert (answer.headers["Content-Length"], "Transfer-Encoding" in answer.headers) == (
        str(len(CONTENT)),
        False,
    )
    record = send_request("GET", f"{access.url}/v2/images/{image}", access.token).json()
    assert (record["status"], record["size"], record["os_hash_value"]) == (
        "active",
        len(CONTENT),
        hashlib.sha512(CONTENT).hexdigest(),
    )
    assert not {"owner", "name", "locations", "direct_url"} & set(record)


def test_image_gateway_lets_host_upload_image_of_its_ticket(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    image = create_image(admin, service, None)
    access = gateway.write_access(image)
    ImageGatewayAccess().upload(access, image, iter([CONTENT, CONTENT]))
    stored = service.show(image, admin.session.get_token())
    assert (stored.status, stored.ref.hash_value) == (
        "active",
        hashlib.sha512(CONTENT * 2).hexdigest(),
    )
    # A repeated upload succeeds, because the first answer may have been lost.
    ImageGatewayAccess().upload(access, image, iter([CONTENT] * 3))


def test_image_gateway_ticket_opens_no_other_image_or_service(
    gateway: Process, cloud: Cloud, admin: Any, service: ImageClient
) -> None:
    """Try the requests that a host's token allowed before there was a gateway, and others."""
    image, other, waits = (
        create_image(admin, service),
        create_image(admin, service),
        create_image(admin, service, None),
    )
    read, write = gateway.read_access(image).token, gateway.write_access(waits).token
    here, attempts = f"{gateway.url}/v2/images", []
    for token in (read, write):
        attempts += [
            (401, send_request("GET", f"{here}/{other}", token)),
            (401, send_request("GET", f"{here}/{other}/file", token)),
            (401, send_request("PUT", f"{here}/{other}/file", token, data=b"x")),
        ]
        for url in (
            f"{cloud.auth_url}/users",
            f"{cloud.auth_url}/projects",
            f"{cloud.auth_url}/auth/tokens",
            f"{cloud.image_url}/v2/images",
            f"{cloud.image_url}/v2/images/{image}",
            f"{cloud.image_url}/v2/images/{image}/file",
        ):
            attempts.append((401, send_request("GET", url, token)))
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
            attempts.append((404, send_request(method, f"{here}{path}", token)))
        attempts += [
            (404, send_request("GET", f"{gateway.url}{path}", token))
            for path in ("/", "/v2", "/v3/users", "/servers")
        ]
    attempts += [
        (401, send_request("PUT", f"{here}/{image}/file", read, data=b"x")),
        (401, send_request("GET", f"{here}/{waits}/file", write)),
        (401, send_request("GET", f"{here}/{image}/file", write)),
    ]
    assert [
        (answer.request.method, answer.url, answer.status_code)
        for status_code, answer in attempts
        if answer.status_code != status_code
    ] == []
    assert not any(CONTENT[:100] in answer.content for _, answer in attempts)
    assert (image_status(admin, service, waits), image_status(admin, service, image)) == (
        "queued",
        "active",
    )


def test_image_gateway_returns_401_for_expired_or_forged_ticket(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    image = create_image(admin, service)
    url = f"{gateway.url}/v2/images/{image}/file"
    old = Tickets(Vault(KEY), lambda: time.time() - LIFETIME - 1).make(HOST, [image])
    forged = Tickets(Vault("a guess")).make(HOST, [image])
    good = gateway.read_access(image).token
    for token in (
        old,
        forged,
        good[:-1],
        "",
        "é".encode().decode("latin-1"),
        admin.session.get_token(),
    ):
        assert send_request("GET", url, token).status_code == 401
    assert send_request("GET", url, good).status_code == 200
    for token in (old, forged):  # Unavailable, so the command is sent again with a new ticket.
        with pytest.raises(errors.Unavailable, match="ticket"):
            list(ImageGatewayAccess().download(Access(gateway.url, token), image))
        with pytest.raises(errors.Unavailable, match="ticket"):
            ImageGatewayAccess().upload(Access(gateway.url, token), image, iter([b"x"]))


def test_image_gateway_log_names_refused_host_and_no_ticket(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    image, other = create_image(admin, service), create_image(admin, service)
    tickets = [gateway.read_access(image).token, gateway.write_access(other).token]
    for token in tickets:
        send_request("GET", f"{gateway.url}/v2/images/{other}/file", token)
        send_request("GET", f"{gateway.url}/{token}?token={token}", token)
    log = gateway.log()
    assert f"a request is refused method=GET image={other} host={HOST} problem=" in log
    assert not any(token in log or token.partition(".")[2] in log for token in tickets)


def test_image_gateway_interrupted_upload_can_be_repeated(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    class Cancelled(Exception):
        """Raised by a cancelled verb."""

    def chunks() -> Iterator[bytes]:
        yield from [CONTENT] * 2
        raise Cancelled

    image = create_image(admin, service, None)
    for _ in range(4):  # An interrupted upload does not block later uploads.
        with pytest.raises(Cancelled):
            ImageGatewayAccess().upload(gateway.write_access(image), image, chunks())

    def is_uploaded() -> bool:  # True once the gateway has given up the interrupted uploads.
        with suppress(errors.Conflict):
            ImageGatewayAccess().upload(gateway.write_access(image), image, iter([CONTENT]))
            return True
        return False

    await_true(is_uploaded, 20, lambda: image_status(admin, service, image))
    assert image_status(admin, service, image) == "active"


def test_image_gateway_passes_refusals_of_image_service_to_host(
    gateway: Process, admin: Any, service: ImageClient
) -> None:
    """This includes a refusal in the middle of an image that is larger than every buffer."""
    full, large, missing = (
        create_image(admin, service),
        create_image(admin, service, None),
        str(uuid.uuid4()),
    )
    write, size = gateway.write_access(full), len(CONTENT)
    answer = send_request(
        "PUT", f"{gateway.url}/v2/images/{full}/file", write.token, data=iter([CONTENT] * 32)
    )
    assert answer.status_code == 409, answer.text
    with pytest.raises(errors.TooLarge, match="at most 8388608"):  # limit of this image service
        ImageGatewayAccess().upload(
            gateway.write_access(large), large, iter([CONTENT] * (8_388_608 // size + 1))
        )
    with pytest.raises(errors.NotFound):
        list(ImageGatewayAccess().download(gateway.read_access(missing), missing))
    with pytest.raises(errors.NotFound):
        ImageGatewayAccess().upload(gateway.write_access(missing), missing, iter([CONTENT]))
    with pytest.raises(errors.NotFound):
        list(ImageGatewayAccess().download(gateway.read_access(large), large))  # No data yet.


@pytest.fixture(scope="module")
def limited_gateway(
    cloud: Cloud, admin: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """Yield a gateway with a service user that may only validate tokens."""
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


MISSING_ROLE = r"lesser of project service \(reader, service\), needs the role admin"


def test_image_service_error_names_missing_role_only_if_missing(
    limited_gateway: Process, gateway: Process, admin: Any, service: ImageClient
) -> None:
    image = create_image(admin, service)
    with pytest.raises(errors.NotFound, match=f"could not be found.*{MISSING_ROLE}"):
        ImageService(IdentityClient(config.load(str(limited_gateway.conf)))).show(image)
    with pytest.raises(errors.Forbidden, match=MISSING_ROLE):
        ImageService(IdentityClient(config.load(str(limited_gateway.conf)))).create(
            {
                "id": str(uuid.uuid4()),
                "name": "snap",
                "owner": "p" * 32,
                "disk_format": "raw",
                "container_format": "bare",
                "visibility": "private",
            }
        )
    answer = send_request(
        "GET",
        f"{limited_gateway.url}/v2/images/{image}/file",
        limited_gateway.read_access(image).token,
    )
    assert answer.status_code == 404 and "needs the role admin" in answer.text
    with pytest.raises(errors.NotFound) as caught:
        ImageService(IdentityClient(config.load(str(gateway.conf)))).show(str(uuid.uuid4()))
    assert "role" not in caught.value.text


def test_image_lookup_is_refused_when_service_user_may_not_read_image(
    limited_gateway: Process, gateway: Process, admin: Any, service: ImageClient
) -> None:
    """The API makes this check for each image that a tenant names."""
    image, token = create_image(admin, service), admin.session.get_token()
    with pytest.raises(errors.Forbidden, match=MISSING_ROLE):
        api_image_client(limited_gateway).show(image, token)
    assert api_image_client(gateway).show(image, token).visibility == "private"
    service.change(image, {"visibility": "public"}, token)
    assert api_image_client(limited_gateway).show(image, token).ref.id == image
    with pytest.raises(errors.BadRequest, match="Can not find requested image"):
        api_image_client(limited_gateway).show(str(uuid.uuid4()), token)
    service.delete(image, token)  # All tests of the shared cloud would see a public image.


def api_image_client(process: Process) -> ImageClient:
    conf = config.load(str(process.conf))
    client: ImageClient = image_client(IdentityClient(conf))
    return client
