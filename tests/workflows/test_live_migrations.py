# SPDX-License-Identifier: Apache-2.0
"""Tests of abort and force-complete of live migrations, and of ports on two hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from common.domain import errors, states
from common.domain.models import Control
from common.domain.statuses import MIGRATIONS_IN_PROGRESS
from common.domain.verbs import control_command
from common.service.notification_options import NotificationSettings
from common.store.servers import migrations
from conductor.engine import runner
from tests.outbox_events import read_server_events
from tests.workflows.moves import (
    CANARY,
    before,
    boot_server,
    check_rests,
    create_cloud,
    last,
    read_disk,
    reset_state,
)
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = create_cloud()
    yield cloud
    cloud.store.close()


def request_control(cloud: Cloud, server: str, control: str) -> None:
    """Write the request for an abort or a completion, as the API does."""
    move = cloud.migration(server)
    assert cloud.store.write(
        lambda tx: migrations.request_control(
            tx, move.uuid, Control(control), MIGRATIONS_IN_PROGRESS
        )
    )


def control_migration(cloud: Cloud, server: str, control: str) -> None:
    """Write the request and send the command to h1, as the API does."""
    request_control(cloud, server, control)
    row = cloud.show(server)
    action = last(cloud, server)
    session = cloud.hosts["h1"].agent.session
    cloud.do(
        "h1",
        [
            control_command(
                runner.key_of(action),
                Control(control),
                server=server,
                fence=row.fence,
                session=session,
            )
        ],
    )


def call_at_migrate(cloud: Cloud, act: Callable[[], None]) -> None:
    """Call ``act`` when the source begins the migration."""
    cloud.hosts["h1"].fault_point = lambda verb, step, where: (
        act() if (verb, where) == ("live_migrate", "before") else None
    )


def check_cancelled(cloud: Cloud, server: str) -> None:
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert (cloud.migration(server).status, last(cloud, server).attempt) == ("cancelled", 1)
    assert cloud.domains(server) == ["h1"]
    assert cloud.hosts["h1"].driver.host.guests[server].boots == 1


def test_live_migrate_is_aborted_while_running(cloud: Cloud) -> None:
    server = boot_server(cloud)
    call_at_migrate(cloud, lambda: control_migration(cloud, server, "abort"))
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    check_cancelled(cloud, server)


def test_live_migrate_is_aborted_when_command_and_abort_are_lost(cloud: Cloud) -> None:
    """The source receives both in the next exchange."""
    server, lost = boot_server(cloud), []

    def lose(host: str) -> None:
        request_control(cloud, server, "abort")
        cloud.lose = lambda kind: kind == "do" and not lost and not lost.append(kind)  # type: ignore[func-returns-value]

    before(cloud, "live_migrate", lose)
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    assert lost
    check_cancelled(cloud, server)
    assert ("live_migrate", server) not in cloud.hosts["h1"].driver.host.calls


@pytest.mark.parametrize("verb", ["offer", "prepare_arrival"])
def test_live_migrate_is_aborted_during_preparation(cloud: Cloud, verb: str) -> None:
    server = boot_server(cloud)
    before(cloud, verb, lambda host: request_control(cloud, server, "abort"))
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    check_cancelled(cloud, server)
    assert ("live_migrate", server) not in cloud.hosts["h1"].driver.host.calls


def test_live_migrate_force_complete_succeeds(cloud: Cloud) -> None:
    server = boot_server(cloud)
    call_at_migrate(cloud, lambda: control_migration(cloud, server, "complete"))
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, cloud.migration(server).dest_host)
    assert cloud.migration(server).status == "completed"


@pytest.mark.parametrize(
    ("control", "ends"),
    [
        (
            "abort",
            [
                "live_migration_rollback.start",
                "live_migration_rollback.end",
                "live_migration_abort.end",
            ],
        ),
        ("complete", ["live_migration_post.end", "live_migration_force_complete.end"]),
    ],
)
def test_live_migrate_abort_and_force_complete_notify_end(
    cloud: Cloud, control: str, ends: list[str]
) -> None:
    server = boot_server(cloud)
    cloud.store.notify_with(NotificationSettings("api"))
    call_at_migrate(cloud, lambda: control_migration(cloud, server, control))
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    assert read_server_events(cloud.store, server)[-len(ends) :] == ends
    assert (
        len(
            [
                name
                for name in read_server_events(cloud.store, server)
                if "abort" in name or "force" in name
            ]
        )
        == 1
    )


def test_reset_state_ends_running_live_migration(cloud: Cloud) -> None:
    """In the next exchange the source receives the end of the action, and stops the migration.

    Otherwise the guest would move to a host with a pending removal of the same guest.
    """
    server = boot_server(cloud)

    def reset_and_sync() -> None:
        reset_state(cloud, server)
        cloud.sync(cloud.hosts["h1"])

    call_at_migrate(cloud, reset_and_sync)
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host, cloud.domains(server)) == (
        states.ACTIVE,
        "h1",
        ["h1"],
    )
    assert cloud.hosts["h1"].driver.host.guests[server].boots == 1


def test_live_migrate_completes_when_abort_comes_after_arrival(cloud: Cloud) -> None:
    server = boot_server(cloud)
    before(cloud, "arrived", lambda host: control_migration(cloud, server, "abort"))
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, cloud.migration(server).dest_host)
    assert cloud.migration(server).status == "completed"


def test_live_migrate_completes_when_port_activation_is_refused(cloud: Cloud) -> None:
    server = boot_server(cloud)
    ask(cloud, server, "os-migrateLive")

    def refuse(port: str, host: str) -> None:
        raise errors.Conflict("No.")

    activate, cloud.networks.activate = cloud.networks.activate, refuse  # type: ignore[method-assign]
    cloud.watcher = lambda: None
    cloud.settle()
    cloud.networks.activate = activate  # type: ignore[method-assign]
    row, [port] = cloud.show(server), cloud.networks.held
    assert (row.vm_state, row.host) == (states.ACTIVE, cloud.migration(server).dest_host)
    assert (cloud.migration(server).status, last(cloud, server).message) == ("completed", "No.")
    assert cloud.domains(server) == [row.host]
    assert cloud.networks.held[port]["binding:host_id"] == "h1"
    assert cloud.pending() == [("port", port)]
    cloud.clean_up()
    assert cloud.networks.held[port]["binding:host_id"] == row.host
    assert cloud.findings() == []


def test_live_migrate_rebinds_port_when_service_allows_one_binding(cloud: Cloud) -> None:
    cloud.networks.has_single_bindings = True
    server = boot_server(cloud)
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, cloud.migration(server).dest_host)
    assert read_disk(cloud, server) == CANARY


def test_move_avoids_host_unable_to_bind_ports(cloud: Cloud) -> None:
    cloud.networks.cannot_bind = {"h2"}
    server = boot_server(cloud)
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h3")
    server = boot_server(cloud)
    ask(cloud, server, "resize")
    cloud.settle()
    check_rests(cloud, server, states.RESIZED, "h3")
