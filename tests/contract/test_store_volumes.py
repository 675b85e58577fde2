# SPDX-License-Identifier: Apache-2.0
"""Volumes of servers on SQLite, PostgreSQL and MariaDB.

The tests cover volume counts, device names, and refused requests.
"""

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
    """Insert a server with an ephemeral disk and swap.

    The host's own disks are /dev/vda to /dev/vdc.
    """
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
    """Begin to attach a volume, complete the action, and return the volume's row."""
    volume_request = WantedVolume(volume_id=volume, size_gb=2, **more)
    store.write(
        lambda tx: volumes.attach(
            tx, ATTACH, server, context=CALLER, project_id="p", volume=volume_request
        )
    )
    complete_action(store, server)
    return store.read(lambda tx: volumes.show(tx, server, volume))


def detach(store: Store, server: str, volume: str = VOLUME) -> None:
    store.write(
        lambda tx: volumes.detach(
            tx, DETACH, server, context=CALLER, project_id="p", volume_id=volume
        )
    )
    complete_action(store, server)


def complete_action(store: Store, server: str) -> None:
    """Complete the server's action."""
    change = sa.update(schema.actions).where(schema.actions.c.server_id == server)
    store.write(
        lambda tx: (
            tx.execute(change.values(state="done", due_at=None)),
            tx.execute(
                sa.update(schema.servers).where(schema.servers.c.id == server).values(action=None)
            ),
        )
    )


def read_count(store: Store, server: str) -> int:
    query = sa.select(schema.servers.c.volumes).where(schema.servers.c.id == server)
    return int(store.read(lambda tx: tx.scalar(query)) or 0)


def test_attach_volume_stores_options_and_counts_volumes(store: Store) -> None:
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
    assert read_count(store, server) == 2
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
    rows = store.read(lambda tx: volumes.list_of(tx, server))
    assert [attachment.volume_id for attachment in rows] == [VOLUME, OTHER]
    assert [
        attachment.server_id for attachment in store.read(lambda tx: volumes.of_volume(tx, VOLUME))
    ] == [server]


def test_attach_volume_twice_to_one_server_is_refused(store: Store) -> None:
    server = add_server(store)
    attach(store, server)
    with pytest.raises(
        errors.BadRequest, match=f"Invalid volume: volume {VOLUME} already attached"
    ):
        attach(store, server)
    assert read_count(store, server) == 1


@pytest.mark.parametrize(
    ("options", "device_name"),
    [
        ({"bus": "scsi"}, "/dev/sda"),
        ({"bus": "virtio"}, "/dev/vdd"),
        ({}, "/dev/vdd"),
    ],
)
def test_attach_volume_names_device_by_bus(
    store: Store, options: dict[str, str], device_name: str
) -> None:
    server = add_server(store)
    assert attach(store, server, **options).device_name == device_name


def test_attach_volume_is_refused_at_26_disk_devices(store: Store) -> None:
    server = add_server(store)
    for _ in range(23):
        attach(store, server, ids.new())
    with pytest.raises(errors.Forbidden, match=r"number of disk devices \(26\)"):
        attach(store, server, ids.new())


def test_attach_volume_to_shelved_server_reserves_volume(store: Store) -> None:
    server = add_server(store, states.SHELVED_OFFLOADED, None)
    assert attach(store, server).status == BlockDeviceStatus.RESERVED


def test_detach_volume_frees_count_and_device_name_when_row_is_removed(store: Store) -> None:
    server = add_server(store)
    with pytest.raises(errors.NotFound, match=f"is not attached to volume {VOLUME}"):
        detach(store, server)
    row = attach(store, server)
    detach(store, server)
    [remaining_row] = store.read(lambda tx: volumes.list_of(tx, server))
    assert (remaining_row.status, read_count(store, server)) == (BlockDeviceStatus.DETACHING, 1)
    for _ in range(2):
        store.write(lambda tx: volumes.remove(tx, server, [row.uuid]))
        assert read_count(store, server) == 0
    assert store.read(lambda tx: volumes.by_uuid(tx, row.uuid)) is None
    assert attach(store, server).device_name == "/dev/vdd"


def test_detach_of_root_volume_is_refused(store: Store) -> None:
    server = add_server(store)
    row = attach(store, server, more={"boot_index": 0})
    attach(store, server, OTHER)
    assert store.read(lambda tx: volumes.root_of(tx, server)).uuid == row.uuid
    assert store.read(lambda tx: volumes.list_of(tx, server))[0].uuid == row.uuid
    with pytest.raises(errors.Forbidden, match="Cannot detach a root device volume"):
        detach(store, server)
    detach(store, server, OTHER)


@pytest.mark.parametrize("row", [ATTACH, DETACH])
def test_attach_and_detach_volume_on_suspended_server_are_refused(
    store: Store, row: states.Action
) -> None:
    server = add_server(store, states.SUSPENDED)
    with pytest.raises(errors.WrongState, match=row.name):
        if row is ATTACH:
            attach(store, server)
        else:
            detach(store, server)


def test_set_delete_on_termination_changes_row_of_volume(store: Store) -> None:
    server = add_server(store)
    attach(store, server)
    for value in (True, False):
        store.write(
            partial(
                volumes.set_delete_on_termination,
                server_id=server,
                volume_id=VOLUME,
                delete_on_termination=value,
            )
        )
        row = store.read(lambda tx: volumes.show(tx, server, VOLUME))
        assert row.delete_on_termination is value
    with pytest.raises(errors.NotFound):
        store.write(lambda tx: volumes.set_delete_on_termination(tx, server, OTHER, True))


def test_volumes_leaving_marks_volumes_of_given_servers_as_detaching(store: Store) -> None:
    first, second = add_server(store), add_server(store)
    rows = {first: [attach(store, first)], second: [attach(store, second, OTHER)]}
    leaving = store.write(lambda tx: volumes.leaving(tx, [first, second]))
    assert {
        server: [row.uuid for row in volume_rows] for server, volume_rows in leaving.items()
    } == {server: [row.uuid for row in volume_rows] for server, volume_rows in rows.items()}
    assert (
        store.read(lambda tx: volumes.show(tx, first, VOLUME)).status == BlockDeviceStatus.DETACHING
    )


def test_doctor_reports_wrong_volume_count_and_volumes_of_deleted_server(store: Store) -> None:
    server, deleted_server = add_server(store), add_server(store)
    for key in (server, deleted_server):
        attach(store, key)

    def list_wrong_counts() -> list[str]:
        return [row.subject for row in store.read(doctor.check) if row.invariant == "volumes"]

    assert list_wrong_counts() == []
    change = sa.update(schema.servers)
    store.write(
        lambda tx: tx.execute(change.where(schema.servers.c.id == server).values(volumes=2))
    )
    assert list_wrong_counts() == [server]
    store.write(
        lambda tx: tx.execute(change.where(schema.servers.c.id == deleted_server).values(deleted=1))
    )
    assert sorted(list_wrong_counts()) == sorted([server, deleted_server])


def test_block_devices_change_swaps_device_names_of_two_volumes_at_once(store: Store) -> None:
    server = add_server(store)
    rows = [attach(store, server, volume) for volume in (VOLUME, OTHER)]
    names = [row.device_name for row in rows]
    changes = {
        row.uuid: {"device_name": name} for row, name in zip(rows, reversed(names), strict=True)
    }
    store.write(lambda tx: block_devices.change(tx, changes))
    renamed = [store.read(lambda tx, row=row: volumes.by_uuid(tx, row.uuid)) for row in rows]
    assert [row.device_name for row in renamed] == names[::-1]
