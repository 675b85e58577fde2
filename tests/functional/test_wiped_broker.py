# SPDX-License-Identifier: Apache-2.0
"""RabbitMQ loses everything it had, in the middle of work: that work is late, never lost and never
doubled."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.domain import states
from compute_agent.verbs import WAITS
from compute_agent.virt.memory.state.script import Slow
from deploy.testing.servers import Servers
from tests.functional.cloud import Cloud


@pytest.fixture
def servers_of_our_own() -> Iterator[Servers]:
    """A broker that only this test uses, since it is wiped. Its folder is none of pytest's, which
    another run of pytest closes to all but root."""
    with tempfile.TemporaryDirectory(prefix="kn-broker-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            yield servers


@pytest.mark.timeout(120)
@pytest.mark.slice("operations")
def test_everything_reaches_its_state_although_the_broker_was_wiped(
    servers_of_our_own: Servers, new_cloud: Callable[..., Cloud], caplog: pytest.LogCaptureFixture
) -> None:
    cloud = new_cloud(broker=servers_of_our_own.start("rabbitmq"))
    broker = servers_of_our_own.broker
    assert broker is not None
    cloud.start(hosts=2, conductors=2)
    stopped, deleted = cloud.create(4), cloud.create(4)
    cloud.await_state(stopped + deleted, states.ACTIVE, 30)
    for driver in cloud.drivers.values():
        driver.host.script["ensure_guest"] = [Slow(1.0, after=True)] * 6
    created = cloud.create(6)  # their results come while the broker is away
    broker.control("stop_app")
    created += cloud.create(4)  # wakeups, commands: all in vain
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
    # A host that hears no conductor for long begins nothing, and is sent the command again.
    made = cloud.made("ensure_guest") - waited(caplog, "ensure_guest")
    assert {made[server] for server in stopped + deleted + created} == {1}
    assert cloud.findings() == []


def waited(caplog: pytest.LogCaptureFixture, verb: str) -> Counter[str]:
    """How often an agent put off this verb, by server."""
    found = [one.args for one in caplog.records if one.msg == WAITS]
    return Counter(str(one[1]) for one in found if isinstance(one, tuple) and one[0] == verb)
