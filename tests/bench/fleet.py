# SPDX-License-Identifier: Apache-2.0
"""Cost of large fleets: ``python -m tests.bench.fleet [HOSTS ...]``, about 20 minutes for 1,000.

One conductor, scheduler and API run as processes, with a private RabbitMQ and MariaDB. 10, 100 and
1,000 agents (or these numbers) run in a few processes, with the memory driver. At each size the
benchmark measures idle hosts, creates, and the lists of an admin. At the last size it restarts the
conductor and the broker, and measures the time until all hosts are up again. It asserts no limits.

The agents share the processors with the services, so creates a second are a lower bound. The CPU of
the services without the CPU of idle hosts is comparable between the sizes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from deploy.one_machine.cloud import process_control
from deploy.progress import say
from tests.bench import figures, load
from tests.bench.idle import WINDOW, Fleet, spend
from tests.waiting import await_true

SIZES, SERVERS, IDLE_SECONDS = (10, 100, 1000), 200, 20
OURS = ("api", "conductor", "scheduler")
#: Lists whose cost depends on the number of hosts.
LISTS = ("/os-hypervisors/detail?limit=1000", "/os-services", "/os-aggregates")


def measure_creates(
    bench: figures.Bench, client: load.Client, image: str, flavor: str, size: int
) -> dict[str, Any]:
    """Create servers, and return creates a second and the services' CPU without idle hosts."""
    # The queues are empty after this time, so that only idle hosts cost CPU.
    time.sleep(5)
    idle = _cpu_of(bench, _wait)[0] / IDLE_SECONDS
    began = time.monotonic()
    used, result = _cpu_of(
        bench, lambda: load.create(client, f"fleet{size}", SERVERS, 16, image, flavor)
    )
    own = used - idle * (time.monotonic() - began)
    return {
        "creates a second": result["servers_per_s"],
        "CPU-ms of a create": round(own * 1000 / SERVERS, 2),
        "idle, CPU-ms a second": round(idle * 1000, 1),
        "errors": result["errors"],
    }


def _wait() -> None:
    # The cloud is idle during the measurement.
    time.sleep(IDLE_SECONDS)


def _cpu_of(bench: figures.Bench, work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU-seconds of the services during the work, and the result of the work."""
    before = bench.cpu()
    result = work()
    after = bench.cpu()
    return sum(after[name] - before[name] for name in OURS), result


def measure_lists(bench: figures.Bench, client: load.Client) -> dict[str, str]:
    """Return the time of each list, and of ``kilonova hosts``."""
    times = {
        path: load.milliseconds([client.call("GET", path)[0] for _ in range(5)]) for path in LISTS
    }
    environment = {"KILONOVA_CONF": str(bench.cloud.config()), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "deploy.operator.main", "hosts"]
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return times | {"kilonova hosts": f"{time.perf_counter() - start:.2f} s"}


def measure_return(bench: figures.Bench, hosts: int, fault: Callable[[], Any]) -> dict[str, Any]:
    """Cause a fault, and watch for two minutes how many hosts are up.

    Returns:
        The seconds from the fault until all hosts were up to stay, and the most hosts that were
        down at once.
    """
    began, last_down, most_down = time.monotonic(), 0.0, 0
    fault()
    while (now := time.monotonic() - began) < 120:
        if down := hosts - bench.hosts_up():
            last_down, most_down = now, max(most_down, down)
        # The database cannot notify this process.
        time.sleep(0.5)
    return {"all up after, s": round(last_down, 1), "most down": most_down}


def measure(bench: figures.Bench, sizes: Sequence[int]) -> None:
    """Measure each size, then the return after a fault at the last size."""
    client, image, flavor = figures.bring_up(bench)
    folder = bench.cloud.home / "fleet"
    folder.mkdir()
    fleet = Fleet(bench, folder)
    try:
        for size in sizes:
            began = time.monotonic()
            fleet.grow(size)
            grown = time.monotonic() - began
            # The API has closed the idle connection.
            client = load.Client(bench.cloud.api_url, client.token)
            load.create(client, f"warm{size}", 20, 4, image, flavor)
            result = measure_creates(bench, client, image, flavor, size)
            result |= {"start, s": round(grown, 1), "memory, PSS MiB": bench.memory()}
            result |= measure_lists(bench, client)
            result["idle"] = spend(bench, WINDOW)
            bench.figures[f"{size} hosts"] = result
            say(json.dumps({size: result}))
        hosts = fleet.size + 1
        bench.figures["conductor restarted"] = measure_return(
            bench, hosts, lambda: process_control.restart(bench.cloud, "conductor")
        )
        bench.figures["broker restarted"] = measure_return(bench, hosts, bench.restart_broker)
        await_true(lambda: bench.hosts_up() >= hosts, 120, "all hosts are up", pause=0.5)
    finally:
        fleet.close()


def main(sizes: Sequence[int] = SIZES) -> int:
    """Measure agents beside the one host of the cloud."""
    return figures.run(lambda bench: measure(bench, sizes), 1)


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]] or SIZES))
