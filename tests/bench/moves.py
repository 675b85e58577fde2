# SPDX-License-Identifier: Apache-2.0
"""Figures of resize, confirm, revert and cold migration: ``python -m tests.bench.moves``.

One API process, one conductor, one scheduler and three agents with the memory driver run as
processes, with a private RabbitMQ and a private MariaDB with durable commits. The agents copy small
files over their own connection. The benchmark asserts no limits. Compare figures of one run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from deploy.one_machine.seed import Seed
from tests.bench import figures, load

HOSTS, TRIES = 3, 30


def measure(bench: figures.Bench) -> None:
    """Measure the moves of one server in sequence, without and with an interface."""
    client, image, flavor = figures.bring_up(bench)
    client = load.Client(bench.cloud.api_url, client.token, "2.79")
    larger = (
        Seed(bench.cloud).admin.compute.create_flavor(name="larger", ram=128, vcpus=2, disk=1).id
    )
    service = Seed(bench.cloud).admin.network
    network = service.create_network(name="bench")
    service.create_subnet(network_id=network.id, ip_version=4, cidr="10.0.0.0/16")
    for name, network_id in (("", None), (" with a port", network.id)):
        server = new_server(client, image, flavor, network_id)
        durations: dict[str, list[float]] = {}
        statements, messages = bench.statements(), bench.messages()
        for _ in range(TRIES):
            round_trip(client, server, flavor, larger, durations)
        bench.figures |= {
            f"{action}{name}, POST to state": load.milliseconds(times)
            for action, times in durations.items()
        }
        bench.figures[f"SQL and messages of such a round{name} (polling counts)"] = (
            round((bench.statements() - statements) / TRIES, 1),
            round((bench.messages() - messages) / TRIES, 1),
        )


def round_trip(
    client: load.Client, server: str, flavor: str, larger: str, durations: dict[str, list[float]]
) -> None:
    """Resize the server up and down with confirms, then up with a revert, then migrate it."""

    def act(action: str, body: dict[str, Any], ends: str) -> None:
        durations.setdefault(action, []).append(
            until(client, server, body, lambda server_view: server_view["status"] == ends)
        )

    for target in (larger, flavor):
        act("resize", {"resize": {"flavorRef": target}}, "VERIFY_RESIZE")
        act("confirm", {"confirmResize": None}, "ACTIVE")
    act("resize", {"resize": {"flavorRef": larger}}, "VERIFY_RESIZE")
    act("revert", {"revertResize": None}, "ACTIVE")
    act("migrate", {"migrate": None}, "VERIFY_RESIZE")
    act("confirm", {"confirmResize": None}, "ACTIVE")


def show(client: load.Client, server: str) -> dict[str, Any]:
    server_view: dict[str, Any] = client.call("GET", f"/servers/{server}")[1]["server"]
    return server_view


def until(
    client: load.Client,
    server: str,
    body: dict[str, Any],
    reached: Callable[[dict[str, Any]], bool],
) -> float:
    """Send an action and return the seconds until a GET shows the expected state."""
    start = time.perf_counter()
    client.call("POST", f"/servers/{server}/action", body)
    while not reached(server_view := show(client, server)):
        if server_view["status"] == "ERROR" or time.perf_counter() - start > 30:
            raise SystemExit(
                f"{body} of {server} ended as {server_view['status']}: {server_view.get('fault')}"
            )
        # A client can only poll.
        time.sleep(0.002)
    return time.perf_counter() - start


def new_server(client: load.Client, image: str, flavor: str, network: str | None) -> str:
    """Create a server, wait until it is built, and return its id."""
    _, answer = client.call("POST", "/servers", load.body("moves", image, flavor, network))
    server = str(answer["server"]["id"])
    while show(client, server)["status"] == "BUILD":
        # A client can only poll.
        time.sleep(0.01)
    return server


def main() -> int:
    """Start a cloud with its servers, measure, print the figures and stop all."""
    return figures.run(measure, HOSTS)


if __name__ == "__main__":
    print(json.dumps({"hosts": HOSTS, "tries": TRIES}))
    sys.exit(main())
