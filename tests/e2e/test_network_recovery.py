# SPDX-License-Identifier: Apache-2.0
"""The processes for networks are killed during creates and deletes, or are down for a while.

Accepted requests complete, running guests keep their connections, and no device or rule is left in
the kernel.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from deploy.one_machine.cloud import lifecycle, process_control
from deploy.one_machine.cloud.process_control import find_process
from deploy.one_machine.connectivity import KEY, PRIVATE
from deploy.one_machine.services.network.host.names import TABLES
from tests.e2e.conftest import Pair
from tests.e2e.guests import SOON, Guest, give_address, guest, kernel, listener, orphans
from tests.e2e.live import SETTLE, Live, Rest
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")

GUESTS = 2
VICTIMS = ("network", "network-host", "metadata")
#: Longest seconds without a sign of an undisturbed guest on a busy machine.
BUSY = 10
#: A command that requests a lease with the options of the tiny guest.
RENEW = "udhcpc -i eth0 -n -q -s /etc/lease -O staticroutes -O mtu -O search"


def create_server(cloud: Live, rest: Rest, name: str, network: str) -> str:
    """Create a server, with repetitions while a service is down, and return its id."""
    return rest.create(
        image=cloud.image(),
        flavor=cloud.flavor(),
        name=name,
        key_name=KEY,
        networks=[{"uuid": network}],
    )


def strike(cloud: Live, victim: str) -> None:
    pid = process_control.kill(cloud.cloud, victim)
    await_true(
        lambda: find_process(cloud.cloud, victim) not in (None, pid),
        30,
        lambda: f"{victim} does not come back",
    )
    if (
        url := {"network": cloud.cloud.network_url, "metadata": cloud.cloud.metadata_url}.get(
            victim
        )
    ) is not None:
        lifecycle.await_http(cloud.cloud, victim, url)


@contextmanager
def check_undisturbed(guest: Guest) -> Iterator[None]:
    """Check that the guest sends during the whole with block, and accepts ssh afterwards."""
    with listener(guest) as listener_result:
        yield
        guest.run("true")
    assert listener_result.longest < BUSY, (
        f"{guest.name} was not heard for {listener_result.longest:.1f} s"
    )


@pytest.mark.parametrize("victim", VICTIMS)
def test_creates_and_deletes_complete_when_network_process_is_killed(
    cloud: Live, pair: Pair, victim: str
) -> None:
    rests = [cloud.rest() for _ in range(GUESTS)]
    name, network = f"struck-{uuid.uuid4().hex[:6]}", cloud.seed.demo.network
    private = next(iter(network.networks(name=PRIVATE))).id
    with check_undisturbed(pair.far), ThreadPoolExecutor(GUESTS) as pool:
        creates = [pool.submit(create_server, cloud, rest, name, private) for rest in rests]
        creates[0].result()
        strike(cloud, victim)
        servers = [new_guest.result() for new_guest in creates]
    for server in servers:
        rests[0].await_status(server, "ACTIVE")
    names = {server: rests[0].server(server)["name"] for server in servers}
    guests = [
        Guest(cloud, server, names[server], give_address(cloud, server)) for server in servers
    ]
    for new_guest in guests:
        new_guest.await_ssh()
        assert new_guest.reaches(pair.far.fixed_address())
    for new_guest in guests:
        for floating in network.ips(floating_ip_address=new_guest.floating):
            network.delete_ip(floating)
    with check_undisturbed(pair.far), ThreadPoolExecutor(GUESTS) as pool:
        deletes = [
            pool.submit(rest.insist, "DELETE", f"/servers/{server}", expected=(204, 404))
            for rest, server in zip(rests, servers, strict=True)
        ]
        deletes[0].result()
        strike(cloud, victim)
        for answer in deletes:
            answer.result()
    for server in servers:
        rests[0].await_gone(server)
    await_true(lambda: orphans(cloud) == [], SETTLE, lambda: orphans(cloud))
    cloud.assert_healthy()


def test_guests_keep_connections_while_network_service_is_down(cloud: Live, pair: Pair) -> None:
    rest = cloud.rest()
    with guest(cloud, "leaves") as leaving, check_undisturbed(pair.far):
        for name in ("network", "network-host"):
            process_control.stop(cloud.cloud, name)
        try:
            assert pair.near.reaches(pair.far.fixed_address()) and pair.far.reaches(
                pair.near.fixed_address()
            )
            assert leaving.reaches(pair.near.fixed_address())
            # A stop needs no network service.
            assert rest.act(pair.near.server, "os-stop").status == 202
            rest.await_status(pair.near.server, "SHUTOFF")
            rest.insist("DELETE", f"/servers/{leaving.server}", expected=(204,))
            waiting = create_without_wait(cloud, rest)
        finally:
            for name in ("network", "network-host"):
                process_control.start(cloud.cloud, name)
        rest.await_gone(leaving.server)
        if waiting is not None:
            rest.await_status(waiting, "ACTIVE")
            rest.insist("DELETE", f"/servers/{waiting}", expected=(204,))
            rest.await_gone(waiting)
    assert rest.act(pair.near.server, "os-start").status == 202
    rest.await_status(pair.near.server, "ACTIVE")
    pair.near.await_ssh()
    await_true(lambda: orphans(cloud) == [], SETTLE, lambda: orphans(cloud))


def create_without_wait(cloud: Live, rest: Rest) -> str | None:
    """Create a server without the network service: refused with 503, or accepted and done later.

    Returns:
        The server's id, or None if the request is refused.
    """
    reply = rest.call(
        "POST",
        "/servers",
        {
            "server": {
                "name": "later",
                "imageRef": cloud.image(),
                "flavorRef": cloud.flavor(),
                "networks": "auto",
            }
        },
    )
    assert reply.status in (202, 503), reply
    return str(reply.body["server"]["id"]) if reply.status == 202 else None


def list_own_tables(cloud: Live) -> list[list[str]]:
    """Return family and name of the nft tables of the network host on the second host.

    The table of the underlay is left out.
    """
    tables = [line.split()[1:] for line in kernel(cloud, 2, "nft", "list", "tables").splitlines()]
    return sorted(table for table in tables if table[1].startswith(TABLES))


def test_network_host_restores_deleted_rules_after_kill(cloud: Live, pair: Pair) -> None:
    """The rules are deleted from the kernel and the process is killed. Both return."""
    near = pair.near
    assert orphans(cloud) == []
    tables = list_own_tables(cloud)
    assert tables
    for family, name in tables:
        kernel(cloud, 2, "nft", "delete", "table", family, name)
    strike(cloud, "network-host-2")
    await_true(
        lambda: list_own_tables(cloud) == tables,
        SOON,
        lambda: kernel(cloud, 2, "nft", "list", "tables"),
    )
    await_true(lambda: near.reaches(pair.far.fixed_address()), SOON, lambda: "far is not reached")
    pair.far.run("true")


def test_dhcp_lease_and_metadata_return_after_network_processes_are_killed(
    cloud: Live, pair: Pair
) -> None:
    for victim in ("network", "network-host", "network-host-2", "metadata"):
        strike(cloud, victim)
    for running_guest in (pair.near, pair.far):
        running_guest.await_ssh(SOON)
        before = running_guest.fixed_address()
        await_true(
            lambda target=running_guest: target.can_run(f"{RENEW} > /tmp/said 2>&1"),
            SETTLE,
            lambda target=running_guest: target.run("cat /tmp/said"),
        )
        assert f"lease of {before} obtained" in running_guest.run("cat /tmp/said")
        command = (
            "timeout 10 wget -q -O - http://169.254.169.254/openstack/latest/meta_data.json || true"
        )
        await_true(
            lambda target=running_guest, command=command: target.server in target.run(command),
            SOON,
            lambda target=running_guest: f"{target.name}: no answer",
        )
