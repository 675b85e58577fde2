# SPDX-License-Identifier: Apache-2.0
"""Volumes of servers: attach, detach, boot, move with them; a service that is silent, refuses, or
does what it has not answered; kills at each step that concerns them. After each, exactly the
server's host may have its volumes, by one attachment each, and nobody else has any."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, states
from common.store import cleanups
from common.store.servers import actions, volumes
from compute_agent.virt.memory.state.script import Fail
from conductor.engine.engine import Lane
from conductor.workflows import WORKFLOWS
from deploy.testing.plan import Slice
from tests.answers import Answer
from tests.schemas import memory_store
from tests.selection import runs_slice
from tests.workflows import volumes as volume_service
from tests.workflows.frozen import register
from tests.workflows.scenarios import OF_A_VOLUME, SCENARIOS, ask, bigger, trial_of
from tests.workflows.simulator import Cloud, Time
from tests.workflows.test_moves_cost import Meter

WITH_VOLUMES = [
    name
    for name, scenario in SCENARIOS.items()
    if scenario.volumes or name in ("attach_volume", *OF_A_VOLUME)
]
#: Steps and verbs that concern volumes.
STEPS = {
    *WORKFLOWS.lanes[Lane.VOLUME],
    *("attach_volume", "detach_volume", "disconnect", "disconnect_volumes"),
    *("copy_volume", "switch_volume", "keep_volume", "decide"),
}


@pytest.fixture
def server(cloud: Cloud) -> str:
    register(cloud)
    [server] = cloud.create(host="h1")
    cloud.settle()
    return server


def attached(cloud: Cloud, server: str, **more: Any) -> str:
    """A volume that the server has."""
    volume = cloud.volumes.make(**more)
    volume_service.attach(cloud, server, volume)
    cloud.settle()
    return volume


def connected(cloud: Cloud, server: str) -> list[str]:
    """What the server's host has connected for it."""
    return cloud.hosts[cloud.show(server).host].driver.host.guests[server].connected


def last(cloud: Cloud, server: str) -> tuple[str, str, str | None]:
    row = cloud.store.read(lambda tx: actions.list_for(tx, server))[0]
    return row.name, row.state, row.message


def bootable(cloud: Cloud, looks: int = 0, delete: bool = True) -> tuple[str, str]:
    """A server that boots from a volume which is made for it, and the volume."""
    cloud.round()
    volume = cloud.volumes.make(looks=looks)
    more = {"boot_index": 0, "status": "creating", "source_type": "image"}
    wish = {"delete_on_termination": delete, "more": more}
    [server] = cloud.create(volumes=[cloud.volumes.wanted(volume, **wish)])
    return server, volume


