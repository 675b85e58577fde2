# SPDX-License-Identifier: Apache-2.0
"""Measure a project's latency beside a busy project: ``python -m tests.bench.fairness``, a minute.

A real API process and a real identity service over SQLite. The busy project has 400 servers with
36 KiB of metadata each, and sends requests without a pause. The other project lists and shows its
only server. The benchmark prints p50, p95 and the maximum of these requests. It asserts no limits.
"""

from __future__ import annotations

import http.client
import multiprocessing
import tempfile
import threading
import time
import urllib.parse
from multiprocessing.synchronize import Event
from pathlib import Path

from common.store.engine import Connection, Store
from common.store.schema.servers import servers
from tests.bench.load import Client, percentile
from tests.schemas import upgrade
from tests.server_rows import server_row
from tests.standalone import connect, running, running_api

SERVERS, ITEMS, ITEM_BYTES = 400, 140, 255
SECONDS, PAUSE_SECONDS = 8.0, 0.02
#: The busy project's clients and the path that each of them requests.
LOADS = (
    (0, ""),
    (1, "/servers/detail"),
    (16, "/servers/detail"),
    (64, "/servers/detail"),
    (64, "/servers?limit=1"),
    (64, "/servers/{id}/metadata"),
)


def insert_servers(store: Store, project_id: str, count: int, items: int) -> str:
    """Insert servers of a project and return the id of the first server."""
    meta = {f"key{number}": "x" * ITEM_BYTES for number in range(items)}
    ids = [f"{project_id[:8]}-0000-4000-8000-{number:012x}" for number in range(count)]
    rows = [
        server_row(key, project_id=project_id, meta=meta | {"own": key}, name=key) for key in ids
    ]

    def insert(tx: Connection) -> None:
        for row in rows:
            tx.execute(servers.insert().values(row))

    store.write(insert)
    return ids[0]


def send_requests(url: str, token: str, path: str, clients: int, stop: Event) -> None:
    """Send requests until ``stop`` is set, each client on its own connection."""
    parts = urllib.parse.urlsplit(url)
    outcomes: dict[int, int] = {}

    def repeat() -> None:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
        while not stop.is_set():
            connection.request("GET", parts.path + path, headers={"X-Auth-Token": token})
            answer = connection.getresponse()
            answer.read()
            outcomes[answer.status] = outcomes.get(answer.status, 0) + 1

    threads = [threading.Thread(target=repeat, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    stop.wait()
    for thread in threads:
        thread.join()
    print(f"    the busy project's responses by status: {outcomes}", flush=True)


def measure(client: Client, server_id: str) -> str:
    """Return p50, p95 and maximum of lists and reads of one server."""
    times: list[float] = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for path in ("/servers/detail", f"/servers/{server_id}", f"/servers/{server_id}/metadata"):
            times.append(client.call("GET", path)[0])
        # Clients of people pause between requests, too.
        time.sleep(PAUSE_SECONDS)
    p50, p95 = (1000 * percentile(times, share) for share in (0.5, 0.95))
    return f"p50 {p50:.0f} ms, p95 {p95:.0f} ms, max {1000 * max(times):.0f} ms of {len(times)}"


def main() -> None:
    """Print a line for each load."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="kn-fair-") as name,
        running(Path(name), with_image=False) as cloud,
    ):
        store = upgrade(Store(f"sqlite:///{name}/kilonova.db"))
        busy = connect(cloud, "kilonova", cloud.service_password, "service")
        other = connect(cloud, "admin", cloud.admin_password, "admin")
        fat = insert_servers(store, busy.current_project_id, SERVERS, ITEMS)
        server_id = insert_servers(store, other.current_project_id, 1, 1)
        store.close()
        with running_api(cloud, store.url) as url:
            client = Client(url, other.auth_token)
            for clients, path in LOADS:
                stop = context.Event()
                arguments = (url, busy.auth_token, path.format(id=fat), clients, stop)
                process = context.Process(target=send_requests, args=arguments)
                process.start()
                # After this time the load has its full rate.
                time.sleep(3)
                print(
                    f"{clients} clients of {path or 'nothing'}: {measure(client, server_id)}",
                    flush=True,
                )
                stop.set()
                process.join()


if __name__ == "__main__":
    main()
