# SPDX-License-Identifier: Apache-2.0
"""A busy guest that is live migrated between two real hosts, by agents that were just started.

The guest counts in memory, writes memory all the time, and wrote to the disk. ``Steered`` requests
a control of the migrations.
"""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.domain.models import Control, DomainState
from compute_agent.verb_context import Part, VerbContext
from compute_agent.virt.driver import RUNNING
from compute_agent.virt.libvirt.disks.images import MEBIBYTE
from compute_agent.virt.libvirt.driver import LibvirtDriver
from compute_agent.virt.libvirt.migration import cold_migration
from compute_agent.virt.libvirt.migration.live_migration import MigrationOptions
from deploy.one_machine.machine import libvirtd
from tests.contract.virt_pairs import PORT, Machines, ticks
from tests.contract.virt_rigs import (
    BOOT_SECONDS,
    IN_TURNS,
    PAUSE_TENTH,
    QUIET,
    Rig,
    guests_folder,
)
from tests.disks import base
from tests.waiting import await_true

#: Offset and size of the guest's data on the disk.
WRITTEN_AT, WRITTEN = 64 << 20, 8 << 20
#: User data that counts on the console and changes memory faster than a slow migration copies it.
BUSY = f"""#!/bin/sh
tr '\\0' c < /dev/zero |
    dd of=/dev/vda bs=64k seek={WRITTEN_AT >> 16} count={WRITTEN >> 16} iflag=fullblock conv=notrunc,fsync
mount -t tmpfs none /mnt
dd if=/dev/urandom of=/mnt/from bs=1M count=16 2> /dev/null
(n=0; while :; do {PAUSE_TENTH}; n=$((n + 1)); echo "tick $n"; done) &
{IN_TURNS}
(while usleep 30000; do dd if=/mnt/from of=/mnt/to bs=1M conv=notrunc 2> /dev/null; done) &
"""
#: MiB a second. At this rate the migration of a busy guest never completes.
SLOW = 32


