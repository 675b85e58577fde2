# SPDX-License-Identifier: Apache-2.0
"""Payloads of notifications in both formats: fields, names, faults and audit periods."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from common.domain import states
from common.domain.clock import parse
from common.notifications import events, periods
from common.notifications.periods import Periods
from common.service.notification_options import BOTH, UNVERSIONED, VERSIONED
from common.store.notifications import outbox
from conductor.notifications import legacy
from conductor.notifications.messages import messages

SERVER = {
    "id": "s1",
    "project_id": "p",
    "user_id": "u",
    "name": "web",
    "hostname": "web",
    "description": None,
    "vm_state": "active",
    "task_state": None,
    "power_state": 1,
    "progress": 0,
    "locked": False,
    "locked_reason": None,
    "host": "h1",
    "node": "node1",
    "availability_zone": None,
    "pinned_availability_zone": "az1",
    "image_id": "i1",
    "image": {"properties": {"hw_architecture": "aarch64", "os_type": "linux", "kernel_id": "k1"}},
    "flavor": {
        "id": "2",
        "name": "m1.big",
        "vcpus": 2,
        "memory_mb": 512,
        "root_gb": 3,
        "ephemeral_gb": 1,
        "swap_mb": 64,
        "extra_specs": {"a": "b"},
    },
    "key_name": "k",
    "key_data": "ssh-ed25519 AAAA",
    "key_type": "ssh",
    "key_fingerprint": "1e:2c",
    "meta": {"x": "y"},
    "tags": ["t"],
    "trusted_image_certificates": None,
    "access_ip_v4": None,
    "access_ip_v6": None,
    "disk_config": "MANUAL",
    "reservation_id": "r-1",
    "created_at": parse("2026-03-05T10:00:00Z"),
    "updated_at": parse("2026-03-05T10:00:09Z"),
    "launched_at": parse("2026-03-05T10:00:08Z"),
    "terminated_at": None,
    "deleted_at": None,
    "scheduler_hints": {"group": "g"},
    "security_groups": [{"name": "default"}],
    "interfaces": [
        {
            "port": "p1",
            "label": "net",
            "mac": "fa:16",
            "device": "tap1",
            "addresses": [
                {"address": "10.0.0.5", "version": 4, "floating": ["1.2.3.4"]},
                {"address": "fe80::1", "version": 6},
            ],
        }
    ],
}
REQUEST = {"id": "req-1", "user": "admin", "project": "other"}
FAULT = {"exception": "ActionFailed", "message": "It broke.", "step": "build", "details": "because"}


def row(
    event: str,
    publisher: str = "nova-compute:h1",
    about: dict[str, Any] | None = None,
    request: dict[str, str] | None = None,
) -> Any:
    return SimpleNamespace(
        id=5,
        event=event,
        key="s1",
        publisher=publisher,
        body={
            "request": REQUEST if request is None else request,
            "object": SERVER,
            "about": about or {},
        },
    )


def versioned_data(event: str, **more: Any) -> Any:
    return messages(row(event, **more), VERSIONED)[0].payload["nova_object.data"]


def unversioned_data(event: str, **more: Any) -> Any:
    return messages(row(event, **more), UNVERSIONED)[0].payload


def test_versioned_notification_describes_server_flavor_and_request() -> None:
    data = versioned_data("instance.create.end")
    assert (data["uuid"], data["host"], data["node"], data["state"], data["power_state"]) == (
        "s1",
        "h1",
        "node1",
        "active",
        "running",
    )
    assert (data["architecture"], data["os_type"], data["kernel_id"], data["ramdisk_id"]) == (
        "aarch64",
        "linux",
        "k1",
        "",
    )
    assert (data["created_at"], data["deleted_at"], data["availability_zone"]) == (
        "2026-03-05T10:00:00Z",
        None,
        "az1",
    )
    assert [
        (address["nova_object.data"]["address"], address["nova_object.data"]["version"])
        for address in data["ip_addresses"]
    ] == [("10.0.0.5", 4), ("fe80::1", 6)]
    flavor = data["flavor"]["nova_object.data"]
    assert (flavor["flavorid"], flavor["swap"], flavor["ephemeral_gb"], flavor["extra_specs"]) == (
        "2",
        64,
        1,
        {"a": "b"},
    )
    assert data["keypairs"][0]["nova_object.data"]["fingerprint"] == "1e:2c"
    assert (
        data["request_id"],
        data["action_initiator_user"],
        data["action_initiator_project"],
    ) == ("req-1", "admin", "other")


def test_versioned_notification_without_a_user_names_no_request() -> None:
    data = versioned_data(
        "instance.reboot.start", request={"id": "req-1", "user": "", "project": "p"}
    )
    assert (data["request_id"], data["action_initiator_user"]) == (None, None)


def test_error_notification_contains_message_step_and_details() -> None:
    [message, plain] = messages(row("instance.create.error", about={"fault": FAULT}), BOTH)
    assert (message.is_error, plain.is_error) == (True, True)
    fault = message.payload["nova_object.data"]["fault"]["nova_object.data"]
    assert (fault["exception_message"], fault["function_name"], fault["traceback"]) == (
        "It broke.",
        "build",
        "because",
    )
    assert plain.payload["message"] == "It broke."


def test_unversioned_notification_describes_server_and_addresses() -> None:
    data = unversioned_data("instance.create.end")
    assert (
        data["instance_id"],
        data["instance_type"],
        data["disk_gb"],
        data["state"],
        data["message"],
    ) == ("s1", "m1.big", 4, "active", "Success")
    assert (data["created_at"], data["launched_at"], data["deleted_at"]) == (
        "2026-03-05 10:00:00+00:00",
        "2026-03-05T10:00:08.000000",
        "",
    )
    assert [
        (address["address"], address["label"], address["floating_ips"])
        for address in data["fixed_ips"]
    ] == [
        ("10.0.0.5", "net", ["1.2.3.4"]),
        ("fe80::1", "net", []),
    ]


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ("instance.power_off.end", "compute.instance.power_off.end"),
        ("instance.resize_prep.start", "compute.instance.resize.prep.start"),
        ("instance.resize_finish.end", "compute.instance.finish_resize.end"),
        ("instance.live_migration_post.end", "compute.instance.live_migration._post.end"),
        ("instance.live_migration_abort.end", "compute.instance.live.migration.abort.end"),
        (
            "instance.live_migration_force_complete.start",
            "compute.instance.live.migration.force.complete.start",
        ),
        ("instance.evacuate", "compute.instance.evacuate"),
        ("instance.lock", None),
    ],
)
def test_unversioned_notification_is_sent_only_for_event_with_legacy_name(
    event: str, name: str | None
) -> None:
    assert legacy.name(event) == name
    assert [message.event for message in messages(row(event), UNVERSIONED)] == (
        [name] if name else []
    )


def test_notification_publisher_name_differs_by_notification_format() -> None:
    assert [message.publisher for message in messages(row("instance.pause.end"), BOTH)] == [
        "nova-compute:h1",
        "compute.h1",
    ]
    assert messages(row("instance.pause.end"), BOTH)[0].context["notification_id"] == 5


def test_update_notification_contains_old_and_new_states() -> None:
    about = {"old_task_state": "powering-off"}
    data = versioned_data("instance.update", about=about)
    assert data["state_update"]["nova_object.data"] == {
        "old_state": "active",
        "state": "active",
        "old_task_state": "powering-off",
        "new_task_state": None,
    }
    plain = unversioned_data("instance.update", about=about)
    assert (plain["old_task_state"], plain["audit_period_beginning"]) == (
        "powering-off",
        "2026-03-01T00:00:00.000000",
    )


@pytest.mark.parametrize(
    ("text", "at", "begin", "end"),
    [
        ("month", "2026-02-28T23:59:59Z", "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"),
        ("month", "2026-01-01T00:00:00Z", "2025-12-01T00:00:00Z", "2026-01-01T00:00:00Z"),
        ("month@15", "2026-03-14T23:00:00Z", "2026-01-15T00:00:00Z", "2026-02-15T00:00:00Z"),
        ("month@0", "2026-01-31T00:00:00Z", "2025-12-01T00:00:00Z", "2026-01-01T00:00:00Z"),
        ("day", "2026-03-01T12:34:56Z", "2026-02-28T00:00:00Z", "2026-03-01T00:00:00Z"),
        ("day@18", "2026-03-01T17:59:59Z", "2026-02-27T18:00:00Z", "2026-02-28T18:00:00Z"),
        ("hour", "2026-01-01T00:59:59Z", "2025-12-31T23:00:00Z", "2026-01-01T00:00:00Z"),
        ("hour@30", "2026-01-01T00:29:00Z", "2025-12-31T22:30:00Z", "2025-12-31T23:30:00Z"),
        ("year", "2026-06-01T00:00:00Z", "2025-01-01T00:00:00Z", "2026-01-01T00:00:00Z"),
        ("year@3", "2026-02-28T00:00:00Z", "2024-03-01T00:00:00Z", "2025-03-01T00:00:00Z"),
    ],
)
def test_audit_periods_return_last_and_current_period(
    text: str, at: str, begin: str, end: str
) -> None:
    audit_periods = Periods.of(text)
    assert re.fullmatch(periods.FORM, text)
    assert audit_periods.last(parse(at)) == (parse(begin), parse(end))
    assert audit_periods.last(parse(end)) == (parse(begin), parse(end)), (
        "a period is over at its end"
    )
    assert audit_periods.current(parse(at)) == (parse(end), parse(at))


@pytest.mark.parametrize(
    "text", ["", "week", "month@29", "day@24", "hour@60", "year@13", "day@", "month@-1", "days"]
)
def test_audit_period_pattern_refuses_malformed_text(text: str) -> None:
    assert not re.fullmatch(periods.FORM, text)


def test_exists_notification_contains_the_audit_period() -> None:
    """The period is a past period, or the current period up to the server's last change."""
    over = {"period": [parse("2026-02-01T00:00:00Z"), parse("2026-03-01T00:00:00Z")]}
    assert versioned_data("instance.exists", about=over)["audit_period"]["nova_object.data"] == {
        "audit_period_beginning": "2026-02-01T00:00:00Z",
        "audit_period_ending": "2026-03-01T00:00:00Z",
    }
    plain = unversioned_data("instance.exists", about={"periods": "day"})
    assert (plain["audit_period_beginning"], plain["audit_period_ending"]) == (
        "2026-03-05 00:00:00",
        "2026-03-05 10:00:09",
    )
    assert legacy.name("instance.exists") == "compute.instance.exists"


