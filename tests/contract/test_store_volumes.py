# SPDX-License-Identifier: Apache-2.0
"""Volumes of servers on SQLite, PostgreSQL and MariaDB: what is counted with them, and what they
are called."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.context import RequestContext
from common.domain.models import Flavor
from common.domain.statuses import BlockDeviceStatus
from common.domain.wire import to_wire
from common.store import schema
from common.store.engine import Store
from common.store.servers import block_devices, volumes
from common.store.servers.volumes import WantedVolume
from deploy.operator import doctor
from tests.server_rows import server_row

CALLER = RequestContext("u", "p", ("member",), "req-1")
VOLUME, OTHER = ids.new(), ids.new()
ATTACH, DETACH = states.row("attach_volume"), states.row("detach_volume")
FLAVOR = Flavor("1", "f", 1, 64, 1, ephemeral_gb=1, swap_mb=64)


def add_server(store: Store, vm_state: str = states.ACTIVE, host: str | None = "h1") -> str:
    """One with an ephemeral disk and swap: /dev/vda to /dev/vdc are its host's."""
    server = ids.new()

    def work(tx: Any) -> None:
        tx.execute(
            sa.insert(schema.servers).values(
                **server_row(
                    server,
                    vm_state=vm_state,
                    fence=3,
                    host=host,
                    flavor=to_wire(FLAVOR),
                    root_device_name="/dev/vda",
                )
            )
        )

    store.write(work)
    return server


def attach(store: Store, server: str, volume: str = VOLUME, **more: Any) -> Any:
    """Ask for a volume, and be done with it; its row."""
    wanted = WantedVolume(volume_id=volume, size_gb=2, **more)
    store.write(
        lambda tx: volumes.attach(tx, ATTACH, server, context=CALLER, project_id="p", volume=wanted)
    )
    free(store, server)
    return store.read(lambda tx: volumes.show(tx, server, volume))


def detach(store: Store, server: str, volume: str = VOLUME) -> None:
    store.write(
        lambda tx: volumes.detach(
            tx, DETACH, server, context=CALLER, project_id="p", volume_id=volume
        )
    )
    free(store, server)


def free(store: Store, server: str) -> None:
    """The action is over."""
    change = sa.update(schema.actions).where(schema.actions.c.server_id == server)
    store.write(
        lambda tx: (
            tx.execute(change.values(state="done", due_at=None)),
            tx.execute(
                sa.update(schema.servers).where(schema.servers.c.id == server).values(action=None)
            ),
        )
    )


def counted(store: Store, server: str) -> int:
    query = sa.select(schema.servers.c.volumes).where(schema.servers.c.id == server)
    return int(store.read(lambda tx: tx.scalar(query)) or 0)


def test_a_server_counts_its_volumes(store: Store) -> None:
    server = add_server(store)
    row = attach(store, server, tag="data", delete_on_termination=True, read_only=True)
    assert (row.status, row.device_name, row.size_gb) == (
        BlockDeviceStatus.ATTACHING,
        "/dev/vdd",
        2,
    )
    assert (row.tag, row.delete_on_termination, row.read_only) == ("data", True, True)
    assert (row.source_type, row.boot_index, row.multiattach) == ("volume", None, False)
    assert attach(store, server, OTHER).device_name == "/dev/vde"
    assert counted(store, server) == 2
    [action] = store.read(
        lambda tx: tx.execute(
            sa.select(schema.actions)
            .where(
                schema.actions.c.server_id == server,
                schema.actions.c.name == "attach_volume",
            )
            .order_by(schema.actions.c.fence)
            .limit(1)
        ).all()
    )
    assert action.args == {"was": "active", "block_device": row.uuid, "volume_id": VOLUME}
    both = store.read(lambda tx: volumes.list_of(tx, server))
    assert [one.volume_id for one in both] == [VOLUME, OTHER]
    assert [one.server_id for one in store.read(lambda tx: volumes.of_volume(tx, VOLUME))] == [
        server
    ]


def test_a_second_attachment_is_refused(store: Store) -> None:
    server = add_server(store)
    attach(store, server)
    with pytest.raises(
        errors.BadRequest, match=f"Invalid volume: volume {VOLUME} already attached"
    ):
        attach(store, server)
    assert counted(store, server) == 1


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"bus": "scsi"}, "/dev/sda"),
        ({"bus": "virtio"}, "/dev/vdd"),
        ({}, "/dev/vdd"),
    ],
)
def test_a_volume_gets_a_name(store: Store, wanted: dict[str, str], named: str) -> None:
    server = add_server(store)
    assert attach(store, server, **wanted).device_name == named


