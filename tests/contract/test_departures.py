# SPDX-License-Identifier: Apache-2.0
"""The contents of a host that an operator drains or restores, on the three databases."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.context import RequestContext
from common.domain.hardware import ON_VOLUME
from common.domain.models import Flavor, HostInventory, ImageRef
from common.domain.statuses import GuestState, MigrationType
from common.domain.wire import to_wire
from common.store import schema
from common.store.engine import Store, now
from common.store.hosts import host_actions, host_status, hosts, services
from common.store.hosts.host_actions import Arguments, Name
from common.store.placement import allocations
from common.store.servers import actions, guests, migrations, servers
from common.store.views import host_contents
from deploy.operator.hosts import restore as host_restore
from deploy.operator.hosts.actions import begin as begin_host_action

ADMIN = RequestContext(user_id="", project_id="", roles=("admin",), request_id="req-1")
FLAVOR, IMAGE = Flavor("1", "m1.nano", 1, 128, 1), ImageRef("i", properties={"os_type": "linux"})


@pytest.fixture
def store(upgraded_url: str) -> Iterator[Store]:
    """Yield a store with two hosts. Only h1 supports live migration."""
    store = Store(upgraded_url)
    for name, uri in (("h1", "qemu+tcp://h1/system"), ("h2", "")):
        store.write(
            lambda tx, name=name, uri=uri: hosts.register(
                tx,
                name,
                "boot",
                HostInventory(
                    "QEMU",
                    7002000,
                    "",
                    4,
                    8192,
                    100,
                    facts={"migration": {"uri": uri, "address": ""}},
                ),
            )
        )
    yield store
    store.close()


def new_server(store: Store, name: str, memory_mb: int = 128, on_volume: bool = False) -> str:
    """Create a stopped server on h1, with allocations and a guest."""
    image = {"id": "", ON_VOLUME: True} if on_volume else to_wire(IMAGE)
    server = ids.new()
    with store.begin() as tx:
        servers.insert(
            tx,
            [
                {
                    "id": server,
                    "project_id": "p",
                    "user_id": "u",
                    "name": name,
                    "hostname": name,
                    "host": "h1",
                    "vm_state": states.STOPPED,
                    "flavor": to_wire(FLAVOR),
                    "flavor_id": "1",
                    "vcpus": 1,
                    "disk_gb": 1,
                    "memory_mb": memory_mb,
                    "meta": {},
                    "tags": [],
                    "scheduler_hints": {"group": "g"},
                    "security_groups": [],
                    "image": image,
                    "image_id": "i",
                    "pinned_availability_zone": "az1",
                    "reservation_id": "r",
                }
            ],
        )
        request = allocations.ClaimRequest(
            server, "p", "u", {"VCPU": 1, "MEMORY_MB": memory_mb}, ["h1"]
        )
        allocations.claim(tx, [request])
        guests.add(
            tx,
            [
                {
                    "server_id": server,
                    "host": "h1",
                    "fence": 1,
                    "wanted": GuestState.STOPPED,
                    "may_run": False,
                }
            ],
        )
    return server


def begin(
    store: Store, server: str, host: str = "h1", vm_state: str = states.STOPPED
) -> host_contents.Move:
    return store.write(
        lambda tx: host_contents.begin(
            tx,
            host,
            "migrate",
            server,
            MigrationType.COLD,
            vm_state=vm_state,
            context=ADMIN,
            args={"host": None, "by": "a drain"},
        )
    )


def test_host_contents_list_servers_by_size_with_scheduler_data(store: Store) -> None:
    small, large = new_server(store, "small"), new_server(store, "large", 256)
    contents = store.read(lambda tx: host_contents.look(tx, "h1"))
    assert [(resident.id, resident.name, resident.busy) for resident in contents.servers] == [
        (large, "large", ""),
        (small, "small", ""),
    ]
    assert contents.servers[1] == host_contents.Resident(
        small, "small", "p", states.STOPPED, FLAVOR, IMAGE, {"group": "g"}, "az1"
    )
    assert contents.guests == {"stopped": 2} and contents.leaving == contents.coming == []
    assert contents.host.answers and abs(contents.at - (contents.host.seen_at or 0)) < 60_000_000
    assert store.read(lambda tx: host_contents.look(tx, "h2")).servers == []
    with pytest.raises(errors.NotFound, match="There is no host h3"):
        store.read(lambda tx: host_contents.look(tx, "h3"))


def test_host_contents_show_flavor_without_root_disk_of_server_on_volume(store: Store) -> None:
    new_server(store, "on-disk"), new_server(store, "on-volume", on_volume=True)
    contents = store.read(lambda tx: host_contents.look(tx, "h1"))
    disks = {resident.name: resident.flavor.root_gb for resident in contents.servers}
    assert disks == {"on-disk": FLAVOR.root_gb, "on-volume": 0} and FLAVOR.root_gb > 0


def test_host_contents_show_move_from_begin_to_end(store: Store) -> None:
    server = new_server(store, "web")
    move = begin(store, server)
    assert (move.status, move.by, move.source, move.dest, move.name) == (
        "accepted",
        "a drain",
        "h1",
        None,
        "web",
    )
    contents = store.read(lambda tx: host_contents.look(tx, "h1"))
    assert contents.leaving == [move] and not move.idle
    assert (contents.servers[0].busy, contents.servers[0].task_state) == (
        "migrate",
        states.RESIZE_PREP,
    )
    with pytest.raises(errors.Conflict):
        begin(store, server)
    action = store.read(lambda tx: actions.list_for(tx, server))[0]
    with store.begin() as tx:
        migrations.update(
            tx, {move.uuid: {"status": "error", "dest_host": "h2", "progress": {"memory_total": 5}}}
        )
        actions.append(
            tx,
            [
                {
                    "action_id": action.id,
                    "seq": 1,
                    "step": "copy",
                    "attempt": 1,
                    "event": "failed",
                    "message": "No space.",
                }
            ],
        )
        actions.update(
            tx, {action.id: {"state": "failed", "message": "No space.", "finished_at": now()}}
        )
    assert store.read(lambda tx: host_contents.look(tx, "h1")).leaving == []
    [move_at_end] = store.read(lambda tx: host_contents.moves(tx, [move.uuid]))
    assert (
        move_at_end.status,
        move_at_end.failed,
        move_at_end.step,
        move_at_end.message,
        move_at_end.progress,
    ) == (
        "error",
        True,
        "copy",
        "No space.",
        {"memory_total": 5},
    )
    assert store.read(lambda tx: host_contents.read_durations(tx, "h1", MigrationType.COLD)) == []
    store.write(lambda tx: actions.update(tx, {action.id: {"state": "done"}}))
    [seconds] = store.read(lambda tx: host_contents.read_durations(tx, "h1", MigrationType.COLD))
    assert 0 <= seconds < 60


def test_begin_move_of_server_on_other_host_raises_conflict(store: Store) -> None:
    server = new_server(store, "web")
    with pytest.raises(errors.Conflict, match="is not on host h2 any more"):
        begin(store, server, "h2")


def test_begin_move_of_server_with_changed_state_raises_conflict(store: Store) -> None:
    server = new_server(store, "web")
    with pytest.raises(
        errors.Conflict, match="is stopped now, but its move was planned for the state active"
    ):
        begin(store, server, vm_state=states.ACTIVE)
    assert store.read(lambda tx: host_contents.look(tx, "h1")).leaving == []


def test_host_contents_show_incoming_move(store: Store) -> None:
    move = begin(store, new_server(store, "web"))
    store.write(lambda tx: migrations.update(tx, {move.uuid: {"dest_host": "h2"}}))
    contents = store.read(lambda tx: host_contents.look(tx, "h2"))
    assert [incoming.uuid for incoming in contents.coming] == [move.uuid] and contents.leaving == []


def test_host_contents_show_pending_cleanup_with_allocations(store: Store) -> None:
    server = new_server(store, "web")
    with store.begin() as tx:
        guests.add_removal(tx, server, 2)
        tx.execute(sa.update(schema.servers).where(schema.servers.c.id == server).values(deleted=1))
    [removal] = store.read(host_contents.removals)
    assert (removal.server, removal.name, removal.host.name, removal.holds) == (
        server,
        "web",
        "h1",
        {"VCPU": 1, "MEMORY_MB": 128},
    )
    assert store.read(lambda tx: host_contents.removals(tx, "h2")) == []


def test_live_migration_capable_lists_hosts_with_migration_uri(store: Store) -> None:
    assert store.read(host_contents.live_migration_capable) == {"h1"}


def test_host_contents_snapshot_is_consistent_during_move(store: Store) -> None:
    """A move that begins between two statements of the snapshot appears fully or not at all."""
    server = new_server(store, "web")
    statements: list[str] = []
    moved: list[host_contents.Move] = []

    def meanwhile(connection: object, cursor: object, statement: str, *more: object) -> None:
        if "OR migrations.dest_host" in statement and not statements:
            statements.append(statement)
            moved.append(begin(store, server))
            with store.begin() as tx:
                tx.execute(
                    sa.update(schema.servers).where(schema.servers.c.id == server).values(host="h2")
                )

    sa.event.listen(store.engine, "after_cursor_execute", meanwhile)
    contents = store.snapshot(lambda tx: host_contents.look(tx, "h1"))
    assert (
        moved
        and [resident.id for resident in contents.servers] == [server]
        and contents.leaving == []
    )
    contents = store.snapshot(lambda tx: host_contents.look(tx, "h1"))
    assert contents.servers == [] and contents.leaving == moved


# --- changes of the host during a drain or restore ---
def test_drain_keeps_disabled_reason_of_concurrent_admin(store: Store) -> None:
    """The drain waits for the other transaction and keeps the reason given there."""
    uuid = store.read(lambda tx: host_status.host_state(tx, "h1")).service
    messages: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            services.set_state(tx, uuid, disabled=True, disabled_reason="smoke")
            drained = pool.submit(
                lambda: begin_host_action(store, "h1", Name.DRAIN, Arguments(), messages.append)
            )
            # On SQLite the drain waits for the only writer.
            with pytest.raises(NotYet):
                drained.result(timeout=0.5)
        drained.result(timeout=20)
    assert messages == ["host h1 is disabled already: smoke"]
    assert store.read(lambda tx: host_status.host_state(tx, "h1")).reason == "smoke"


def test_restore_keeps_host_disabled_by_concurrent_admin(store: Store) -> None:
    uuid = store.read(lambda tx: host_status.host_state(tx, "h1")).service
    store.write(lambda tx: host_actions.begin(tx, "h1", Name.DRAIN, Arguments(), ADMIN))
    messages: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            services.set_state(tx, uuid, disabled=True, disabled_reason="smoke")
            restored = pool.submit(lambda: host_restore.give_back(store, "h1", messages.append))
            with pytest.raises(NotYet):
                restored.result(timeout=0.5)
        assert restored.result(timeout=20) == 1
    state = store.read(lambda tx: host_status.host_state(tx, "h1"))
    assert (state.disabled, state.reason) == (
        True,
        "smoke",
    ) and "but for this reason: smoke" in messages[0]
