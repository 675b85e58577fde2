# SPDX-License-Identifier: Apache-2.0
"""Shares of servers on SQLite, PostgreSQL and MariaDB: what is counted with them, and who needs a
rule."""

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
    """One that is off, on a host with an address of its own."""
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
    """Ask for a share, and be done with it; its row."""
    wanted = {"share_id": share, "tag": tag, "protocol": "NFS", "export_location": "192.0.2.9:/one"}
    store.write(
        lambda tx: shares.attach(tx, ATTACH, server, context=CALLER, project_id="p", share=wanted)
    )
    free(store, server)
    return store.read(lambda tx: shares.show(tx, server, share))


def detach(store: Store, server: str, share: str = SHARE) -> None:
    store.write(
        lambda tx: shares.detach(tx, DETACH, server, context=CALLER, project_id="p", share_id=share)
    )
    free(store, server)


def free(store: Store, server: str) -> None:
    """The action is over."""
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


def counted(store: Store, server: str) -> int:
    return int(
        store.read(
            lambda tx: tx.scalar(
                sa.select(schema.servers.c.shares).where(schema.servers.c.id == server)
            )
        )
        or 0
    )


def test_a_server_counts_its_shares(store: Store) -> None:
    server = add_server(store)
    for number, (share, tag) in enumerate(((SHARE, "data"), (OTHER, "more")), 1):
        row = attach(store, server, share, tag)
        assert (row.status, row.access_to, counted(store, server)) == (
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
    assert counted(store, server) == 2
    with pytest.raises(errors.NotFound):
        detach(store, server, ids.new())


def test_what_shares_forbid_is_refused(store: Store) -> None:
    server = add_server(store)
    attach(store, server)
    with pytest.raises(errors.Conflict, match="Cannot 'rebuild' .* while it has shares"):
        store.write(lambda tx: actions.begin(tx, states.row("rebuild"), server, context=CALLER))
    store.write(lambda tx: actions.begin(tx, states.row("os-start"), server, context=CALLER))


def test_a_rule_is_needed_by_the_servers_of_one_host(store: Store) -> None:
    def used() -> list[bool]:
        return [
            store.read(lambda tx, host=host: shares.is_used(tx, SHARE, f"192.0.2.{host}"))
            for host in (1, 2)
        ]

    one, two, elsewhere = add_server(store), add_server(store), add_server(store, "h2")
    assert used() == [False, False]
    for server in (one, two, elsewhere):
        attach(store, server)
    detach(store, elsewhere)
    assert used() == [True, False]
    row = store.read(lambda tx: shares.show(tx, one, SHARE))
    store.write(lambda tx: shares.put(tx, [row.uuid], ShareStatus.ERROR))
    assert used() == [True, False]
    assert store.write(lambda tx: shares.leaving(tx, [two, one])) == {
        server: [
            shares.as_args(store.read(lambda tx, server=server: shares.show(tx, server, SHARE)))
        ]
        for server in (one, two)
    }
    assert used() == [False, False]
    store.write(lambda tx: shares.remove(tx, [row.uuid]))
    assert store.read(lambda tx: shares.list_of(tx, one)) == []


def test_a_server_that_counts_wrong_is_found(store: Store) -> None:
    server, gone = add_server(store), add_server(store)
    for one in (server, gone):
        attach(store, one)

    def found() -> list[str]:
        return [one.subject for one in store.read(doctor.check) if one.invariant == "shares"]

    assert found() == []
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == server).values(shares=2)
        )
    )
    assert found() == [server]
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == gone).values(deleted=1)
        )
    )
    assert sorted(found()) == sorted([server, gone])
