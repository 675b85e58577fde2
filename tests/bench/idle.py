# SPDX-License-Identifier: Apache-2.0
"""Cost of idle hosts: ``python -m tests.bench.idle [NUMBER ...]``, about eight minutes.

One conductor, scheduler and API run as processes, with a private RabbitMQ and MariaDB. 10, 50 and
200 agents (or these NUMBERs) run in a few processes, with the memory driver and two guests each.
The cloud is idle. The benchmark counts CPU, SQL statements and messages for two minutes. Hosts
report all their domains in their first minute, and then every half hour. The result is the slope,
the cost of one more host. The benchmark asserts no limits.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.domain.clock import Clock
from common.rpc import agent as agent_rpc
from common.rpc import conductor as conductor_rpc
from common.rpc.broker import opener
from common.rpc.host_link import HostSide
from common.service import config
from common.store.engine import Store
from common.store.hosts import host_keys
from compute_agent.image_access import ImageGatewayAccess
from compute_agent.journal import Journal
from compute_agent.service import AgentProcess
from compute_agent.sync import Agent
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from deploy.progress import say
from tests.bench import figures, load
from tests.waiting import await_true

HOSTS, A_PROCESS, GUESTS, WINDOW = (10, 50, 200), 50, 2, 60.0
Cost = dict[str, float]


def run_agents(path: str, folder: Path, names: Sequence[str], stop: Any) -> None:
    """Run the agents of these hosts as threads of this process until ``stop`` is set."""
    conf, closers = config.load(path), []
    store = Store.open(conf)
    for name in names:
        store.write(partial(host_keys.ensure, host=name))
    keys = host_keys.of_all(store, conf)
    for name in names:
        driver, journal = MemoryDriver(MemoryHost(name)), Journal(folder / f"{name}.db")
        link = HostSide(opener(conf), keys.for_host(name), name)
        host = AgentProcess(
            Agent(name, journal, Clock(), driver.boot_id()),
            journal,
            driver,
            conductor_rpc.ConductorClient(link),
            ImageGatewayAccess(),
        )
        agent_rpc.serve(link, host)
        host.start(1)
        closers += [host.close]
    stop.wait()
    for close in closers:
        close()


class Fleet:
    """Agents in separate processes."""

    def __init__(self, bench: figures.Bench, folder: Path) -> None:
        self._bench, self._folder, self.size = bench, folder, 0
        context = multiprocessing.get_context("spawn")
        self._context, self._stop, self._processes = context, context.Event(), []  # type: ignore[var-annotated]

    def grow(self, size: int) -> None:
        """Start agents until ``size`` hosts exist, and wait until all are up."""
        while self.size < size:
            count = min(A_PROCESS, size - self.size)
            names = [f"idle{number:04d}" for number in range(self.size, self.size + count)]
            process = self._context.Process(
                target=run_agents,
                daemon=True,
                args=(str(self._bench.cloud.config()), self._folder, names, self._stop),
            )
            process.start()
            self._processes.append(process)
            self.size += count
            await_true(
                lambda: self._bench.hosts_up() >= self.size, 120, "all hosts are up", pause=0.5
            )
            say(f"{self.size} hosts are up")

    def close(self) -> None:
        self._stop.set()
        for process in self._processes:
            process.join(10)
            process.kill()


def spend(bench: figures.Bench, seconds: float) -> Cost:
    """Return the conductor's CPU, the SQL statements and the messages a second in this time."""
    cpu, statements, messages = bench.cpu(), bench.statements(), bench.messages()
    # The cloud is idle during the measurement.
    time.sleep(seconds)
    return {
        "conductor, CPU-ms": (bench.cpu()["conductor"] - cpu["conductor"]) * 1000 / seconds,
        "SQL": (bench.statements() - statements) / seconds,
        "messages": (bench.messages() - messages) / seconds,
    }


def measure(bench: figures.Bench, sizes: Sequence[int]) -> None:
    """Measure two minutes with each number of hosts."""
    client, image, flavor = figures.bring_up(bench)
    folder = bench.cloud.home / "idle"
    folder.mkdir()
    fleet, costs_by_size = Fleet(bench, folder), list[tuple[int, Cost, Cost]]()
    try:
        for size in sizes:
            added = size - fleet.size
            fleet.grow(size)
            # The API has closed the idle connection.
            client = load.Client(bench.cloud.api_url, client.token)
            load.create(client, f"idle{size}", added * GUESTS, figures.THREADS, image, flavor)
            # Work left over from the creates ends within this time without a signal.
            time.sleep(5)
            costs_by_size.append((size, spend(bench, WINDOW), spend(bench, WINDOW)))
            say(json.dumps(costs_by_size[-1]))
    finally:
        fleet.close()
    (few, *begin), (many, *end) = costs_by_size[0], costs_by_size[-1]
    for name, which in (("first minute", 0), ("second minute", 1)):
        bench.figures[f"one idle host more, a second, {name}"] = {
            quantity: round((end[which][quantity] - begin[which][quantity]) / (many - few), 4)
            for quantity in end[which]
        }
    bench.figures["all, a second"] = {
        f"{size} hosts": [
            {quantity: round(number, 2) for quantity, number in cost.items()} for cost in costs
        ]
        for size, *costs in costs_by_size
    }


def main(sizes: Sequence[int] = HOSTS) -> int:
    """Measure agents beside the one host of the cloud."""
    return figures.run(lambda bench: measure(bench, sizes), 1)


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]] or HOSTS))
