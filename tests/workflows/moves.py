# SPDX-License-Identifier: Apache-2.0
"""A cloud of several hosts for tests of moves, with hooks for events at one moment of a move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from common.domain import states
from common.domain.context import RequestContext
from common.domain.models import Command
from common.store import schema
from common.store.servers import actions, immediate_actions
from tests.schemas import memory_store
from tests.workflows.frozen import register
from tests.workflows.scenarios import bigger, watch
from tests.workflows.simulator import Cloud, Time

ADMIN = RequestContext(user_id="admin", project_id="admins", roles=("admin",), request_id="req-a")
CANARY = {"canary": "alive"}
#: A function that receives the name of a host.
Act = Callable[[str], object]


def create_cloud(hosts: int = 3, storage: str = "") -> Cloud:
    """Return a cloud of registered hosts, which is checked after each round (``watch``).

    Args:
        hosts: Number of hosts.
        storage: Name of the storage that all hosts share, or "" for local disks.
    """
    time = Time()
    cloud = Cloud(memory_store(time), time, hosts, storage)
    register(cloud, storage)
    watch(cloud)
    return cloud


def has_shared_storage(cloud: Cloud) -> bool:
    """Return True if the hosts share storage."""
    return cloud.hosts["h1"].driver.host.storage is cloud.hosts["h2"].driver.host.storage


def boot_server(cloud: Cloud, host: str = "h1", **args: Any) -> str:
    """Create a server on this host, write the file CANARY to the disk, and return the id."""
    server = cloud.create(host=host, **args)[0]
    cloud.settle()
    cloud.hosts[host].driver.host.write_file(server, "canary", "alive")
    cloud.sent.clear()
    return server


def before(cloud: Cloud, verb: str, act: Act) -> None:
    """Call ``act`` with the host of the first command with this verb, before the host gets it."""
    deliver = cloud.do
    hosts: list[str] = []

    def do(host: str, commands: list[Command]) -> None:
        if not hosts and any(command.verb == verb for command in commands):
            hosts.append(host)
            act(host)
        deliver(host, commands)

    cloud.do = do  # type: ignore[method-assign]


def after(cloud: Cloud, verb: str, act: Act) -> None:
    """Call ``act`` with the first host that completes this verb, before the host reports it."""
    hosts: list[str] = []

    def at(name: str) -> Callable[[str, str, str], None]:
        def hit(reached_verb: str, step: str, where: str) -> None:
            if (reached_verb, where) == (verb, "after") and not hosts:
                hosts.append(name)
                act(name)

        return hit

    for name, host in cloud.hosts.items():
        host.fault_point = at(name)


def reset_state(cloud: Cloud, server: str, state: str = "active") -> None:
    """Reset the state of a server, as an admin does with os-resetState."""
    cloud.store.write(
        lambda tx: immediate_actions.do(
            tx, states.row("os-resetState"), server, context=ADMIN, args={"state": state}
        )
    )


def last(cloud: Cloud, server: str) -> Any:
    """Return the newest action of a server."""
    return cloud.store.read(lambda tx: actions.list_for(tx, server))[0]


def failures(cloud: Cloud) -> dict[str, int]:
    """Return the number of failed builds that the scheduler counts for each host."""
    rows = cloud.store.read(lambda tx: list(tx.execute(sa.select(schema.providers))))
    return {row.host: row.failures for row in rows if row.host}


def read_disk(cloud: Cloud, server: str) -> dict[str, str]:
    """Return the files on the server's disk, by name, from the server's host."""
    return cloud.hosts[cloud.show(server).host].driver.host.guests[server].disk


def resize_to_bigger(cloud: Cloud, server: str) -> None:
    """Resize the server to a bigger flavor, up to VERIFY_RESIZE."""
    cloud.move(server, "resize", bigger(cloud, server))
    cloud.settle()
    assert cloud.show(server).vm_state == states.RESIZED


def lead_up(cloud: Cloud, server: str, key: str) -> None:
    """Prepare the server for the action with this key.

    A revert needs a resize before, and an evacuation a dead host.
    """
    if key == "revertResize":
        resize_to_bigger(cloud, server)
    if key == "evacuate":
        cloud.kill(cloud.show(server).host)
    cloud.sent.clear()


def check_rests(cloud: Cloud, server: str, vm_state: str, host: str | None) -> None:
    """Check that the server is idle in this state, and that the doctor has no finding.

    A server in ACTIVE or VERIFY_RESIZE must run on this host only, others on no host. The quota
    must count the flavor, except before a confirm or revert.
    """
    row = cloud.show(server)
    assert (row.vm_state, row.task_state, row.action, row.host) == (
        vm_state,
        None,
        None,
        host,
    ), last(cloud, server).message
    assert (row.vcpus, row.memory_mb) == (row.flavor["vcpus"], row.flavor["memory_mb"]) or (
        vm_state == states.RESIZED
    )
    assert cloud.findings() == []
    runs = [
        name
        for name, other_host in cloud.hosts.items()
        if any(
            domain.server == server and domain.power_state == states.RUNNING
            for domain in other_host.driver.domains()
        )
    ]
    assert runs == ([host] if vm_state in (states.ACTIVE, states.RESIZED) else [])
