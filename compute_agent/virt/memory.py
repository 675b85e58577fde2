# SPDX-License-Identifier: Apache-2.0
"""A complete hypervisor in memory: the other implementation of ``virt.driver``.

Called by the agent when ``virt_driver = memory``, by tests and by the bench. Guests are records; nothing
runs. ``script`` makes any verb slow or fail, one behaviour for each call; ``calls`` tells what was asked.
With ``state_file`` the guests outlive the process, as real ones do when an agent is killed: each change is a
line written before the verb returns, and the file is read and shortened at start. All methods are thread-safe.
"""
from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from common import errors
from common.models import DomainState, GuestSpec, HostInventory, ImageRef
from compute_agent.virt.driver import RUNNING, SHUTDOWN, Cancelled, ImageReader, Run, VerbFailed

QUIET = Run(phase=lambda name: None, cancelled=lambda: False)


@dataclass(frozen=True, slots=True)
class Slow:
    """The call takes ``seconds`` more: before its effect, or between the effect and the answer."""

    seconds: float
    after: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The call raises VerbFailed before it has any effect."""

    text: str = "The hypervisor refused."
    retryable: bool = False
    details: str = "scripted"


@dataclass(slots=True)
class Guest:
    power_state: int
    fence: int
    boots: int = 0
    console: str = ""
    ignores_acpi: bool = False


class MemoryDriver:
    """Implements ``Driver``. ``guests`` may be shared by two drivers: the same host, restarted."""

    def __init__(self, host: str = "memory", *, vcpus: int = 64, memory_mb: int = 262144, disk_gb: int = 4096,
                 state_file: str | Path | None = None, script: dict[str, list[Slow | Fail]] | None = None,
                 guests: dict[str, Guest] | None = None, read_images: bool = False) -> None:
        self.size = HostInventory("memory", 1, host, vcpus, memory_mb, disk_gb)
        self.script = script if script is not None else {}
        self.calls: deque[tuple[str, str]] = deque(maxlen=100_000)
        self.guests: dict[str, Guest] = guests if guests is not None else {}
        self._boot_id = str(uuid.uuid4())
        self._read_images = read_images
        self._watchers: list[Callable[[str], None]] = []
        self._changed: deque[str] = deque()
        self._lock = threading.RLock()
        self._file = self._restore(Path(state_file)) if state_file else None

    def inventory(self) -> HostInventory:
        self._begin("inventory")
        return self.size

    def boot_id(self) -> str:
        return self._boot_id

    def domains(self) -> list[DomainState]:
        self._begin("domains")
        with self._lock:
            return [_state(server, guest) for server, guest in self.guests.items()]

    def ensure_guest(self, spec: GuestSpec, read_image: ImageReader, run: Run) -> DomainState:
        after = self._begin("ensure_guest", spec.server, run)
        if spec.image is not None and self._read_images:
            run.phase("fetching image")
            _read(spec.image, read_image, run)
        run.phase("starting")
        _pause(0, run)
        with self._lock:
            guest = self.guests.setdefault(spec.server, Guest(SHUTDOWN, spec.fence))
            state = self._start(spec.server, guest, spec.fence)
        return self._end(state, after, run)

    def ensure_running(self, server: str, fence: int, run: Run) -> DomainState:
        after = self._begin("ensure_running", server, run)
        with self._lock:
            state = self._start(server, self._guest(server), fence)
        return self._end(state, after, run)

    def ensure_stopped(self, server: str, fence: int, timeout: float, run: Run) -> DomainState:
        after = self._begin("ensure_stopped", server, run)
        self._await_shutdown(server, timeout, run)
        with self._lock:
            guest = self._guest(server)
            guest.fence = fence
            self._power(server, guest, SHUTDOWN)
        return self._end(_state(server, guest), after, run)

    def reboot(self, server: str, fence: int, timeout: float, run: Run) -> DomainState:
        after = self._begin("reboot", server, run)
        guest = self._guest(server)
        if (guest.power_state, guest.fence) != (RUNNING, fence):
            self._await_shutdown(server, timeout, run)
            with self._lock:
                guest.power_state = SHUTDOWN
                self._start(server, guest, fence)
        return self._end(_state(server, guest), after, run)

    def ensure_absent(self, server: str, fence: int) -> None:
        after = self._begin("ensure_absent", server)
        with self._lock:
            if self.guests.pop(server, None) is not None:
                self._write(server, None)
        _pause(after, QUIET)

    def console_output(self, server: str, limit: int) -> str:
        self._begin("console_output", server)
        with self._lock:
            text = self._guest(server).console
        return text.encode()[-limit:].decode(errors="replace") if limit > 0 else ""

    def watch(self, changed: Callable[[str], None]) -> None:
        self._watchers.append(changed)

    def close(self) -> None:
        self._watchers.clear()
        if self._file is not None:
            self._file.close()

    def power_off(self, server: str) -> None:
        """The guest stops by itself, as after ``poweroff`` inside it."""
        with self._lock:
            self._power(server, self._guest(server), SHUTDOWN)
        self._tell()

    def reboot_host(self) -> None:
        """The host loses its power and comes back: another boot id, and no guest runs."""
        with self._lock:
            self._boot_id = str(uuid.uuid4())
            if self._file is not None:
                self._file.write(_line("boot_id", self._boot_id))
            for server, guest in self.guests.items():
                guest.power_state = SHUTDOWN
                self._write(server, guest)

    def _begin(self, verb: str, server: str = "", run: Run = QUIET) -> float:
        """Record the call and act the next scripted behaviour; returns the seconds to wait at the end."""
        self.calls.append((verb, server))
        with self._lock:
            behaviours = self.script.get(verb)
            behaviour = behaviours.pop(0) if behaviours else None
        if isinstance(behaviour, Fail):
            raise VerbFailed(behaviour.text, details=behaviour.details, retryable=behaviour.retryable)
        if isinstance(behaviour, Slow):
            if behaviour.after:
                return behaviour.seconds
            _pause(behaviour.seconds, run)
        return 0.0

    def _end(self, state: DomainState, after: float, run: Run) -> DomainState:
        self._tell()
        if after:
            _pause(after, run)
        return state

    def _guest(self, server: str) -> Guest:
        with self._lock:
            if server not in self.guests:
                raise VerbFailed("The server has no guest on this host.", details=f"no record of {server}")
            return self.guests[server]

    def _start(self, server: str, guest: Guest, fence: int) -> DomainState:
        guest.fence = fence
        if guest.power_state != RUNNING:
            guest.boots += 1
            guest.console += f"kilonova memory guest: booting\nid: {server}\nboot: {guest.boots}\n"
        self._power(server, guest, RUNNING)
        return _state(server, guest)

    def _power(self, server: str, guest: Guest, power_state: int) -> None:
        if guest.power_state != power_state:
            self._changed.append(server)
        guest.power_state = power_state
        self._write(server, guest)

    def _tell(self) -> None:
        """Watchers are called without the lock: they may take locks of their own."""
        while self._changed:
            server = self._changed.popleft()
            for watcher in self._watchers:
                watcher(server)

    def _await_shutdown(self, server: str, timeout: float, run: Run) -> None:
        """A guest that ignores ACPI costs the whole ``timeout``; any other powers off at once."""
        guest = self._guest(server)
        if guest.power_state == RUNNING and guest.ignores_acpi:
            _pause(timeout, run)

    def _write(self, server: str, guest: Guest | None) -> None:
        """One line for one change: cheap with a thousand guests, whole even when the process is killed."""
        if self._file is not None:
            self._file.write(_line(server, guest))

    def _restore(self, path: Path) -> FileIO:
        """Read what an earlier process wrote, and write it again without what is past."""
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_bytes().splitlines() if path.exists() else []:
            server, fields = json.loads(line)
            if server == "boot_id":
                self._boot_id = fields
            elif fields is None:
                self.guests.pop(server, None)
            else:
                self.guests[server] = Guest(**fields)
        part = path.with_name(f"{path.name}.part")
        lines = [_line(server, guest) for server, guest in self.guests.items()]
        part.write_bytes(b"".join([_line("boot_id", self._boot_id), *lines]))
        os.replace(part, path)
        return FileIO(path, "a")


def _line(key: str, value: Guest | str | None) -> bytes:
    return json.dumps([key, asdict(value) if isinstance(value, Guest) else value]).encode() + b"\n"


def _state(server: str, guest: Guest) -> DomainState:
    return DomainState(server, guest.power_state, guest.fence)


def _pause(seconds: float, run: Run) -> None:
    deadline = time.monotonic() + seconds
    while not run.cancelled():
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, 0.02))
    raise Cancelled


def _read(image: ImageRef, read_image: ImageReader, run: Run) -> None:
    digest = hashlib.new(image.hash_algo) if image.hash_algo else None
    try:
        for chunk in read_image(image.id):
            if run.cancelled():
                raise Cancelled
            if digest:
                digest.update(chunk)
    except errors.NotFound as gone:
        raise VerbFailed(gone.text, details=f"image {image.id}") from gone
    if digest and digest.hexdigest() != image.hash_value:
        raise VerbFailed("The image does not have the checksum that the image service gave for it.")
