# SPDX-License-Identifier: Apache-2.0
"""Tests of actions with images, and of rotation, image checks, offload and reclaim.

The double of the image service can refuse calls or be silent.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import errors, states
from common.domain.models import FailureReason, ImageRef
from common.domain.statuses import GuestState
from common.domain.wire import to_wire
from common.store.rows import ActionRow
from common.store.servers import actions, guests
from compute_agent.virt.memory.state.script import Fail
from conductor.engine import runner
from tests.workflows.frozen import register
from tests.workflows.scenarios import ARGS, ask, trial_of
from tests.workflows.simulator import Cloud


@pytest.mark.parametrize("workflow", ["snapshot", "backup", "shelve"])
def test_snapshot_backup_shelve_fail_without_change_if_image_is_refused(
    cloud: Cloud, workflow: str
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.images.refuses = "You have no room for another image."
    trial.begin()
    cloud.settle()
    trial.check_end(states.ACTIVE, 1)
    last = cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[0]
    assert (last.state, last.message) == ("failed", "You have no room for another image.")
    assert last.data["problem"]["status"] == 403, "by it the user's answer says whose refusal it is"
    assert [
        host.driver.host.guests[trial.server].power_state
        for host in cloud.hosts.values()
        if trial.server in host.driver.host.guests
    ] == [states.RUNNING]


@pytest.mark.parametrize(
    "workflow", ["snapshot", "backup", "shelve", "unshelve", "unshelve_here", "delete"]
)
def test_action_with_images_succeeds_after_silence_of_image_service(
    cloud: Cloud, workflow: str
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.images.silent = 3
    trial.begin()
    cloud.settle()
    trial.check_expected_end()


def test_create_is_not_delayed_by_snapshot_waiting_for_image_service(cloud: Cloud) -> None:
    trial = trial_of(cloud, "snapshot")
    cloud.images.silent = 1000
    trial.begin()
    cloud.round()
    server = cloud.create()[0]
    cloud.round()
    assert cloud.show(server).vm_state == states.ACTIVE
    cloud.images.silent = 0
    cloud.settle()
    trial.check_expected_end()


@pytest.mark.parametrize("workflow", ["snapshot", "backup", "shelve"])
@pytest.mark.parametrize("rounds", [0, 1])
def test_server_delete_during_snapshot_or_shelve_deletes_unfinished_image(
    cloud: Cloud, workflow: str, rounds: int
) -> None:
    trial = trial_of(cloud, workflow)
    for host in cloud.hosts.values():
        host.driver.host.script["snapshot"] = [Fail("never reached")] * 9
    cloud.lose = lambda kind: kind == "do"
    trial.begin()
    for _ in range(rounds):
        cloud.advance()
    cloud.lose = lambda kind: False
    cloud.ask(trial.server, "delete")
    cloud.settle()
    trial.check_end(states.DELETED, 0)


@pytest.mark.parametrize("workflow", ["snapshot", "backup", "shelve"])
@pytest.mark.parametrize("rounds", [0, 1])
def test_delete_repeated_during_snapshot_or_shelve_deletes_partial_image(
    cloud: Cloud, workflow: str, rounds: int
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.lose = lambda kind: kind == "do"
    trial.begin()
    cloud.advance()
    for _ in range(3):
        cloud.ask(trial.server, "delete")
        for _ in range(rounds):
            cloud.advance()
    cloud.lose = lambda kind: False
    cloud.settle()
    trial.check_end(states.DELETED, 0)


@pytest.mark.parametrize("before", [("shelve",), ("shelve", "shelveOffload")])
def test_delete_of_shelved_server_deletes_its_image(cloud: Cloud, before: tuple[str, ...]) -> None:
    trial = trial_of(cloud, "delete")
    for key in before:
        ask(cloud, trial.server, key)
        cloud.settle()
    trial.begin()
    cloud.settle()
    trial.check_end(states.DELETED, 0)


def test_backup_with_rotation_two_deletes_oldest_of_three(cloud: Cloud) -> None:
    trial = trial_of(cloud, "backup")
    properties = {"image_type": "backup", "backup_type": "daily", "instance_uuid": trial.server}
    for number in range(3):
        cloud.ask(
            trial.server,
            "createBackup",
            args={
                **ARGS["createBackup"],
                "image_id": f"{number:08d}-0000-4000-8000-000000000000",
                "rotation": 2,
                "properties": properties,
            },
        )
        cloud.settle()
    assert sorted(cloud.images.records) == [
        f"{number:08d}-0000-4000-8000-000000000000" for number in (1, 2)
    ]


@pytest.mark.parametrize("stopped", [False, True])
def test_rescue_failure_before_change_of_guest_leaves_server_unchanged(
    cloud: Cloud, stopped: bool
) -> None:
    trial = trial_of(cloud, "rescue")
    before = states.STOPPED if stopped else states.ACTIVE
    if stopped:
        ask(cloud, trial.server, "os-stop")
        cloud.settle()
    host = cloud.hosts[cloud.show(trial.server).host].driver.host
    host.script["rescue"] = [Fail("The image is no image.", reason=FailureReason.UNTOUCHED)]
    trial.begin()
    cloud.settle()
    row = cloud.show(trial.server)
    assert (row.vm_state, row.fault) == (before, None)
    assert host.guests[trial.server].power_state == (states.SHUTDOWN if stopped else states.RUNNING)
    last = cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[0]
    assert (last.state, last.message) == ("failed", "The image is no image.")
    assert cloud.findings() == []


IMAGE = "77777777-7777-4777-8777-777777777777"
CHANGES = pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": "deactivated"}, f"Image {IMAGE} is not active."),
        ({"ref": ImageRef(IMAGE, "iso", 1)}, "its format is 'iso'"),
        ({"min_ram": 99999}, "Flavor's memory is too small for requested image."),
    ],
)


def set_image(cloud: Cloud, server: str) -> None:
    """Record ``IMAGE`` as the image of the server."""
    cloud.store.write(
        lambda tx: actions.update_servers(
            tx, {server: {"image": to_wire(ImageRef(IMAGE, "qcow2"))}}
        )
    )


def read_last_action(cloud: Cloud, server: str) -> ActionRow:
    return cloud.store.read(lambda tx: actions.list_for(tx, server))[0]


@CHANGES
def test_create_fails_before_claim_when_image_became_unusable_meanwhile(
    cloud: Cloud, change: dict[str, Any], reason: str
) -> None:
    register(cloud)
    [server] = cloud.create()
    set_image(cloud, server)
    cloud.images.changed[IMAGE] = change
    cloud.time.pass_by(10)
    cloud.settle()
    row, last = cloud.show(server), read_last_action(cloud, server)
    assert (row.vm_state, row.host, last.state) == (states.ERROR, None, "failed")
    assert reason in (last.message or "") and reason in row.fault["message"]
    assert cloud.findings() == []


def test_create_checks_image_again_only_after_waiting_ten_seconds(cloud: Cloud) -> None:
    register(cloud)
    for seconds, calls in ((0, 0), (9, 0), (10, 1)):
        cloud.images.asked.clear()
        [server] = cloud.create()
        set_image(cloud, server)
        cloud.time.pass_by(seconds)
        cloud.settle()
        assert cloud.show(server).vm_state == states.ACTIVE
        assert cloud.images.asked.count(("look", IMAGE)) == calls


@CHANGES
def test_rebuild_fails_without_change_when_image_became_unusable(
    cloud: Cloud, change: dict[str, Any], reason: str
) -> None:
    server = trial_of(cloud, "rebuild").server
    set_image(cloud, server)
    cloud.images.changed[IMAGE] = change
    for args in ({}, {"before": {"image_id": None, "image": None}}):
        cloud.ask(server, "rebuild", args=args)
        cloud.settle()
        last = read_last_action(cloud, server)
        assert cloud.show(server).vm_state == states.ACTIVE
        assert last.state == "failed" and reason in (last.message or "")
    assert cloud.show(server).image is None, "as it was before the request"


def test_rescue_fails_without_change_when_image_was_deactivated(cloud: Cloud) -> None:
    trial = trial_of(cloud, "rescue")
    cloud.images.changed[ARGS["rescue"]["image"]["id"]] = {"status": "deactivated"}
    trial.begin()
    cloud.settle()
    last = read_last_action(cloud, trial.server)
    assert cloud.show(trial.server).vm_state == states.ACTIVE
    assert last.state == "failed" and "is not active" in (last.message or "")


@pytest.mark.parametrize("rotation", [1, 2, 3])
@pytest.mark.parametrize("clock", ["stands still", "runs backwards"])
def test_backup_rotation_keeps_newest_when_image_service_clock_is_wrong(
    cloud: Cloud, clock: str, rotation: int
) -> None:
    trial = trial_of(cloud, "backup")
    cloud.images.age = {"stands still": lambda number: 0, "runs backwards": int}[clock]
    images = [f"{number:08d}-0000-4000-8000-000000000000" for number in range(5)]
    for image in images:
        cloud.ask(
            trial.server,
            "createBackup",
            args={
                **ARGS["createBackup"],
                "image_id": image,
                "rotation": rotation,
                "properties": {
                    "image_type": "backup",
                    "backup_type": "daily",
                    "instance_uuid": trial.server,
                },
            },
        )
        cloud.settle()
    assert sorted(cloud.images.records) == images[-rotation:]


def test_shelve_offloads_at_once_when_offload_time_is_zero(cloud: Cloud) -> None:
    trial = trial_of(cloud, "shelve")
    cloud.engine.shelved_offload_time = 0
    trial.begin()
    cloud.settle()
    trial.check_end(states.SHELVED_OFFLOADED, 0, images=1)
    assert cloud.show(trial.server).host is None


def test_shelved_server_is_offloaded_after_offload_time(cloud: Cloud) -> None:
    trial = trial_of(cloud, "shelve")
    cloud.engine.shelved_offload_time = 50
    trial.begin()
    cloud.settle()
    trial.check_end(states.SHELVED, 1, images=1)
    cloud.idle(60)
    trial.check_end(states.SHELVED_OFFLOADED, 0, images=1)


def test_soft_deleted_server_is_deleted_after_reclaim_interval(cloud: Cloud) -> None:
    trial = trial_of(cloud, "soft_delete")
    cloud.engine.reclaim_interval = 50
    trial.begin()
    cloud.settle()
    trial.check_end(states.SOFT_DELETED, 1)
    cloud.idle(60)
    trial.check_end(states.DELETED, 0)


def test_restored_server_is_not_deleted_after_reclaim_interval(cloud: Cloud) -> None:
    trial = trial_of(cloud, "soft_delete")
    cloud.engine.reclaim_interval = 50
    trial.begin()
    cloud.settle()
    cloud.time.pass_by(60)
    cloud.ask(trial.server, "restore")
    cloud.idle(60)
    trial.check_end(states.ACTIVE, 1)


def test_unshelve_retries_on_other_host_after_retryable_failure(cloud: Cloud) -> None:
    trial = trial_of(cloud, "unshelve")
    cloud.hosts["h1"].driver.host.script["ensure_guest"] = [Fail("Disk full.", retryable=True)] * 9
    trial.begin()
    cloud.settle()
    trial.check_expected_end()
    assert cloud.show(trial.server).host == "h2"


def test_shelve_with_failed_undo_sets_error_with_both_reasons(cloud: Cloud) -> None:
    """The snapshot fails, and then the undo cannot start the stopped guest."""
    trial = trial_of(cloud, "shelve")
    for host in cloud.hosts.values():
        host.driver.host.script["snapshot"] = [Fail("No space.")]
        host.driver.host.script["ensure_running"] = [Fail("Cannot start.")]
    trial.begin()
    cloud.settle()
    trial.check_end(states.ERROR, 1)
    message = cloud.show(trial.server).fault["message"]
    assert "No space." in message
    assert "restart: Cannot start." in message
    [guest] = cloud.store.read(lambda tx: guests.places(tx, trial.server))
    assert (guest.wanted, guest.may_run) == (GuestState.STOPPED, False)


def test_pause_and_shelve_are_refused_while_snapshot_runs(cloud: Cloud) -> None:
    trial = trial_of(cloud, "snapshot")
    trial.begin()
    with pytest.raises(errors.WrongState, match="while it is in task_state image_snapshot_pending"):
        cloud.ask(trial.server, "pause")
    runner.advance(cloud.engine)
    with pytest.raises(errors.WrongState):
        ask(cloud, trial.server, "shelve")
    cloud.settle()
    trial.check_expected_end()