# --- attach and detach ---
def test_the_host_has_it_from_attach_to_detach(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    assert volume_service.of(cloud, server) == {volume: "attached"}
    assert connected(cloud, server) == [volume]
    assert cloud.volumes.state.volumes[volume].status == "in-use"
    volume_service.detach(cloud, server, volume)
    cloud.settle()
    assert volume_service.of(cloud, server) == {} and connected(cloud, server) == []
    assert cloud.volumes.state.volumes[volume].status == "available"


def names(cloud: Cloud, server: str) -> dict[str, str]:
    """Device name by volume, as the API shows it."""
    rows = cloud.store.read(lambda tx: volumes.list_of(tx, server))
    return {str(row.volume_id): row.device_name for row in rows}


def names_in_guest(cloud: Cloud, server: str) -> dict[str, str]:
    return cloud.hosts[cloud.show(server).host].driver.host.guests[server].names


BOOTS = {
    "reboot": ["reboot:SOFT"],
    "hard reboot": ["reboot:HARD"],
    "stop and start": ["os-stop", "os-start"],
    "cold move": ["migrate", "confirmResize"],
    "cold move and back": ["migrate", "revertResize"],
    "shelve": ["shelve", "shelveOffload", "unshelve"],
    "rebuild": ["rebuild"],
    "rescue": ["rescue", "unrescue"],
}


@pytest.mark.parametrize("boot", BOOTS)
def test_device_names_agree_with_guest_after_attach_detach_and(
    cloud: Cloud, server: str, boot: str
) -> None:
    """A running guest keeps the names of its disks and a booting guest counts them."""
    first, second, third = (attached(cloud, server) for _ in range(3))
    volume_service.detach(cloud, server, first)
    cloud.settle()
    assert names(cloud, server) == {second: "/dev/vdc", third: "/dev/vdd"}
    assert names(cloud, server) == names_in_guest(cloud, server)
    for key in BOOTS[boot]:
        ask(cloud, server, key)
        cloud.settle()
    assert names(cloud, server) == {second: "/dev/vdb", third: "/dev/vdc"}
    assert names(cloud, server) == names_in_guest(cloud, server)


@pytest.mark.parametrize("moment", ["live", "paused", "suspended"])
def test_device_names_stay_while_guest_goes_on(cloud: Cloud, server: str, moment: str) -> None:
    first, second = (attached(cloud, server) for _ in range(2))
    volume_service.detach(cloud, server, first)
    cloud.settle()
    keys = {
        "live": ["os-migrateLive"],
        "paused": ["pause", "unpause"],
        "suspended": ["suspend", "resume"],
    }
    for key in keys[moment]:
        ask(cloud, server, key)
        cloud.settle()
    assert names(cloud, server) == {second: "/dev/vdc"} == names_in_guest(cloud, server)
    third = attached(cloud, server)
    assert names(cloud, server) == names_in_guest(cloud, server)
    ask(cloud, server, "reboot:HARD")
    cloud.settle()
    expected = {third: "/dev/vdb", second: "/dev/vdc"}
    assert names(cloud, server) == expected == names_in_guest(cloud, server)


def test_device_names_make_room_for_local_disks_of_new_flavor(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    cloud.move(server, "resize", replace(bigger(cloud, server), swap_mb=64))
    cloud.settle()
    assert names(cloud, server) == {volume: "/dev/vdc"} == names_in_guest(cloud, server)
    ask(cloud, server, "revertResize")
    cloud.settle()
    assert names(cloud, server) == {volume: "/dev/vdb"} == names_in_guest(cloud, server)


def test_the_passwords_of_connections_are_sealed(cloud: Cloud, server: str) -> None:
    attached(cloud, server)
    with cloud.store.engine.connect() as database:
        kept = "".join(database.connection.dbapi_connection.iterdump())  # type: ignore[union-attr]
    assert "auth_password" not in kept and cloud.volumes.state.held


@pytest.mark.parametrize("method", ["attach", "connect"])
def test_a_refusal_is_told_in_its_words(cloud: Cloud, server: str, method: str) -> None:
    volume = cloud.volumes.make()
    cloud.volumes.refusing[method, volume] = errors.BadRequest("It is in maintenance.")
    volume_service.attach(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server) == ("attach_volume", "failed", "It is in maintenance.")
    assert volume_service.of(cloud, server) == {} and cloud.volumes.state.held == {}


def test_a_guest_that_keeps_it_keeps_its_attachment(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    guest = cloud.hosts["h1"].driver.host.guests[server]
    guest.holds_volumes = True
    volume_service.detach(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server)[:2] == ("detach_volume", "failed")
    assert volume_service.of(cloud, server) == {volume: "attached"}
    assert cloud.volumes.hosts_of(volume) == {"h1"}


def test_what_the_guest_may_have_after_a_failed_attach_stays_attached(
    cloud: Cloud, server: str
) -> None:
    """The host says that it failed, and cannot take it back either."""
    volume = cloud.volumes.make()
    script = cloud.hosts["h1"].driver.host.script
    script["attach_volume"], script["detach_volume"] = [Fail("Broke.")], [Fail("Stays.")] * 99
    volume_service.attach(cloud, server, volume)
    for _ in range(30):
        cloud.round()
    assert volume_service.of(cloud, server)[volume] in ("error", "detaching")
    assert cloud.volumes.hosts_of(volume) == {"h1"}
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.volumes.state.held == {} and cloud.findings() == []


def test_what_a_host_kept_of_a_failed_attach_is_taken_back(cloud: Cloud, server: str) -> None:
    volume = cloud.volumes.make()
    script = cloud.hosts["h1"].driver.host.script
    script["attach_volume"], script["detach_volume"] = [Fail("Broke.")], [Fail("Stays.")] * 2
    volume_service.attach(cloud, server, volume)
    for _ in range(90):
        cloud.round()
    assert cloud.show(server).vm_state == states.ACTIVE
    assert volume_service.of(cloud, server) == cloud.volumes.state.held == {}
    assert (cloud.pending(), cloud.findings()) == ([], [])
    attached(cloud, server)


def test_a_dead_host_has_let_go_of_it(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    cloud.kill("h1")
    volume_service.detach(cloud, server, volume)
    cloud.settle()
    assert volume_service.of(cloud, server) == {} and cloud.volumes.state.held == {}


@pytest.mark.parametrize("before", ["os-stop", "pause", ""])
def test_a_host_that_is_back_has_lost_what_was_detached(
    cloud: Cloud, server: str, before: str
) -> None:
    """Whether its guest ran or rested when the power went, it starts without it; what the server
    has stays."""
    gone, kept = attached(cloud, server), attached(cloud, server)
    if before:
        cloud.ask(server, before)
        cloud.settle()
    cloud.kill("h1")
    volume_service.detach(cloud, server, gone)
    cloud.settle()
    other = cloud.create(host="h2")[0]
    cloud.settle()
    volume_service.attach(cloud, other, gone)
    cloud.settle()
    host = cloud.hosts["h1"]
    host.power_on()
    cloud.force_down("h1", False)
    cloud.settle()
    if not host.driver.host.guests[server].is_active:
        cloud.ask(server, "os-start" if cloud.show(server).vm_state == states.STOPPED else "reboot")
        cloud.settle()
    guest = host.driver.host.guests[server]
    assert guest.is_active and connected(cloud, server) == [kept]
    assert [one.volume_id for one in guest.volumes] == [kept]
    assert cloud.volumes.hosts_of(gone) == {"h2"} and cloud.findings() == []


def test_a_command_that_is_sent_again_says_it_too(cloud: Cloud, server: str) -> None:
    """The first sending is lost with its host's power."""
    gone = attached(cloud, server)
    cloud.ask(server, "os-stop")
    cloud.settle()
    cloud.kill("h1")
    volume_service.detach(cloud, server, gone)
    cloud.settle()
    cloud.hosts["h1"].power_on()
    cloud.force_down("h1", False)
    cloud.settle()
    lost, cloud.lose = [0], lambda kind: kind == "do" and not lost.append(1)
    cloud.ask(server, "os-start")
    for _ in range(2):
        cloud.round()
    cloud.lose = lambda kind: False
    cloud.settle()
    guest = cloud.hosts["h1"].driver.host.guests[server]
    assert len(lost) > 1 and guest.is_active and guest.volumes == []


def test_a_server_without_a_host_has_it_without_a_connection(cloud: Cloud, server: str) -> None:
    for wanted in ("shelve", "shelveOffload"):
        cloud.ask(server, wanted, args={"image_id": "33333333-3333-4333-8333-333333333333"})
        cloud.settle()
    volume = attached(cloud, server)
    assert volume_service.of(cloud, server) == {volume: "reserved"}
    assert cloud.volumes.state.volumes[volume].status == "in-use"
    assert not cloud.volumes.hosts_of(volume) and cloud.findings() == []
    cloud.ask(server, "unshelve")
    cloud.settle()
    assert volume_service.of(cloud, server) == {volume: "attached"} and connected(
        cloud, server
    ) == [volume]
    assert cloud.volumes.state.volumes[volume].status == "in-use"


def test_a_server_without_a_host_gives_it_back(cloud: Cloud, server: str) -> None:
    for wanted in ("shelve", "shelveOffload"):
        cloud.ask(server, wanted, args={"image_id": "33333333-3333-4333-8333-333333333333"})
        cloud.settle()
    volume = attached(cloud, server)
    volume_service.detach(cloud, server, volume)
    cloud.settle()
    assert volume_service.of(cloud, server) == {} and cloud.volumes.state.held == {}
    assert cloud.volumes.state.volumes[volume].status == "available"


def test_a_volume_that_grew_is_seen_by_the_guest(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    found = cloud.volumes.state.volumes
    found[volume] = replace(found[volume], size_gb=7)
    volume_service.extend(cloud, server, volume)
    cloud.settle()
    [one] = cloud.hosts["h1"].driver.host.guests[server].volumes
    assert one.size_gb == 7


# --- create and delete ---
def test_a_server_waits_for_the_volume_that_it_boots_from(cloud: Cloud) -> None:
    server, volume = bootable(cloud, looks=4)
    cloud.advance()
    assert cloud.show(server).host is None, "no host is claimed before the volume is there"
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE
    assert volume_service.of(cloud, server) == {volume: "attached"} and connected(
        cloud, server
    ) == [volume]


def test_a_volume_that_is_never_made_fails_the_create(cloud: Cloud) -> None:
    cloud.engine.volume_timeout = 5
    server, volume = bootable(cloud, looks=1000)
    cloud.settle()
    assert cloud.show(server).vm_state == states.ERROR
    assert f"{volume} was not made within 5 seconds" in cloud.show(server).fault["message"]
    assert cloud.volumes.state.held == {}


def test_delete_ends_the_wait(cloud: Cloud) -> None:
    server, volume = bootable(cloud, looks=6)
    for _ in range(2):
        cloud.round()
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.show(server).deleted and volume_service.of(cloud, server) == {}
    cloud.volumes.finish()
    cloud.clean_up()
    assert cloud.volumes.deleted == [volume]


@pytest.mark.parametrize("delete", [True, False])
def test_a_deleted_server_takes_along_what_goes_with_it(cloud: Cloud, delete: bool) -> None:
    server, volume = bootable(cloud, delete=delete)
    cloud.settle()
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.volumes.deleted == ([volume] if delete else [])
    assert cloud.volumes.state.held == {} and volume_service.of(cloud, server) == {}


def test_a_failed_create_keeps_its_volumes_for_its_delete(cloud: Cloud) -> None:
    for host in cloud.hosts.values():
        host.driver.host.script["ensure_guest"] = [Fail("Disk full.", retryable=True)] * 3
    server, volume = bootable(cloud)
    cloud.settle()
    assert cloud.show(server).vm_state == states.ERROR
    assert volume_service.of(cloud, server) == {volume: "reserved"} and not cloud.volumes.hosts_of(
        volume
    )
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.volumes.deleted == [volume] and cloud.volumes.state.held == {}


@pytest.mark.parametrize("rounds", range(4))
def test_a_delete_spares_the_volume_that_is_being_detached(
    cloud: Cloud, server: str, rounds: int
) -> None:
    """At the service it may be free already, and its user may have written down that it is."""
    volume = cloud.volumes.make()
    volume_service.attach(cloud, server, volume, delete_on_termination=True)
    cloud.settle()
    volume_service.detach(cloud, server, volume)
    for _ in range(rounds):
        cloud.advance()
    cloud.ask(server, "delete")
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.show(server).deleted and cloud.volumes.deleted == []
    assert cloud.volumes.state.volumes[volume].status == "available"


def test_what_no_host_had_stays_reserved_as_it_is(cloud: Cloud) -> None:
    server, volume = bootable(cloud)
    cloud.volumes.refusing["connect", volume] = errors.Conflict("No target is left.")
    cloud.settle()
    assert cloud.show(server).vm_state == states.ERROR
    assert volume_service.of(cloud, server) == {volume: "reserved"}
    assert cloud.volumes.asked.count(("attach", volume)) == 1


def test_another_host_gets_the_volumes_when_the_first_has_let_go(cloud: Cloud) -> None:
    cloud.hosts["h1"].driver.host.script["ensure_guest"] = [Fail("Full.", retryable=True)] * 2
    cloud.hosts["h2"].driver.host.script["ensure_guest"] = []
    server, volume = bootable(cloud)
    cloud.settle()
    assert cloud.show(server).host == "h2" and cloud.volumes.hosts_of(volume) == {"h2"}


def test_a_host_that_knows_no_volumes_gets_none(cloud: Cloud) -> None:
    for host in cloud.hosts.values():
        size = host.driver.host.size
        host.driver.host.size.traits[:] = [
            trait for trait in size.traits if trait != "COMPUTE_VOLUME_ATTACH"
        ]
    server, _ = bootable(cloud)
    cloud.settle()
    assert "without the trait COMPUTE_VOLUME_ATTACH" in (last(cloud, server)[2] or "")


def test_a_silent_host_keeps_the_volume_of_a_deleted_server(cloud: Cloud, server: str) -> None:
    """Its guest may still write to it: nobody else gets it before there is proof that it does
    not."""
    volume = attached(cloud, server)
    cloud.hosts["h1"].power_cut()
    cloud.until_down("h1")
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.show(server).deleted and volume_service.of(cloud, server) == {}
    assert cloud.volumes.hosts_of(volume) == {"h1"}
    assert [kind for kind, _ in cloud.pending()] == [cleanups.ATTACHMENT]
    cloud.force_down("h1")
    cloud.clean_up()
    assert cloud.volumes.state.held == {}


# --- moves ---
def test_the_way_back_of_a_move_has_its_volumes(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    cloud.hosts["h2"].driver.host.script["install"] = [Fail("It broke.")]
    cloud.move(server, "resize", bigger(cloud, server))
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h1")
    assert cloud.volumes.hosts_of(volume) == {"h1"} and connected(cloud, server) == [volume]
    assert cloud.hosts["h1"].driver.host.guests[server].power_state == states.RUNNING


def test_the_way_back_of_a_revert_has_its_volumes(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    cloud.move(server, "resize", bigger(cloud, server))
    cloud.settle()
    cloud.hosts["h1"].driver.host.script["install"] = [Fail("It broke.")]
    cloud.close(server, "revertResize")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.RESIZED, "h2")
    assert cloud.volumes.hosts_of(volume) == {"h2"} and connected(cloud, server) == [volume]


@pytest.mark.parametrize("verb", ["prepare_arrival", "live_migrate"])
def test_a_live_migration_that_fails_ends_the_second_attachment(
    cloud: Cloud, server: str, verb: str
) -> None:
    volume = attached(cloud, server)
    for host in cloud.hosts.values():
        host.driver.host.script[verb] = [Fail("It broke.")]
    cloud.move(server, "os-migrateLive")
    cloud.settle()
    assert cloud.show(server).host == "h1" and cloud.volumes.hosts_of(volume) == {"h1"}
    assert len(cloud.volumes.state.held) == 1 and connected(cloud, server) == [volume]


# --- whatever the service does ---
@cache
def calls_of(workflow: str) -> range:
    """Return the numbers of the calls of the service that the workflow makes."""
    time = Time()
    cloud = Cloud(memory_store(time), time)
    trial = trial_of(cloud, workflow)
    before = cloud.volumes.calls
    trial.begin()
    cloud.settle()
    cloud.store.close()
    return range(1, cloud.volumes.calls - before + 1)


HALVES = (Slice.GUESTS, Slice.MOVES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Number the calls and the fault points of each workflow.

    Only processes that run these slices look for all of them.
    """
    points = POINTS.get(metafunc.function.__name__)
    if points is None:
        return
    looks = runs_slice(metafunc.config, *HALVES)
    cases = [
        pytest.param(name, number, marks=pytest.mark.slice(HALVES[number % 2]))
        for name in WITH_VOLUMES
        for number in (points(name) if looks else [1])
    ]
    metafunc.parametrize(("workflow", "number"), cases)


@pytest.mark.parametrize("answer", [Answer.SILENT, Answer.LOST])
def test_a_silent_service_makes_it_late(
    cloud: Cloud, workflow: str, number: int, answer: Answer
) -> None:
    trial = trial_of(cloud, workflow)
    at = cloud.volumes.calls + number
    cloud.volumes.script = dict.fromkeys(range(at, at + 3), answer)
    trial.begin()
    cloud.settle()
    trial.has_ended()


#: Workflows whose way back connects the volumes again.
CONNECTING_BACK = ("resize", "revert_resize", "evacuate")


@pytest.mark.parametrize("answer", [Answer.FORBIDDEN, Answer.CONFLICT])
def test_a_refusal_leaves_nothing_for_ever(
    cloud: Cloud, workflow: str, number: int, answer: Answer
) -> None:
    """The action ends, done or failed. A service that refuses the way back too leaves a volume that
    is connected nowhere, which the doctor tells. When the service is well and the server is
    deleted, nobody has anything."""
    trial = trial_of(cloud, workflow)
    cloud.watcher = lambda: None  # it takes no finding, at no moment
    cloud.volumes.script = {cloud.volumes.calls + number: answer}
    trial.begin()
    cloud.settle()
    cloud.volumes.well()
    cloud.volumes.finish()
    cloud.clean_up()
    connects = workflow == "rebuild:boots" or workflow.partition(":")[0] in CONNECTING_BACK
    left = {"volume-of-server"} if connects else set()
    assert {one.invariant for one in cloud.findings()} <= left
    if not cloud.show(trial.server).deleted:
        cloud.ask(trial.server, "delete")
    cloud.settle()
    cloud.clean_up()
    for host in cloud.hosts.values():
        assert host.is_on is False or trial.server not in host.driver.host.guests
    assert cloud.volumes.state.held == {}


@pytest.mark.slice("moves")
@pytest.mark.parametrize("rounds", [0, 1, 2])
@pytest.mark.parametrize("workflow", [name for name in WITH_VOLUMES if "delete" not in name])
def test_delete_wins_at_any_moment(cloud: Cloud, workflow: str, rounds: int) -> None:
    trial = trial_of(cloud, workflow)
    trial.begin()
    for _ in range(rounds):
        cloud.advance()
        cloud.time.pass_by(1)
    cloud.ask(trial.server, "delete")
    cloud.settle()
    cloud.volumes.finish()
    cloud.clean_up()
    before = cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[1]
    keeps = before.name == "createImage" and before.state == "done"
    trial.is_right(states.DELETED, 0, trial.scenario.images if keeps else 0)
    assert cloud.volumes.state.held == {}


# --- kills ---
def fault_points(workflow: str) -> list[int]:
    """Those at steps and verbs that concern volumes."""
    time = Time()
    cloud = Cloud(memory_store(time), time)
    trial = trial_of(cloud, workflow)
    trial.crash_at(-1)
    trial.begin()
    cloud.settle()
    cloud.store.close()
    return [number for number, hit in enumerate(trial.hits) if STEPS & set(hit[1:])]


#: What a test is tried at, each in turn.
POINTS = {
    "test_a_silent_service_makes_it_late": calls_of,
    "test_a_refusal_leaves_nothing_for_ever": calls_of,
    "test_killed_at_each_fault_point": fault_points,
}


def test_killed_at_each_fault_point(cloud: Cloud, workflow: str, number: int) -> None:
    trial = trial_of(cloud, workflow)
    trial.crash_at(number)
    trial.begin()
    trial.run_through_crashes()
    assert len(trial.hits) > number, "the fault point was not reached"
    trial.has_ended()


# --- what it costs ---
#: Statements, messages and calls of the service: of one server with one volume beside its disk.
COSTS = {
    "attach_volume": (60, 2, 3),
    "detach_volume": (35, 2, 2),
    "create:volumes": (83, 2, 3),
    "delete:volumes": (58, 2, 2),
    "live_migrate:volumes": (162, 10, 5),
}


@pytest.mark.parametrize("workflow", COSTS)
def test_statements_messages_and_calls(cloud: Cloud, workflow: str) -> None:
    trial = trial_of(cloud, workflow)
    cloud.watcher = lambda: None
    meter, calls = Meter(cloud), cloud.volumes.calls
    trial.begin()
    cloud.settle()
    calls = cloud.volumes.calls - calls
    print(f"\n{workflow}: {meter.statements} statements, {meter.messages} messages, {calls} calls")
    assert meter.statements <= COSTS[workflow][0]
    assert meter.messages <= COSTS[workflow][1]
    assert calls <= COSTS[workflow][2]


def test_servers_without_volumes_ask_nobody(cloud: Cloud) -> None:
    statements: list[str] = []
    cloud.round()
    sa.event.listen(
        cloud.store.engine, "before_cursor_execute", lambda *given: statements.append(given[2])
    )
    [server] = cloud.create(host="h1")
    cloud.advance()
    for host in cloud.hosts.values():
        host.work()
        cloud.sync(host)
    for wanted in ("os-stop", "delete"):
        cloud.ask(server, wanted)
        cloud.advance()
    assert statements and not any("block_devices" in one for one in statements)
    assert cloud.volumes.asked == []
