# SPDX-License-Identifier: Apache-2.0
"""Guests in memory that are resized where they are: what the disk was is kept aside until that is settled.

The part of ``virt.memory`` above its moves. Must stay true: what is kept aside is what the guest had before the first
resize that nobody settled, however often a resize is repeated.
"""
from __future__ import annotations

from copy import deepcopy

from common.models import DomainState, GuestSpec
from compute_agent.virt.driver import PAUSED, RUNNING, Run, VerbFailed
from compute_agent.virt.memory_guest import Guest
from compute_agent.virt.memory_host import state_of
from compute_agent.virt.memory_live import MemoryLive
from compute_agent.virt.wanted import wanted


class MemoryResize(MemoryLive):
    """The verbs of guests that are resized on their host, as ``Driver`` has them."""

    def resize_here(self, spec: GuestSpec, runs: bool, run: Run) -> DomainState:
        after = self._begin("resize_here", spec.server, run)
        wanted(spec)
        with self._lock:
            guest = self._guest(spec.server)
            if guest.resized != spec.fence:
                _refuse_active(guest)
                guest.aside = {"disk": dict(guest.disk), "root_gb": guest.root_gb, "local": deepcopy(guest.ephemeral),
                               "resized": spec.fence}
                guest.dress(spec)
                guest.resized, guest.saved = spec.fence, False
                self._write(spec.server, guest)
        return self._end(self._run_or_rest(spec, guest, runs, run), after, run)

    def settle_resize(self, spec: GuestSpec, back: bool, resized: int, run: Run) -> DomainState:
        after = self._begin("settle_resize", spec.server, run)
        with self._lock:
            guest = self._guest(spec.server)
            if back:
                _refuse_active(guest)
                if guest.aside is not None and guest.aside["resized"] == resized:
                    guest.disk.clear()
                    guest.disk.update(guest.aside["disk"])
                    guest.root_gb, guest.saved = guest.aside["root_gb"], False
                    swap = {name: disk for name, disk in guest.local.items() if name not in guest.ephemeral}
                    guest.local = guest.aside.get("local", {}) | swap
                guest.dress(spec)
            guest.aside, guest.fence = None, spec.fence
            self._write(spec.server, guest)
        return self._end(state_of(spec.server, guest), after, run)


def _refuse_active(guest: Guest) -> None:
    if guest.power_state in (RUNNING, PAUSED):
        raise VerbFailed("The server runs; stop it before it is resized.", details=f"power state {guest.power_state}")
