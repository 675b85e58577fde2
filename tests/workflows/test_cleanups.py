# SPDX-License-Identifier: Apache-2.0
"""Tests of calls to external services that fail after an action's pivot.

The server reaches the requested state, and the remaining work becomes a pending cleanup.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import errors, states
from common.domain.clock import SECOND
from common.store import cleanups as store_cleanups
from common.store.servers import actions
from conductor.steps import cleanups
from tests.answers import Answer
from tests.workflows.frozen import register
from tests.workflows.moves import before, boot_server, check_rests, create_cloud, read_disk
from tests.workflows.scenarios import ask, trial_of
from tests.workflows.simulator import Cloud

IN_USE = errors.Conflict("Port is currently a parent port for trunk.")
PROTECTED = errors.Forbidden("Image is protected and cannot be deleted.")


def read_last_action(cloud: Cloud, server: str) -> Any:
    return cloud.store.read(lambda tx: actions.list_for(tx, server))[0]


def read_cleanups(cloud: Cloud) -> list[Any]:
    return cloud.store.read(store_cleanups.list_all)


def hasten(cloud: Cloud) -> None:
    for row in read_cleanups(cloud):
        cloud.store.write(lambda tx, row=row: store_cleanups.hasten(tx, row.id))


def test_delete_ends_with_pending_cleanup_when_port_deletion_is_refused(cloud: Cloud) -> None:
    register(cloud)
    user_port = cloud.networks.create_user_port("n2")
    server = cloud.create(networks=[{"network": "n1"}, {"port": user_port}, {"network": "n2"}])[0]
    cloud.settle()
    own_port = cloud.show(server).interfaces[0]["port"]
    cloud.networks.refusing["delete", own_port] = IN_USE
    ask(cloud, server, "delete")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).deleted, cloud.domains(server)) == (
        states.DELETED,
        1,
        [],
    )
    assert (read_last_action(cloud, server).state, read_last_action(cloud, server).message) == (
        "done",
        IN_USE.text,
    )
    assert set(cloud.networks.held) == {own_port, user_port}
    assert cloud.networks.held[user_port]["device_id"] == ""
    [row] = read_cleanups(cloud)
    assert (row.kind, row.target, row.server_id, row.project_id, row.why) == (
        "port",
        own_port,
        server,
        "project",
        IN_USE.text,
    )
    assert cloud.findings() == []
    cloud.networks.well()
    cloud.clean_up()
    assert (set(cloud.networks.held), cloud.findings()) == ({user_port}, [])


@pytest.mark.parametrize("workflow", ["unshelve", "unshelve_here"])
def test_unshelve_ends_with_pending_cleanup_when_image_deletion_is_refused(
    cloud: Cloud, workflow: str
) -> None:
    trial = trial_of(cloud, workflow)
    image = trial.was.shelved_image_id
    cloud.images.refusing["delete", image] = PROTECTED
    trial.begin()
    cloud.settle()
    trial.check_end(states.ACTIVE, 1, images=1)
    server = cloud.show(trial.server)
    assert (server.shelved_image_id, server.shelved_at, server.power_state) == (
        None,
        None,
        states.RUNNING,
    )
    if workflow == "unshelve_here":
        assert read_disk(cloud, trial.server) == {"canary": "alive"}
    with pytest.raises(errors.WrongState):
        ask(cloud, trial.server, "shelveOffload")
    assert cloud.pending() == [("image", image)]
    ask(cloud, trial.server, "shelve")  # The request contains the same image id.
    cloud.settle()
    cloud.images.well()
    cloud.clean_up()
    trial.check_end(states.SHELVED, 1, images=1)


@pytest.mark.parametrize("was", [states.ACTIVE, states.STOPPED])
def test_shelve_offloads_server_when_port_unbinding_is_refused(cloud: Cloud, was: str) -> None:
    trial = trial_of(cloud, "shelve")
    if was == states.STOPPED:
        ask(cloud, trial.server, "os-stop")
        cloud.settle()
    cloud.engine.shelved_offload_time = 0
    [port] = cloud.networks.held
    cloud.networks.refusing["update", port] = IN_USE
    trial.begin()
    cloud.settle()
    trial.check_end(states.SHELVED_OFFLOADED, 0, images=1)
    assert cloud.networks.held[port]["binding:host_id"] != ""
    cloud.networks.well()
    cloud.clean_up()
    assert cloud.networks.held[port]["binding:host_id"] == ""
    ask(cloud, trial.server, "unshelve")
    cloud.settle()
    trial.check_end(states.ACTIVE, 1)


def test_pending_port_unbinding_keeps_binding_if_server_was_unshelved(cloud: Cloud) -> None:
    """The offload could not unbind the port. At the retry the server is on a host again."""
    trial = trial_of(cloud, "offload")
    [port] = cloud.networks.held
    cloud.networks.refusing["update", port] = IN_USE
    trial.begin()
    cloud.settle()
    cloud.networks.well()
    ask(cloud, trial.server, "unshelve")
    cloud.settle()
    cloud.clean_up()
    assert cloud.networks.held[port]["binding:host_id"] == cloud.show(trial.server).host
    assert cloud.findings() == []


def test_pending_port_unbinding_rebinds_port_if_unshelve_ends_during_it(cloud: Cloud) -> None:
    """The cleanup unbinds the port during the unshelve, and then binds the port again."""
    trial = trial_of(cloud, "offload")
    [port] = cloud.networks.held
    cloud.networks.refusing["update", port] = IN_USE
    trial.begin()
    cloud.settle()
    cloud.networks.well()
    update = cloud.networks.update

    def update_after_unshelve(port_id: str, values: dict[str, Any]) -> dict[str, Any]:
        cloud.networks.update = update  # type: ignore[method-assign]
        ask(cloud, trial.server, "unshelve")
        for _ in range(20):
            cloud.advance()
            for host in cloud.hosts.values():
                host.work()
                cloud.sync(host)
        assert cloud.show(trial.server).vm_state == states.ACTIVE
        return update(port_id, values)

    cloud.networks.update = update_after_unshelve  # type: ignore[method-assign]
    hasten(cloud)
    cleanups.retry(cloud.engine)
    assert cloud.networks.held[port]["binding:host_id"] == ""
    cloud.clean_up()
    assert cloud.networks.held[port]["binding:host_id"] == cloud.show(trial.server).host
    assert cloud.findings() == []


def test_detach_interface_ends_with_cleanup_when_port_deletion_is_refused(cloud: Cloud) -> None:
    trial = trial_of(cloud, "detach_interface")
    [port] = cloud.networks.held
    cloud.networks.refusing["delete", port] = IN_USE
    trial.begin()
    cloud.settle()
    assert (cloud.show(trial.server).interfaces, cloud.pending()) == ([], [("port", port)])
    trial.check_end(states.ACTIVE, 1)
    cloud.networks.well()
    cloud.clean_up()
    assert cloud.networks.held == {}


@pytest.mark.parametrize("call", ["bind_there", "let_go"])
def test_live_migrate_with_refused_binding_call_leaves_no_extra_binding(
    cloud: Cloud, call: str
) -> None:
    trial = trial_of(cloud, "live_migrate")
    [port] = cloud.networks.held
    cloud.networks.refusing["unbind_at" if call == "let_go" else "bind_also", port] = IN_USE
    cloud.watcher = lambda: None
    trial.begin()
    cloud.settle()
    is_moved = call == "let_go"
    assert (cloud.show(trial.server).host != trial.was.host) == is_moved
    assert cloud.pending() == ([("binding", port)] if is_moved else [])
    trial.check_end(states.ACTIVE, 1)
    cloud.networks.well()
    cloud.clean_up()
    assert [binding["host"] for binding in cloud.networks.held[port]["bindings"]] == []
    assert cloud.findings() == []


def test_pending_binding_removal_keeps_binding_of_returned_server(cloud: Cloud) -> None:
    trial = trial_of(cloud, "live_migrate")
    [port] = cloud.networks.held
    cloud.networks.refusing["unbind_at", port] = IN_USE
    cloud.watcher = lambda: None
    trial.begin()
    cloud.settle()
    ask(cloud, trial.server, "os-migrateLive")
    cloud.settle()
    cloud.networks.well()
    cloud.clean_up()
    port_record = cloud.networks.held[port]
    assert (port_record["binding:host_id"], port_record["bindings"]) == (
        cloud.show(trial.server).host,
        [],
    )
    assert cloud.show(trial.server).host == trial.was.host


def test_pending_binding_removal_waits_while_server_moves_back(cloud: Cloud) -> None:
    """The server moves back to the host of the binding that the cleanup should remove."""
    trial = trial_of(cloud, "live_migrate")
    [port] = cloud.networks.held
    cloud.networks.refusing["unbind_at", port] = IN_USE
    cloud.watcher = lambda: None
    trial.begin()
    cloud.settle()
    cloud.networks.well()
    seen_hosts = []

    def clean_up(host: str) -> None:
        hasten(cloud)
        cleanups.retry(cloud.engine)
        seen_hosts.extend(binding["host"] for binding in cloud.networks.held[port]["bindings"])

    before(cloud, "live_migrate", clean_up)
    ask(cloud, trial.server, "os-migrateLive")
    cloud.settle()
    assert seen_hosts == [trial.was.host]
    cloud.clean_up()
    trial.check_end(states.ACTIVE, 1)


def test_migrate_succeeds_when_network_service_refuses_to_list_ports() -> None:
    """The guest is paused until the service has wired the ports."""
    cloud = create_cloud()
    cloud.networks.wires_after = 3
    server = boot_server(cloud)
    before(
        cloud, "install", lambda host: cloud.networks.refusing.update({("ports", server): IN_USE})
    )
    cloud.move(server, "migrate")
    cloud.settle()
    check_rests(cloud, server, states.RESIZED, cloud.show(server).host)
    assert read_last_action(cloud, server).state == "done"
    cloud.networks.well()
    cloud.clean_up()
    cloud.store.close()


def test_revert_resize_succeeds_when_source_ports_are_not_wired_in_time() -> None:
    cloud = create_cloud()
    cloud.engine.vif_plugging_timeout = 20
    server = boot_server(cloud)
    cloud.move(server, "migrate")
    cloud.settle()
    cloud.networks.wires_after = 1000
    cloud.close(server, "revertResize")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert read_disk(cloud, server) == {"canary": "alive"}
    cloud.store.close()


# --- silent external services ---
@pytest.mark.parametrize(
    ("workflow", "name", "after"),
    [
        ("unshelve", "images", 1),
        ("unshelve_here", "images", 0),
        ("backup", "images", 1),
        ("delete", "networks", 0),
        ("offload", "networks", 0),
        ("detach_interface", "networks", 0),
        ("live_migrate", "networks", 3),
    ],
)
def test_action_succeeds_with_pending_cleanup_when_service_falls_silent(
    cloud: Cloud, workflow: str, name: str, after: int
) -> None:
    """The service answers ``after`` more calls and then falls silent."""
    trial = trial_of(cloud, workflow)
    service, cloud.watcher = getattr(cloud, name), lambda: None
    first_silent = service.calls + after + 1
    service.script = dict.fromkeys(range(first_silent, first_silent + 1000), Answer.SILENT)
    trial.begin()
    cloud.settle()
    server = cloud.show(trial.server)
    assert (server.vm_state, server.task_state, server.action) == (trial.scenario.ends, None, None)
    assert read_last_action(cloud, trial.server).state == "done"
    assert cloud.pending() != []
    service.well()
    for _ in range(4):
        cloud.time.pass_by(20)
        cloud.round()
    assert cloud.pending() == [], "it is asked once a minute"
    trial.check_expected_end()


def test_delete_without_image_and_network_service_leaves_pending_cleanups(cloud: Cloud) -> None:
    trial = trial_of(cloud, "delete")
    ask(cloud, trial.server, "shelve")
    cloud.settle()
    clients = cloud.engine.images, cloud.engine.networks
    cloud.engine.images = cloud.engine.networks = None
    trial.begin()
    cloud.settle()
    assert sorted(kind for kind, _ in cloud.pending()) == ["image", "ports"]
    cloud.engine.images, cloud.engine.networks = clients
    cloud.clean_up()
    trial.check_end(states.DELETED, 0)
    assert cloud.networks.held == {}


# --- retries ---
def test_cleanup_is_retried_once_per_due_time_with_backoff_to_one_hour(cloud: Cloud) -> None:
    trial = trial_of(cloud, "delete")
    [port] = cloud.networks.held
    cloud.networks.refusing["delete", port] = IN_USE
    trial.begin()
    cloud.settle()
    waits = []
    for _ in range(12):
        row = read_cleanups(cloud)[0]
        time_before = cloud.time.micros
        cloud.time.micros = max(row.due_at, time_before)
        assert cleanups.retry(cloud.engine) == 1
        assert cleanups.retry(cloud.engine) == 0
        waits.append((read_cleanups(cloud)[0].due_at - cloud.time.micros + 100) // SECOND)
    assert waits[:3] == [20, 40, 80], "the first try was while the delete ended"
    assert waits[-1] == 3600
    assert read_cleanups(cloud)[0].tries >= 12
    cloud.networks.well()
    cloud.time.pass_by(3600)
    assert cleanups.retry(cloud.engine) == 1
    assert (read_cleanups(cloud), cloud.networks.held) == ([], {})


def test_pending_cleanup_of_port_is_done_when_port_is_already_deleted(cloud: Cloud) -> None:
    trial = trial_of(cloud, "delete")
    [port] = cloud.networks.held
    cloud.networks.refusing["delete", port] = IN_USE
    trial.begin()
    cloud.settle()
    del cloud.networks.held[port]
    cloud.clean_up()


def test_pending_cleanup_of_port_keeps_port_used_by_another_owner(cloud: Cloud) -> None:
    trial = trial_of(cloud, "delete")
    [port] = cloud.networks.held
    cloud.networks.refusing["delete", port] = IN_USE
    trial.begin()
    cloud.settle()
    cloud.networks.held[port]["device_id"] = "another"
    cloud.networks.well()
    cloud.clean_up()
    assert list(cloud.networks.held) == [port]


def test_cleanup_with_unexpected_exception_does_not_delay_other_cleanups(cloud: Cloud) -> None:
    register(cloud)
    servers = cloud.create(2)
    cloud.settle()
    for port in cloud.networks.held:
        cloud.networks.refusing["delete", port] = IN_USE
    for server in servers:
        ask(cloud, server, "delete")
    cloud.settle()
    poison, delete = read_cleanups(cloud)[0].target, cloud.networks.delete
    cloud.networks.well()

    def fail(port_id: str) -> None:
        if port_id == poison:
            raise RuntimeError("nobody foresaw this")
        delete(port_id)

    cloud.networks.delete = fail  # type: ignore[method-assign]
    hasten(cloud)
    cloud.round()
    assert cloud.pending() == [("port", poison)]


#: Workflow -> number of rounds until the action has ended.
ROUNDS = {
    "create": 1,
    "attach_interface": 1,
    "reboot_hard": 1,
    "rebuild": 1,
    "resize": 3,
    "live_migrate": 4,
    "evacuate": 1,
    "unshelve": 2,
}


@pytest.mark.parametrize(
    ("workflow", "rounds"),
    [(name, number) for name, end in ROUNDS.items() for number in range(end + 1)],
)
def test_port_deleted_during_action_is_removed_from_server_and_guest(
    cloud: Cloud, workflow: str, rounds: int
) -> None:
    trial = trial_of(cloud, workflow)
    trial.begin()
    for _ in range(rounds):
        cloud.round()
    server, gone = cloud.show(trial.server), set(cloud.networks.held)
    cloud.networks.held.clear()
    # The API does the same when the network service reports the deletion.
    for port in gone:
        cloud.store.write(
            lambda tx, port=port: store_cleanups.add_gone_port(
                tx, server.id, server.project_id, port
            )
        )
    cloud.settle()
    if workflow == "resize":
        ask(cloud, trial.server, "confirmResize")
        cloud.settle()
    # The first retry detaches a port, and the second retry checks this.
    for _ in range(2 * len(gone)):
        hasten(cloud)
        cloud.settle()
    guests = [
        host.driver.host.guests[trial.server]
        for host in cloud.hosts.values()
        if host.is_on and trial.server in host.driver.host.guests
    ]
    plugged = {interface.port for guest in guests for interface in guest.interfaces}
    listed = {interface["port"] for interface in cloud.show(trial.server).interfaces or ()}
    assert (plugged & gone, listed & gone) == (set(), set())
    assert (cloud.pending(), cloud.findings()) == ([], [])
