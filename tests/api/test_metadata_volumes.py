# SPDX-License-Identifier: Apache-2.0
"""What a guest finds at 169.254.169.254 of its volumes."""

from __future__ import annotations

from common.store import schema
from common.store.servers import volumes as store_volumes
from tests.api.conftest import Cloud
from tests.api.test_metadata_service import Service


def test_tagged_volumes_of_a_server(cloud: Cloud) -> None:
    """One more statement, and for servers with volumes only; those that it has not yet are not
    told."""
    service = Service(cloud)
    volumes = [("v1", "data", "attached"), ("v2", None, "attached"), ("v3", "logs", "attaching")]
    rows = [
        {"uuid": one, "server_id": service.server, "volume_id": one, "tag": tag, "status": status}
        for one, tag, status in volumes
    ]
    service.cloud.store.write(
        lambda tx: store_volumes.insert(
            tx, [{**row, "device_name": f"/dev/{row['uuid']}"} for row in rows]
        )
    )
    service.cloud.change(schema.servers, schema.servers.c.id == service.server, volumes=3)
    service.statements = 0
    told = service.ask("/openstack/latest/meta_data.json").json["devices"]
    assert service.statements == 2
    assert [(one["serial"], one["tags"]) for one in told if one["type"] == "disk"] == [
        ("v1", ["data"])
    ]
