# SPDX-License-Identifier: Apache-2.0
"""Three hosts between which a server moves, and things that happen at one moment of it; for the
stories of moves."""

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
Act = Callable[[str], object]


def create_cloud(hosts: int = 3, storage: str = "") -> Cloud:
    """Hosts that have registered; after every round the oracle is asked."""
    time = Time()
    cloud = Cloud(memory_store(time), time, hosts, storage)
    register(cloud, storage)
    watch(cloud)
    return cloud


def has_shared_storage(cloud: Cloud) -> bool:
    """Have the hosts the same storage?"""
    return cloud.hosts["h1"].driver.host.storage is cloud.hosts["h2"].driver.host.storage


def boot_server(cloud: Cloud, host: str = "h1", **wishes: Any) -> str:
    """A server that has written a file."""
    server = cloud.create(host=host, **wishes)[0]
    cloud.settle()
    cloud.hosts[host].driver.host.write_file(server, "canary", "alive")
    cloud.sent.clear()
    return server


def before(cloud: Cloud, verb: str, act: Act) -> None:
    """When a command with this verb is about to be sent for the first time, this happens to the
    host it is for."""
    deliver, done = cloud.do, []

    def do(host: str, commands: list[Command]) -> None:
        if not done and any(command.verb == verb for command in commands):
            done.append(host)
            act(host)
        deliver(host, commands)

    cloud.do = do  # type: ignore[method-assign]  # the post is the simulator's to bend


def after(cloud: Cloud, verb: str, act: Act) -> None:
    """When a host has carried a command with this verb out for the first time, and has told
    nobody."""
    done: list[str] = []

    def at(name: str) -> Callable[[str, str, str], None]:
        def hit(seen: str, step: str, where: str) -> None:
            if (seen, where) == (verb, "after") and not done:
                done.append(name)
                act(name)

        return hit

    for name, host in cloud.hosts.items():
        host.fault_point = at(name)


def reset_state(cloud: Cloud, server: str, state: str = "active") -> None:
    """An admin's word."""
    cloud.store.write(
        lambda tx: immediate_actions.do(
            tx, states.row("os-resetState"), server, context=ADMIN, args={"state": state}
        )
    )


def last(cloud: Cloud, server: str) -> Any:
    """The last action of a server."""
    return cloud.store.read(lambda tx: actions.list_for(tx, server))[0]


def failures(cloud: Cloud) -> dict[str, int]:
    """How many builds count as failed on each host."""
    rows = cloud.store.read(lambda tx: list(tx.execute(sa.select(schema.providers))))
    return {row.host: row.failures for row in rows if row.host}


def read_disk(cloud: Cloud, server: str) -> dict[str, str]:
    """What the server's disk has, where the server is."""
    return cloud.hosts[cloud.show(server).host].driver.host.guests[server].disk


def resize_to_bigger(cloud: Cloud, server: str) -> None:
    """It waits to be confirmed."""
    cloud.move(server, "resize", bigger(cloud, server))
    cloud.settle()
    assert cloud.show(server).vm_state == states.RESIZED


def lead_up(cloud: Cloud, server: str, wanted: str) -> None:
    """What comes before such a move."""
    if wanted == "revertResize":
        resize_to_bigger(cloud, server)
    if wanted == "evacuate":
        cloud.kill(cloud.show(server).host)
    cloud.sent.clear()


def check_rests(cloud: Cloud, server: str, vm_state: str, host: str | None) -> None:
    """It is at rest in this state on this host, runs if it should, has no more than it needs, and
    is whole."""
    found = cloud.show(server)
    assert (found.vm_state, found.task_state, found.action, found.host) == (
        vm_state,
        None,
        None,
        host,
    ), last(cloud, server).message
    assert (found.vcpus, found.memory_mb) == (found.flavor["vcpus"], found.flavor["memory_mb"]) or (
        vm_state == states.RESIZED
    )
    assert cloud.findings() == []
    runs = [
        name
        for name, one in cloud.hosts.items()
        if any(
            domain.server == server and domain.power_state == states.RUNNING
            for domain in one.driver.domains()
        )
    ]
    assert runs == ([host] if vm_state in (states.ACTIVE, states.RESIZED) else [])
