# SPDX-License-Identifier: Apache-2.0
"""Power of the hosts with network namespaces of their own: cut, restore, query.

deploy/one_machine/lab_hosts.py uses this module. ``shut_down`` in
deploy/one_machine/cloud/lifecycle.py uses ``sweep`` to clean up the kernel. Files that a process
wrote survive such a power cut in the page cache of the machine. Only libvirt's /run is empty when a
host boots. Invariant: when ``off`` returns, no process and no guest of the host runs, and no
process starts before ``on`` or ``lifecycle.launch``.
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
    """Kill the host's processes, and remove its namespaces, devices and rules from the kernel.

    The supervisor starts no process of the host before ``on`` or ``lifecycle.launch``. A host that
    is off stays off.

    Args:
        cloud: The cloud.
        number: The number of the host, counted from 1.
        seconds: How long to wait for the end of the processes.

    Raises:
        Failure: A process of the host still runs after this many seconds, or a command that cleans
            up fails.
    """
    names = processes.of_host(cloud, number)
    for name in names:
        marker = cloud.run / f"{name}.down"
        part = marker.with_suffix(".new")
        part.write_text(supervise.KILL)
        part.replace(marker)

    def is_dead() -> bool:
        """Kill the host's processes. Return True if there was none and the supervisor runs none.

        Why: the supervisor may start another process before it reads the markers.
        """
        living = _kill(_namespaces(cloud, number))
        return not living and not _is_started(cloud, names)

    wait(
        is_dead,
        seconds,
        f"Processes of host {cloud.hosts[number - 1]} do not die",
        lambda: (
            f"Their ids are {sorted(find_pids(_namespaces(cloud, number)))}. 'cat /proc/ID/stack' shows the kernel "
            "function in which a process waits. Run this again once the processes have ended."
        ),
        pause=0.02,
    )
    # Otherwise the next libvirtd would report the dead guests as running for a moment.
    shutil.rmtree(
        cloud.libvirt_folder(number) / libvirtd.FOLDERS["/run/libvirt"], ignore_errors=True
    )
    sweep(cloud, number)


def on(cloud: Cloud, number: int, seconds: float = 30) -> None:
    """Boot the host. A host that is on stays on, and its cable is connected.

    Args:
        cloud: The cloud.
        number: The number of the host, counted from 1.
        seconds: How long to wait for the processes.

    Raises:
        Failure: A process does not start within this many seconds, or the namespace or cable cannot
            be made.
    """
    cloud.underlay.join(number)
    names = processes.of_host(cloud, number)
    for name in names:
        (cloud.run / f"{name}.down").unlink(missing_ok=True)
    wait(
        lambda: all(find_process(cloud, name) for name in names),
        seconds,
        f"Not all of these processes start: {', '.join(names)}",
        lambda: explain_failure(cloud, "supervise"),
    )


def is_on(cloud: Cloud, number: int) -> bool:
    """Return True if the host's network namespace exists, or if one of its processes runs."""
    return cloud.underlay.exists(number) or _is_started(cloud, processes.of_host(cloud, number))


def sweep(cloud: Cloud, number: int) -> None:
    """Remove the namespaces, devices and rules of a host whose programs have ended.

    DHCP servers that the network agent left running are killed.

    Args:
        cloud: The cloud.
        number: The number of the host, counted from 1, or 0 for the gateway of a lab.

    Raises:
        Failure: A command that cleans up fails.
    """
    if number == 0 or cloud.underlay.namespace(number) is None:
        run(
            processes.clean_command(cloud, number),
            "Run ./deploy/down again.",
            log=cloud.log("network-host-clean"),
        )
        return
    names = Names.of(cloud.network_folder(number))
    spaces = _namespaces(cloud, number)
    # The network agent leaves DHCP servers running.
    _kill(spaces)
    for space in spaces:
        if space.name.startswith(names.namespaces):
            run(["ip", "netns", "delete", space.name], ADVICE)
    shutil.rmtree(names.runtime, ignore_errors=True)
    cloud.underlay.remove_host(number)


def find_pids(spaces: Iterable[Path]) -> set[int]:
    """Return the ids of the processes in these network namespaces.

    A namespace whose file does not exist is ignored.
    """
    identities = {_read_identity(space) for space in spaces}
    return {
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if (identity := _read_identity(process / "ns/net")) is not None and identity in identities
    }


def _read_identity(space: Path) -> tuple[int, int] | None:
    try:
        status = space.stat()
    except OSError:  # The process has ended.
        return None
    return status.st_dev, status.st_ino


def _namespaces(cloud: Cloud, number: int) -> list[Path]:
    """Return the files of the existing namespaces of the host, its routers and DHCP servers."""
    own = cloud.underlay.namespace(number)
    return [
        *NAMESPACES.glob(f"{own}"),
        *NAMESPACES.glob(f"{Names.of(cloud.network_folder(number)).namespaces}*"),
    ]


def _is_started(cloud: Cloud, names: list[str]) -> bool:
    """Return True if the supervisor runs any of these processes."""
    return find_supervisor(cloud) is not None and any(
        (pid := find_process(cloud, name)) is not None and Path(f"/proc/{pid}/ns/net").exists()
        for name in names
    )


def _kill(spaces: Iterable[Path]) -> set[int]:
    """Kill the processes in these network namespaces and return their ids."""
    living = find_pids(spaces)
    for pid in living:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return living
