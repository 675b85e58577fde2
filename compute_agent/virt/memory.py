# SPDX-License-Identifier: Apache-2.0
"""A complete hypervisor in memory: the other implementation of ``virt.driver``.

Called by the agent when ``virt_driver = memory``, by tests and by the bench. Guests are records; nothing runs.
The host they live on, with its script and its memory of calls, is ``virt.memory_host``; how they move is
``virt.memory_moves``. All methods are thread-safe.
"""
from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from common import errors
from common.models import DomainState, GuestSpec, HostInventory, ImageRef, Interface
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN, ImageReader, ImageWriter, Run, VerbFailed
from compute_agent.virt.interfaces import plugs
from compute_agent.virt.memory_guest import Guest, made
from compute_agent.virt.memory_host import state_of
from compute_agent.virt.memory_resize import MemoryResize
from compute_agent.virt.memory_script import QUIET, Fail, Slow, wait
from compute_agent.virt.wanted import still_demanded

__all__ = ["QUIET", "Fail", "Guest", "MemoryDriver", "Slow"]


class MemoryDriver(MemoryResize):
    """Implements ``Driver``."""

    def inventory(self) -> HostInventory:
        self._begin("inventory")
        return self.size

    def domains(self) -> list[DomainState]:
        self._begin("domains")
        with self._lock:
            return [state_of(server, guest) for server, guest in self.guests.items()]

    def ensure_image(self, image: ImageRef, read_image: ImageReader, run: Run) -> None:
        self._begin("ensure_image", "", run)
        self._fetch(image, read_image, run)
        self.images.add(image.id)

    def ensure_guest(self, spec: GuestSpec, read_image: ImageReader, run: Run) -> DomainState:
        after = self._begin("ensure_guest", spec.server, run)
        disk = self._fetch(spec.image, read_image, run)
        run.phase("starting")
        wait(0, run)
        self._before_start(spec.server, spec.interfaces, run)
        with self._lock:
            guest = self.guests.get(spec.server) or made(spec, disk)
            self._keep(spec.server, guest)
            guest.interfaces = list(spec.interfaces)
            state = self._start(spec.server, guest, spec.fence, spec.paused)
        return self._end(state, after, run)

    def ensure_running(self, server: str, fence: int, run: Run) -> DomainState:
        after = self._begin("ensure_running", server, run)
        self._before_start(server, self._guest(server).interfaces, run)
        with self._lock:
            state = self._start(server, self._guest(server), fence)
        return self._end(state, after, run)

    def ensure_stopped(self, server: str, fence: int, timeout: float, run: Run) -> DomainState:
        after = self._begin("ensure_stopped", server, run)
        self._await_shutdown(server, timeout, run)
        with self._lock:
            guest = self._guest(server)
            guest.fence, guest.saved = fence, False
            self._power(server, guest, SHUTDOWN)
        return self._end(state_of(server, guest), after, run)

    def pull_plug(self, server: str) -> None:
        after = self._begin("pull_plug", server)
        with self._lock:
            if (guest := self.guests.get(server)) is not None:
                guest.saved = False
                self._power(server, guest, SHUTDOWN)
        self._tell()
        wait(after, QUIET)

    def reboot(self, server: str, fence: int, timeout: float, run: Run) -> DomainState:
        after = self._begin("reboot", server, run)
        guest = self._guest(server)
        if (guest.power_state, guest.fence) != (RUNNING, fence):
            self._await_shutdown(server, timeout, run)
            self._before_start(server, guest.interfaces, run)
            with self._lock:
                guest.power_state, guest.saved = SHUTDOWN, False
                self._start(server, guest, fence)
        return self._end(state_of(server, guest), after, run)

    def ensure_paused(self, server: str, fence: int, run: Run) -> DomainState:
        after = self._begin("ensure_paused", server, run)
        with self._lock:
            guest = self._active(server)
            guest.fence = fence
            self._power(server, guest, PAUSED)
        return self._end(state_of(server, guest), after, run)

    def ensure_suspended(self, server: str, fence: int, run: Run) -> DomainState:
        after = self._begin("ensure_suspended", server, run)
        run.phase("saving memory 0 %")
        wait(0, run)
        with self._lock:
            guest = self._guest(server)
            guest = guest if guest.saved else self._active(server)
            guest.fence, guest.saved = fence, True
            self._power(server, guest, SHUTDOWN)
        return self._end(state_of(server, guest), after, run)

    def rebuild(self, spec: GuestSpec, read_image: ImageReader, runs: bool, run: Run, keep_ephemeral: bool = False
                ) -> DomainState:
        after = self._begin("rebuild", spec.server, run)
        guest = self.guests.get(spec.server)
        if guest is None or guest.made != spec.fence:
            plugs(spec.interfaces)
            disk = self._fetch(spec.image, read_image, run)
            run.phase("making disks")
            wait(0, run)
            with self._lock:
                guest = self._replace(spec, disk, keep_ephemeral)
        if runs:
            self._before_start(spec.server, spec.interfaces, run)
        with self._lock:
            state = self._start(spec.server, guest, spec.fence) if runs else state_of(spec.server, guest)
        return self._end(state, after, run)

    def rescue(self, spec: GuestSpec, image: ImageRef, read_image: ImageReader, run: Run) -> DomainState:
        after = self._begin("rescue", spec.server, run)
        guest = self._guest(spec.server)
        if guest.rescue != spec.fence:
            plugs(spec.interfaces)
            self._fetch(image, read_image, run)
            run.phase("making disks")
            wait(0, run)
            with self._lock:
                guest.rescue, guest.rescue_image = spec.fence, image.id
                guest.interfaces = list(spec.interfaces)
                guest.power_state, guest.saved = SHUTDOWN, False
        self._before_start(spec.server, guest.interfaces, run)
        with self._lock:
            state = self._start(spec.server, guest, spec.fence)
        return self._end(state, after, run)

    def unrescue(self, spec: GuestSpec, run: Run) -> DomainState:
        after = self._begin("unrescue", spec.server, run)
        with self._lock:
            guest = self._guest(spec.server)
            if guest.rescue:
                plugs(spec.interfaces)
                guest.rescue, guest.rescue_image = 0, ""
                guest.interfaces = list(spec.interfaces)
                guest.power_state, guest.saved = SHUTDOWN, False
        self._before_start(spec.server, guest.interfaces, run)
        with self._lock:
            state = self._start(spec.server, guest, spec.fence)
        return self._end(state, after, run)

    def attach_interface(self, server: str, fence: int, interface: Interface, run: Run) -> DomainState:
        after = self._begin("attach_interface", server, run)
        self._refuse_saved(server)
        run.phase("attaching the interface")
        self._await_bridges([interface], run)
        with self._lock:
            guest = self._guest(server)
            if _mac(interface) not in map(_mac, guest.interfaces):
                guest.interfaces.append(interface)
            state = self._interfaces_changed(server, guest, fence)
        return self._end(state, after, run)

    def detach_interface(self, server: str, fence: int, interface: Interface, run: Run) -> DomainState:
        after = self._begin("detach_interface", server, run)
        self._refuse_saved(server)
        run.phase("detaching the interface")
        with self._lock:
            guest = self._guest(server)
            left = [other for other in guest.interfaces if _mac(other) != _mac(interface)]
            holds = guest.power_state == PAUSED or (guest.power_state == RUNNING and guest.holds_interfaces)
            if holds and left != guest.interfaces:
                raise VerbFailed(f"The guest did not let go of the interface {_mac(interface)}. The interface stays.")
            guest.interfaces = left
            state = self._interfaces_changed(server, guest, fence)
        return self._end(state, after, run)

    def snapshot(self, server: str, fence: int, write_image: ImageWriter, run: Run) -> int:
        after = self._begin("snapshot", server, run)
        with self._lock:
            guest = self._guest(server)
            if guest.power_state in (RUNNING, PAUSED) and not guest.can_be_still:
                raise still_demanded()
            content = guest.disk_image()
        run.phase("copying disk 100 %")
        wait(0, run)

        def chunks() -> Iterator[bytes]:
            wait(0, run)
            yield content
            run.phase("uploading 100 %")

        try:
            write_image(chunks())
        except errors.Unavailable:
            raise
        except errors.Problem as refused:
            raise VerbFailed(refused.text, details=repr(refused)) from refused
        wait(after, run)
        return len(content)

    def inject_nmi(self, server: str) -> None:
        after = self._begin("inject_nmi", server)
        with self._lock:
            guest = self._active(server)
            guest.nmis += 1
            guest.console += "NMI received\n"
            self._write(server, guest)
        wait(after, QUIET)

    def set_password(self, server: str, user: str, password: str) -> None:
        after = self._begin("set_password", server)
        with self._lock:
            guest = self._active(server)
            if not guest.has_agent or guest.power_state != RUNNING:
                raise VerbFailed("The guest has no agent that answers; install and start qemu-guest-agent in it.")
            guest.set_password(user, password)
            self._write(server, guest)
        wait(after, QUIET)

    def diagnostics(self, server: str) -> dict[str, Any]:
        self._begin("diagnostics", server)
        with self._lock:
            return self._active(server).diagnostics()

    def ensure_absent(self, server: str, fence: int, keep_files: bool = False) -> None:
        after = self._begin("ensure_absent", server)
        with self._lock:
            self._forget(server, keep_files)
            self._consoles.end(server)
        wait(after, QUIET)

    def console_output(self, server: str, limit: int) -> str:
        self._begin("console_output", server)
        with self._lock:
            text = self._guest(server).console
        return text.encode()[-limit:].decode(errors="replace") if limit > 0 else ""

    def console(self, server: str, kind: str) -> socket.socket:
        self._begin("console", server)
        with self._lock:
            self._active(server)
            return self._consoles.open(server, kind)

    def _refuse_saved(self, server: str) -> None:
        if self._guest(server).saved:
            raise VerbFailed("The server is suspended; resume it before its interfaces are changed.")

    def _interfaces_changed(self, server: str, guest: Guest, fence: int) -> DomainState:
        guest.fence = fence
        self._write(server, guest)
        return state_of(server, guest)

    def _replace(self, spec: GuestSpec, disk: dict[str, str], keep_ephemeral: bool) -> Guest:
        """The guest anew, off; its console goes on."""
        old = self.guests.get(spec.server)
        guest = made(spec, disk)
        if old is not None and keep_ephemeral:
            guest.local |= {name: kept for name, kept in old.ephemeral.items() if name in guest.local}
        self._keep(spec.server, guest)
        guest.made = spec.fence
        if old is not None:
            guest.boots, guest.console, guest.ignores_acpi = old.boots, old.console, old.ignores_acpi
            guest.power_state = old.power_state
        self._power(spec.server, guest, SHUTDOWN)
        return guest


def _mac(interface: Interface) -> str:
    return interface.mac.lower()
