# SPDX-License-Identifier: Apache-2.0
"""Wrong requests: exact status and message, no 500, and no rows."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import falcon.testing
import orjson
import pytest
import sqlalchemy as sa
from gunicorn.http.errors import InvalidChunkSize

from common.domain import ids
from common.domain.models import Flavor
from common.store import schema
from common.store.engine import Store
from common.store.version import UPGRADED_TO, USABLE_FROM, find_needed, guard
from compute_api.placement import app as placement
from tests.api.conftest import IMAGE, Callers, Cloud
from tests.log_lines import logged_fields, rendered_lines

GOOD: dict[str, Any] = {"name": "vm", "imageRef": IMAGE, "flavorRef": "1"}
UNKNOWN = "deadbeef-dead-dead-dead-deaddeadbeef"
NO_NETWORK = (
    'networks: this cloud has no network service; leave networks out, or give "none" or "auto".'
)
NO_VOLUME = (
    "block_device_mapping_v2: this cloud has no volume service. Disks can be the image as local boot disk "
    "(source_type image, destination_type local), or new local disks (source_type blank, destination_type local)."
)


def schema_message(key: str, value: str, text: str) -> str:
    return f"Invalid input for field/attribute {key}. Value: {value}. {text}"


# fmt: off
#: Id of the case, microversion, change of a valid create, status, message.
CREATES: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("unknown key", "2.1", {"colour": "red"}, 400,
     schema_message("server", "{'name': 'vm', 'imageRef': '" + IMAGE + "', 'flavorRef': '1', 'colour': 'red'}",
          "Additional properties are not allowed ('colour' was unexpected)")),
    ("wrong type", "2.1", {"name": 7}, 400, schema_message("name", "7", "7 is not of type 'string'")),
    ("empty name", "2.1", {"name": ""}, 400, schema_message("name", "", "'' should be non-empty")),
    ("white name", "2.1", {"name": " vm"}, 400, schema_message(
        "name", " vm", "' vm' must not be empty, hold only printable characters, and neither begin nor end with white "
        "space")),
    ("no UUID", "2.1", {"imageRef": "cirros"}, 400,
     schema_message("imageRef", "cirros", "'cirros' is not valid under any of the given schemas")),
    ("unknown image", "2.1", {"imageRef": UNKNOWN}, 400, f"Can not find requested image {UNKNOWN}."),
    ("no image", "2.1", {"imageRef": ""}, 400, "Invalid imageRef provided."),
    ("unknown flavor", "2.1", {"flavorRef": "99"}, 400, "Flavor 99 could not be found."),
    ("unknown key pair", "2.1", {"key_name": "nope"}, 400, "Invalid key_name provided."),
    ("networks", "2.1", {"networks": [{"uuid": UNKNOWN}]}, 400, NO_NETWORK),
    ("networks as word, too early", "2.36", {"networks": "none"}, 400,
     schema_message("networks", "none", "'none' is not of type 'array'")),
    ("volume", "2.1", {"block_device_mapping_v2": [
        {"source_type": "volume", "destination_type": "volume", "uuid": UNKNOWN, "boot_index": 0}]}, 400, NO_VOLUME),
    ("old mapping", "2.1", {"block_device_mapping": [{"volume_id": UNKNOWN, "device_name": "/dev/vda"}]}, 400,
     "block_device_mapping: this cloud has no volume service; boot from an image."),
    ("another image as boot disk", "2.1", {"block_device_mapping_v2": [
        {"source_type": "image", "destination_type": "local", "uuid": UNKNOWN, "boot_index": 0}]}, 400,
     "Block Device Mapping is Invalid: Boot sequence for the instance and image/block device mapping combination is "
     "not valid."),
    ("least above most", "2.1", {"min_count": 3, "max_count": 2}, 400, "min_count must be <= max_count"),
    ("too many at once", "2.1", {"min_count": 1, "max_count": "99999"}, 400,
     "max_count must be at most 1000: create the servers in several requests"),
    ("user data", "2.1", {"user_data": "!"}, 400,
     "Invalid input for field/attribute user_data. The value is not repeated here. It is not base64."),
    ("password", "2.1", {"adminPass": 7}, 400,
     "Invalid input for field/attribute adminPass. The value is not repeated here. Its type is not string."),
    ("zone", "2.1", {"availability_zone": "mars"}, 400, "The requested availability zone is not available"),
    ("zone in four parts", "2.1", {"availability_zone": "a:b:c:d"}, 400,
     "Unable to parse availability_zone: give ZONE, ZONE:HOST or ZONE:HOST:NODE."),
    ("host by a tenant", "2.1", {"availability_zone": "nova:host1"}, 403,
     "Policy doesn't allow os_compute_api:servers:create:forced_host to be performed."),
    ("destination by a tenant", "2.74", {"networks": "none", "host": "host1"}, 403,
     "Policy doesn't allow compute:servers:create:requested_destination to be performed."),
    ("metadata items", "2.1", {"metadata": {str(number): "" for number in range(129)}}, 403,
     "Maximum number of metadata items exceeds 128"),
    ("files", "2.1", {"personality": [{"path": f"/{number}", "contents": ""} for number in range(6)]}, 403,
     "Quota exceeded: a request may have at most 5 injected files."),
    ("over quota", "2.1", {"min_count": 11, "max_count": 11}, 403,
     "Quota exceeded for instances: Requested 11, but already used 0 of 10 instances"),
]
# fmt: on
KINDS = {
    400: "badRequest",
    403: "forbidden",
    404: "itemNotFound",
    413: "overLimit",
    415: "badMediaType",
}


@pytest.mark.parametrize(
    ("mv", "change", "status", "message"),
    [row[1:] for row in CREATES],
    ids=[row[0] for row in CREATES],
)
def test_create_server_returns_400_for_invalid_and_403_for_forbidden_field(
    cloud: Cloud, mv: str, change: dict[str, Any], status: int, message: str
) -> None:
    answer = cloud.call("POST", "/servers", {"server": {**GOOD, **change}}, mv=mv)
    assert answer.json == {KINDS[status]: {"code": status, "message": message}}
    assert answer.status_code == status
    assert cloud.rows(schema.servers) == cloud.rows(schema.actions) == []
    assert cloud.wakeup.count == 0


def test_create_server_accepts_name_of_255_letters_and_returns_400_for_256(cloud: Cloud) -> None:
    assert (
        cloud.call("POST", "/servers", {"server": {**GOOD, "name": "x" * 255}}).status_code == 202
    )
    answer = cloud.call("POST", "/servers", {"server": {**GOOD, "name": "x" * 256}})
    text = schema_message("name", "x" * 256, f"'{'x' * 256}' is too long")
    assert answer.json == {"badRequest": {"code": 400, "message": text}}


@pytest.mark.parametrize(
    "raw", [b'{"server": ', b"", b"\xff\xfe", b"[" * 5000, b'{"server": NaN}', b'{"a": "\\ud800"}']
)
def test_create_server_with_malformed_json_returns_400(cloud: Cloud, raw: bytes) -> None:
    answer = cloud.call("POST", "/servers", raw=raw)
    assert answer.status_code == 400
    assert answer.json == {"badRequest": {"code": 400, "message": "Malformed request body"}}


def build_nested_json(levels: int, bracket: str = "{") -> bytes:
    """Return JSON of objects or lists within each other."""
    opening, closing = (b'{"a":', b"}") if bracket == "{" else (b"[", b"]")
    return opening * levels + b"1" + closing * levels


@pytest.mark.parametrize("bracket", "{[")
@pytest.mark.parametrize("levels", [33, 200, 900, 1000])
def test_json_deeper_than_32_levels_returns_400_with_reason(
    cloud: Cloud, levels: int, bracket: str
) -> None:
    server = cloud.create()
    for method, path in (
        ("POST", "/servers"),
        ("POST", f"/servers/{server}/action"),
        ("PUT", f"/servers/{server}/tags"),
        ("POST", "/flavors"),
        ("POST", "/os-aggregates"),
        ("PUT", "/os-quota-sets/x"),
    ):
        answer = cloud.call(
            method, path, raw=build_nested_json(levels, bracket), token="admin", mv="2.26"
        )
        assert (answer.status_code, answer.json) == (
            400,
            {
                "badRequest": {
                    "code": 400,
                    "message": "The request body is nested too deeply: at most 32 levels are accepted.",
                }
            },
        )
    hints = cloud.call(
        "POST",
        "/servers",
        {"server": GOOD, "os:scheduler_hints": {"x": orjson.loads(build_nested_json(29, bracket))}},
    )
    assert hints.status_code in (202, 400)


@pytest.mark.parametrize("bracket", "{[")
def test_placement_json_deeper_than_32_levels_returns_400(cloud: Cloud, bracket: str) -> None:
    client = falcon.testing.TestClient(Callers(placement.create(cloud.store)))
    answer = client.simulate_post(
        "/resource_providers",
        body=build_nested_json(33, bracket),
        headers={"X-Auth-Token": "admin", "Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert "at most 32 levels" in answer.json["errors"][0]["detail"]


@pytest.mark.parametrize(
    "name",
    [
        "☃",
        "a\nb",
        "a\rb: c",
        "\x01",
        "\x7f",
        "\x85",
        "\u2028",
        "\ud7ff",
        "\ufffe",
        "é",
        "%0a",
        "\U0001f600",
    ],
)
def test_unusual_characters_in_names_and_tags_cause_no_500(cloud: Cloud, name: str) -> None:
    server = cloud.create()
    answer_to_tag = cloud.call("PUT", f"/servers/{server}/tags/{quote(name)}", mv="2.26")
    assert answer_to_tag.status_code in (201, 400)
    if answer_to_tag.status_code == 201:
        assert answer_to_tag.headers["Location"].endswith(quote(name))
        assert (
            cloud.call("GET", f"/servers/{server}/tags/{quote(name)}", mv="2.26").status_code == 204
        )
    for method, path, body in (
        ("PUT", f"/servers/{server}", {"server": {"name": name}}),
        ("POST", "/os-keypairs", {"keypair": {"name": name}}),
        ("POST", "/os-server-groups", {"server_group": {"name": name, "policies": ["affinity"]}}),
        ("POST", "/os-aggregates", {"aggregate": {"name": name}}),
        (
            "POST",
            "/flavors",
            {"flavor": {"name": name, "id": name, "ram": 64, "vcpus": 1, "disk": 1}},
        ),
        ("POST", f"/servers/{server}/metadata", {"metadata": {name: name}}),
        (
            "POST",
            f"/servers/{server}/action",
            {"createImage": {"name": name, "metadata": {"a": name}}},
        ),
        ("POST", "/servers", {"server": {**GOOD, "name": name, "metadata": {"a": name}}}),
    ):
        answer = cloud.call(method, path, body, token="admin")
        assert answer.status_code < 500, (path, answer.text)
        assert answer.headers["Content-Type"].startswith("application/json") or not answer.text
    for path in (
        f"/servers/{quote(name)}",
        f"/flavors/{quote(name)}",
        f"/servers?name={quote(name)}",
        f"/os-keypairs/{quote(name)}",
        f"/os-hypervisors/{quote(name)}/search",
    ):
        assert cloud.call("GET", path, token="admin").status_code < 500


@pytest.mark.parametrize(
    "sign", ["\n", "\r\nX-Forged: 1", "\x01", "\x1b[31m", "\x7f", "\x85", "\u2028"]
)
def test_tag_with_control_character_returns_400(cloud: Cloud, sign: str) -> None:
    server = cloud.create()
    path = f"/servers/{server}/tags"
    answer_to_create = cloud.call(
        "POST", "/servers", {"server": {**GOOD, "tags": [f"a{sign}b"]}}, mv="2.52"
    )
    for answer in (
        cloud.call("PUT", f"{path}/{quote(f'a{sign}b', safe='')}", mv="2.26"),
        cloud.call("PUT", path, {"tags": [f"a{sign}b"]}, mv="2.26"),
        answer_to_create,
    ):
        assert answer.status_code == 400
        assert "printable characters" in answer.json["badRequest"]["message"]
    assert cloud.call("GET", path, mv="2.26").json == {"tags": []}


@pytest.mark.parametrize(
    "raw", [b"null", b"[]", b"7", b'"x"', b'{"server": null}', b'{"server": {"name": "a\\u0000"}}']
)
def test_create_server_with_wrong_json_type_or_nul_in_name_returns_400(
    cloud: Cloud, raw: bytes
) -> None:
    assert cloud.call("POST", "/servers", raw=raw).status_code == 400


class Endless(io.BytesIO):
    """A body without end that counts the requested bytes."""

    requested_bytes = 0

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None and size >= 0, "a read must have a size"
        self.requested_bytes += size
        return b" " * size


def test_body_of_10_mib_returns_413_without_a_read(cloud: Cloud) -> None:
    body = Endless()
    answer = cloud.client.simulate_post(
        "/v2.1/servers",
        headers={
            "X-Auth-Token": "user",
            "Content-Type": "application/json",
            "Content-Length": str(10 * 1024**2),
        },
        extras={"wsgi.input": body},
    )
    assert answer.status_code == 413
    assert answer.json == {
        "overLimit": {
            "code": 413,
            "message": "Request is too large: at most 1048576 bytes are accepted.",
        }
    }
    assert answer.headers["Retry-After"] == "0"
    assert body.requested_bytes == 0


def test_body_of_unknown_length_is_read_up_to_limit_and_returns_413(cloud: Cloud) -> None:
    body = Endless()
    answer = cloud.client.simulate_post(
        "/v2.1/servers",
        headers={"X-Auth-Token": "user", "Content-Type": "application/json"},
        extras={"wsgi.input": body, "wsgi.input_terminated": True, "CONTENT_LENGTH": ""},
    )
    assert answer.status_code == 413
    assert body.requested_bytes == 1024**2 + 1


def test_body_with_content_type_xml_returns_415(cloud: Cloud) -> None:
    answer = cloud.call(
        "POST", "/servers", raw=b"<server/>", headers={"Content-Type": "application/xml"}
    )
    assert answer.status_code == 415
    assert answer.json["badMediaType"]["code"] == 415


@pytest.mark.parametrize(
    "media_type", ["application/vnd.openstack.compute+json", "text/plain", "text/plain; charset=x"]
)
def test_json_body_with_media_type_of_nova_or_text_is_accepted(
    cloud: Cloud, media_type: str
) -> None:
    body = b'{"keypair": {"name": "k"}}'
    headers = {"Content-Type": media_type}
    assert cloud.call("POST", "/os-keypairs", raw=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("user_data", "reason"),
    [
        ("a" * 65536, "It has more than 65535 characters."),
        ("no base64!", "It is not base64."),
        (5, "Its type is not string."),
    ],
)
def test_create_server_with_invalid_user_data_returns_400_without_value(
    cloud: Cloud, user_data: object, reason: str
) -> None:
    body = {"server": {"name": "a", "imageRef": IMAGE, "flavorRef": "1", "user_data": user_data}}
    message = cloud.call("POST", "/servers", body).json["badRequest"]["message"]
    assert message == (
        f"Invalid input for field/attribute user_data. The value is not repeated here. {reason}"
    )


@pytest.mark.parametrize("token", [None, "", "forged"])
def test_request_without_valid_token_returns_401(cloud: Cloud, token: str | None) -> None:
    answer = cloud.call("GET", "/servers", token=token)
    assert answer.status_code == 401
    assert answer.json == {
        "unauthorized": {
            "code": 401,
            "message": "The request you have made requires authentication.",
        }
    }


def test_identity_headers_of_client_are_ignored(cloud: Cloud) -> None:
    headers = {"X-User-Id": "a1", "X-Project-Id": "admins", "X-Roles": "admin"}
    assert cloud.call("GET", "/os-services", token=None, headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("PUT", "", {"server": {"name": "mine"}}),
        ("DELETE", "", None),
        ("POST", "/action", {"os-stop": None}),
        ("GET", "/os-instance-actions", None),
        ("GET", "/metadata", None),
        ("GET", "/ips", None),
        ("GET", "/os-interface", None),
        ("POST", "/os-interface", {}),
        ("GET", f"/os-interface/{UNKNOWN}", None),
        ("DELETE", f"/os-interface/{UNKNOWN}", None),
        ("GET", "/os-security-groups", None),
        ("POST", "/action", {"addSecurityGroup": {"name": "default"}}),
    ],
)
def test_foreign_server_returns_404_like_missing_one(
    cloud: Cloud, method: str, path: str, body: Any
) -> None:
    server = cloud.create()
    foreign = cloud.call(method, f"/servers/{server}{path}", body, token="stranger")
    missing = cloud.call(method, f"/servers/{ids.new()}{path}", body, token="stranger")
    assert foreign.status_code == missing.status_code == 404
    assert foreign.json == {
        "itemNotFound": {"code": 404, "message": f"Instance {server} could not be found."}
    }
    assert cloud.call("GET", f"/servers/{server}", token="admin").status_code == 200


@pytest.mark.parametrize(
    ("token", "status"),
    [("user", 202), ("manager", 202), ("admin", 202), ("reader", 403), ("nobody", 403)],
)
def test_create_server_needs_member_role_and_list_servers_any_role(
    cloud: Cloud, token: str, status: int
) -> None:
    assert cloud.call("POST", "/servers", {"server": GOOD}, token=token).status_code == status
    assert cloud.call("GET", "/servers", token=token).status_code == (
        200 if token != "nobody" else 403
    )


def test_unexpected_error_returns_500_without_details_and_is_logged(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    # This breaks the double of the image service.
    cloud.images.images = None  # type: ignore[assignment]
    answer = cloud.call("POST", "/servers", {"server": GOOD})
    assert answer.status_code == 500
    assert answer.json == {
        "computeFault": {
            "code": 500,
            "message": "Unexpected error. Give the request id to your operator.",
        }
    }
    [fields] = logged_fields(caplog, "a request failed unexpectedly")
    assert fields["request"] == answer.headers["X-Compute-Request-Id"]
    assert any("TypeError" in line for line in rendered_lines(caplog))


def test_create_server_returns_503_when_image_service_is_down(cloud: Cloud) -> None:
    cloud.images.down = True
    answer = cloud.call("POST", "/servers", {"server": GOOD})
    assert answer.status_code == 503
    assert answer.json == {
        "serviceUnavailable": {
            "code": 503,
            "message": "The image service does not answer; try again later.",
        }
    }
    assert answer.headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    "path",
    [
        "/servers?limit=x",
        "/servers?limit=-1",
        "/servers?marker=" + UNKNOWN,
        "/servers?name=(",
        "/servers?name=",
        "/servers?sort_key=colour",
        "/servers?sort_key=uuid&sort_dir=up",
        "/servers?changes-since=yesterday",
        "/servers?block_device_mapping=x",
        "/servers?_x=1",
        "/flavors?limit=x",
        "/flavors?marker=nope",
        "/flavors?minRam=x",
        "/flavors?sort_key=colour",
        "/flavors/detail?sort_dir=up",
    ],
)
def test_list_servers_and_flavors_with_invalid_query_return_400(cloud: Cloud, path: str) -> None:
    answer = cloud.call("GET", path)
    assert answer.status_code == 400
    assert answer.json["badRequest"]["code"] == 400


@pytest.mark.parametrize(
    ("path", "field", "mv"),
    [
        ("/flavors?name=", "name", "2.102"),
        ("/servers?name=", "name", "2.1"),
        ("/servers/detail?ip=", "ip", "2.1"),
        ("/servers?tags=", "tags", "2.26"),
    ],
)
def test_expensive_regular_expression_in_query_returns_400_at_once(
    cloud: Cloud, path: str, field: str, mv: str
) -> None:
    # Other processes may use the CPU, so the test counts the time of its own process.
    started = time.process_time()
    answer = cloud.call(
        "GET", path + quote("(?:(?:(?:^){60000}){60000}){60000}"), mv=mv, token="reader"
    )
    assert answer.status_code == 400
    assert f"Invalid input for field/attribute {field}." in answer.json["badRequest"]["message"], (
        answer.json
    )
    assert cloud.call("GET", path + quote("(a+)+$"), mv=mv, token="reader").status_code == 200
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("path", "strict_since"),
    [
        ("/servers", 75),
        ("/servers/detail", 75),
        ("/flavors", 75),
        ("/limits", 75),
        ("/os-keypairs", 75),
        ("/os-services", 75),
        ("/os-hypervisors", 53),
        ("/extensions", 102),
        ("/os-availability-zone", 102),
        ("/flavors/1", 102),
    ],
)
def test_unknown_query_parameter_returns_400_from_strict_microversion(
    cloud: Cloud, path: str, strict_since: int
) -> None:
    for number in (strict_since - 1, strict_since):
        answer = cloud.call("GET", path + "?colour=red", mv=f"2.{number}", token="admin")
        assert answer.status_code == (400 if number == strict_since else 200), answer.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "queued"}, f"Image {IMAGE} is not active."),
        ({"min_ram": 1024}, "Flavor's memory is too small for requested image."),
        (
            {"min_disk": 2},
            "Flavor's disk is too small for requested image. Flavor disk is 1073741824 bytes, image needs at "
            "least 2147483648 bytes.",
        ),
        (
            {"virtual_size": 1024**3 + 1},
            "Flavor's disk is too small for requested image. Flavor disk is 1073741824 "
            "bytes, image is 1073741825 bytes.",
        ),
    ],
)
def test_create_server_with_inactive_image_or_too_small_flavor_returns_400(
    cloud: Cloud, change: dict[str, Any], message: str
) -> None:
    cloud.images.images[IMAGE] = replace(cloud.images.images[IMAGE], **change)
    answer = cloud.call("POST", "/servers", {"server": GOOD})
    assert answer.json == {"badRequest": {"code": 400, "message": message}}


def test_create_server_with_diskless_flavor_returns_403_except_to_admin(cloud: Cloud) -> None:
    cloud.add_flavor(Flavor("0", "nodisk", 1, 64, 0))
    assert cloud.call("POST", "/servers", {"server": {**GOOD, "flavorRef": "0"}}).status_code == 403
    assert (
        cloud.call(
            "POST", "/servers", {"server": {**GOOD, "flavorRef": "0"}}, token="admin"
        ).status_code
        == 202
    )


class BrokenBody:
    """The body of a client whose connection breaks within a chunk."""

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def read(self, size: int = -1) -> bytes:
        raise self._problem

    readline = readlines = __iter__ = read


@pytest.mark.parametrize("problem", [InvalidChunkSize(b"zz"), ConnectionResetError("gone")])
def test_body_of_broken_connection_or_invalid_chunk_returns_400(
    cloud: Cloud, problem: Exception
) -> None:
    answer = cloud.client.simulate_request(
        "POST",
        "/v2.1/servers",
        headers={"X-Auth-Token": "user", "Content-Type": "application/json"},
        extras={"wsgi.input": BrokenBody(problem), "wsgi.input_terminated": True},
    )
    assert answer.status_code == 400, answer.text
    assert "a chunk is missing or malformed" in answer.json["badRequest"]["message"]


def test_requests_return_503_while_database_has_other_version(cloud: Cloud) -> None:
    """A fail-over to an old copy or an early upgrade can cause this."""
    guard(cloud.store)
    operator = Store(cloud.store.url)
    for version, status in (("0000", 503), ("9999", 503), (find_needed(), 200)):
        with operator.begin() as tx:
            for table in (UPGRADED_TO, USABLE_FROM):
                tx.execute(sa.text(f"UPDATE {table} SET version_num = :found"), {"found": version})
        # The connections break.
        cloud.store.engine.dispose()
        answer = cloud.call("GET", "/servers")
        assert answer.status_code == status
        if status == 503:
            assert f"has version {version}" in answer.json["serviceUnavailable"]["message"]
            assert answer.headers["Retry-After"] == "1"
    operator.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("DELETE", "/os-security-groups/", 404),
        ("DELETE", "/os-security-groups", 405),
        ("PUT", "/servers/", 404),
        ("GET", "/servers/", 404),
        ("GET", "/os-simple-tenant-usage/?start=2026-01-01T00:00:00", 404),
        ("GET", "/servers/detail/", 404),
        ("POST", "/servers/", 404),
        ("GET", "/", 200),
    ],
)
def test_path_with_trailing_slash_returns_404_except_root(
    cloud: Cloud, method: str, path: str, status: int
) -> None:
    assert cloud.call(method, path).status_code == status