def test_build_instances_error_notification_contains_the_request_spec() -> None:
    data = versioned_data("compute_task.build_instances.error", about={"fault": FAULT})
    spec = data["request_spec"]["nova_object.data"]
    assert (spec["scheduler_hints"], spec["security_groups"], spec["num_instances"]) == (
        {"group": ["g"]},
        ["default"],
        1,
    )
    plain = messages(
        row("compute_task.build_instances.error", about={"fault": FAULT}), UNVERSIONED
    )[0]
    assert (plain.event, plain.payload["method"], plain.payload["reason"]) == (
        "compute_task.build_instances",
        "build_instances",
        "It broke.",
    )


def test_server_columns_stored_for_notifications_contain_no_secrets() -> None:
    columns = {column.name for column in outbox.PICTURE.selected_columns}
    assert columns & {"user_data", "password", "secrets", "fault"} == set()
    assert set(SERVER) == columns, "SERVER must have the columns of the snapshot"


def test_notification_stores_only_action_arguments_of_its_payload() -> None:
    args = {
        "image_id": "i",
        "image": {"id": "i"},
        "admin_pass": "p",
        "new_flavor": {"id": "2"},
        "files": ["f"],
    }
    stored_arguments = {
        name: events.about(name, args)
        for name in ("snapshot", "rescue", "resize", "create", "rebuild")
    }
    assert stored_arguments == {
        "snapshot": {"snapshot_image_id": "i"},
        "rescue": {"rescue_image_ref": "i"},
        "resize": {"new_flavor": {"id": "2"}},
        "create": {},
        "rebuild": {},
    }


def test_action_has_notification_names_or_is_in_the_silent_list() -> None:
    silent = {row.name for row in states.ACTIONS if row.workflow and row.notification is None}
    assert silent == {
        "changePassword",
        "addSecurityGroup",
        "removeSecurityGroup",
        "extend_volume",
        "volume_snapshot_create",
        "volume_snapshot_delete",
    }
    for action in states.ACTIONS:
        names_of = events.event_names(action)
        names = [*names_of.begun, *names_of.done, *names_of.failed]
        assert bool(names) == (action.notification is not None)
        assert all(name.startswith("instance.") for name in names)
