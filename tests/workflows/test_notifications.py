# SPDX-License-Identifier: Apache-2.0
"""What each workflow tells, in order: written with each transition, so the same whoever dies in
between."""

from __future__ import annotations

from collections import Counter

import pytest
import sqlalchemy as sa

from common.errors import Conflict
from common.notifications.options import VM_AND_TASK_STATE, VM_STATE, NotificationSettings
from common.store.servers import stuck_actions
from compute_agent.virt.memory.script import Fail
from conductor.workflows import WORKFLOWS
from tests.schemas import memory_store
from tests.told import all_told, told
from tests.workflows.scenarios import SCENARIOS, trial_of
from tests.workflows.simulator import Cloud, Time
from tests.workflows.test_every_workflow import fault_points

_MOVED = [
    "resize_prep.start",
    "resize_prep.end",
    "resize.start",
    "resize.end",
    "resize_finish.start",
    "resize_finish.end",
]
#: Workflow -> what it tells when it succeeds; others tell NAME.start and NAME.end.
TOLD = {
    "delete": ["delete.start", "shutdown.start", "shutdown.end", "delete.end"],
    "resize": _MOVED,
    "migrate": _MOVED,
    "resize_here": _MOVED,
    "live_migrate": [
        "live_migration_pre.start",
        "live_migration_pre.end",
        "live_migration_post.start",
        "live_migration_post_dest.start",
        "live_migration_post_dest.end",
        "live_migration_post.end",
    ],
    "evacuate": ["evacuate", "rebuild.start", "rebuild.end"],
    "change_password": [],
    "extend_volume": [],
    "volume_snapshot_create": [],
    "volume_snapshot_delete": [],
    "add_security_group": [],
    "remove_security_group": [],
}
NAMES = {
    "start": "power_on",
    "stop": "power_off",
    "reboot_soft": "reboot",
    "reboot_hard": "reboot",
    "crash_dump": "trigger_crash_dump",
    "backup": "snapshot",
    "offload": "shelve_offload",
    "unshelve_here": "unshelve",
    "attach_interface": "interface_attach",
    "detach_interface": "interface_detach",
    "attach_share": "share_attach",
    "detach_share": "share_detach",
    "attach_volume": "volume_attach",
    "detach_volume": "volume_detach",
    "swap_volume": "volume_swap",
    "confirm_resize": "resize_confirm",
    "confirm_here": "resize_confirm",
    "revert_resize": "resize_revert",
    "revert_here": "resize_revert",
}


#: Before these Nova says what the server has used until now.
USED_UNTIL = {
    "rescue",
    "rebuild",
    "shelve",
    "resize",
    "migrate",
    "resize_here",
    "revert_resize",
    "revert_here",
    "evacuate",
}


def expected(scenario: str) -> list[str]:
    workflow = scenario.partition(":")[0]
    name = NAMES.get(workflow, workflow)
    return ["exists"] * (workflow in USED_UNTIL) + TOLD.get(
        workflow, [f"{name}.start", f"{name}.end"]
    )


def test_every_workflow_is_looked_at() -> None:
    assert {name.partition(":")[0] for name in SCENARIOS} == set(WORKFLOWS)
    assert set(TOLD) | set(NAMES) <= set(WORKFLOWS)


@pytest.mark.parametrize(
    "workflow",
    [
        # A variant of a workflow notifies of the same as the workflow itself.
        pytest.param(name, marks=pytest.mark.slice("moves")) if ":" in name else name
        for name in SCENARIOS
    ],
)
def test_success_is_told_from_start_to_end(cloud: Cloud, workflow: str) -> None:
    trial = trial_of(cloud, workflow)
    cloud.store.notify_with(NotificationSettings("api"))
    trial.begin()
    cloud.settle()
    assert told(cloud.store, trial.server) == expected(workflow)
    last = all_told(cloud.store)[-1:]
    ends = "deleted" if workflow.startswith("delete") else trial.scenario.ends
    assert [row.body["object"]["vm_state"] for row in last] == [ends] * len(last)


@pytest.mark.parametrize(
    ("workflow", "verb"),
    [
        (name, verb)
        for name, scenario in SCENARIOS.items()
        for verb in scenario.verbs
        if not scenario.brief
    ],
)
def test_failure_is_told_last_with_its_cause(cloud: Cloud, workflow: str, verb: str) -> None:
    trial = trial_of(cloud, workflow)
    cloud.store.notify_with(NotificationSettings("api"))
    for host in cloud.hosts.values():
        host.driver.host.script[verb] = [Fail("It broke.", details="because")]
    trial.begin()
    cloud.settle()
    names, usual = told(cloud.store, trial.server), expected(workflow)
    if not usual:
        assert names == []
        return
    if workflow == "live_migrate":
        assert names[-2:] == ["live_migration_rollback.start", "live_migration_rollback.end"]
        assert names[:-2] == usual[: len(names) - 2]
        return
    assert names[:-1] == usual[: len(names) - 1], "begun as usual"
    assert names[-1].endswith(".error")
    fault = all_told(cloud.store)[-1].body["about"]["fault"]
    assert (fault["message"], fault["details"], bool(fault["step"])) == (
        "It broke.",
        "because",
        True,
    )


