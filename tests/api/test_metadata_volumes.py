# SPDX-License-Identifier: Apache-2.0
"""Volumes of a server in the documents of the metadata service."""

from __future__ import annotations

from common.store import schema
from common.store.servers import volumes as store_volumes
from tests.api.conftest import Cloud
from tests.api.test_metadata_service import Service


def test_metadata_lists_tagged_attached_volumes_with_second_sql_statement(cloud: Cloud) -> None:
    """Only servers with volumes cost the second statement.

    Volumes that are still being attached are left out.
    """
    service = Service(cloud)
    volumes = [("v1", "data", "attached"), ("v2", None, "attached"), ("v3", "logs", "attaching")]
    rows = [
        {"uuid": uuid, "server_id": service.server, "volume_id": uuid, "tag": tag, "status": status}
        for uuid, tag, status in volumes
    ]
    service.cloud.store.write(
        lambda tx: store_volumes.insert(
            tx, [{**row, "device_name": f"/dev/{row['uuid']}"} for row in rows]
        )
    )
    service.cloud.change(schema.servers, schema.servers.c.id == service.server, volumes=3)
    service.statements = 0
    devices = service.request("/openstack/latest/meta_data.json").json["devices"]
    assert service.statements == 2
    assert [(uuid["serial"], uuid["tags"]) for uuid in devices if uuid["type"] == "disk"] == [
        ("v1", ["data"])
    ]