class Files:
    """A ``Peer`` with the files of a guest on the same machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def parts(self) -> list[Part]:
        sizes = {
            name: (self._folder / name).stat().st_size
            for name in (base(self._folder).name, cold_migration.CONFIG)
        }
        return [Part(name, size, size) for name, size in sizes.items()]

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        content, at = (self._folder / name).read_bytes(), 0
        while at < len(content):
            yield at, content[at : at + MEBIBYTE]
            at += MEBIBYTE


def no_options(at: int) -> dict[str, Any]:
    """Return the default options."""
    return {}


class Traveller:
    """A busy guest on the host ``here``, which may go to the host ``there``.

    ``options`` returns the migration, SPICE and volume options of the first (0) or second (1) host.
    """

    def __init__(
        self,
        machines: Machines,
        image: Path,
        shared: bool = False,
        options: Callable[[int], dict[str, Any]] = no_options,
        user_data: str = BUSY,
        **changed: Any,
    ) -> None:
        self.machines, self.shared, self.options = machines, shared, options
        place = guests_folder("t", machines.folder)
        self.folders = [place / "a", place / ("a" if shared else "b")]
        daemons = [machines.home(name) for name in machines.names]
        self.uris = [libvirtd.uri(daemon) for daemon in daemons]
        self.here, self.there = (
            Rig(
                "qemu",
                self.folders[at],
                functools.partial(self.agent, at),
                image.read_bytes(),
                "qcow2",
                daemon,
            )
            for at, daemon in enumerate(daemons)
        )
        self.at, self.ticked = 0, 0
        self.spec = self.here.boot(ready=True, user_data=user_data, **changed)
        self.arrived = self.spec.fence
        self.check_counts(self.here)

    @property
    def server(self) -> str:
        return self.spec.server

    def agent(self, at: int, **options: Any) -> LibvirtDriver:
        """Return the driver of an agent that was just started."""
        options = {
            "port": PORT,
            "address": self.machines.addresses[at],
            "plain_text": True,
            **self.options(at),
            **options,
        }
        spice, connectors = options.pop("spice", False), options.pop("connectors", None)
        return self.machines.on(
            self.machines.names[at],
            LibvirtDriver(
                self.uris[at],
                self.folders[at],
                migration=MigrationOptions(**options),
                connectors=connectors,
                spice=spice,
            ),
        )

    def prepare(self, **changed: Any) -> dict[str, Any]:
        """Prepare a new migration and return the description of the destination."""
        self.spec = replace(self.spec, fence=self.spec.fence + 1, **changed)
        source = Files(self.folders[self.at] / "instances" / self.server)
        return self.there.driver.prepare_incoming(
            self.spec,
            source,
            self.shared,
            self.here.driver.inventory().cpu_info,
            self.there.read_image,
            QUIET,
        )

    def migrate(
        self, to: dict[str, Any] | None = None, run: VerbContext = QUIET, **options: Any
    ) -> dict[str, Any]:
        """Migrate the guest by an agent with these options."""
        agent, to = self.agent(self.at, **options), to or self.prepare()
        try:
            return agent.live_migrate(self.spec, to, self.shared, run)
        finally:
            agent.close()

    def check_counts(self, host: Rig) -> None:
        """Check that the guest continues to count at the host without a restart."""
        before = ticks(host, self.server)
        await_true(
            lambda: ticks(host, self.server) > max(before, self.ticked) + 2,
            BOOT_SECONDS,
            lambda: f"{host.state(self.server)} {host.console(self.server)[-300:]}",
        )
        self.ticked = ticks(host, self.server)
        self.is_well = True

    def check_stayed(self) -> None:
        """Check that the guest runs here as before, and that the other host has no domain."""
        assert (self.here.state(self.server), self.there.state(self.server)) == (
            (RUNNING, self.arrived),
            None,
        )
        self.check_counts(self.here)

    def check_arrived(self) -> None:
        """Check that the guest runs there and no longer here, then exchange the two hosts."""
        assert self.here.state(self.server) is None
        state = self.there.driver.finish_incoming(self.spec, QUIET)
        assert state == DomainState(self.server, RUNNING, self.spec.fence)
        self.arrived = self.spec.fence
        self.here, self.there, self.at = self.there, self.here, 1 - self.at
        self.check_counts(self.here)

    def has_written_data(self) -> bool:
        """Return True if the disk of the running guest contains the written data."""
        result = subprocess.run(
            [
                "qemu-io",
                "-U",
                "-r",
                "-f",
                "qcow2",
                "-c",
                f"read -P {ord('c')} {WRITTEN_AT} {WRITTEN}",
                self.folders[self.at] / "instances" / self.server / "disk",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        return result.returncode == 0 and "verification failed" not in result.stdout

    def clean(self) -> None:
        for rig in (self.here, self.there):
            rig.servers = [self.server]
            rig.clean()


class Steered:
    """A ``VerbContext`` that records progress, and requests a control once ``when`` is true."""

    def __init__(
        self,
        control: str = "",
        cancels: bool = False,
        when: Callable[[Mapping[str, int]], bool] = lambda numbers: numbers["memory_processed"] > 0,
    ) -> None:
        self.progress: list[Mapping[str, int]] = []
        self.moments: list[float] = []
        self._control = Control(control) if control else None
        self._cancels, self._when, self._is_triggered = cancels, when, False

    @property
    def run(self) -> VerbContext:
        return VerbContext(
            lambda name: None,
            lambda: self._is_triggered and self._cancels,
            lambda: self._control if self._is_triggered else None,
            self._record_progress,
        )

    def _record_progress(self, numbers: Mapping[str, int]) -> None:
        self.progress.append(numbers)
        self.moments.append(time.monotonic())
        self._is_triggered = self._when(numbers) or self._is_triggered
