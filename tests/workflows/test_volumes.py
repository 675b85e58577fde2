# SPDX-License-Identifier: Apache-2.0
"""Tests of volumes of servers: attach, detach, boot and moves, with faults of service and hosts.

Most tests check that only the server's host has the volume, by one attachment.
"""

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
from tests.workflows.scenarios import SCENARIOS, VOLUME_ACTIONS, ask, bigger, trial_of
from tests.workflows.simulator import Cloud, Time
from tests.workflows.test_moves_cost import Meter

WITH_VOLUMES = [
    name
    for name, scenario in SCENARIOS.items()
    if scenario.volumes or name in ("attach_volume", *VOLUME_ACTIONS)
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


def attach_new_volume(cloud: Cloud, server: str, **more: Any) -> str:
    """Attach a new volume to the server, settle, and return the volume's id."""
    volume = cloud.volumes.make(**more)
    volume_service.attach(cloud, server, volume)
    cloud.settle()
    return volume


def read_connected(cloud: Cloud, server: str) -> list[str]:
    """Return the volumes that the server's host has connected for the guest."""
    return cloud.hosts[cloud.show(server).host].driver.host.guests[server].connected


def last(cloud: Cloud, server: str) -> tuple[str, str, str | None]:
    """Return name, state and message of the last action of the server."""
    row = cloud.store.read(lambda tx: actions.list_for(tx, server))[0]
    return row.name, row.state, row.message


def boot_from_new_volume(cloud: Cloud, looks: int = 0, delete: bool = True) -> tuple[str, str]:
    """Create a server that boots from a new volume, without a round. Return both ids.

    Args:
        cloud: The cloud.
        looks: Number of polls after which the service shows the volume as available.
        delete: Value of delete_on_termination.
    """
    cloud.round()
    volume = cloud.volumes.make(looks=looks)
    more = {"boot_index": 0, "status": "creating", "source_type": "image"}
    values = {"delete_on_termination": delete, "more": more}
    [server] = cloud.create(volumes=[cloud.volumes.build_wanted_volume(volume, **values)])
    return server, volume


# --- attach and detach ---
def test_attach_volume_connects_host_to_volume_until_detach(cloud: Cloud, server: str) -> None:
    volume = attach_new_volume(cloud, server)
    assert volume_service.of(cloud, server) == {volume: "attached"}
    assert read_connected(cloud, server) == [volume]
    assert cloud.volumes.state.volumes[volume].status == "in-use"
    volume_service.detach(cloud, server, volume)
    cloud.settle()
    assert volume_service.of(cloud, server) == {} and read_connected(cloud, server) == []
    assert cloud.volumes.state.volumes[volume].status == "available"


def read_device_names(cloud: Cloud, server: str) -> dict[str, str]:
    """Return volume -> device name from the records, which the API shows."""
    rows = cloud.store.read(lambda tx: volumes.list_of(tx, server))
    return {str(row.volume_id): row.device_name for row in rows}


def read_guest_names(cloud: Cloud, server: str) -> dict[str, str]:
    """Return volume -> device name inside the guest."""
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
def test_volume_device_names_equal_names_in_guest_after_detach_and_boot(
    cloud: Cloud, server: str, boot: str
) -> None:
    """A detach from a running guest changes no device names. A boot assigns all names anew."""
    first, second, third = (attach_new_volume(cloud, server) for _ in range(3))
    volume_service.detach(cloud, server, first)
    cloud.settle()
    assert read_device_names(cloud, server) == {second: "/dev/vdc", third: "/dev/vdd"}
    assert read_device_names(cloud, server) == read_guest_names(cloud, server)
    for key in BOOTS[boot]:
        ask(cloud, server, key)
        cloud.settle()
    assert read_device_names(cloud, server) == {second: "/dev/vdb", third: "/dev/vdc"}
    assert read_device_names(cloud, server) == read_guest_names(cloud, server)


@pytest.mark.parametrize("moment", ["live", "paused", "suspended"])
def test_volume_device_names_stay_after_detach_until_guest_boots(
    cloud: Cloud, server: str, moment: str
) -> None:
    first, second = (attach_new_volume(cloud, server) for _ in range(2))
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
    assert (
        read_device_names(cloud, server) == {second: "/dev/vdc"} == read_guest_names(cloud, server)
    )
    third = attach_new_volume(cloud, server)
    assert read_device_names(cloud, server) == read_guest_names(cloud, server)
    ask(cloud, server, "reboot:HARD")
    cloud.settle()
    expected = {third: "/dev/vdb", second: "/dev/vdc"}
    assert read_device_names(cloud, server) == expected == read_guest_names(cloud, server)


def test_resize_to_flavor_with_swap_changes_device_name_of_volume(
    cloud: Cloud, server: str
) -> None:
    volume = attach_new_volume(cloud, server)
    cloud.move(server, "resize", replace(bigger(cloud, server), swap_mb=64))
    cloud.settle()
    assert (
        read_device_names(cloud, server) == {volume: "/dev/vdc"} == read_guest_names(cloud, server)
    )
    ask(cloud, server, "revertResize")
    cloud.settle()
    assert (
        read_device_names(cloud, server) == {volume: "/dev/vdb"} == read_guest_names(cloud, server)
    )


def test_attach_volume_seals_connection_password_in_database(cloud: Cloud, server: str) -> None:
    attach_new_volume(cloud, server)
    with cloud.store.engine.connect() as database:
        dump = "".join(database.connection.dbapi_connection.iterdump())  # type: ignore[union-attr]
    assert "auth_password" not in dump and cloud.volumes.state.held


@pytest.mark.parametrize("method", ["attach", "connect"])
def test_attach_volume_fails_with_message_of_refusing_service(
    cloud: Cloud, server: str, method: str
) -> None:
    volume = cloud.volumes.make()
    cloud.volumes.refusing[method, volume] = errors.BadRequest("It is in maintenance.")
    volume_service.attach(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server) == ("attach_volume", "failed", "It is in maintenance.")
    assert volume_service.of(cloud, server) == {} and cloud.volumes.state.held == {}


def test_detach_volume_keeps_attachment_when_guest_holds_volume(cloud: Cloud, server: str) -> None:
    volume = attach_new_volume(cloud, server)
    guest = cloud.hosts["h1"].driver.host.guests[server]
    guest.holds_volumes = True
    volume_service.detach(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server)[:2] == ("detach_volume", "failed")
    assert volume_service.of(cloud, server) == {volume: "attached"}
    assert cloud.volumes.hosts_of(volume) == {"h1"}


def test_failed_attach_volume_keeps_attachment_when_host_cannot_undo(
    cloud: Cloud, server: str
) -> None:
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


def test_failed_attach_volume_is_undone_when_host_recovers(cloud: Cloud, server: str) -> None:
    volume = cloud.volumes.make()
    script = cloud.hosts["h1"].driver.host.script
    script["attach_volume"], script["detach_volume"] = [Fail("Broke.")], [Fail("Stays.")] * 2
    volume_service.attach(cloud, server, volume)
    for _ in range(90):
        cloud.round()
    assert cloud.show(server).vm_state == states.ACTIVE
    assert volume_service.of(cloud, server) == cloud.volumes.state.held == {}
    assert (cloud.pending(), cloud.findings()) == ([], [])
    attach_new_volume(cloud, server)


def test_detach_volume_on_host_forced_down_ends_attachment(cloud: Cloud, server: str) -> None:
    volume = attach_new_volume(cloud, server)
    cloud.kill("h1")
    volume_service.detach(cloud, server, volume)
    cloud.settle()
    assert volume_service.of(cloud, server) == {} and cloud.volumes.state.held == {}


@pytest.mark.parametrize("before", ["os-stop", "pause", ""])
def test_returned_host_starts_guest_without_detached_volume(
    cloud: Cloud, server: str, before: str
) -> None:
    """At the power cut the guest runs, or is paused or stopped. A second volume stays attached."""
    detached, kept = attach_new_volume(cloud, server), attach_new_volume(cloud, server)
    if before:
        cloud.ask(server, before)
        cloud.settle()
    cloud.kill("h1")
    volume_service.detach(cloud, server, detached)
    cloud.settle()
    other = cloud.create(host="h2")[0]
    cloud.settle()
    volume_service.attach(cloud, other, detached)
    cloud.settle()
    host = cloud.hosts["h1"]
    host.power_on()
    cloud.force_down("h1", False)
    cloud.settle()
    if not host.driver.host.guests[server].is_active:
        cloud.ask(server, "os-start" if cloud.show(server).vm_state == states.STOPPED else "reboot")
        cloud.settle()
    guest = host.driver.host.guests[server]
    assert guest.is_active and read_connected(cloud, server) == [kept]
    assert [volume.volume_id for volume in guest.volumes] == [kept]
    assert cloud.volumes.hosts_of(detached) == {"h2"} and cloud.findings() == []


def test_repeated_start_command_omits_detached_volume(cloud: Cloud, server: str) -> None:
    """The first start command to the returned host is lost."""
    detached = attach_new_volume(cloud, server)
    cloud.ask(server, "os-stop")
    cloud.settle()
    cloud.kill("h1")
    volume_service.detach(cloud, server, detached)
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


def test_attach_volume_to_offloaded_server_reserves_volume_until_unshelve(
    cloud: Cloud, server: str
) -> None:
    for key in ("shelve", "shelveOffload"):
        cloud.ask(server, key, args={"image_id": "33333333-3333-4333-8333-333333333333"})
        cloud.settle()
    volume = attach_new_volume(cloud, server)
    assert volume_service.of(cloud, server) == {volume: "reserved"}
    assert cloud.volumes.state.volumes[volume].status == "in-use"
    assert not cloud.volumes.hosts_of(volume) and cloud.findings() == []
    cloud.ask(server, "unshelve")
    cloud.settle()
    assert volume_service.of(cloud, server) == {volume: "attached"} and read_connected(
        cloud, server
    ) == [volume]
    assert cloud.volumes.state.volumes[volume].status == "in-use"


def test_detach_volume_from_offloaded_server_frees_volume(cloud: Cloud, server: str) -> None:
    for key in ("shelve", "shelveOffload"):
        cloud.ask(server, key, args={"image_id": "33333333-3333-4333-8333-333333333333"})
        cloud.settle()
    volume = attach_new_volume(cloud, server)
    volume_service.detach(cloud, server, volume)
    cloud.settle()
    assert volume_service.of(cloud, server) == {} and cloud.volumes.state.held == {}
    assert cloud.volumes.state.volumes[volume].status == "available"


def test_extend_volume_updates_size_of_volume_in_guest(cloud: Cloud, server: str) -> None:
    volume = attach_new_volume(cloud, server)
    volumes = cloud.volumes.state.volumes
    volumes[volume] = replace(volumes[volume], size_gb=7)
    volume_service.extend(cloud, server, volume)
    cloud.settle()
    [volume_in_guest] = cloud.hosts["h1"].driver.host.guests[server].volumes
    assert volume_in_guest.size_gb == 7


# --- create and delete ---
def test_create_waits_for_boot_volume_before_claim(cloud: Cloud) -> None:
    server, volume = boot_from_new_volume(cloud, looks=4)
    cloud.advance()
    assert cloud.show(server).host is None, "no host is claimed before the volume is ready"
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE
    assert volume_service.of(cloud, server) == {volume: "attached"} and read_connected(
        cloud, server
    ) == [volume]


def test_create_fails_when_boot_volume_is_not_ready_in_time(cloud: Cloud) -> None:
    cloud.engine.volume_timeout = 5
    server, volume = boot_from_new_volume(cloud, looks=1000)
    cloud.settle()
    assert cloud.show(server).vm_state == states.ERROR
    assert f"{volume} was not created within 5 seconds" in cloud.show(server).fault["message"]
    assert cloud.volumes.state.held == {}


def test_delete_during_wait_for_boot_volume_deletes_volume(cloud: Cloud) -> None:
    server, volume = boot_from_new_volume(cloud, looks=6)
    for _ in range(2):
        cloud.round()
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.show(server).deleted and volume_service.of(cloud, server) == {}
    cloud.volumes.finish()
    cloud.clean_up()
    assert cloud.volumes.deleted == [volume]


@pytest.mark.parametrize("delete", [True, False])
def test_delete_deletes_volume_only_if_delete_on_termination(cloud: Cloud, delete: bool) -> None:
    server, volume = boot_from_new_volume(cloud, delete=delete)
    cloud.settle()
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.volumes.deleted == ([volume] if delete else [])
    assert cloud.volumes.state.held == {} and volume_service.of(cloud, server) == {}


def test_failed_create_keeps_volume_reserved_until_delete(cloud: Cloud) -> None:
    for host in cloud.hosts.values():
        host.driver.host.script["ensure_guest"] = [Fail("Disk full.", retryable=True)] * 3
    server, volume = boot_from_new_volume(cloud)
    cloud.settle()
    assert cloud.show(server).vm_state == states.ERROR
    assert volume_service.of(cloud, server) == {volume: "reserved"} and not cloud.volumes.hosts_of(
        volume
    )
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.volumes.deleted == [volume] and cloud.volumes.state.held == {}


@pytest.mark.parametrize("rounds", range(4))
def test_delete_during_detach_volume_keeps_delete_on_termination_volume(
    cloud: Cloud, server: str, rounds: int
) -> None:
    """The service may show the volume as available already, and the user may rely on the data."""
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


def test_create_with_refused_volume_connection_keeps_attachment_reserved(cloud: Cloud) -> None:
    server, volume = boot_from_new_volume(cloud)
    cloud.volumes.refusing["connect", volume] = errors.Conflict("No target is left.")
    cloud.settle()
    assert cloud.show(server).vm_state == states.ERROR
    assert volume_service.of(cloud, server) == {volume: "reserved"}
    assert cloud.volumes.asked.count(("attach", volume)) == 1


def test_create_retry_on_other_host_disconnects_volume_from_first_host(cloud: Cloud) -> None:
    cloud.hosts["h1"].driver.host.script["ensure_guest"] = [Fail("Full.", retryable=True)] * 2
    cloud.hosts["h2"].driver.host.script["ensure_guest"] = []
    server, volume = boot_from_new_volume(cloud)
    cloud.settle()
    assert cloud.show(server).host == "h2" and cloud.volumes.hosts_of(volume) == {"h2"}


def test_create_with_volume_fails_when_no_host_has_volume_trait(cloud: Cloud) -> None:
    for host in cloud.hosts.values():
        size = host.driver.host.size
        host.driver.host.size.traits[:] = [
            trait for trait in size.traits if trait != "COMPUTE_VOLUME_ATTACH"
        ]
    server, _ = boot_from_new_volume(cloud)
    cloud.settle()
    assert "without the trait COMPUTE_VOLUME_ATTACH" in (last(cloud, server)[2] or "")


def test_delete_on_silent_host_keeps_attachment_until_forced_down(
    cloud: Cloud, server: str
) -> None:
    """The guest may still write to the volume, so no other server may attach the volume."""
    volume = attach_new_volume(cloud, server)
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
def test_failed_resize_reconnects_volume_at_source(cloud: Cloud, server: str) -> None:
    volume = attach_new_volume(cloud, server)
    cloud.hosts["h2"].driver.host.script["install"] = [Fail("It broke.")]
    cloud.move(server, "resize", bigger(cloud, server))
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h1")
    assert cloud.volumes.hosts_of(volume) == {"h1"} and read_connected(cloud, server) == [volume]
    assert cloud.hosts["h1"].driver.host.guests[server].power_state == states.RUNNING


def test_failed_revert_resize_reconnects_volume_at_destination(cloud: Cloud, server: str) -> None:
    volume = attach_new_volume(cloud, server)
    cloud.move(server, "resize", bigger(cloud, server))
    cloud.settle()
    cloud.hosts["h1"].driver.host.script["install"] = [Fail("It broke.")]
    cloud.close(server, "revertResize")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.RESIZED, "h2")
    assert cloud.volumes.hosts_of(volume) == {"h2"} and read_connected(cloud, server) == [volume]


