# SPDX-License-Identifier: Apache-2.0
"""RabbitMQ loses its queues and messages during actions.

These are delayed, and neither lost nor repeated.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.domain import states
from compute_agent.virt.memory.state.script import Slow
from deploy.testing.servers import Servers
from tests.functional.cloud import Cloud
from tests.log_lines import logged_fields


@pytest.fixture
def own_servers() -> Iterator[Servers]:
    """Servers of this test only, because the broker is wiped.

    The folder is outside pytest's folders, because another run of pytest closes those to all users
    except root.
    """
    with tempfile.TemporaryDirectory(prefix="kn-broker-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            yield servers


@pytest.mark.timeout(120)
@pytest.mark.slice("operations")
def test_servers_reach_their_states_after_broker_is_wiped(
    own_servers: Servers, new_cloud: Callable[..., Cloud], caplog: pytest.LogCaptureFixture
) -> None:
    cloud = new_cloud(broker=own_servers.start("rabbitmq"))
    broker = own_servers.broker
    assert broker is not None
    cloud.start(hosts=2, conductors=2)
    stopped, deleted = cloud.create(4), cloud.create(4)
    cloud.await_state(stopped + deleted, states.ACTIVE, 30)
    for driver in cloud.drivers.values():
        driver.host.script["ensure_guest"] = [Slow(1.0, after=True)] * 6
    # The results of these creates arrive while the broker is down.
    created = cloud.create(6)
    broker.control("stop_app")
    # The wakeup messages of these creates are lost.
    created += cloud.create(4)
    for server in stopped:
        cloud.begin_action(server, "os-stop")
    broker.control("reset")
    for server in deleted:
        cloud.begin_action(server, "delete")
    broker.control("start_app")
    cloud.await_state(created, states.ACTIVE, 30)
    cloud.await_state(stopped, states.STOPPED, 30)
    cloud.await_state(deleted, states.DELETED, 30)
    cloud.await_idle()
    # A host without contact to a conductor postpones commands, and gets them again later.
    executions = cloud.count_commands("ensure_guest") - count_postponed_commands(
        caplog, "ensure_guest"
    )
    assert {executions[server] for server in stopped + deleted + created} == {1}
    assert cloud.findings() == []


def count_postponed_commands(caplog: pytest.LogCaptureFixture, verb: str) -> Counter[str]:
    """Return how often agents postponed a verb, by server."""
    return Counter(
        str(fields["server"])
        for fields in logged_fields(caplog, "a command waits")
        if fields["verb"] == verb
    )
