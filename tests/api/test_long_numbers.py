# SPDX-License-Identifier: Apache-2.0
"""Long numbers in texts of clients: Python's int() refuses more than 4300 digits.

No such request may cause a 500.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import orjson
import pytest

from tests.api.conftest import IMAGE, Cloud
from tests.api.networks import Networks
from tests.api.volumes import SNAPSHOT, VOLUME, Volumes

LONG = ["9" * 4301, "0" * 5000 + "1", "-" + "9" * 5000, "1" + "0" * 4400, "\u0663" * 5000, "1e999"]
BASE: dict[str, Any] = {"name": "vm", "imageRef": IMAGE, "flavorRef": "1"}


def _requests(server: str, text: str) -> list[tuple[str, str, Any, str, str]]:
    """Return requests with this text as a number: method, path, body, token and microversion."""
    mapping = {"uuid": IMAGE, "source_type": "image", "destination_type": "local"}
    action = f"/servers/{server}/action"
    return [
        *(
            ("POST", "/servers", {"server": {**BASE, **fields}}, "user", "2.1")
            for fields in (
                {"min_count": text},
                {"max_count": text},
                {"flavorRef": text},
                {"block_device_mapping_v2": [{**mapping, "boot_index": text}]},
                {"block_device_mapping_v2": [{**mapping, "volume_size": text}]},
            )
        ),
        ("POST", action, {"os-getConsoleOutput": {"length": text}}, "user", "2.1"),
        (
            "POST",
            action,
            {"createBackup": {"name": "x", "backup_type": "d", "rotation": text}},
            "user",
            "2.1",
        ),
        ("POST", action, {"resize": {"flavorRef": text}}, "user", "2.1"),
        *(
            (
                "POST",
                "/flavors",
                {"flavor": {"name": f"f{key}", "ram": 64, "vcpus": 1, "disk": 1, key: text}},
                "admin",
                "2.1",
            )
            for key in ("ram", "vcpus", "disk", "swap", "OS-FLV-EXT-DATA:ephemeral", "rxtx_factor")
        ),
        ("PUT", "/os-quota-sets/x", {"quota_set": {"cores": text}}, "admin", "2.1"),
        ("PUT", "/os-quota-class-sets/x", {"quota_class_set": {"cores": text}}, "admin", "2.1"),
        (
            "POST",
            "/os-server-groups",
            {
                "server_group": {
                    "name": "x",
                    "policy": "anti-affinity",
                    "rules": {"max_server_per_host": text},
                }
            },
            "user",
            "2.64",
        ),
        ("POST", "/os-volumes", {"volume": {"size": text}}, "user", "2.1"),
        (
            "POST",
            "/os-security-group-rules",
            {
                "security_group_rule": {
                    "parent_group_id": IMAGE,
                    "ip_protocol": "tcp",
                    "from_port": text,
                    "to_port": text,
                }
            },
            "user",
            "2.1",
        ),
        *(
            ("POST", "/flavors/1/os-extra_specs", {"extra_specs": {key: text[:255]}}, "admin", mv)
            for key in ("hw:cpu_sockets", "hw:numa_nodes", "hw:mem_page_size", "resources:VCPU")
            for mv in ("2.1", "2.86")
        ),
    ]


@pytest.mark.parametrize("text", LONG, ids=[text[:3] for text in LONG])
def test_long_number_in_request_body_causes_no_500(
    make_cloud: Callable[..., Cloud], networks: Networks, text: str
) -> None:
    cloud = make_cloud(networks=networks)
    cloud.services.volumes = Volumes()
    server = cloud.create()
    cloud.set_state(server)
    for method, path, body, token, mv in _requests(server, text):
        answer = cloud.call(method, path, body, token=token, mv=mv)
        assert answer.status_code < 500, (path, body, answer.text)


PATHS = [
    "/servers?limit={}",
    "/servers?marker={}",
    "/servers?launch_index={}",
    "/servers?power_state={}",
    "/servers?progress={}",
    "/servers?changes-since={}",
    "/flavors?limit={}",
    "/flavors?minRam={}",
    "/flavors?minDisk={}",
    "/os-keypairs?limit={}",
    "/os-server-groups?limit={}",
    "/os-server-groups?offset={}",
    "/os-migrations?limit={}",
    "/os-hypervisors?limit={}",
    "/os-hypervisors?marker={}",
    "/os-hypervisors/{}",
    "/os-aggregates/{}",
    "/servers/{server}/os-instance-actions?limit={}",
    "/servers/{server}/os-volume_attachments?limit={}",
    "/servers/{server}/os-volume_attachments?offset={}",
    "/servers/{server}/migrations/{}",
    "/os-simple-tenant-usage?limit={}&start={}",
    "/os-instance_usage_audit_log/{}",
    "/images?limit={}",
    "/images?page_size={}",
    "/os-volumes?limit={}",
    "/os-volumes?offset={}",
    "/os-snapshots?offset={}",
    "/os-security-groups?offset={}",
    "/os-networks?limit={}",
]


@pytest.mark.parametrize("text", LONG, ids=[text[:3] for text in LONG])
@pytest.mark.parametrize("mv", ["2.1", "2.35", "2.90"])
def test_long_number_in_url_causes_no_500(
    make_cloud: Callable[..., Cloud], mv: str, text: str
) -> None:
    cloud = make_cloud()
    cloud.services.volumes = Volumes()
    server = cloud.create()
    for path in PATHS:
        url = path.replace("{server}", server).replace("{}", quote(text))
        answer = cloud.call("GET", url, token="admin", mv=mv)
        assert answer.status_code < 500 or answer.status_code == 501, (path, answer.text[:200])


#: Values that the owner of an image may store in the property block_device_mapping.
MAPPINGS: list[Any] = [
    *([{"boot_index": text}] for text in LONG),
    *([{"boot_index": value}] for value in ("x", [], {}, 1e300, True)),
    *([{"boot_index": 0, "volume_size": value}] for value in (*LONG, "x", [], {}, -1)),
    *([{"boot_index": 0, "device_name": value}] for value in (7, [], {"a": 1})),
    *([{"boot_index": 0, "source_type": value}] for value in (7, [], {"a": 1})),
    *([{"boot_index": 0, "snapshot_id": value}] for value in (7, [], {"a": 1})),
    *([{"boot_index": 0, "tag": value}] for value in (7, [], {"a": 1})),
    *([{"boot_index": 0, "volume_type": value}] for value in (7, [], {"a": 1})),
    *([{"boot_index": 0, "disk_bus": value}] for value in (7, [], {"a": 1})),
    *([{"boot_index": 0, "guest_format": value}] for value in (7, [], {"a": 1})),
    [[]],
    {"a": 1},
    7,
]


@pytest.mark.parametrize("bdm_v2", ["true", ""])
def test_create_server_with_malformed_image_device_mapping_causes_no_500(
    make_cloud: Callable[..., Cloud], bdm_v2: str
) -> None:
    cloud = make_cloud()
    cloud.services.volumes = Volumes()
    image = cloud.images.images[IMAGE]
    whole = {
        "source_type": "snapshot",
        "destination_type": "volume",
        "snapshot_id": SNAPSHOT,
        "volume_size": 1,
    }
    for mapping in MAPPINGS:
        full = (
            [{**whole, **item} for item in mapping if item]
            if isinstance(mapping, list)
            else mapping
        )
        for value in (mapping, full):
            properties = {"block_device_mapping": orjson.dumps(value).decode(), "bdm_v2": bdm_v2}
            cloud.images.images[IMAGE] = replace(
                image, ref=replace(image.ref, properties={**image.ref.properties, **properties})
            )
            answer = cloud.call("POST", "/servers", {"server": BASE})
            assert answer.status_code < 500, (value, answer.text)


@pytest.mark.parametrize("text", LONG, ids=[text[:3] for text in LONG])
def test_long_number_in_image_metadata_of_volume_causes_no_500(
    make_cloud: Callable[..., Cloud], text: str
) -> None:
    cloud = make_cloud()
    cloud.services.volumes = volumes = Volumes()
    volumes.change(VOLUME, image_metadata={"min_ram": text, "min_disk": text})
    answer = cloud.call(
        "POST",
        "/servers",
        {
            "server": {
                "name": "vm",
                "flavorRef": "1",
                "block_device_mapping_v2": [
                    {
                        "uuid": VOLUME,
                        "source_type": "volume",
                        "destination_type": "volume",
                        "boot_index": 0,
                    }
                ],
            }
        },
    )
    assert answer.status_code < 500, answer.text
