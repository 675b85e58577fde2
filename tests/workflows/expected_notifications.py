# SPDX-License-Identifier: Apache-2.0
"""The notifications that each workflow sends."""

from __future__ import annotations

from typing import Any

from common.store.engine import Store
from tests.outbox_events import read_outbox, read_server_events

_MOVE_EVENTS = [
    "resize_prep.start",
    "resize_prep.end",
    "resize.start",
    "resize.end",
    "resize_finish.start",
    "resize_finish.end",
]
#: Workflow -> the events of a success. The default is NAME.start and NAME.end.
EVENTS = {
    "delete": ["delete.start", "shutdown.start", "shutdown.end", "delete.end"],
    "resize": _MOVE_EVENTS,
    "migrate": _MOVE_EVENTS,
    "resize_here": _MOVE_EVENTS,
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
#: Workflow -> NAME in its events. The default is the name of the workflow.
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


#: Workflows with an ``exists`` event about the usage so far before their own events, as in Nova.
WORKFLOWS_WITH_EXISTS = {
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
    """Return the names of the notifications of a scenario that succeeds, in order."""
    workflow = scenario.partition(":")[0]
    name = NAMES.get(workflow, workflow)
    return ["exists"] * (workflow in WORKFLOWS_WITH_EXISTS) + EVENTS.get(
        workflow, [f"{name}.start", f"{name}.end"]
    )


def check_success(store: Store, server: str, scenario: str, vm_state: str) -> None:
    """Check the notifications of a successful scenario. The last one must have this vm_state."""
    assert read_server_events(store, server) == expected(scenario)
    last = read_outbox(store)[-1:]
    assert [row.body["object"]["vm_state"] for row in last] == [vm_state] * len(last)


def check_failure(store: Store, server: str, scenario: str, fault: dict[str, Any]) -> None:
    """Check the notifications of a failed scenario: the usual events, and then an error.

    A live migration sends those of its rollback in place of the error.

    Args:
        store: The store with the notifications.
        server: The server's id.
        scenario: The scenario's name.
        fault: The message and the details of the failure.
    """
    names, usual = read_server_events(store, server), expected(scenario)
    if not usual:
        assert names == []
        return
    if scenario.startswith("live_migrate"):
        assert names[-2:] == ["live_migration_rollback.start", "live_migration_rollback.end"]
        assert names[:-2] == usual[: len(names) - 2]
        return
    assert names[:-1] == usual[: len(names) - 1], "begun as usual"
    assert names[-1].endswith(".error")
    sent = read_outbox(store)[-1].body["about"]["fault"]
    assert {name: sent[name] for name in fault} == fault
    assert sent["step"]
