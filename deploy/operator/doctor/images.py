# SPDX-License-Identifier: Apache-2.0
"""Snapshots that the image service has, and that no action makes any more."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.json_types import JsonMapping
from common.store import cleanups
from common.store.schema import actions, servers
from common.store.servers.actions import LIVE
from deploy.operator.doctor.finding import Finding

#: Statuses of images whose bytes are not there.
IN_TRANSIT = ("queued", "saving")


def compare_images(images: Sequence[JsonMapping], tx: Connection) -> list[Finding]:
    """The image service's own records that name one of our servers, against the actions. What an
    action has in hand is not judged, nor what a pending cleanup will remove."""
    found = {
        str(one["id"]): one
        for one in images
        if one.get("status") in IN_TRANSIT and one.get("instance_uuid")
    }
    ours = set(
        tx.scalars(
            sa.select(servers.c.id).where(
                servers.c.id.in_(sorted({str(one["instance_uuid"]) for one in found.values()}))
            )
        )
    )
    spared = {row.target for row in cleanups.list_all(tx)} | set(
        tx.scalars(sa.select(actions.c.server_id).where(actions.c.state.in_(LIVE)))
    )
    return sorted(
        Finding(
            "image-in-transit",
            image,
            f"is {one['status']} since a snapshot of server {one['instance_uuid']}, which has none in hand",
            facts=(str(one["instance_uuid"]),),
        )
        for image, one in found.items()
        if one["instance_uuid"] in ours and not spared & {image, str(one["instance_uuid"])}
    )
