# SPDX-License-Identifier: Apache-2.0
"""A RabbitMQ cluster on this machine, whose nodes can be killed, be stopped or hang."""

from __future__ import annotations

import json
import os
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.security.broker_names import names_of
from deploy.one_machine.cloud.broker import Broker
from deploy.progress import Failure
from deploy.testing.servers import Servers, free_ports
from tests.waiting import await_true, is_true_within

#: Seconds after which nodes take a silent node for dead. RabbitMQ's default is 60.
NET_TICK_SECONDS = 10


@dataclass(frozen=True)
class Node(Broker):
    """A node of the cluster.

    Attributes:
        number: The number of the node, from 1 on.
        mapper_port: The port of the cluster's port mapper.
        cookie: The secret that the nodes share.
    """

    number: int = 1
    mapper_port: int = 0
    cookie: str = ""

    @property
    def name(self) -> str:
        return f"rabbitmq-{self.number}"

    @property
    def environment(self) -> dict[str, str]:
        arguments = "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"
        environment = super().environment
        return environment | {
            "RABBITMQ_NODENAME": f"kilonova{self.number}@localhost",
            "ERL_EPMD_PORT": str(self.mapper_port),
            arguments: f"{environment[arguments]} -kernel net_ticktime {NET_TICK_SECONDS}",
        }

    def prepare(self) -> bool:
        changed = super().prepare()
        self._write(".erlang.cookie", self.cookie)
        path = self.folder / "rabbitmq.conf"
        first = "kilonova1@localhost"
        lines = (
            "cluster_partition_handling = pause_minority",
            "cluster_formation.peer_discovery_backend = classic_config",
            f"cluster_formation.classic_config.nodes.1 = {first}",
            "",
        )
        self._write(path.name, path.read_text() + "\n".join(lines))
        return changed


class Cluster(Servers):
    """A context manager that runs a RabbitMQ cluster, and stops the nodes at exit."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.nodes: list[Node] = []
        #: The URL with all nodes, once they have started.
        self.url = ""

    def start_nodes(self, count: int = 3) -> str:
        """Start the nodes one after the other, and return the URL with all nodes."""
        password, cookie = secrets.token_hex(16), secrets.token_hex(16)
        mapper_port = 0
        for number in range(1, count + 1):
            port = free_ports(3)
            mapper_port = mapper_port or port + 2
            node = Node(
                self.folder / f"rabbitmq-{number}",
                port,
                password,
                number=number,
                mapper_port=mapper_port,
                cookie=cookie,
            )
            node.prepare()
            if number == 1:
                self._run("epmd", node.mapper_command(), "rabbitmq", node.environment)
            self.nodes.append(node)
            self.begin(node)
        places = ",".join(f"kilonova:{password}@127.0.0.1:{node.port}" for node in self.nodes)
        self.url = f"rabbit://{places}/"
        return self.url

    def begin(self, node: Node) -> None:
        """Start a node, and wait until it accepts connections."""
        self._run(node.name, node.command(), "rabbitmq", node.environment)
        self._wait(node.name, node.port)

    def stop(self, node: Node) -> None:
        """Stop a node in an orderly way, and wait until it has ended."""
        process = dict(self._processes)[node.name]
        node.control("shutdown")
        process.wait(timeout=60)
        self._processes.remove((node.name, process))

    def hang(self, node: Node) -> None:
        """Let a node hang. The node's connections stay open, without answers."""
        os.killpg(self.pid(node.name), signal.SIGSTOP)

    def wake(self, node: Node) -> None:
        """End ``hang``."""
        os.killpg(self.pid(node.name), signal.SIGCONT)

    def find_node(self, queue: str, running_node: Node) -> Node | None:
        """Return the node where a queue is under any of its names, or None if there is no queue.

        Args:
            queue: The first name of the queue.
            running_node: A running node of the cluster.
        """
        names = names_of(queue)
        lines = running_node.control("list_queues", "--silent", "name", "pid").splitlines()
        for name, _, process in (line.partition("\t") for line in lines):
            for node in self.nodes:
                if name in names and f"kilonova{node.number}@" in process:
                    return node
        return None

    def mend(self) -> None:
        """Wait until all nodes run in the cluster. Restart the nodes that do not join it again.

        Why: a node that hung for long may stay separate until a restart.
        """
        if is_true_within(lambda: len(self._largest_side()) == len(self.nodes), 15, pause=1.0):
            return
        side = self._largest_side()
        for node in self.nodes:
            if node not in side:
                self.kill(node.name)
                self.begin(node)
        await_true(
            lambda: len(self._largest_side()) == len(self.nodes), 60, "all nodes join", pause=1.0
        )

    def _largest_side(self) -> list[Node]:
        """Return the nodes of the largest part of the cluster."""
        sides = [self._side_of(node) for node in self.nodes]
        return max(sides, key=len)

    def _side_of(self, node: Node) -> list[Node]:
        """Return the nodes that this node sees in the cluster, none if it does not answer."""
        try:
            text = node.control("cluster_status", "--formatter", "json")
        except Failure:  # The node has paused, and starts again.
            return []
        running = json.loads(text)["running_nodes"]
        return [other for other in self.nodes if f"kilonova{other.number}@localhost" in running]

    def __exit__(self, *error: Any) -> None:
        for _, process in self._processes:
            with suppress(ProcessLookupError):  # The node has ended.
                os.killpg(process.pid, signal.SIGCONT)
        super().__exit__(*error)
