# SPDX-License-Identifier: Apache-2.0
"""Compares rules of the shared file system service with the shares of servers."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.json_types import JsonMapping
from common.store import cleanups
from common.store.schema import hosts, share_mappings
from deploy.operator.doctor.finding import Finding

#: States of a rule that the service is removing.
_GOING = ("queued_to_deny", "denying")


def compare_rules(rules: Sequence[JsonMapping], tx: Connection) -> list[Finding]:
    """Return a finding for each rule of a host's address that no server's share needs.

    Only addresses of known hosts are checked, because another cloud may use the same service. Rules
    that the service removes and rules with a pending cleanup are left out.

    Args:
        rules: Kilonova's own rules, with share_id, access_to (an address) and state.
        tx: The transaction.
    """
    table = share_mappings
    needed_rules = {(row.share_id, row.access_to) for row in tx.execute(sa.select(table))}
    needed_rules |= {
        (row.target, row.place) for row in cleanups.list_all(tx) if row.kind == cleanups.SHARE
    }
    host_addresses = {
        (row.facts or {}).get("share_address") or row.host_ip
        for row in tx.execute(sa.select(hosts.c.host_ip, hosts.c.facts))
    }
    states_by_rule = {
        (str(rule["share_id"]), str(rule["access_to"])): rule["state"] for rule in rules
    }
    return sorted(
        Finding(
            "share-rule-of-server",
            share,
            f"may be mounted from {address}, but no server of that host has the share",
            "share-rule-of-nobody",
            (address,),
        )
        for (share, address), state in states_by_rule.items()
        if address
        and address in host_addresses
        and state not in _GOING
        and (share, address) not in needed_rules
    )
