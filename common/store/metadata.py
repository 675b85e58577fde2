# SPDX-License-Identifier: Apache-2.0
"""What the metadata service reads of a server, in one statement, and the one thing that it writes.

Called by ``compute_api.metadata_service``. A guest's password is written once; its owner clears it through the API.
"""
from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from common.store.engine import now
from common.store.schema import servers

C = servers.c
#: What ``instance_data.guest_spec`` reads, and the password.
_FACTS = [C[name] for name in (
    "id", "name", "hostname", "project_id", "availability_zone", "launch_index", "meta", "key_name", "key_data",
    "flavor", "image", "config_drive", "user_data", "interfaces", "security_groups", "reservation_id",
    "root_device_name", "fence", "password", "disks")]


def facts(tx: Connection, server_id: str) -> Row[Any] | None:
    """What its guest may know of a server, JSON columns read; None: it is gone."""
    return tx.execute(sa.select(*_FACTS).where(C.id == server_id, C.deleted == 0)).first()


def post_password(tx: Connection, server_id: str, password: str) -> bool:
    """Keep the password that a guest posted, unless there is one (False)."""
    return bool(tx.execute(sa.update(servers).where(C.id == server_id, C.deleted == 0, C.password.is_(None)).values(
        password=password, updated_at=now())).rowcount)
