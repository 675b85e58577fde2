# SPDX-License-Identifier: Apache-2.0
"""TCP and UDP listeners in a namespace, and a probe that lists the addresses with an answer."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from tests.contract.network_lab import run

LISTEN = """
import selectors, socket
found = selectors.DefaultSelector()
for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        made = socket.socket(family, kind)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((any_address, 8774))
        if kind == socket.SOCK_STREAM:
            made.listen()
        found.register(made, selectors.EVENT_READ)
print("listens", flush=True)
while True:
    for key, _ in found.select():
        if key.fileobj.type == socket.SOCK_STREAM:
            key.fileobj.accept()[0].close()
        else:
            key.fileobj.sendto(b"x", key.fileobj.recvfrom(10)[1])
"""
TRY = """
import selectors, socket, sys
found = selectors.DefaultSelector()
for address in sys.argv[2:]:
    for kind, event in ((socket.SOCK_STREAM, selectors.EVENT_WRITE), (socket.SOCK_DGRAM, selectors.EVENT_READ)):
        made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
        made.setblocking(False)
        made.connect_ex((address, int(sys.argv[1])))
        if kind == socket.SOCK_DGRAM:
            made.send(b"x")
        found.register(made, event, address)
while ready := found.select(0.5):
    for key, _ in ready:
        print(key.data)
        found.unregister(key.fileobj)
"""


@contextlib.contextmanager
def listen_in(space: str) -> Iterator[None]:
    """Listen on port 8774 of all addresses of a namespace."""
    with subprocess.Popen(
        ["ip", "netns", "exec", space, sys.executable, "-c", LISTEN], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listens\n"
        try:
            yield
        finally:
            process.kill()


def find_answering(space: str, port: int, *addresses: str) -> set[str]:
    """Return the addresses that answer at a port. A refusal counts as an answer."""
    return set(run(sys.executable, "-c", TRY, str(port), *addresses, space=space).stdout.split())
