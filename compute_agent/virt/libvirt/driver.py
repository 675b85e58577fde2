# SPDX-License-Identifier: Apache-2.0
"""The virt driver for QEMU and KVM through libvirt: what each verb does, in order.

Called by ``compute_agent.verbs`` through ``virt.driver.Driver``. The work is in the files beside this one: images
and disks make files, domain_xml describes, connection asks libvirt. A server has a folder
``<state_dir>/instances/<id>/``; whoever removes that folder and the domain has removed the server from this host.
Must stay true: a verb looks first and then does what is missing, so that it can be repeated after any crash; while
libvirtd is away it waits and repeats by itself.
"""
from __future__ import annotations

import functools
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common import errors
from common.models import DomainState, GuestSpec, HostInventory
from compute_agent import config_drive
from compute_agent.virt.driver import (
    PAUSED,
    RUNNING,
    SHUTDOWN,
    Cancelled,
    ImageReader,
    Run,
    VerbFailed,
)
from compute_agent.virt.libvirt import disks, host
from compute_agent.virt.libvirt.connection import Connection, Found
from compute_agent.virt.libvirt.domain_xml import Domain, domain_xml, metadata
from compute_agent.virt.libvirt.images import GIBIBYTE, ImageCache

Answer = TypeVar("Answer")
QUIET = Run(phase=lambda name: None, cancelled=lambda: False)
#: Seconds between two looks at a domain that should power off, and between two presses of its button: a guest
#: that has just begun to boot misses the first.
LOOK_EVERY, PRESS_EVERY, REPEAT_EVERY = 0.1, 5.0, 0.5


