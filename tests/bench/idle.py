# SPDX-License-Identifier: Apache-2.0
"""What idle hosts cost: ``python -m tests.bench.idle [NUMBER ...]``, about eight minutes.

One conductor, scheduler and API as processes, a private RabbitMQ and MariaDB, and 10, 50 and 200
agents (or these NUMBERs) in a few processes, with the memory driver and two guests each. Nothing
happens. For a minute, and for one more, CPU, SQL statements and messages are counted; hosts tell
all their domains within the first minute that a conductor knows them, and then every half hour.
What counts is the slope: what one host more costs. Nothing is asserted.
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
    """A process with the threads of these hosts' agents."""
    conf, closers = config.load(path), []
    store = Store.opened(conf)
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
    """Agents in processes of their own; ``grow`` starts more."""

    def __init__(self, bench: figures.Bench, folder: Path) -> None:
        self._bench, self._folder, self.size = bench, folder, 0
        context = multiprocessing.get_context("spawn")
        self._context, self._stop, self._processes = context, context.Event(), []  # type: ignore[var-annotated]

    def grow(self, size: int) -> None:
        """Returns when so many hosts are up."""
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

    def close(self) -> None:
        self._stop.set()
        for process in self._processes:
            process.join(10)
            process.kill()


def spend(bench: figures.Bench, seconds: float) -> Cost:
    """What the conductor's CPU, SQL and messages come to in this time, a second."""
    cpu, statements, messages = bench.cpu(), bench.statements(), bench.messages()
    time.sleep(seconds)  # what is measured is that nothing happens
    return {
        "conductor, CPU-ms": (bench.cpu()["conductor"] - cpu["conductor"]) * 1000 / seconds,
        "SQL": (bench.statements() - statements) / seconds,
        "messages": (bench.messages() - messages) / seconds,
    }


def measure(bench: figures.Bench, sizes: Sequence[int]) -> None:
    """A minute and one more with each number of hosts."""
    client, image, flavor = figures.bring_up(bench)
    folder = bench.cloud.home / "idle"
    folder.mkdir()
    fleet, found = Fleet(bench, folder), list[tuple[int, Cost, Cost]]()
    try:
        for size in sizes:
            added = size - fleet.size
            fleet.grow(size)
            # the API has closed the connection meanwhile
            client = load.Client(bench.cloud.api_url, client.token)
            load.create(client, f"idle{size}", added * GUESTS, figures.THREADS, image, flavor)
            time.sleep(5)  # what the creates left over is done by then, and nobody says so
            found.append((size, spend(bench, WINDOW), spend(bench, WINDOW)))
            say(json.dumps(found[-1]))
    finally:
        fleet.close()
    (few, *begin), (many, *end) = found[0], found[-1]
    for name, which in (("first minute", 0), ("second minute", 1)):
        bench.figures[f"one idle host more, a second, {name}"] = {
            what: round((end[which][what] - begin[which][what]) / (many - few), 4)
            for what in end[which]
        }
    bench.figures["all, a second"] = {
        f"{size} hosts": [
            {what: round(number, 2) for what, number in cost.items()} for cost in costs
        ]
        for size, *costs in found
    }


def main(sizes: Sequence[int] = HOSTS) -> int:
    """Beside one host of the cloud's own."""
    return figures.run(lambda bench: measure(bench, sizes), 1)


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]] or HOSTS))
