# SPDX-License-Identifier: Apache-2.0
"""The power of the hosts that have namespaces of their own: cut at once, put back, and whether it
is there.

Used by deploy/one_machine/lab_hosts.py. ``shut_down`` in deploy/one_machine/cloud/lifecycle.py
uses ``sweep`` to clean up the kernel. Files that a process wrote survive such a power cut in the
page cache of the machine. Only libvirt's /run is empty when a host boots. Invariant: when ``off``
returns, no process and no guest of the host lives, and none is started again before ``on``.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

from deploy.one_machine.cloud import processes
from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.cloud.process_control import explain_failure, find_process, find_supervisor
from deploy.one_machine.machine import libvirtd, supervise
from deploy.one_machine.machine.underlay import ADVICE, NAMESPACES
from deploy.one_machine.services.network.host.names import Names
from deploy.progress import run, wait


def off(cloud: Cloud, number: int, seconds: float = 30) -> None:
    """SIGKILL to all that the host runs, and its part of the kernel is emptied; harmless when it is
    off.

    Raises:
        Failure: something of it still lives.
    """
    names = processes.of_host(cloud, number)
    for name in names:
        marker = cloud.run / f"{name}.down"
        part = marker.with_suffix(".new")
        part.write_text(supervise.KILL)
        part.replace(marker)

    def dead() -> bool:
        """The supervisor may have started one more before it saw the markers."""
        living = _kill(_spaces(cloud, number))
        return not living and not _started(cloud, names)

    wait(
        dead,
        seconds,
        f"Processes of {cloud.hosts[number - 1]} do not die",
        lambda: (
            f"They are {sorted(inhabitants(_spaces(cloud, number)))}; see what they wait for with "
            "'cat /proc/NUMBER/stack', then run this again."
        ),
        pause=0.02,
    )
    # Else the next libvirtd says for a moment that the dead guests run.
    shutil.rmtree(
        cloud.libvirt_folder(number) / libvirtd.FOLDERS["/run/libvirt"], ignore_errors=True
    )
    sweep(cloud, number)


def on(cloud: Cloud, number: int, seconds: float = 30) -> None:
    """Boot the host; harmless when it is on."""
    cloud.underlay.join(number)
    names = processes.of_host(cloud, number)
    for name in names:
        (cloud.run / f"{name}.down").unlink(missing_ok=True)
    wait(
        lambda: all(find_process(cloud, name) for name in names),
        seconds,
        f"Not all of these start: {', '.join(names)}",
        lambda: explain_failure(cloud, "supervise"),
    )


def is_on(cloud: Cloud, number: int) -> bool:
    """Does the host run, or at least a part of it?"""
    return cloud.underlay.exists(number) or _started(cloud, processes.of_host(cloud, number))


def sweep(cloud: Cloud, number: int) -> None:
    """Remove what a host whose processes have ended left in the kernel; number 0 is the gateway of
    a lab."""
    if number == 0 or cloud.underlay.namespace(number) is None:
        run(
            processes.cleaning(cloud, number),
            "Run ./deploy/down again.",
            log=cloud.log("network-host-clean"),
        )
        return
    names = Names.of(cloud.network_folder(number))
    spaces = _spaces(cloud, number)
    _kill(spaces)  # the network service's part leaves its servers running
    for space in spaces:
        if space.name.startswith(names.namespaces):
            run(["ip", "netns", "delete", space.name], ADVICE)
    shutil.rmtree(names.runtime, ignore_errors=True)
    cloud.underlay.remove_host(number)


def inhabitants(spaces: Iterable[Path]) -> set[int]:
    """The processes in these network namespaces."""
    wanted = {_identity(space) for space in spaces}
    return {
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if (found := _identity(process / "ns/net")) is not None and found in wanted
    }


def _identity(space: Path) -> tuple[int, int] | None:
    try:
        found = space.stat()
    except OSError:  # it has ended meanwhile
        return None
    return found.st_dev, found.st_ino


def _spaces(cloud: Cloud, number: int) -> list[Path]:
    """The host's own network namespace, and those of its routers and DHCP servers."""
    own = cloud.underlay.namespace(number)
    return [
        *NAMESPACES.glob(f"{own}"),
        *NAMESPACES.glob(f"{Names.of(cloud.network_folder(number)).namespaces}*"),
    ]


def _started(cloud: Cloud, names: list[str]) -> bool:
    """Has the supervisor one of these running?"""
    return find_supervisor(cloud) is not None and any(
        (pid := find_process(cloud, name)) is not None and Path(f"/proc/{pid}/ns/net").exists()
        for name in names
    )


def _kill(spaces: Iterable[Path]) -> set[int]:
    """Those that lived."""
    living = inhabitants(spaces)
    for pid in living:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return living
