# SPDX-License-Identifier: Apache-2.0
"""Live migrations that somebody steers, and ports of servers that are in two places."""

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
from tests.told import read_server_events
from tests.workflows.moves import CANARY, before, clouds, disk, last, reset_state, server_on, stands
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = clouds()
    yield cloud
    cloud.store.close()


def request(cloud: Cloud, server: str, control: str) -> None:
    """What the API writes."""
    move = cloud.migration(server)
    assert cloud.store.write(
        lambda tx: migrations.request_control(
            tx, move.uuid, Control(control), MIGRATIONS_IN_PROGRESS
        )
    )


def steer(cloud: Cloud, server: str, what: str) -> None:
    """That, and what it sends."""
    request(cloud, server, what)
    found = cloud.show(server)
    action = last(cloud, server)
    session = cloud.hosts["h1"].agent.session
    cloud.do(
        "h1",
        [
            control_command(
                runner.key_of(action),
                Control(what),
                server=server,
                fence=found.fence,
                session=session,
            )
        ],
    )


def at_migrate(cloud: Cloud, act: Callable[[], None]) -> None:
    """This happens when the source has just begun."""
    cloud.hosts["h1"].fault_point = lambda verb, step, where: (
        act() if (verb, where) == ("live_migrate", "before") else None
    )


def is_cancelled(cloud: Cloud, server: str) -> None:
    stands(cloud, server, states.ACTIVE, "h1")
    assert (cloud.migration(server).status, last(cloud, server).attempt) == ("cancelled", 1)
    assert cloud.domains(server) == ["h1"]
    assert cloud.hosts["h1"].driver.host.guests[server].boots == 1


def test_one_that_runs_is_aborted(cloud: Cloud) -> None:
    server = server_on(cloud)
    at_migrate(cloud, lambda: steer(cloud, server, "abort"))
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    is_cancelled(cloud, server)


def test_one_that_waits_for_its_turn_is_aborted_though_nobody_told_its_host(cloud: Cloud) -> None:
    """The command and the API's word are lost; the host hears of both with its next exchange."""
    server, lost = server_on(cloud), []

    def lose(host: str) -> None:
        request(cloud, server, "abort")
        cloud.lose = lambda kind: kind == "do" and not lost and not lost.append(kind)  # type: ignore[func-returns-value]

    before(cloud, "live_migrate", lose)
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    assert lost
    is_cancelled(cloud, server)
    assert ("live_migrate", server) not in cloud.hosts["h1"].driver.host.calls


@pytest.mark.parametrize("verb", ["offer", "prepare_arrival"])
def test_one_that_is_prepared_is_aborted_before_it_goes(cloud: Cloud, verb: str) -> None:
    server = server_on(cloud)
    before(cloud, verb, lambda host: request(cloud, server, "abort"))
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    is_cancelled(cloud, server)
    assert ("live_migrate", server) not in cloud.hosts["h1"].driver.host.calls


def test_one_that_is_to_be_completed_is(cloud: Cloud) -> None:
    server = server_on(cloud)
    at_migrate(cloud, lambda: steer(cloud, server, "complete"))
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, cloud.migration(server).dest_host)
    assert cloud.migration(server).status == "completed"


@pytest.mark.parametrize(
    ("what", "ends"),
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
def test_the_end_of_what_was_wished_is_told(cloud: Cloud, what: str, ends: list[str]) -> None:
    server = server_on(cloud)
    cloud.store.notify_with(NotificationSettings("api"))
    at_migrate(cloud, lambda: steer(cloud, server, what))
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


def test_an_admins_word_ends_one_that_runs(cloud: Cloud) -> None:
    """Its host hears with its next exchange that nobody wants that any more; else the guest would
    go where it is a debt."""
    server = server_on(cloud)

    def word() -> None:
        reset_state(cloud, server)
        cloud.sync(cloud.hosts["h1"])

    at_migrate(cloud, word)
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host, cloud.domains(server)) == (
        states.ACTIVE,
        "h1",
        ["h1"],
    )
    assert cloud.hosts["h1"].driver.host.guests[server].boots == 1


def test_an_abort_that_comes_too_late_changes_nothing(cloud: Cloud) -> None:
    server = server_on(cloud)
    before(cloud, "arrived", lambda host: steer(cloud, server, "abort"))
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, cloud.migration(server).dest_host)
    assert cloud.migration(server).status == "completed"


def test_a_server_that_has_moved_stays_although_its_ports_cannot_be_activated(cloud: Cloud) -> None:
    server = server_on(cloud)
    ask(cloud, server, "os-migrateLive")

    def refuse(port: str, host: str) -> None:
        raise errors.Conflict("No.")

    activate, cloud.networks.activate = cloud.networks.activate, refuse  # type: ignore[method-assign]
    cloud.watcher = lambda: None
    cloud.settle()
    cloud.networks.activate = activate  # type: ignore[method-assign]
    found, [port] = cloud.show(server), cloud.networks.held
    assert (found.vm_state, found.host) == (states.ACTIVE, cloud.migration(server).dest_host)
    assert (cloud.migration(server).status, last(cloud, server).message) == ("completed", "No.")
    assert cloud.domains(server) == [found.host]
    assert cloud.networks.held[port]["binding:host_id"] == "h1"
    assert cloud.pending() == [("port", port)]
    cloud.clean_up()
    assert cloud.networks.held[port]["binding:host_id"] == found.host
    assert cloud.findings() == []


def test_where_a_port_has_one_host_it_is_moved_when_the_guest_has(cloud: Cloud) -> None:
    cloud.networks.one_host_a_port = True
    server = server_on(cloud)
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, cloud.migration(server).dest_host)
    assert disk(cloud, server) == CANARY


def test_a_host_that_cannot_bind_the_ports_is_not_gone_to(cloud: Cloud) -> None:
    cloud.networks.cannot_bind = {"h2"}
    server = server_on(cloud)
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h3")
    server = server_on(cloud)
    ask(cloud, server, "resize")
    cloud.settle()
    stands(cloud, server, states.RESIZED, "h3")