@pytest.mark.parametrize("verb", ["prepare_arrival", "live_migrate"])
def test_failed_live_migrate_deletes_second_attachment(
    cloud: Cloud, server: str, verb: str
) -> None:
    volume = attach_new_volume(cloud, server)
    for host in cloud.hosts.values():
        host.driver.host.script[verb] = [Fail("It broke.")]
    cloud.move(server, "os-migrateLive")
    cloud.settle()
    assert cloud.show(server).host == "h1" and cloud.volumes.hosts_of(volume) == {"h1"}
    assert len(cloud.volumes.state.held) == 1 and read_connected(cloud, server) == [volume]


# --- faults of the service ---
@cache
def read_calls(workflow: str) -> range:
    """Return the numbers of the workflow's calls to the volume service, counted from 1."""
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
    """Parametrize the tests in ``POINTS`` with the call or fault point numbers of each workflow.

    Only processes that run these slices read all numbers, because this runs the workflows.
    """
    points = POINTS.get(metafunc.function.__name__)
    if points is None:
        return
    reads_all = runs_slice(metafunc.config, *HALVES)
    cases = [
        pytest.param(name, number, marks=pytest.mark.slice(HALVES[number % 2]))
        for name in WITH_VOLUMES
        for number in (points(name) if reads_all else [1])
    ]
    metafunc.parametrize(("workflow", "number"), cases)


