# SPDX-License-Identifier: Apache-2.0
"""The processes behind networks are killed in the middle of creates and deletes, or are away for a
while: what was accepted comes to its end, guests that are there are not disturbed, and nothing is
left in the kernel."""

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
#: Seconds that nobody may hear a guest whose machine is busy, although nothing disturbs it.
BUSY = 10
#: A lease asked for anew, with all that the tiny guest asks for.
RENEW = "udhcpc -i eth0 -n -q -s /etc/lease -O staticroutes -O mtu -O search"


def created(cloud: Live, rest: Rest, name: str, network: str) -> str:
    """A server's id; a client is patient while a service is away."""
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
def undisturbed(guest: Guest) -> Iterator[None]:
    """Nothing in the block disturbs the guest: it is heard all the time, and lets in when the block
    is over."""
    with listener(guest) as heard:
        yield
        guest.run("true")
    assert heard.longest < BUSY, f"{guest.name} was not heard for {heard.longest:.1f} s"


@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_in_the_middle_of_creates_and_deletes(cloud: Live, pair: Pair, victim: str) -> None:
    rests = [cloud.rest() for _ in range(GUESTS)]
    name, network = f"struck-{uuid.uuid4().hex[:6]}", cloud.seed.demo.network
    private = next(iter(network.networks(name=PRIVATE))).id
    with undisturbed(pair.far), ThreadPoolExecutor(GUESTS) as pool:
        asked = [pool.submit(created, cloud, rest, name, private) for rest in rests]
        asked[0].result()
        strike(cloud, victim)
        servers = [one.result() for one in asked]
    for server in servers:
        rests[0].await_status(server, "ACTIVE")
    names = {server: rests[0].server(server)["name"] for server in servers}
    made = [Guest(cloud, server, names[server], give_address(cloud, server)) for server in servers]
    for one in made:
        one.await_ssh()
        assert one.reaches(pair.far.fixed())
    for one in made:
        for floating in network.ips(floating_ip_address=one.floating):
            network.delete_ip(floating)
    with undisturbed(pair.far), ThreadPoolExecutor(GUESTS) as pool:
        gone = [
            pool.submit(rest.insist, "DELETE", f"/servers/{server}", fine=(204, 404))
            for rest, server in zip(rests, servers, strict=True)
        ]
        gone[0].result()
        strike(cloud, victim)
        for answer in gone:
            answer.result()
    for server in servers:
        rests[0].await_gone(server)
    await_true(lambda: orphans(cloud) == [], SETTLE, lambda: orphans(cloud))
    cloud.judge()


def test_guests_go_on_while_their_network_service_is_away(cloud: Live, pair: Pair) -> None:
    rest = cloud.rest()
    with guest(cloud, "leaves") as leaving, undisturbed(pair.far):
        for name in ("network", "network-host"):
            process_control.stop(cloud.cloud, name)
        try:
            assert pair.near.reaches(pair.far.fixed()) and pair.far.reaches(pair.near.fixed())
            assert leaving.reaches(pair.near.fixed())
            assert rest.act(pair.near.server, "os-stop").status == 202  # needs no network service
            rest.await_status(pair.near.server, "SHUTOFF")
            rest.insist("DELETE", f"/servers/{leaving.server}", fine=(204,))
            waiting = created_without_wait(cloud, rest)
        finally:
            for name in ("network", "network-host"):
                process_control.start(cloud.cloud, name)
        rest.await_gone(leaving.server)
        if waiting is not None:
            rest.await_status(waiting, "ACTIVE")
            rest.insist("DELETE", f"/servers/{waiting}", fine=(204,))
            rest.await_gone(waiting)
    assert rest.act(pair.near.server, "os-start").status == 202
    rest.await_status(pair.near.server, "ACTIVE")
    pair.near.await_ssh()
    await_true(lambda: orphans(cloud) == [], SETTLE, lambda: orphans(cloud))


def created_without_wait(cloud: Live, rest: Rest) -> str | None:
    """A create on a network that cannot be looked up is refused as such, or accepted and carried
    out later."""
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


def own_tables(cloud: Live) -> list[list[str]]:
    """Family and name of each nft table that the second host's part has made; the guard of the
    underlay is not its."""
    listed = [line.split()[1:] for line in kernel(cloud, 2, "nft", "list", "tables").splitlines()]
    return sorted(one for one in listed if one[1].startswith(TABLES))


def test_host_part_makes_again_what_somebody_destroyed(cloud: Live, pair: Pair) -> None:
    """Its rules are gone from the kernel, and it comes back from kill -9: all is as before."""
    near = pair.near
    assert orphans(cloud) == []
    tables = own_tables(cloud)
    assert tables
    for family, name in tables:
        kernel(cloud, 2, "nft", "delete", "table", family, name)
    strike(cloud, "network-host-2")
    await_true(
        lambda: own_tables(cloud) == tables, SOON, lambda: kernel(cloud, 2, "nft", "list", "tables")
    )
    await_true(lambda: near.reaches(pair.far.fixed()), SOON, lambda: "far is not reached")
    pair.far.run("true")


def test_lease_is_renewed_after_everything_was_killed(cloud: Live, pair: Pair) -> None:
    for victim in ("network", "network-host", "network-host-2", "metadata"):
        strike(cloud, victim)
    for one in (pair.near, pair.far):
        one.await_ssh(SOON)
        before = one.fixed()
        await_true(
            lambda who=one: who.does(f"{RENEW} > /tmp/said 2>&1"),
            SETTLE,
            lambda who=one: who.run("cat /tmp/said"),
        )
        assert f"lease of {before} obtained" in one.run("cat /tmp/said")
        ask = (
            "timeout 10 wget -q -O - http://169.254.169.254/openstack/latest/meta_data.json || true"
        )
        await_true(
            lambda who=one, ask=ask: who.server in who.run(ask),
            SOON,
            lambda who=one: f"{who.name}: no answer",
        )
