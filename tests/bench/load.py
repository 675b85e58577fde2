# SPDX-License-Identifier: Apache-2.0
"""A load on the public Compute API by threads with one persistent connection each.

Times are seconds of the wall clock. The load polls the state of many servers with one list request.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Client:
    """A client of one user at one endpoint with a connection for each thread."""

    def __init__(self, url: str, token: str, microversion: str = "2.79") -> None:
        parts = urllib.parse.urlsplit(url)
        self._address, self._base = (parts.hostname or "", parts.port or 80), parts.path.rstrip("/")
        self.token = token
        self._headers = {
            "X-Auth-Token": token,
            "OpenStack-API-Version": "compute " + microversion,
            "Content-Type": "application/json",
        }
        self._local = threading.local()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[float, Any]:
        """Send a request and return (seconds, body of the response).

        Raises:
            RuntimeError: The response is not a success.
        """
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection(*self._address, timeout=60)
        data = None if body is None else json.dumps(body).encode()
        start = time.perf_counter()
        self._local.connection.request(method, self._base + path, data, self._headers)
        answer = self._local.connection.getresponse()
        raw = answer.read()
        took = time.perf_counter() - start
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {raw[:300]!r}")
        return took, json.loads(raw) if raw else None


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value that the fraction ``share`` of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def milliseconds(values: list[float]) -> str:
    """Format the median and the 95th percentile of seconds in milliseconds."""
    return (
        f"p50 {percentile(values, 0.5) * 1000:.1f} ms, p95 {percentile(values, 0.95) * 1000:.1f} ms"
    )


def in_parallel(threads: int, work: Callable[[int], float], count: int) -> list[float]:
    """Call ``work`` with 0 to ``count`` - 1 in threads and return the results in order."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(count)))


def body(name: str, image: str, flavor: str, network: str | None) -> dict[str, Any]:
    """Return the body of a POST /servers, with an interface in the network or without one."""
    return {
        "server": {
            "name": name,
            "imageRef": image,
            "flavorRef": flavor,
            "networks": [{"uuid": network}] if network else "none",
        }
    }


def create(
    client: Client,
    prefix: str,
    count: int,
    threads: int,
    image: str,
    flavor: str,
    network: str | None = None,
) -> dict[str, Any]:
    """Create servers, wait until all have left BUILD, and return rates, times and errors."""

    def post(number: int) -> float:
        return client.call(
            "POST", "/servers", body(f"{prefix}-{number:05d}", image, flavor, network)
        )[0]

    start = time.perf_counter()
    posts = in_parallel(threads, post, count)
    accepted = time.perf_counter() - start
    while True:
        _, building = client.call("GET", f"/servers/detail?limit=1000&name=^{prefix}-&status=BUILD")
        if not building["servers"]:
            break
        # A client can only poll.
        time.sleep(0.05)
    took = time.perf_counter() - start
    _, failed = client.call("GET", f"/servers/detail?limit=1000&name=^{prefix}-&status=ERROR")
    return {
        "servers_per_s": round(count / took, 1),
        "seconds": round(took, 2),
        "accepted_in": round(accepted, 2),
        "post": milliseconds(posts),
        "errors": len(failed["servers"]),
    }


def act(
    client: Client, ids: list[str], name: str, action: str, ends: str, threads: int
) -> tuple[list[float], float]:
    """Send an action to each server and poll until all servers have the final status.

    Args:
        client: The client.
        ids: Ids of the servers.
        name: Filter of the list request that matches the servers.
        action: Key of the action.
        ends: Final status.
        threads: Number of threads that send the actions.

    Returns:
        The seconds of each server, and servers a second in total.
    """
    starts: dict[str, float] = {}
    took: dict[str, float] = {}

    def post(number: int) -> float:
        starts[ids[number]] = time.perf_counter()
        return client.call("POST", f"/servers/{ids[number]}/action", {action: None})[0]

    def watch() -> None:
        while len(took) < len(ids):
            _, answer = client.call("GET", f"/servers?limit=1000&status={ends}&name={name}")
            now = time.perf_counter()
            for server in answer["servers"]:
                if server["id"] in starts:
                    took.setdefault(server["id"], now - starts[server["id"]])
            # A client can only poll.
            time.sleep(0.005)

    start = time.perf_counter()
    watcher = threading.Thread(target=watch)
    watcher.start()
    in_parallel(threads, post, len(ids))
    watcher.join()
    return list(took.values()), len(ids) / (time.perf_counter() - start)


def create_in_sequence(
    client: Client, prefix: str, count: int, image: str, flavor: str, network: str | None = None
) -> list[float]:
    """Create servers in sequence and return the seconds from each POST to the end of BUILD."""
    times = []
    for number in range(count):
        start = time.perf_counter()
        _, created = client.call(
            "POST", "/servers", body(f"{prefix}-{number}", image, flavor, network)
        )
        while (
            client.call("GET", f"/servers/{created['server']['id']}")[1]["server"]["status"]
            == "BUILD"
        ):
            # A client can only poll.
            time.sleep(0.002)
        times.append(time.perf_counter() - start)
    return times
