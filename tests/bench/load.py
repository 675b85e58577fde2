# SPDX-License-Identifier: Apache-2.0
"""A load on the Compute API: threads with one kept connection each, through the public REST API
only.

Used by ``tests.bench.figures``. Times are seconds of the wall clock; whether servers are ACTIVE is
found by one list call for all of them, never one GET for each.
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
    """One user at one endpoint; each thread keeps its own connection."""

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
        """(seconds, the answer's body); anything but a success raises RuntimeError with the
        body."""
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection(*self._address, timeout=60)
        data = None if body is None else json.dumps(body).encode()
        began = time.perf_counter()
        self._local.connection.request(method, self._base + path, data, self._headers)
        answer = self._local.connection.getresponse()
        raw = answer.read()
        took = time.perf_counter() - began
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {raw[:300]!r}")
        return took, json.loads(raw) if raw else None


def percentile(values: Iterable[float], share: float) -> float:
    """The value that ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def milliseconds(values: list[float]) -> str:
    """Median and 95th percentile."""
    return (
        f"p50 {percentile(values, 0.5) * 1000:.1f} ms, p95 {percentile(values, 0.95) * 1000:.1f} ms"
    )


def in_parallel(threads: int, work: Callable[[int], float], count: int) -> list[float]:
    """Call ``work(0 … count-1)`` from this many threads; their results in order."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(count)))


def body(name: str, image: str, flavor: str, network: str | None) -> dict[str, Any]:
    """Of a POST /servers, with an interface in this network or with none."""
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
    """Create servers and wait until all are ACTIVE."""

    def post(number: int) -> float:
        return client.call(
            "POST", "/servers", body(f"{prefix}-{number:05d}", image, flavor, network)
        )[0]

    began = time.perf_counter()
    posts = in_parallel(threads, post, count)
    accepted = time.perf_counter() - began
    while True:
        _, found = client.call("GET", f"/servers/detail?limit=1000&name=^{prefix}-&status=BUILD")
        if not found["servers"]:
            break
        time.sleep(0.05)  # a client has to ask
    took = time.perf_counter() - began
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
    """POST an action to each server and see them reach the state, by one list call for all of them
    (``name`` is the filter that finds them). Returns the seconds of each, and servers a second in
    all."""
    began: dict[str, float] = {}
    took: dict[str, float] = {}

    def post(number: int) -> float:
        began[ids[number]] = time.perf_counter()
        return client.call("POST", f"/servers/{ids[number]}/action", {action: None})[0]

    def watch() -> None:
        while len(took) < len(ids):
            _, found = client.call("GET", f"/servers?limit=1000&status={ends}&name={name}")
            now = time.perf_counter()
            for server in found["servers"]:
                if server["id"] in began:
                    took.setdefault(server["id"], now - began[server["id"]])
            time.sleep(0.005)  # a client has to ask

    start = time.perf_counter()
    watcher = threading.Thread(target=watch)
    watcher.start()
    in_parallel(threads, post, len(ids))
    watcher.join()
    return list(took.values()), len(ids) / (time.perf_counter() - start)


def one_at_a_time(
    client: Client, prefix: str, count: int, image: str, flavor: str, network: str | None = None
) -> list[float]:
    """From the client's POST to the first GET that says ACTIVE, one server after the other."""
    times = []
    for number in range(count):
        began = time.perf_counter()
        _, made = client.call(
            "POST", "/servers", body(f"{prefix}-{number}", image, flavor, network)
        )
        while (
            client.call("GET", f"/servers/{made['server']['id']}")[1]["server"]["status"] == "BUILD"
        ):
            time.sleep(0.002)  # a client has to ask
        times.append(time.perf_counter() - began)
    return times