class LibvirtDriver:
    """Implements ``Driver`` on one libvirtd. Thread-safe for different servers.

    ``state_dir`` holds instances/ and images/ and must be readable to QEMU's user. ``virt_type``: auto takes kvm
    where a probe guest runs under it, else qemu; test is for libvirt's ``test:///``. ``image_ttl`` and ``patience``
    (how long a verb waits for a libvirtd that does not answer) are seconds.
    """

    def __init__(self, uri: str, state_dir: str | Path, virt_type: str = "auto", *, hostname: str = "",
                 host_ip: str = "127.0.0.1", reserved_memory_mb: int = 0, reserved_disk_gb: int = 0,
                 image_ttl: float = 24 * 3600, patience: float = 60) -> None:
        self._state_dir = Path(state_dir).resolve()
        self._instances = self._state_dir / "instances"
        for folder in (self._state_dir, self._instances):
            folder.mkdir(parents=True, exist_ok=True)
            # QEMU may run as another user: it must reach its files, and need not list its neighbours'.
            folder.chmod(folder.stat().st_mode | 0o711)
        self._asked_type = virt_type
        self._about: dict[str, Any] = {
            "hostname": hostname, "host_ip": host_ip, "reserved_memory_mb": reserved_memory_mb,
            "reserved_disk_gb": reserved_disk_gb}
        self._patience = patience
        self._images = ImageCache(self._state_dir / "images", image_ttl)
        self._libvirt = Connection(uri)

    @functools.cached_property
    def virt_type(self) -> str:
        """kvm, qemu or test. The first ask may take ``host.PROBE_SECONDS``."""
        if self._asked_type != "auto":
            return self._asked_type
        return "kvm" if host.kvm_works(self._state_dir) else "qemu"

    def inventory(self) -> HostInventory:
        facts = self._patiently(QUIET, self._libvirt.facts)
        return host.inventory(facts, self._state_dir, **self._about)

    def boot_id(self) -> str:
        return host.boot_id()

    def domains(self) -> list[DomainState]:
        return [_state(found) for found in self._libvirt.domains()]

    def ensure_guest(self, spec: GuestSpec, read_image: ImageReader, run: Run) -> DomainState:
        self._folder(spec.server)

        def work() -> DomainState:
            try:
                return self._make_guest(spec, read_image, run)
            except (Cancelled, errors.Unavailable):
                raise
            except Exception as error:
                self._clean_up(spec.server, error)
                if isinstance(error, VerbFailed):
                    raise
                raise VerbFailed("The host could not make the server's guest; its log says more.", retryable=True,
                                 details=f"{type(error).__name__}: {error}") from error
        return self._patiently(run, work)

    def ensure_running(self, server: str, fence: int, run: Run) -> DomainState:
        def work() -> DomainState:
            self._found(server)
            return self._start(server, fence, run)
        return self._patiently(run, work)

    def ensure_stopped(self, server: str, fence: int, timeout: float, run: Run) -> DomainState:
        def work() -> DomainState:
            self._power_off(server, timeout, run)
            self._libvirt.set_metadata(server, metadata(server, fence))
            return _state(self._found(server))
        return self._patiently(run, work)

    def reboot(self, server: str, fence: int, timeout: float, run: Run) -> DomainState:
        def work() -> DomainState:
            found = self._found(server)
            if (found.power_state, found.fence) == (RUNNING, fence):
                return _state(found)
            self._power_off(server, timeout, run)
            return self._start(server, fence, run)
        return self._patiently(run, work)

    def ensure_absent(self, server: str, fence: int) -> None:
        self._patiently(QUIET, lambda: self._remove(server))
        self._images.evict()

    def console_output(self, server: str, limit: int) -> str:
        log = self._folder(server) / "console.log"
        # virtlogd turns the log over when it is long: the end of the older part stands in ".0".
        text = _tail(log, limit)
        if text is None:
            raise VerbFailed("The server has no console log on this host.", details=f"no file {log}")
        if len(text) < limit:
            text = (_tail(log.with_name("console.log.0"), limit - len(text)) or b"") + text
        return text.decode(errors="replace")

    def watch(self, changed: Callable[[str], None]) -> None:
        self._libvirt.watch(changed)

    def close(self) -> None:
        self._libvirt.close()

    def _make_guest(self, spec: GuestSpec, read_image: ImageReader, run: Run) -> DomainState:
        folder = self._folder(spec.server)
        found = self._libvirt.find(spec.server)
        if found is None or found.power_state != RUNNING:
            folder.mkdir(exist_ok=True)
            folder.chmod(0o711)
            image = (self._images.fetch(spec.image, spec.flavor.root_gb * GIBIBYTE, read_image, run)
                     if spec.image else None)
            run.phase("making disks")
            disk = disks.make(folder, image, spec.flavor.root_gb)
            drive = folder / "config" if spec.config_drive else None
            if drive:
                config_drive.build(spec, drive)
            self._libvirt.define(domain_xml(Domain(
                spec.server, spec.fence, spec.name, spec.flavor.vcpus, spec.flavor.memory_mb, self.virt_type, disk,
                folder / "console.log", drive)))
        return self._start(spec.server, spec.fence, run)

    def _start(self, server: str, fence: int, run: Run) -> DomainState:
        """Make the domain run under this fence: the fence is written first, it counts once the domain runs."""
        run.phase("starting")
        found = self._found(server)
        if run.cancelled():
            raise Cancelled
        if found.fence != fence:
            self._libvirt.set_metadata(server, metadata(server, fence))
        if found.power_state == PAUSED:
            self._libvirt.resume(server)
        elif found.power_state != RUNNING:
            self._libvirt.start(server)
        return _state(self._found(server))

    def _power_off(self, server: str, timeout: float, run: Run) -> None:
        """ACPI for ``timeout`` seconds, then the plug."""
        deadline, press_at = time.monotonic() + timeout, 0.0
        while (now := time.monotonic()) < deadline and self._found(server).power_state == RUNNING:
            if run.cancelled():
                raise Cancelled
            if now >= press_at:
                self._libvirt.press_power_button(server)
                press_at = now + PRESS_EVERY
            time.sleep(LOOK_EVERY)
        if run.cancelled():
            raise Cancelled
        if self._found(server).power_state != SHUTDOWN:
            self._libvirt.destroy(server)

    def _clean_up(self, server: str, cause: Exception) -> None:
        """After a definite failure nothing may be left; while that is not sure, it was not definite."""
        try:
            self._remove(server)
        except (VerbFailed, OSError) as error:
            raise errors.NoAnswer(f"{cause}; and what was made could not be removed: {error}") from error

    def _remove(self, server: str) -> None:
        folder = self._folder(server)
        self._libvirt.destroy(server)
        self._libvirt.undefine(server)
        if folder.exists():
            shutil.rmtree(folder)

    def _found(self, server: str) -> Found:
        self._folder(server)
        found = self._libvirt.find(server)
        if found is None:
            raise VerbFailed("The server has no guest on this host.", details=f"libvirt knows no domain {server}")
        return found

    def _folder(self, server: str) -> Path:
        """The server's folder; an id that is not a UUID never becomes a path."""
        try:
            if str(uuid.UUID(server)) == server:
                return self._instances / server
        except ValueError:
            pass
        raise VerbFailed("The server's id is not a UUID.", details=f"id {server!r}")

    def _patiently(self, run: Run, work: Callable[[], Answer]) -> Answer:
        """Repeat while libvirtd is away: what became of the last try is seen by looking again."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return work()
            except errors.NoAnswer:
                if run.cancelled():
                    raise Cancelled from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(REPEAT_EVERY)


def _state(found: Found) -> DomainState:
    return DomainState(found.server, found.power_state, found.fence)


def _tail(path: Path, limit: int) -> bytes | None:
    """The last ``limit`` bytes of what a guest wrote; None when there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            return file.read(max(0, limit))
    except FileNotFoundError:
        return None
