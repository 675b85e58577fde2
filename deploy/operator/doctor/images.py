# SPDX-License-Identifier: Apache-2.0
"""Snapshots in the image service that no action writes any more."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.json_types import JsonMapping
from common.store import cleanups
from common.store.schema import actions, servers
from common.store.servers.actions import LIVE
from deploy.operator.doctor.finding import Finding

#: Statuses of images without data.
IN_TRANSIT = ("queued", "saving")


def compare_images(images: Sequence[JsonMapping], tx: Connection) -> list[Finding]:
    """Return a finding for each incomplete snapshot that no action writes.

    Snapshots of unknown servers, of servers with a running action, and of a pending cleanup are
    left out.

    Args:
        images: Images of the image service, with id, status and instance_uuid.
        tx: The transaction.
    """
    incomplete = {
        str(record["id"]): record
        for record in images
        if record.get("status") in IN_TRANSIT and record.get("instance_uuid")
    }
    known_servers = set(
        tx.scalars(
            sa.select(servers.c.id).where(
                servers.c.id.in_(
                    sorted({str(record["instance_uuid"]) for record in incomplete.values()})
                )
            )
        )
    )
    ignored_ids = {row.target for row in cleanups.list_all(tx)} | set(
        tx.scalars(sa.select(actions.c.server_id).where(actions.c.state.in_(LIVE)))
    )
    return sorted(
        Finding(
            "image-in-transit",
            image,
            f"is {record['status']} as a snapshot of server {record['instance_uuid']}, which has no running action",
            facts=(str(record["instance_uuid"]),),
        )
        for image, record in incomplete.items()
        if record["instance_uuid"] in known_servers
        and not ignored_ids & {image, str(record["instance_uuid"])}
    )