@pytest.mark.parametrize("answer", [Answer.SILENT, Answer.LOST])
def test_volume_workflow_succeeds_after_missing_answers_of_service(
    cloud: Cloud, workflow: str, number: int, answer: Answer
) -> None:
    trial = trial_of(cloud, workflow)
    at = cloud.volumes.calls + number
    cloud.volumes.script = dict.fromkeys(range(at, at + 3), answer)
    trial.begin()
    cloud.settle()
    trial.check_expected_end()


#: Workflows whose undo connects the volumes again.
CONNECTING_BACK = ("resize", "revert_resize", "evacuate")


@pytest.mark.parametrize("answer", [Answer.FORBIDDEN, Answer.CONFLICT])
def test_delete_after_refused_call_in_volume_workflow_ends_attachments(
    cloud: Cloud, workflow: str, number: int, answer: Answer
) -> None:
    """The service repeats the refusal, also during the undo.

    A volume may then have no connection until the delete, and the doctor reports this volume.
    """
    trial = trial_of(cloud, workflow)
    cloud.watcher = lambda: None  # Findings are expected until the delete.
    cloud.volumes.script = {cloud.volumes.calls + number: answer}
    trial.begin()
    cloud.settle()
    cloud.volumes.well()
    cloud.volumes.finish()
    cloud.clean_up()
    connects = workflow == "rebuild:boots" or workflow.partition(":")[0] in CONNECTING_BACK
    expected_kinds = {"volume-of-server"} if connects else set()
    assert {finding.invariant for finding in cloud.findings()} <= expected_kinds
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
def test_delete_supersedes_volume_workflow_after_up_to_two_rounds(
    cloud: Cloud, workflow: str, rounds: int
) -> None:
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
    has_image = before.name == "createImage" and before.state == "done"
    trial.check_end(states.DELETED, 0, trial.scenario.images if has_image else 0)
    assert cloud.volumes.state.held == {}


