# SPDX-License-Identifier: Apache-2.0
"""Figures of volumes: attach and detach, and fio in a guest: ``python -m tests.bench.volumes``.

The first part uses the memory driver and the embedded volume service. One API process, one
conductor and one agent run as processes, with a private RabbitMQ and MariaDB with durable commits.
The second part starts a lab, runs fio in a real guest on a volume over NBD with TLS, runs the same
fio on this machine on the file of another volume, and removes the lab.

``python -m tests.bench.volumes memory`` runs the first part only. With the home of a lab
(``./deploy/lab up 1 --volumes``) as the argument, the second part runs on this lab. The benchmark
asserts no limits. Compare figures of one run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.one_machine.cloud.cloud import Ports
from deploy.one_machine.lab_hosts import Facts, Lab
from deploy.one_machine.seed import Seed
from deploy.progress import Failure, run, say
from deploy.testing.servers import free_ports
from tests.bench import figures, fio, load
from tests.bench.moves import new_server
from tests.e2e import guests
from tests.e2e.lab import LiveLab
from tests.waiting import await_true

TRIES, GUEST_TRIES = 30, 10
HOSTS = 1
#: A flavor with enough memory for fio and its libraries.
FLAVOR = "m1.tiny"
#: Folder in the guest's memory.
THERE = "/fio"
#: Timeout of a command in the guest.
GUEST_SECONDS = 600


def round_trips(
    client: load.Client, user: Any, server: str, volume: str, tries: int
) -> dict[str, str]:
    """Measure attach and detach from the request to the status in the volume service."""
    path = f"/servers/{server}/os-volume_attachments"
    service = user.block_storage

    def until(status: str, request: Callable[[], object]) -> float:
        start = time.perf_counter()
        request()
        while service.get_volume(volume).status != status:
            # A client can only poll.
            time.sleep(0.005)
        return time.perf_counter() - start

    body = {"volumeAttachment": {"volumeId": volume}}
    durations: dict[str, list[float]] = {"attach": [], "detach": []}
    for _ in range(tries):
        durations["attach"].append(until("in-use", lambda: client.call("POST", path, body)))
        durations["detach"].append(
            until("available", lambda: client.call("DELETE", f"{path}/{volume}"))
        )
    return {action: load.milliseconds(times) for action, times in durations.items()}


def new_volume(user: Any) -> str:
    service = user.block_storage
    volume = str(service.create_volume(name="bench", size=1).id)
    await_true(lambda: service.get_volume(volume).status == "available", 60, "the volume")
    return volume


def remove(user: Any, *volumes: str) -> None:
    """Delete volumes as soon as they are available."""
    service = user.block_storage

    def are_free() -> bool:
        return all(service.get_volume(volume).status == "available" for volume in volumes)

    await_true(are_free, 60, "the volumes are free")
    for volume in volumes:
        service.delete_volume(volume)


def in_memory(bench: figures.Bench) -> None:
    client, image, flavor = figures.bring_up(bench)
    client = load.Client(bench.cloud.api_url, client.token, "2.79")
    user = Seed(bench.cloud).admin
    server, volume = new_server(client, image, flavor, None), new_volume(user)
    # Warm up all processes.
    round_trips(client, user, server, volume, 2)
    bench.figures |= round_trips(client, user, server, volume, TRIES)


def on_guest(live: LiveLab) -> None:
    """Measure a volume of a real guest and print the figures.

    The figures include the machine's load before and after, because the guest shares its CPUs.
    """
    user = live.seed.demo
    volume, beside = new_volume(user), new_volume(user)
    measured: dict[str, object] = {"load before": os.getloadavg()}
    with (
        tempfile.TemporaryDirectory() as scratch,
        guests.guest(live, "bench", flavor=live.flavor(FLAVOR)) as guest,
    ):
        parts = fio.fetch(Path(scratch))
        local_fio = fio.copy_to_folder(parts, Path(scratch) / "here")
        guest.insist(f"mkdir {THERE} && tar xz -C {THERE}", GUEST_SECONDS, fio.pack(parts))
        client = load.Client(live.cloud.api_url, str(user.session.get_token()), "2.79")
        measured |= round_trips(client, user, guest.server, volume, GUEST_TRIES)
        path = f"/servers/{guest.server}/os-volume_attachments"
        client.call("POST", path, {"volumeAttachment": {"volumeId": volume}})
        await_true(lambda: guest.can_run("test -b /dev/vdb"), 60, "the guest sees it")
        file = next((live.home / "volume").rglob(f"*{beside}*"))
        for workload, way in fio.WAYS.items():
            line = " ".join(fio.command(THERE, "/dev/vdb", way))
            measured[f"{workload}, in the guest"] = fio.figure(
                guest.insist(line, GUEST_SECONDS).stdout
            )
            output = run(fio.command(str(local_fio), str(file), way), "See what fio says.")
            measured[f"{workload}, the file beside it"] = fio.figure(output)
    remove(user, volume, beside)
    measured["load after"] = os.getloadavg()
    say(f"Machine: {figures.machine()}")
    say(json.dumps(measured, indent=1))


def on_guest_of_new_lab() -> None:
    """Start a lab, measure on its guest and remove the lab."""
    home = Path(tempfile.mkdtemp(prefix="kn-bench-", dir="/tmp"))
    # QEMU's user must reach the files below.
    home.chmod(0o755)
    live = LiveLab(Lab.make(home, Facts(HOSTS, False, free_ports(Ports.COUNT), volumes=True)))
    try:
        process = live.up()
        if process.returncode != 0:
            raise Failure(
                f"No lab: {process.stdout[-2000:]}{process.stderr[-2000:]}", "See what it says."
            )
        on_guest(live)
    finally:
        live.down()


def main() -> int:
    """Run both parts, or the part in the arguments."""
    match sys.argv[1:]:
        case [] | ["memory"]:
            failed = figures.run(in_memory, 1, volumes=True)
            if sys.argv[1:] or failed:
                return failed
            on_guest_of_new_lab()
        case [home]:
            on_guest(LiveLab(Lab.open(Path(home))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
