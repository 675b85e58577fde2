# SPDX-License-Identifier: Apache-2.0
"""Change of secrets as in docs/secrets.md, while clients create and delete servers.

No server is lost, agents keep running, and data that was encrypted with the old key stays readable.
The password of a host at the broker is tested in tests/contract/test_broker_identities.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from deploy.one_machine.cloud import process_control
from deploy.one_machine.cloud.broker import Broker
from deploy.testing.servers import Servers
from tests.e2e.conftest import without_guests
from tests.e2e.live import SETTLE, Live
from tests.e2e.storm import Client, clients
from tests.e2e.test_storm import check_no_remains
from tests.waiting import await_true

pytestmark = [pytest.mark.slice("operations"), pytest.mark.timeout(900)]
#: Names of the passwords of ``Cloud.password`` that are lists in the configuration.
LISTS = ("sealing", "commands", "queries", "tickets")
#: The three values of an option, from the old and the new secret.
STEPS: tuple[Callable[[str, str], str], ...] = (
    lambda old, new: f"{old},{new}",
    lambda old, new: f"{new},{old}",
    lambda old, new: new,
)
#: The processes of the control plane in this cloud.
PROCESSES = ("api", "conductor", "scheduler", "placement", "image-gateway")
USER_DATA = "c2VjcmV0"


@pytest.fixture
def live() -> Iterator[Live]:
    """Yield a cloud on a PostgreSQL of its own.

    The folder is outside pytest's folders, because another run of pytest closes those to all users
    except root.
    """
    with tempfile.TemporaryDirectory(prefix="kn-secrets-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            url = sa.make_url(servers.start("postgresql")).set(database="postgres")
            text = url.render_as_string(hide_password=False)
            with without_guests(database_url=text) as live:
                yield live


def configure(live: Live, changes: dict[str, str]) -> None:
    """Replace texts in the configuration files of the control plane, and restart its processes."""
    missing = set(changes)
    for path in (live.home / "etc").glob("kilonova*.conf"):
        text = path.read_text()
        for old, new in changes.items():
            missing -= {old} if old in text else set()
            text = text.replace(old, new)
        path.write_text(text)
    assert not missing
    for name in PROCESSES:
        process_control.restart(live.cloud, name)
    await_true(lambda: live.kilonova("status").returncode == 0, SETTLE, "the processes are up")


@contextmanager
def load(live: Live) -> Iterator[None]:
    """Create and delete servers during the block, and check that agents run on and none is lost."""
    agents = [process_control.find_process(live.cloud, name) for name in ("agent", "agent-2")]
    with clients(live, 2, Client) as workers:
        await_true(lambda: all(client.created for client in workers), SETTLE, "clients work")
        yield
    assert agents == [
        process_control.find_process(live.cloud, name) for name in ("agent", "agent-2")
    ]
    check_no_remains(live, workers)


def find_user_data(live: Live, server: str) -> object:
    return live.rest("kilonova-admin").server(server)["OS-EXT-SRV-ATTR:user_data"]


def test_lists_of_secrets_change_without_lost_servers(live: Live) -> None:
    server = live.rest().create(
        image=live.image("empty"), flavor=live.flavor(), user_data=USER_DATA
    )
    before = {name: live.cloud.password(name) for name in LISTS}
    present = dict(before)
    with load(live):
        for step in STEPS:
            after = {name: step(secret, f"new{secret}") for name, secret in before.items()}
            if step is STEPS[-1]:
                resealed = live.kilonova("database", "reseal")
                assert resealed.returncode == 0 and "servers: 1 encrypted anew" in resealed.stdout
            configure(live, {f"= {present[name]}\n": f"= {after[name]}\n" for name in LISTS})
            present = after
            shown = live.kilonova("host", "secrets", "--wait")
            assert shown.stdout == "2 of 2 hosts have today's secrets\n", shown
            assert find_user_data(live, server) == USER_DATA
    for path in live.home.glob("state*/host.key"):
        assert not any(secret in path.read_text() for secret in before.values())


def test_users_of_database_and_broker_change_without_lost_servers(live: Live) -> None:
    url = sa.make_url(live.cloud.database_url or "")
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    broker = Broker.of(live.cloud)
    with load(live):
        with engine.connect() as connection:
            for statement in (
                f"CREATE ROLE kilonova2 LOGIN PASSWORD 'NEW' IN ROLE {url.username}",
                f"ALTER ROLE kilonova2 SET role = '{url.username}'",
            ):
                connection.exec_driver_sql(statement)
        broker.control("add_user", "kilonova2", "NEW")
        broker.control("set_permissions", "kilonova2", ".*", ".*", ".*")
        second = url.set(username="kilonova2", password="NEW")
        urls = {
            broker.role_url(role): f"rabbit://kilonova2:NEW@{broker.address}:{broker.port}/"
            for role in ("api", "scheduler", "console", "conductor")
        }
        configure(
            live,
            {str(live.cloud.store_url): second.render_as_string(hide_password=False)} | urls,
        )
        for role in ("api", "scheduler", "console", "conductor"):
            broker.control("delete_user", f"kilonova-{role}")
        with engine.connect() as connection:
            sessions = connection.exec_driver_sql(
                "SELECT count(*) FROM pg_stat_activity WHERE usename = 'kilonova2'"
            )
            assert sessions.scalar_one() > 0
