# SPDX-License-Identifier: Apache-2.0
"""The figures of volumes: attach and detach, and what a guest writes to one.

``python -m tests.bench.volumes``: with the memory driver, against the standalone volume service;
one API process, one conductor and one agent as processes, private RabbitMQ and MariaDB with durable
commits. ``python -m tests.bench.volumes HOME``: a real guest of the lab there (``./deploy/lab up 2
--volumes``), over NBD with TLS; what it writes to a volume, and the same on this machine to the
file that another volume is. Nothing is asserted; compare figures of one run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.lab_hosts import Lab
from deploy.progress import say
from deploy.seed import Seed
from tests.bench import figures, load
from tests.bench.moves import made
from tests.e2e import guests
from tests.e2e.lab import LiveLab
from tests.waiting import await_true

TRIES, GUEST_TRIES = 30, 10
MIB = 64  #: that are written
#: What is written: bytes, and the arguments of dd.
WAYS = {
    f"{MIB} MiB in blocks of 1 MiB, then fsync": (
        MIB << 20,
        f"bs=1M count={MIB} conv=notrunc,fsync",
    ),
    "2 MiB in blocks of 4 KiB, past the cache": (
        2 << 20,
        "bs=4k count=512 oflag=direct conv=notrunc",
    ),
}


def round_trips(
    client: load.Client, user: Any, server: str, volume: str, tries: int
) -> dict[str, str]:
    """From the request until the volume service shows the volume in use, and until it shows it
    available."""
    path = f"/servers/{server}/os-volume_attachments"
    service = user.block_storage

    def until(status: str, ask: Callable[[], object]) -> float:
        began = time.perf_counter()
        ask()
        while service.get_volume(volume).status != status:
            time.sleep(0.005)  # a client has to ask
        return time.perf_counter() - began

    body = {"volumeAttachment": {"volumeId": volume}}
    found: dict[str, list[float]] = {"attach": [], "detach": []}
    for _ in range(tries):
        found["attach"].append(until("in-use", lambda: client.call("POST", path, body)))
        found["detach"].append(
            until("available", lambda: client.call("DELETE", f"{path}/{volume}"))
        )
    return {what: load.milliseconds(times) for what, times in found.items()}


def new_volume(user: Any) -> str:
    service = user.block_storage
    volume = str(service.create_volume(name="bench", size=1).id)
    await_true(lambda: service.get_volume(volume).status == "available", 60, "the volume")
    return volume


def remove(user: Any, *made: str) -> None:
    """They go when they are free."""
    service = user.block_storage

    def are_free() -> bool:
        return all(service.get_volume(one).status == "available" for one in made)

    await_true(are_free, 60, "the volumes are free")
    for one in made:
        service.delete_volume(one)


def in_memory(bench: figures.Bench) -> None:
    client, image, flavor = figures.bring_up(bench)
    client = load.Client(bench.cloud.api_url, client.token, "2.79")
    user = Seed(bench.cloud).admin
    server, volume = made(client, image, flavor, None), new_volume(user)
    round_trips(client, user, server, volume, 2)  # warms everybody up
    bench.figures |= round_trips(client, user, server, volume, TRIES)


def in_guest(guest: guests.Guest, dd: str) -> float:
    """Seconds that the command takes there, by the guest's own clock."""
    clock = "read now rest < /proc/uptime && echo $now"
    began, ended = guest.run(f"{clock}; {dd} 2> /dev/null || exit 1; {clock}").split()
    return float(ended) - float(began)


def rate(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e6:.1f} MB/s ({seconds:.2f} s)"


def on_guest(home: Path) -> None:
    """The load of the machine is said before and after: a guest shares its processors."""
    live = LiveLab(Lab.open(home))
    user = live.seed.demo
    volume, beside = new_volume(user), new_volume(user)
    figured: dict[str, object] = {"load before": os.getloadavg()}
    with guests.guest(live, "bench") as guest:
        client = load.Client(live.cloud.api_url, str(user.session.get_token()), "2.79")
        figured |= round_trips(client, user, guest.server, volume, GUEST_TRIES)
        path = f"/servers/{guest.server}/os-volume_attachments"
        client.call("POST", path, {"volumeAttachment": {"volumeId": volume}})
        await_true(lambda: guest.does("test -b /dev/vdb"), 60, "the guest sees it")
        for what, (size, way) in WAYS.items():
            dd = f"dd if=/dev/zero {way} of="
            figured[f"{what}, in the guest"] = rate(size, in_guest(guest, f"{dd}/dev/vdb"))
            file = next((live.home / "volume").rglob(f"*{beside}*"))
            began = time.perf_counter()
            subprocess.run(f"{dd}{file}".split(), capture_output=True, check=True)
            figured[f"{what}, the file beside it"] = rate(size, time.perf_counter() - began)
    remove(user, volume, beside)
    figured["load after"] = os.getloadavg()
    say(f"Machine: {figures.machine()}")
    say(json.dumps(figured, indent=1))


def main() -> int:
    """With the home of a lab: on a guest there; else in memory."""
    if sys.argv[1:]:
        on_guest(Path(sys.argv[1]))
        return 0
    return figures.run(in_memory, 1, volumes=True)


if __name__ == "__main__":
    sys.exit(main())
