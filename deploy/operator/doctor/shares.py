# SPDX-License-Identifier: Apache-2.0
"""The rules at the shared file system service that let hosts mount shares, against the shares that
servers have."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.json_types import JsonMapping
from common.store import cleanups
from common.store.schema import hosts, share_mappings
from deploy.operator.doctor.finding import Finding

#: States of a rule that is on its way out.
_GOING = ("queued_to_deny", "denying")


def compare_rules(rules: Sequence[JsonMapping], tx: Connection) -> list[Finding]:
    """The rules that Kilonova made (share_id, access_to, state), against the shares of servers.

    Only those for an address of a host that is known: another may be a host of another cloud, which
    uses the service as this one does. What is on its way out is not judged, nor what a pending
    cleanup will look at.
    """
    table = share_mappings
    named = {(row.share_id, row.access_to) for row in tx.execute(sa.select(table))}
    named |= {
        (row.target, row.place) for row in cleanups.list_all(tx) if row.kind == cleanups.SHARE
    }
    ours = {
        (row.facts or {}).get("share_address") or row.host_ip
        for row in tx.execute(sa.select(hosts.c.host_ip, hosts.c.facts))
    }
    found = {(str(one["share_id"]), str(one["access_to"])): one["state"] for one in rules}
    return sorted(
        Finding(
            "share-rule-of-server",
            share,
            f"may be mounted from {address}, and no server of that host has it",
            "share-rule-of-nobody",
            (address,),
        )
        for (share, address), state in found.items()
        if address and address in ours and state not in _GOING and (share, address) not in named
    )
