# SPDX-License-Identifier: Apache-2.0
"""The figures of volumes: attach and detach, and what fio in a guest makes of one.

``python -m tests.bench.volumes`` prints all of them, and leaves nothing: with the memory driver,
against the standalone volume service (one API process, one conductor and one agent as processes,
private RabbitMQ and MariaDB with durable commits); then on a real guest of a lab that it makes and
takes down, over NBD with TLS: fio on a volume in the guest, and the same fio on this machine on the
file that another volume is. ``python -m tests.bench.volumes memory`` prints the first only, and
with the home of a lab (``./deploy/lab up 1 --volumes``) what is on its guest. Nothing is asserted;
compare figures of one run.
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
from tests.bench.moves import made
from tests.e2e import guests
from tests.e2e.lab import LiveLab
from tests.waiting import await_true

TRIES, GUEST_TRIES = 30, 10
HOSTS = 1
FLAVOR = "m1.tiny"  #: has the memory for fio and its libraries
THERE = "/fio"  #: in the guest's memory
GUEST_SECONDS = 600  #: for what a guest is told to do at most


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


def on_guest(live: LiveLab) -> None:
    """The load of the machine is said before and after: a guest shares its processors."""
    user = live.seed.demo
    volume, beside = new_volume(user), new_volume(user)
    figured: dict[str, object] = {"load before": os.getloadavg()}
    with (
        tempfile.TemporaryDirectory() as scratch,
        guests.guest(live, "bench", flavor=live.flavor(FLAVOR)) as guest,
    ):
        parts = fio.fetch(Path(scratch))
        here = fio.laid(parts, Path(scratch) / "here")
        guest.insist(f"mkdir {THERE} && tar xz -C {THERE}", GUEST_SECONDS, fio.packed(parts))
        client = load.Client(live.cloud.api_url, str(user.session.get_token()), "2.79")
        figured |= round_trips(client, user, guest.server, volume, GUEST_TRIES)
        path = f"/servers/{guest.server}/os-volume_attachments"
        client.call("POST", path, {"volumeAttachment": {"volumeId": volume}})
        await_true(lambda: guest.does("test -b /dev/vdb"), 60, "the guest sees it")
        file = next((live.home / "volume").rglob(f"*{beside}*"))
        for what, way in fio.WAYS.items():
            line = " ".join(fio.command(THERE, "/dev/vdb", way))
            figured[f"{what}, in the guest"] = fio.figure(guest.insist(line, GUEST_SECONDS).stdout)
            said = run(fio.command(str(here), str(file), way), "See what fio says.")
            figured[f"{what}, the file beside it"] = fio.figure(said)
    remove(user, volume, beside)
    figured["load after"] = os.getloadavg()
    say(f"Machine: {figures.machine()}")
    say(json.dumps(figured, indent=1))


def on_guest_of_its_own() -> None:
    """In a lab that is there for this alone."""
    home = Path(tempfile.mkdtemp(prefix="kn-bench-", dir="/tmp"))
    home.chmod(0o755)  # QEMU's user goes through it
    live = LiveLab(Lab.make(home, Facts(HOSTS, False, free_ports(Ports.COUNT), volumes=True)))
    try:
        made = live.up()
        if made.returncode != 0:
            raise Failure(
                f"No lab: {made.stdout[-2000:]}{made.stderr[-2000:]}", "See what it says."
            )
        on_guest(live)
    finally:
        live.down()


def main() -> int:
    """All of it, or what is asked for."""
    match sys.argv[1:]:
        case [] | ["memory"]:
            failed = figures.run(in_memory, 1, volumes=True)
            if sys.argv[1:] or failed:
                return failed
            on_guest_of_its_own()
        case [home]:
            on_guest(LiveLab(Lab.open(Path(home))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