@pytest.mark.parametrize(
    ("workflow", "each"),
    [
        ("create", 1),
        ("delete", 1),
        ("resize", 4),
        pytest.param("resize", 1, marks=pytest.mark.slice("moves")),
        pytest.param("live_migrate", 1, marks=pytest.mark.slice("moves")),
    ],
)
def test_a_crash_anywhere_changes_nothing_of_it(workflow: str, each: int) -> None:
    """Killed at each so-many-th fault point."""
    for number in range(0, len(fault_points(workflow)), each):
        time = Time()
        cloud = Cloud(memory_store(time), time)
        trial = trial_of(cloud, workflow)
        cloud.store.notify_with(NotificationSettings("api"))
        trial.crash_at(number)
        trial.begin()
        trial.run_through_crashes()
        assert told(cloud.store, trial.server) == expected(workflow), (
            f"killed at {trial.hits[number]}"
        )
        cloud.store.close()


def test_a_server_that_finds_no_host_tells_why(cloud: Cloud) -> None:
    trial = trial_of(cloud, "create")
    for name in cloud.hosts:
        cloud.force_down(name)
    cloud.store.notify_with(NotificationSettings("api"))
    trial.begin()
    cloud.settle()
    rows = all_told(cloud.store)
    assert [row.event for row in rows] == [
        "instance.create.start",
        "compute_task.build_instances.error",
        "instance.create.error",
    ]
    assert {row.body["about"]["fault"]["exception"] for row in rows[1:]} == {"NoValidHost"}


def test_what_a_delete_supersedes_has_ended(cloud: Cloud) -> None:
    trial = trial_of(cloud, "snapshot")
    cloud.store.notify_with(NotificationSettings("api"))
    trial.begin()
    cloud.advance()
    cloud.ask(trial.server, "delete")
    cloud.settle()
    assert told(cloud.store, trial.server) == [
        "snapshot.start",
        "snapshot.error",
        *expected("delete"),
    ]
    assert all_told(cloud.store)[1].body["about"]["fault"]["exception"] == "Superseded"


def test_what_an_operator_settles_has_failed(cloud: Cloud) -> None:
    trial = trial_of(cloud, "stop")
    cloud.store.notify_with(NotificationSettings("api"))
    trial.begin()
    action = cloud.show(trial.server).action
    with pytest.raises(Conflict):
        cloud.store.write(lambda tx: stuck_actions.settle(tx, action, "Enough."))
    assert told(cloud.store, trial.server) == ["power_off.start"], (
        "nothing is told of what was refused"
    )
    cloud.time.pass_by(700)
    cloud.store.write(lambda tx: stuck_actions.settle(tx, action, "Enough."))
    assert told(cloud.store, trial.server) == ["power_off.start", "power_off.error"]
    assert all_told(cloud.store)[-1].body["object"]["vm_state"] == "error"


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        (VM_STATE, [("active", "stopped")]),
        (VM_AND_TASK_STATE, [(None, "powering-off"), ("powering-off", None)]),
    ],
)
def test_changes_of_state_are_told_where_wanted(
    cloud: Cloud, wanted: str, changes: list[tuple[str, str]]
) -> None:
    trial = trial_of(cloud, "stop")
    cloud.store.notify_with(NotificationSettings("api", wanted))
    trial.begin()
    cloud.settle()
    rows = [row for row in all_told(cloud.store) if row.event == "instance.update"]
    name = "state" if wanted == VM_STATE else "task_state"
    shown = "vm_state" if wanted == VM_STATE else "task_state"
    assert [
        (row.body["about"][f"old_{name}"], row.body["object"][shown]) for row in rows
    ] == changes


def test_nothing_is_written_where_nothing_is_told(cloud: Cloud) -> None:
    trial = trial_of(cloud, "resize")
    trial.begin()
    cloud.settle()
    assert all_told(cloud.store) == []


def test_a_burst_costs_as_many_statements_as_one_server(cloud: Cloud) -> None:
    cloud.equip(1)
    cloud.store.notify_with(NotificationSettings("api"))
    cloud.round()
    made: list[str] = []

    @sa.event.listens_for(cloud.store.engine, "before_cursor_execute")
    def count(connection: object, cursor: object, statement: str, *more: object) -> None:
        if "notifications" in statement or "key_fingerprint" in statement:
            made.append(statement.split()[0])

    found = []
    for number in (1, 12):
        servers = cloud.create(number)
        made.clear()
        cloud.settle()
        found.append(Counter(made))
        assert {tuple(told(cloud.store, server)) for server in servers} == {
            ("create.start", "create.end")
        }
    assert found[0] == found[1] == {"SELECT": 1, "INSERT": 1}
