# SPDX-License-Identifier: Apache-2.0
"""A lab as the tests strike it: three real hosts, made by ``deploy/lab up`` and watched as long as
they live.

Fixtures (conftest.py): ``lab`` is the lab of the session, ``shared_lab`` one whose hosts share
their guests' disks. Both hand out a ``LiveLab``: all of ``Live`` (live.py: openstack, rest, rows,
virsh …) with hosts "lab1", "lab2" and "lab3" that can be struck. A test that takes one fails when
two domains of one server ran at the same moment (watcher.py); after it all hosts are on, plugged
in, enabled and not forced down, its servers must be gone, and the oracle has the last word.

    def test_guest_comes_back(lab: LiveLab) -> None:
        with witness(lab, "w", host="lab2") as guest:  # a canary on its disk, a counter in memory
            before = guest.account()  # .canary, .run and .count in memory, .written on the disk
            lab.strike("kill", "lab2")
            lab.strike("start", "lab2")
            guest.await_ssh()
            assert guest.account().canary == before.canary

``strike`` types the command; ``lab.lab`` does the same without it
(deploy/one_machine/lab_hosts.py: state, kill, start, cut, heal, fence, guests). ``where`` says on
which hosts a server's domain is, and how; ``await_host`` waits for what the API says of a host;
``registration`` tells the boot and the session of a host. ``listener`` (guests.py) measures from
outside how long a guest was not heard. KILONOVA_LAB and KILONOVA_SHARED_LAB name the homes of labs
that run already: these are used, and left, which saves the time of making them while a test is
written.
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

#: Seconds after which a host that says nothing counts as down, and what may be added.
SILENCE = 30 + 30


class LiveLab(Live):
    """A lab that runs, or is about to."""

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
        """./deploy/lab …, however it ends."""
        return self.run(ROOT / "deploy/lab", *words, seconds=seconds)

    def up(self, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """./deploy/lab up, with what this lab is made of."""
        return self.run(
            ROOT / "deploy/lab",
            "up",
            *arguments(self.lab.facts).split(),
            *more,
            seconds=900,
            **variables,
        )

    def down(self, *more: str) -> subprocess.CompletedProcess[str]:
        """./deploy/lab down"""
        return self.command("down", *more)

    def strike(self, what: str, host: str) -> str:
        """kill, start, cut, heal or fence a host; what the command says."""
        done = self.command(what, host, seconds=60)
        assert done.returncode == 0, done
        return done.stdout

    def watcher(self) -> Watcher:
        """One that is to be started."""
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
        """New guests go to this host; afterwards to all."""
        self.open_only(host)
        try:
            yield
        finally:
            self.open_all()

    # --- what is so ---
    def uri(self, host: str) -> str:
        """Of a host's libvirtd."""
        return libvirtd.uri(self.cloud.libvirt_folder(self.lab.number(host)))

    def where(self, server: str) -> dict[str, str]:
        """Host -> state of the server's domain, of every host that is on and has one."""
        return {
            host: guest.state
            for host in self.cloud.hosts
            for guest in self.lab.guests(host) or ()
            if guest.server == server
        }

    def place(self, server: str) -> str:
        """The host that the API says it is on."""
        return str(self.rest("kilonova-admin").server(server)["OS-EXT-SRV-ATTR:host"])

    def service(self, host: str) -> Any:
        """The service of a host's agent, as the API shows it."""
        return next(iter(self.seed.admin.compute.services(binary="nova-compute", host=host)))

    def await_host(self, host: str, state: str = "up", seconds: float = SETTLE) -> None:
        """Until the API says so."""
        await_true(lambda: self.service(host).state == state, seconds, lambda: self.service(host))

    def registration(self, host: str) -> tuple[str, int]:
        """The boot that the host has told of last, and how often its agent has registered."""
        [(boot, session)] = self.rows("SELECT boot_id, session FROM hosts WHERE name = ?", host)
        return str(boot), int(session)

    def facts(self, host: str) -> dict[str, Any]:
        """What the host's agent told of it in its last registration, as it is kept."""
        [(facts,)] = self.rows("SELECT facts FROM hosts WHERE name = ?", host)
        return dict(json.loads(facts))

    def repair(self) -> None:
        """Every host is on, plugged in, enabled, not forced down and up, whatever was done to
        it."""
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