def test_names_come_to_an_end(store: Store) -> None:
    server = add_server(store)
    for _ in range(23):
        attach(store, server, ids.new())
    with pytest.raises(errors.Forbidden, match=r"number of disk devices \(26\)"):
        attach(store, server, ids.new())


def test_a_server_without_a_host_reserves(store: Store) -> None:
    server = add_server(store, states.SHELVED_OFFLOADED, None)
    assert attach(store, server).status == BlockDeviceStatus.RESERVED


def test_a_volume_is_given_back(store: Store) -> None:
    server = add_server(store)
    with pytest.raises(errors.NotFound, match=f"is not attached to volume {VOLUME}"):
        detach(store, server)
    row = attach(store, server)
    detach(store, server)
    [left] = store.read(lambda tx: volumes.list_of(tx, server))
    assert (left.status, counted(store, server)) == (BlockDeviceStatus.DETACHING, 1)
    for _ in range(2):
        store.write(lambda tx: volumes.remove(tx, server, [row.uuid]))
        assert counted(store, server) == 0
    assert store.read(lambda tx: volumes.by_uuid(tx, row.uuid)) is None
    assert attach(store, server).device_name == "/dev/vdd"


def test_what_a_server_boots_from_stays(store: Store) -> None:
    server = add_server(store)
    row = attach(store, server, more={"boot_index": 0})
    attach(store, server, OTHER)
    assert store.read(lambda tx: volumes.root_of(tx, server)).uuid == row.uuid
    assert store.read(lambda tx: volumes.list_of(tx, server))[0].uuid == row.uuid
    with pytest.raises(errors.Forbidden, match="Cannot detach a root device volume"):
        detach(store, server)
    detach(store, server, OTHER)


@pytest.mark.parametrize("row", [ATTACH, DETACH])
def test_states_that_forbid_it_are_refused(store: Store, row: states.Action) -> None:
    server = add_server(store, states.SUSPENDED)
    with pytest.raises(errors.WrongState, match=row.name):
        if row is ATTACH:
            attach(store, server)
        else:
            detach(store, server)


def test_what_goes_with_a_server_is_changed(store: Store) -> None:
    server = add_server(store)
    attach(store, server)
    for wanted in (True, False):
        store.write(
            partial(
                volumes.keep_on_termination,
                server_id=server,
                volume_id=VOLUME,
                delete_on_termination=wanted,
            )
        )
        found = store.read(lambda tx: volumes.show(tx, server, VOLUME))
        assert found.delete_on_termination is wanted
    with pytest.raises(errors.NotFound):
        store.write(lambda tx: volumes.keep_on_termination(tx, server, OTHER, True))


def test_a_deleted_server_leaves_its_volumes(store: Store) -> None:
    one, two = add_server(store), add_server(store)
    rows = {one: [attach(store, one)], two: [attach(store, two, OTHER)]}
    left = store.write(lambda tx: volumes.leaving(tx, [one, two]))
    assert {server: [row.uuid for row in found] for server, found in left.items()} == {
        server: [row.uuid for row in found] for server, found in rows.items()
    }
    assert (
        store.read(lambda tx: volumes.show(tx, one, VOLUME)).status == BlockDeviceStatus.DETACHING
    )


def test_a_server_that_counts_wrong_is_found(store: Store) -> None:
    server, gone = add_server(store), add_server(store)
    for one in (server, gone):
        attach(store, one)

    def found() -> list[str]:
        return [one.subject for one in store.read(doctor.check) if one.invariant == "volumes"]

    assert found() == []
    change = sa.update(schema.servers)
    store.write(
        lambda tx: tx.execute(change.where(schema.servers.c.id == server).values(volumes=2))
    )
    assert found() == [server]
    store.write(lambda tx: tx.execute(change.where(schema.servers.c.id == gone).values(deleted=1)))
    assert sorted(found()) == sorted([server, gone])


def test_volumes_exchange_names_in_one_change(store: Store) -> None:
    server = add_server(store)
    rows = [attach(store, server, volume) for volume in (VOLUME, OTHER)]
    names = [row.device_name for row in rows]
    changes = {
        row.uuid: {"device_name": name} for row, name in zip(rows, reversed(names), strict=True)
    }
    store.write(lambda tx: block_devices.change(tx, changes))
    renamed = [store.read(lambda tx, row=row: volumes.by_uuid(tx, row.uuid)) for row in rows]
    assert [row.device_name for row in renamed] == names[::-1]
