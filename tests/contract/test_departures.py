# SPDX-License-Identifier: Apache-2.0
"""What an operator who empties a host reads of it, on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.context import RequestContext
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
    """Two hosts; the first takes servers in while they run, and the second does not."""
    made = Store(upgraded_url)
    for name, uri in (("h1", "qemu+tcp://h1/system"), ("h2", "")):
        made.write(
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
    yield made
    made.close()


def new_server(store: Store, name: str, memory_mb: int = 128) -> str:
    """One that is stopped on h1, with what it holds there."""
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
                    "image": to_wire(IMAGE),
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


def test_servers_with_all_that_a_scheduler_wants_to_know_large_ones_first(store: Store) -> None:
    small, large = new_server(store, "small"), new_server(store, "large", 256)
    found = store.read(lambda tx: host_contents.look(tx, "h1"))
    assert [(one.id, one.name, one.busy) for one in found.servers] == [
        (large, "large", ""),
        (small, "small", ""),
    ]
    assert found.servers[1] == host_contents.Resident(
        small, "small", "p", states.STOPPED, FLAVOR, IMAGE, {"group": "g"}, "az1"
    )
    assert found.guests == {"stopped": 2} and found.leaving == found.coming == []
    assert found.host.answers and abs(found.at - (found.host.seen_at or 0)) < 60_000_000
    assert store.read(lambda tx: host_contents.look(tx, "h2")).servers == []
    with pytest.raises(errors.NotFound, match="There is no host h3"):
        store.read(lambda tx: host_contents.look(tx, "h3"))


def test_a_move_from_its_beginning_to_its_end(store: Store) -> None:
    server = new_server(store, "web")
    move = begin(store, server)
    assert (move.status, move.by, move.source, move.dest, move.name) == (
        "accepted",
        "a drain",
        "h1",
        None,
        "web",
    )
    found = store.read(lambda tx: host_contents.look(tx, "h1"))
    assert found.leaving == [move] and not move.idle
    assert (found.servers[0].busy, found.servers[0].task_state) == ("migrate", states.RESIZE_PREP)
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
    [ended] = store.read(lambda tx: host_contents.moves(tx, [move.uuid]))
    assert (ended.status, ended.failed, ended.step, ended.message, ended.progress) == (
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


def test_a_server_that_has_left_is_not_moved_from_elsewhere(store: Store) -> None:
    server = new_server(store, "web")
    with pytest.raises(errors.Conflict, match="is not on host h2 any more"):
        begin(store, server, "h2")


def test_a_server_that_has_another_state_by_now_is_not_moved_as_planned(store: Store) -> None:
    server = new_server(store, "web")
    with pytest.raises(
        errors.Conflict, match="is stopped by now, and its move was planned when it was active"
    ):
        begin(store, server, vm_state=states.ACTIVE)
    assert store.read(lambda tx: host_contents.look(tx, "h1")).leaving == []


def test_what_is_on_its_way_to_the_host(store: Store) -> None:
    move = begin(store, new_server(store, "web"))
    store.write(lambda tx: migrations.update(tx, {move.uuid: {"dest_host": "h2"}}))
    found = store.read(lambda tx: host_contents.look(tx, "h2"))
    assert [one.uuid for one in found.coming] == [move.uuid] and found.leaving == []


def test_debts_with_what_they_hold(store: Store) -> None:
    server = new_server(store, "web")
    with store.begin() as tx:
        guests.add_debt(tx, server, 2)
        tx.execute(sa.update(schema.servers).where(schema.servers.c.id == server).values(deleted=1))
    [debt] = store.read(host_contents.debts)
    assert (debt.server, debt.name, debt.host.name, debt.holds) == (
        server,
        "web",
        "h1",
        {"VCPU": 1, "MEMORY_MB": 128},
    )
    assert store.read(lambda tx: host_contents.debts(tx, "h2")) == []


def test_hosts_that_take_servers_in_while_they_run(store: Store) -> None:
    assert store.read(host_contents.live_migration_capable) == {"h1"}


def test_a_look_is_of_one_moment(store: Store) -> None:
    """A move that begins between two of its statements, and takes the server away, is seen whole or
    not at all."""
    server = new_server(store, "web")
    seen: list[str] = []
    moved: list[host_contents.Move] = []

    def meanwhile(connection: object, cursor: object, statement: str, *more: object) -> None:
        if "OR migrations.dest_host" in statement and not seen:
            seen.append(statement)
            moved.append(begin(store, server))
            with store.begin() as tx:
                tx.execute(
                    sa.update(schema.servers).where(schema.servers.c.id == server).values(host="h2")
                )

    sa.event.listen(store.engine, "after_cursor_execute", meanwhile)
    found = store.snapshot(lambda tx: host_contents.look(tx, "h1"))
    assert moved and [one.id for one in found.servers] == [server] and found.leaving == []
    found = store.snapshot(lambda tx: host_contents.look(tx, "h1"))
    assert found.servers == [] and found.leaving == moved


# --- what a drain does to the host, and somebody else at the same time ---
def test_an_admin_who_disables_the_host_first_has_the_say(store: Store) -> None:
    """The drain waits for the word of the other, and does not write over it."""
    uuid = store.read(lambda tx: host_status.host_state(tx, "h1")).service
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            services.set_state(tx, uuid, disabled=True, disabled_reason="smoke")
            drained = pool.submit(
                lambda: begin_host_action(store, "h1", Name.DRAIN, Arguments(), said.append)
            )
            with pytest.raises(NotYet):  # on SQLite it waits to write at all
                drained.result(timeout=0.5)
        drained.result(timeout=20)
    assert said == ["host h1 is disabled already: smoke"]
    assert store.read(lambda tx: host_status.host_state(tx, "h1")).reason == "smoke"


def test_a_host_that_somebody_takes_out_while_it_is_restored_stays_out(store: Store) -> None:
    uuid = store.read(lambda tx: host_status.host_state(tx, "h1")).service
    store.write(lambda tx: host_actions.begin(tx, "h1", Name.DRAIN, Arguments(), ADMIN))
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            services.set_state(tx, uuid, disabled=True, disabled_reason="smoke")
            restored = pool.submit(lambda: host_restore.give_back(store, "h1", said.append))
            with pytest.raises(NotYet):
                restored.result(timeout=0.5)
        assert restored.result(timeout=20) == 1
    state = store.read(lambda tx: host_status.host_state(tx, "h1"))
    assert (state.disabled, state.reason) == (True, "smoke") and "but because: smoke" in said[0]
