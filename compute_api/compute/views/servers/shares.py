# SPDX-License-Identifier: Apache-2.0
"""Shares of a server in responses."""

from __future__ import annotations

from common.domain import states
from common.domain.json_types import JsonObject
from common.domain.statuses import ShareStatus
from common.store.rows import ServerRecord, ShareMappingRow

#: The status of an attached share while the guest runs.
ACTIVE = "active"
_RUNS = (states.RUNNING, states.POWER_PAUSED)


def of(mapping: ShareMappingRow, server: ServerRecord, is_admin: bool = False) -> JsonObject:
    """Return the body of a share. Only administrators see the uuid and the export location.

    An attached share is shown as active while the guest runs or is paused, otherwise with the
    stored status.
    """
    status = (
        ACTIVE
        if mapping.status == ShareStatus.INACTIVE and server.power_state in _RUNS
        else mapping.status
    )
    shown = {"share_id": mapping.share_id, "status": status, "tag": mapping.tag}
    return (
        {**shown, "uuid": mapping.uuid, "export_location": mapping.export_location}
        if is_admin
        else shown
    )