# --- kills ---
def read_fault_points(workflow: str) -> list[int]:
    """Return the numbers of the fault points at steps and verbs that concern volumes."""
    time = Time()
    cloud = Cloud(memory_store(time), time)
    trial = trial_of(cloud, workflow)
    trial.crash_at(-1)
    trial.begin()
    cloud.settle()
    cloud.store.close()
    return [number for number, hit in enumerate(trial.hits) if STEPS & set(hit[1:])]


#: Test -> a function that returns the numbers of its cases.
POINTS = {
    "test_volume_workflow_succeeds_after_missing_answers_of_service": read_calls,
    "test_delete_after_refused_call_in_volume_workflow_ends_attachments": read_calls,
    "test_volume_workflow_completes_after_process_kill_at_fault_point": read_fault_points,
}


def test_volume_workflow_completes_after_process_kill_at_fault_point(
    cloud: Cloud, workflow: str, number: int
) -> None:
    trial = trial_of(cloud, workflow)
    trial.crash_at(number)
    trial.begin()
    trial.run_through_crashes()
    assert len(trial.hits) > number, "the fault point was not reached"
    trial.check_expected_end()


# --- statements, messages and calls ---
#: Workflow -> limit of statements, messages and calls to the service, for one server with one
#: volume beside its disk.
COSTS = {
    "attach_volume": (60, 2, 3),
    "detach_volume": (35, 2, 2),
    "create:volumes": (83, 2, 3),
    "delete:volumes": (58, 2, 2),
    "live_migrate:volumes": (162, 10, 5),
}


@pytest.mark.parametrize("workflow", COSTS)
def test_volume_workflow_stays_within_limit_of_statements_and_calls(
    cloud: Cloud, workflow: str
) -> None:
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


def test_server_without_volumes_makes_no_volume_calls_and_statements(cloud: Cloud) -> None:
    statements: list[str] = []
    cloud.round()
    sa.event.listen(
        cloud.store.engine, "before_cursor_execute", lambda *event: statements.append(event[2])
    )
    [server] = cloud.create(host="h1")
    cloud.advance()
    for host in cloud.hosts.values():
        host.work()
        cloud.sync(host)
    for key in ("os-stop", "delete"):
        cloud.ask(server, key)
        cloud.advance()
    assert statements and not any("block_devices" in statement for statement in statements)
    assert cloud.volumes.asked == []
