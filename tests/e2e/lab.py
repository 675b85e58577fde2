# SPDX-License-Identifier: Apache-2.0
"""A lab for tests: three real hosts, created by ``deploy/lab up``, that tests kill or disconnect.

Fixtures (conftest.py): ``lab`` is the lab of the session. The hosts of ``shared_lab`` share the
disks of their guests. Both yield a ``LiveLab``, a ``Live`` (live.py: openstack, rest, rows, virsh)
with the hosts "lab1", "lab2" and "lab3". A test fails if two domains of one server run at the same
moment (watcher.py). After the test all hosts are started, connected, enabled and not forced down.
The test's servers must then be deleted, and the doctor must find no problem.

    def test_guest_survives_restart_of_host(lab: LiveLab) -> None:
        # A witness has a canary on its disk and a counter in memory.
        with witness(lab, "w", host="lab2") as guest:
            before = guest.read_state()  # .canary, .run and .count in memory, .written on the disk
            lab.strike("kill", "lab2")
            lab.strike("start", "lab2")
            guest.await_ssh()
            assert guest.read_state().canary == before.canary

``strike`` runs the command ``deploy/lab``. ``lab.lab`` does the same without the command
(deploy/one_machine/lab_hosts.py: state, kill, start, cut, heal, fence, guests). ``find_domains``
returns the hosts with a domain of a server, and the domain's state on each. ``await_host`` waits
for the state of a host in the API. ``registration`` returns the boot and the session of a host.
``listener`` (guests.py) measures from outside how long a guest does not answer.

KILONOVA_LAB and KILONOVA_SHARED_LAB name the homes of running labs. The tests use these labs and
leave them running, which saves the time to create them while a test is written.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deploy.one_machine.lab_hosts import Lab, arguments
from deploy.one_machine.machine import libvirtd
from deploy.one_machine.machine.underlay import NAMESPACES
from deploy.packages import ROOT
from tests.e2e.live import SETTLE, Live
from tests.e2e.watcher import Watcher
from tests.waiting import await_true

#: Seconds after which the API shows a silent host as down, with a margin.
SILENCE = 30 + 30


class LiveLab(Live):
    """A lab that is running, or that ``up`` will start."""

    def __init__(self, lab: Lab) -> None:
        cloud = lab.cloud
        super().__init__(
            cloud.home,
            cloud.ports.identity,
            hosts=cloud.hosts,
            apart=True,
            shared=cloud.shared,
            networks=True,
            fencing_hook=cloud.fencing_hook,
            volumes=cloud.volumes,
        )
        assert self.cloud == cloud
        self.lab = lab

    # --- commands ---
    def command(self, *words: str, seconds: float = 900) -> subprocess.CompletedProcess[str]:
        """Run ``./deploy/lab`` with these words. The exit status is not checked."""
        return self.run(ROOT / "deploy/lab", *words, seconds=seconds)

    def up(self, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``./deploy/lab up`` with the options of this lab."""
        return self.run(
            ROOT / "deploy/lab",
            "up",
            *arguments(self.lab.facts).split(),
            *more,
            seconds=900,
            **variables,
        )

    def down(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Run ``./deploy/lab down``."""
        return self.command("down", *more)

    def strike(self, operation: str, host: str) -> str:
        """Kill, start, cut, heal or fence a host, and return the output of the command."""
        result = self.command(operation, host, seconds=60)
        assert result.returncode == 0, result
        return result.stdout

    def watcher(self) -> Watcher:
        """Return a watcher of all hosts, which is not started yet."""
        numbers = {host: number for number, host in enumerate(self.cloud.hosts, 1)}
        return Watcher(
            {
                host: libvirtd.uri(self.cloud.libvirt_folder(number))
                for host, number in numbers.items()
            },
            {
                host: NAMESPACES / f"{self.cloud.underlay.namespace(number)}"
                for host, number in numbers.items()
            },
        )

    @contextmanager
    def only(self, host: int) -> Iterator[None]:
        """Disable all other hosts for the block, and enable every host afterwards."""
        self.open_only(host)
        try:
            yield
        finally:
            self.open_all()

    # --- state ---
    def uri(self, host: str) -> str:
        """Return the URI of a host's libvirtd."""
        return libvirtd.uri(self.cloud.libvirt_folder(self.lab.number(host)))

    def find_domains(self, server: str) -> dict[str, str]:
        """Return the state of the server's domain on each running host with such a domain."""
        return {
            host: guest.state
            for host in self.cloud.hosts
            for guest in self.lab.guests(host) or ()
            if guest.server == server
        }

    def host_of(self, server: str) -> str:
        """Return the host that the API shows for a server to an admin."""
        return str(self.rest("kilonova-admin").server(server)["OS-EXT-SRV-ATTR:host"])

    def service(self, host: str) -> Any:
        """Return the compute service of a host from the API."""
        return next(iter(self.seed.admin.compute.services(binary="nova-compute", host=host)))

    def await_host(self, host: str, state: str = "up", seconds: float = SETTLE) -> None:
        """Wait until the API shows this state of the host's compute service."""
        await_true(lambda: self.service(host).state == state, seconds, lambda: self.service(host))

    def registration(self, host: str) -> tuple[str, int]:
        """Return the boot id that the host reported last, and the session number."""
        [(boot, session)] = self.rows("SELECT boot_id, session FROM hosts WHERE name = ?", host)
        return str(boot), int(session)

    def facts(self, host: str) -> dict[str, Any]:
        """Return the facts that the host's agent reported in the last registration."""
        [(facts,)] = self.rows("SELECT facts FROM hosts WHERE name = ?", host)
        return dict(json.loads(facts))

    def repair(self) -> None:
        """Start, connect and enable every host, undo forced down, and wait until all are up."""
        for host in self.cloud.hosts:
            {"off": self.lab.start, "cut": self.lab.heal, "up": lambda host: None}[
                self.lab.state(host)
            ](host)
        compute = self.seed.admin.compute
        for service in list(compute.services(binary="nova-compute")):
            if service.is_forced_down:
                compute.update_service_forced_down(service, forced=False)
        self.open_all()
        for host in self.cloud.hosts:
            self.await_host(host)
