# SPDX-License-Identifier: Apache-2.0
"""Shares of servers on SQLite, PostgreSQL and MariaDB.

The tests cover share counts, refused actions, and use of access rules.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.context import RequestContext
from common.domain.models import HostInventory
from common.domain.statuses import ShareStatus
from common.store import schema
from common.store.engine import Store
from common.store.hosts import hosts
from common.store.servers import actions, shares
from deploy.operator import doctor
from tests.server_rows import server_row

CALLER = RequestContext("u", "p", ("member",), "req-1")
SHARE, OTHER = ids.new(), ids.new()
ATTACH, DETACH = states.row("attach_share"), states.row("detach_share")


def add_server(store: Store, host: str = "h1") -> str:
    """Insert a stopped server. Each host has a different address."""
    server = ids.new()

    def work(tx: Any) -> None:
        hosts.register(
            tx,
            host,
            "boot",
            HostInventory(
                "memory", 1, host, 8, 4096, 100, f"192.0.2.{host[1:]}", traits=list(shares.TRAITS)
            ),
        )
        tx.execute(
            sa.insert(schema.servers).values(
                **server_row(
                    server,
                    vm_state=states.STOPPED,
                    fence=3,
                    host=host,
                    flavor={"vcpus": 1, "memory_mb": 1},
                )
            )
        )

    store.write(work)
    return server


def attach(store: Store, server: str, share: str = SHARE, tag: str = "data") -> Any:
    """Begin to attach a share, complete the action, and return the share's row."""
    request = {
        "share_id": share,
        "tag": tag,
        "protocol": "NFS",
        "export_location": "192.0.2.9:/one",
    }
    store.write(
        lambda tx: shares.attach(tx, ATTACH, server, context=CALLER, project_id="p", share=request)
    )
    complete_action(store, server)
    return store.read(lambda tx: shares.show(tx, server, share))


def detach(store: Store, server: str, share: str = SHARE) -> None:
    store.write(
        lambda tx: shares.detach(tx, DETACH, server, context=CALLER, project_id="p", share_id=share)
    )
    complete_action(store, server)


def complete_action(store: Store, server: str) -> None:
    """Complete the server's action."""
    store.write(
        lambda tx: (
            tx.execute(
                sa.update(schema.actions)
                .where(schema.actions.c.server_id == server)
                .values(state="done", due_at=None)
            ),
            tx.execute(
                sa.update(schema.servers).where(schema.servers.c.id == server).values(action=None)
            ),
        )
    )


def read_count(store: Store, server: str) -> int:
    return int(
        store.read(
            lambda tx: tx.scalar(
                sa.select(schema.servers.c.shares).where(schema.servers.c.id == server)
            )
        )
        or 0
    )


def test_attach_share_counts_shares_and_refuses_duplicate_share_or_tag(store: Store) -> None:
    server = add_server(store)
    for number, (share, tag) in enumerate(((SHARE, "data"), (OTHER, "more")), 1):
        row = attach(store, server, share, tag)
        assert (row.status, row.access_to, read_count(store, server)) == (
            ShareStatus.ATTACHING,
            "192.0.2.1",
            number,
        )
    assert [row.tag for row in store.read(lambda tx: shares.list_of(tx, server))] == [
        "data",
        "more",
    ]
    for share, tag in ((SHARE, "new"), (ids.new(), "more")):
        with pytest.raises(errors.Conflict, match="already associated"):
            attach(store, server, share, tag)
    assert read_count(store, server) == 2
    with pytest.raises(errors.NotFound):
        detach(store, server, ids.new())


def test_rebuild_with_shares_is_refused_and_start_is_not(store: Store) -> None:
    server = add_server(store)
    attach(store, server)
    with pytest.raises(errors.Conflict, match="Cannot 'rebuild' .* while it has shares"):
        store.write(lambda tx: actions.begin(tx, states.row("rebuild"), server, context=CALLER))
    store.write(lambda tx: actions.begin(tx, states.row("os-start"), server, context=CALLER))


def test_share_rule_is_used_while_a_server_of_the_host_has_the_share(store: Store) -> None:
    def is_used_by_host() -> list[bool]:
        return [
            store.read(lambda tx, host=host: shares.is_used(tx, SHARE, f"192.0.2.{host}"))
            for host in (1, 2)
        ]

    first, second, elsewhere = add_server(store), add_server(store), add_server(store, "h2")
    assert is_used_by_host() == [False, False]
    for server in (first, second, elsewhere):
        attach(store, server)
    detach(store, elsewhere)
    assert is_used_by_host() == [True, False]
    row = store.read(lambda tx: shares.show(tx, first, SHARE))
    store.write(lambda tx: shares.put(tx, [row.uuid], ShareStatus.ERROR))
    assert is_used_by_host() == [True, False]
    assert store.write(lambda tx: shares.leaving(tx, [second, first])) == {
        server: [
            shares.as_args(store.read(lambda tx, server=server: shares.show(tx, server, SHARE)))
        ]
        for server in (first, second)
    }
    assert is_used_by_host() == [False, False]
    store.write(lambda tx: shares.remove(tx, [row.uuid]))
    assert store.read(lambda tx: shares.list_of(tx, first)) == []


def test_doctor_reports_wrong_share_count_and_shares_of_deleted_server(store: Store) -> None:
    server, deleted_server = add_server(store), add_server(store)
    for key in (server, deleted_server):
        attach(store, key)

    def list_wrong_counts() -> list[str]:
        return [row.subject for row in store.read(doctor.check) if row.invariant == "shares"]

    assert list_wrong_counts() == []
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == server).values(shares=2)
        )
    )
    assert list_wrong_counts() == [server]
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == deleted_server).values(deleted=1)
        )
    )
    assert sorted(list_wrong_counts()) == sorted([server, deleted_server])
