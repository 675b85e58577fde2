# SPDX-License-Identifier: Apache-2.0
"""The figures of servers that move: resize, confirm, revert and cold migration, with the memory
driver.

``python -m tests.bench.moves``: one API process, one conductor, one scheduler and three agents as
processes, a private RabbitMQ and a private MariaDB with durable commits. Files travel between the
agents over their own connection, small ones. Nothing is asserted; compare figures of one run.
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
    """Each move of one server after the other, with and without an interface."""
    client, image, flavor = figures.bring_up(bench)
    client = load.Client(bench.cloud.api_url, client.token, "2.79")
    larger = (
        Seed(bench.cloud).admin.compute.create_flavor(name="larger", ram=128, vcpus=2, disk=1).id
    )
    service = Seed(bench.cloud).admin.network
    network = service.create_network(name="bench")
    service.create_subnet(network_id=network.id, ip_version=4, cidr="10.0.0.0/16")
    for name, where in (("", None), (" with a port", network.id)):
        server = made(client, image, flavor, where)
        found: dict[str, list[float]] = {}
        statements, messages = bench.statements(), bench.messages()
        for _ in range(TRIES):
            round_trip(client, server, flavor, larger, found)
        bench.figures |= {
            f"{what}{name}, POST to state": load.milliseconds(times)
            for what, times in found.items()
        }
        bench.figures[f"SQL and messages of such a round{name} (polling counts)"] = (
            round((bench.statements() - statements) / TRIES, 1),
            round((bench.messages() - messages) / TRIES, 1),
        )


def round_trip(
    client: load.Client, server: str, flavor: str, larger: str, found: dict[str, list[float]]
) -> None:
    """Up and confirmed, down and confirmed, up and reverted, migrated and confirmed."""

    def act(what: str, body: dict[str, Any], ends: str) -> None:
        found.setdefault(what, []).append(
            until(client, server, body, lambda shown: shown["status"] == ends)
        )

    for target in (larger, flavor):
        act("resize", {"resize": {"flavorRef": target}}, "VERIFY_RESIZE")
        act("confirm", {"confirmResize": None}, "ACTIVE")
    act("resize", {"resize": {"flavorRef": larger}}, "VERIFY_RESIZE")
    act("revert", {"revertResize": None}, "ACTIVE")
    act("migrate", {"migrate": None}, "VERIFY_RESIZE")
    act("confirm", {"confirmResize": None}, "ACTIVE")


def show(client: load.Client, server: str) -> dict[str, Any]:
    found: dict[str, Any] = client.call("GET", f"/servers/{server}")[1]["server"]
    return found


def until(
    client: load.Client,
    server: str,
    body: dict[str, Any],
    reached: Callable[[dict[str, Any]], bool],
) -> float:
    """Seconds from the POST to the first GET that shows it."""
    began = time.perf_counter()
    client.call("POST", f"/servers/{server}/action", body)
    while not reached(shown := show(client, server)):
        if shown["status"] == "ERROR" or time.perf_counter() - began > 30:
            raise SystemExit(f"{body} of {server} ended as {shown['status']}: {shown.get('fault')}")
        time.sleep(0.002)  # a client has to ask
    return time.perf_counter() - began


def made(client: load.Client, image: str, flavor: str, network: str | None) -> str:
    """A server that runs, after one round that warms everybody up."""
    _, answer = client.call("POST", "/servers", load.body("moves", image, flavor, network))
    server = str(answer["server"]["id"])
    while show(client, server)["status"] == "BUILD":
        time.sleep(0.01)  # a client has to ask
    return server


def main() -> int:
    """Start everything, measure, print, stop everything."""
    return figures.run(measure, HOSTS)


if __name__ == "__main__":
    print(json.dumps({"hosts": HOSTS, "tries": TRIES}))
    sys.exit(main())
