# SPDX-License-Identifier: Apache-2.0
"""Compare Kilonova's worker with gunicorn's threads: ``python -m tests.bench.connections``.

Both workers serve the same application, each in its own process. The clients are threads of this
process and measure the workers in turns.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

from deploy.one_machine.cloud.probes import answers
from deploy.progress import wait
from deploy.testing.servers import free_ports

ROUNDS, SECONDS = 5, 3.0
SERVER = """
import sys, falcon
from compute_api.http.worker.server import Server
class One:
    def on_get(self, req, resp):
        resp.data = b'{"x": "' + b"y" * 2000 + b'"}'
    def on_post(self, req, resp):
        resp.data = req.bounded_stream.read()
def load():
    app = falcon.App()
    app.add_route("/", One())
    return app
server = Server("bench", "127.0.0.1", int(sys.argv[2]), load, lambda: None)
if sys.argv[1] == "gthread":
    server.cfg.set("worker_class", "gthread")
    server.cfg.set("keepalive", 75)
server.run()
"""
GET = b"GET / HTTP/1.1\r\nHost: x\r\nX-Auth-Token: abcdefgh\r\nAccept: application/json\r\n\r\n"
POST = (
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    + b"b" * 500
)
CASES = (("one client", 1, GET), ("eight clients", 8, GET), ("four that post", 4, POST))


def measure(port: int, clients: int, request: bytes) -> tuple[float, float, float]:
    """Return requests a second, and p50 and p99 in milliseconds."""
    took: list[float] = []
    until = time.monotonic() + SECONDS

    def send_requests() -> None:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (start := time.monotonic()) < until:
                client.sendall(request)
                response = client.recv(65536)
                head, _, rest = response.partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                while len(rest) < length:
                    rest += client.recv(65536)
                took.append(time.monotonic() - start)

    threads = [threading.Thread(target=send_requests) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took.sort()
    return len(took) / SECONDS, 1000 * took[len(took) // 2], 1000 * took[len(took) * 99 // 100]


def main() -> None:
    """Print a line for each case and server."""
    first = free_ports(2)
    ports = {"gthread": first, "ours": first + 1}
    servers = [
        subprocess.Popen([sys.executable, "-c", SERVER, name, str(port)], stderr=subprocess.DEVNULL)
        for name, port in ports.items()
    ]
    for port in ports.values():
        wait(
            lambda port=port: answers(port),
            20,
            "The server does not listen",
            "See its application.",
        )
    for case, clients, request in CASES:
        figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ports}
        for _ in range(ROUNDS):
            for name, port in ports.items():
                figures[name].append(measure(port, clients, request))
        for name, rounds in figures.items():
            rate, middle, late = (
                sorted(column)[ROUNDS // 2] for column in zip(*rounds, strict=True)
            )
            print(
                f"{case:15} {name:8} {rate:6.0f} a second, p50 {middle:.2f} ms, p99 {late:.2f} ms"
            )
    for server in servers:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


if __name__ == "__main__":
    main()
