# SPDX-License-Identifier: Apache-2.0
"""An upgrade from the release before to this code while servers live, in both orders, and back.

The cloud has PostgreSQL, two conductors and two hosts with a driver in memory. After each step the
lives of servers (create, attach, stop, start, live migration, resize, delete) and an evacuation
must work. At the end nothing is lost, stuck or left behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from common import __version__
from deploy.one_machine import up
from deploy.one_machine.cloud import host_keys, lifecycle, process_control
from deploy.testing.servers import Servers
from tests.e2e.conftest import without_guests
from tests.e2e.live import SETTLE, Live
from tests.e2e.storm import clients as run_clients
from tests.schemas import Server
from tests.upgrade.lives import Client, await_lives
from tests.upgrade.mixed import FIRST, HOSTS, SECOND, START_SECONDS, MixedCloud, unpack
from tests.waiting import await_true

OLD = "0.1.0"
CLIENTS = 2

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / OLD
    if reason := unpack(OLD, folder):
        pytest.skip(f"needs the commit of {OLD}: {reason}")
    return folder


@pytest.fixture
def mixed(tree: Path) -> Iterator[MixedCloud]:
    """Yield a cloud that runs the older release on a new database."""
    with tempfile.TemporaryDirectory(prefix="kn-upgrade-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with (
            Servers(Path(folder)) as servers,
            without_guests(
                start=lambda live: start_old_release(MixedCloud(live, tree)),
                networks=True,
                volumes=True,
                database_url=Server(servers.start("postgresql")).create(),
            ) as live,
        ):
            yield MixedCloud(live, tree)


def start_old_release(mixed: MixedCloud) -> None:
    up.prepare(mixed.cloud)
    assert "0001" in mixed.kilonova("database", "upgrade", old=True)
    host_keys.make(mixed.cloud)
    up.bootstrap(mixed.cloud)
    lifecycle.launch(mixed.cloud, mixed.programs())


def make_network(live: Live) -> str:
    network = live.seed.demo.network.create_network(name="upgrade").id
    live.seed.demo.network.create_subnet(network_id=network, ip_version=4, cidr="10.9.0.0/24")
    return str(network)


def run_lives(live: Live) -> AbstractContextManager[list[Client]]:
    """Run clients on a new network during a with block."""
    return run_clients(live, CLIENTS, partial(Client, network=make_network(live)))


def upgrade_database(mixed: MixedCloud) -> None:
    assert "was 0001" in mixed.kilonova("database", "upgrade")
    # The restarted processes of the first controller have waited for the database.
    up.await_services(mixed.cloud)


def evacuate_one(mixed: MixedCloud) -> None:
    """Create a server on the second host, evacuate it, and let the host return."""
    live, admin = mixed.live, mixed.live.rest("kilonova-admin")
    server = admin.create(
        image=live.image("empty"),
        flavor=live.flavor(),
        name="evacuated",
        host="two",
        seconds=SETTLE,
    )
    admin.await_status(server, "ACTIVE")
    process_control.stop(mixed.cloud, "agent-2")
    try:
        [service] = live.seed.admin.compute.services(binary="nova-compute", host="two")
        live.seed.admin.compute.update_service_forced_down(service, forced=True)
        assert admin.act(server, "evacuate", {"host": "one"}).status == 200
        await_true(
            lambda: admin.server(server)["OS-EXT-SRV-ATTR:host"] == "one",
            SETTLE,
            lambda: admin.server(server),
        )
        admin.await_status(server, "SHUTOFF")  # since microversion 2.95
    finally:
        process_control.start(mixed.cloud, "agent-2")
        live.seed.admin.compute.update_service_forced_down(service, forced=False)
    admin.insist("DELETE", f"/servers/{server}", expected=(204, 404))
    admin.await_gone(server)
    await_true(
        lambda: all(
            found.state == "up" for found in live.seed.admin.compute.services(binary="nova-compute")
        ),
        START_SECONDS,
        "the host is up again",
    )


def upgrade_first_conductor(mixed: MixedCloud) -> None:
    """Upgrade the first conductor, which waits for the database, and then the database."""
    mixed.upgrade(FIRST[:1])
    upgrade_database(mixed)


def upgrade_first_controller(mixed: MixedCloud) -> None:
    mixed.upgrade(FIRST)
    up.await_services(mixed.cloud)


def upgrade_second_controller(mixed: MixedCloud) -> None:
    mixed.upgrade(SECOND)


def upgrade_first_host(mixed: MixedCloud) -> None:
    mixed.upgrade(HOSTS[:1])


def upgrade_all_hosts(mixed: MixedCloud) -> None:
    mixed.upgrade(HOSTS)


CONTROLLERS = (upgrade_first_conductor, upgrade_first_controller, upgrade_second_controller)
HOST_STEPS = (upgrade_first_host, upgrade_all_hosts)
#: The order of docs/install.md, and the opposite one.
ORDERS = {
    "controllers first": (*CONTROLLERS, *HOST_STEPS),
    "hosts first": (*HOST_STEPS, *CONTROLLERS),
}


def check_end(mixed: MixedCloud, clients: list[Client], capsys: pytest.CaptureFixture[str]) -> None:
    """Check that no server is left, that the doctor finds nothing, and print the figures."""
    live = mixed.live
    for user in ("kilonova", "kilonova-admin"):
        assert live.rest(user).servers() == []
    live.assert_healthy()
    with capsys.disabled():
        print(
            f"\n{sum(len(client.begun) for client in clients)} complete lives, "
            f"{sum(client.repeated for client in clients)} requests repeated, 0 failed"
        )


@pytest.mark.parametrize("order", ORDERS)
def test_lives_of_servers_go_on_during_upgrade(
    mixed: MixedCloud, order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_lives(mixed.live) as clients:
        await_lives(clients)
        for step in ORDERS[order]:
            step(mixed)
            await_lives(clients)
            evacuate_one(mixed)
    check_end(mixed, clients, capsys)
    other_versions = {
        service: version for service, version in mixed.versions().items() if version != __version__
    }
    # A conductor of 0.1.0 does not record the version of a new host. Host two has restarted since.
    expected = {"nova-compute one": "unknown"} if order == "hosts first" else {}
    assert other_versions == expected
    report = mixed.kilonova("upgrade", "check")
    assert ("of an unknown version: nova-compute on one." in report) == bool(expected), report


def test_lives_of_servers_go_on_when_processes_return_to_older_release(
    mixed: MixedCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed.upgrade([*FIRST, *SECOND, *HOSTS])
    upgrade_database(mixed)
    with run_lives(mixed.live) as clients:
        await_lives(clients)
        for names in (HOSTS[:1], HOSTS, SECOND, FIRST):
            mixed.go_back(names)
            await_lives(clients)
            evacuate_one(mixed)
    check_end(mixed, clients, capsys)
