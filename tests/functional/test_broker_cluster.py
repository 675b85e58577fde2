# SPDX-License-Identifier: Apache-2.0
"""A node of a RabbitMQ cluster is killed, stopped or hangs while servers are created and deleted.

Actions go on during the fault, and nothing is lost, doubled or stuck. Hosts stay up, except after a
node hangs, when a host may be down for some seconds.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from common.domain import states
from common.domain.clock import SECOND
from common.domain.service_binaries import Binary
from common.security.broker_names import REPORTS, host_queue
from common.store.engine import Connection, moment
from common.store.hosts import services
from tests.broker_cluster import Cluster, Node
from tests.functional.cloud import Cloud
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")
#: Seconds from the beginning of a fault until hosts are heard and actions end again.
RECOVERY_SECONDS = 60.0
#: The greatest age of the last sign of life of a host that is not silent.
RECENT_SECONDS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Yield a running cluster.

    The folder is outside pytest's folders, because another run of pytest closes those to all users
    except root.
    """
    with tempfile.TemporaryDirectory(prefix="kn-cluster-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Cluster(Path(folder)) as cluster:
            yield cluster


@pytest.fixture
def cloud(cluster: Cluster, new_cloud: Callable[..., Cloud]) -> Cloud:
    """Return a cloud with three hosts, two conductors and two schedulers at the cluster."""
    if not cluster.url:
        cluster.start_nodes()
    cluster.mend()
    cloud = new_cloud(broker=cluster.url)
    cloud.start(hosts=3, conductors=2, schedulers=2)
    return cloud


@dataclass(frozen=True)
class Fault:
    """The functions that begin and end a fault of a node."""

    begin: Callable[[Cluster, Node], None]
    end: Callable[[Cluster, Node], None]


FAULTS = {
    "killed": Fault(lambda cluster, node: cluster.kill(node.name), Cluster.begin),
    "stopped": Fault(Cluster.stop, Cluster.begin),
    "hanging": Fault(Cluster.hang, Cluster.wake),
}


def list_silent_hosts(cloud: Cloud) -> list[str]:
    """Return the hosts that count as down, or without a recent sign of life."""

    def silent(tx: Connection) -> list[str]:
        limit = moment(tx) - RECENT_SECONDS * SECOND
        rows = services.list_all(tx, binary=Binary.COMPUTE)
        return [row.host for row in rows if not row.up or (row.seen_at or 0) < limit]

    return cloud.watcher.read(silent)


def seconds_left(began: float) -> float:
    """Return the rest of the recovery time of a fault that began at this monotonic time."""
    return max(1.0, began + RECOVERY_SECONDS - time.monotonic())


class Owner(StrEnum):
    """The owner of the queues at the node with the fault."""

    HOST = "host"
    CONDUCTORS = "conductors"


def find_node(owner: Owner, cloud: Cloud, cluster: Cluster) -> Node:
    """Return a node that has queues of this owner."""
    prefix = cloud.network.name
    queue = f"{prefix}-{REPORTS}" if owner is Owner.CONDUCTORS else host_queue(prefix, "h1")
    node = cluster.find_node(queue, cluster.nodes[0])
    assert node is not None, f"the cluster has no queue {queue}"
    return node


class DownHosts:
    """A thread that records which hosts ever count as down."""

    def __init__(self, cloud: Cloud) -> None:
        self.names: set[str] = set()
        self._cloud, self._stops = cloud, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stops.wait(0.5):
            rows = self._cloud.watcher.read(lambda tx: services.list_all(tx, binary=Binary.COMPUTE))
            self.names |= {row.host for row in rows if not row.up}

    def close(self) -> None:
        self._stops.set()
        self._thread.join(5)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "owner"),
    [
        ("killed", Owner.CONDUCTORS),
        ("stopped", Owner.HOST),
        ("hanging", Owner.CONDUCTORS),
        ("hanging", Owner.HOST),
    ],
)
def test_actions_end_during_fault_of_node_with_queues(
    kind: str, owner: Owner, cluster: Cluster, cloud: Cloud
) -> None:
    fault, node = FAULTS[kind], find_node(owner, cloud, cluster)
    before = cloud.create(6)
    cloud.await_state(before, states.ACTIVE, 60)
    down_hosts = DownHosts(cloud)
    fault.begin(cluster, node)
    began = time.monotonic()
    try:
        during = cloud.create(6)
        for server in before[:3]:
            cloud.begin_action(server, "os-stop")
        cloud.await_state(during, states.ACTIVE, RECOVERY_SECONDS)
        cloud.await_state(before[:3], states.STOPPED, seconds_left(began))
        ended_after = time.monotonic() - began
        await_true(
            lambda: not list_silent_hosts(cloud),
            seconds_left(began),
            lambda: f"a sign of life of {list_silent_hosts(cloud)}",
        )
        # A new action is not slower than a lost message allows.
        later = cloud.create(3)
        usual = cloud.await_state(later, states.ACTIVE, 20)
    finally:
        fault.end(cluster, node)
    afterwards = cloud.create(3)
    for server in during:
        cloud.begin_action(server, "delete")
    cloud.await_state(afterwards, states.ACTIVE, 60)
    cloud.await_state(during, states.DELETED, 60)
    await_true(lambda: not list_silent_hosts(cloud), RECOVERY_SECONDS)
    cloud.await_idle()
    down_hosts.close()
    print(
        f"node {node.number} with queues of {owner} {kind}: hosts down {sorted(down_hosts.names)}, "
        f"actions ended after {ended_after:.1f} s, then a create took {usual:.1f} s"
    )
    if kind != "hanging":  # RabbitMQ notices a hanging node only after net_ticktime.
        assert down_hosts.names == set()
    created = before + during + later + afterwards
    guest_counts = Counter(
        server
        for driver in cloud.drivers.values()
        for server in {state.server for state in driver.domains()}
    )
    assert set(guest_counts) == set(created) - set(during)
    assert set(guest_counts.values()) == {1}
    assert cloud.findings() == []
