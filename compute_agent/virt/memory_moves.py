# SPDX-License-Identifier: Apache-2.0
"""Guests in memory that move while they are off: their files, through a peer.

The part of ``virt.memory`` above its host; ``memory_live`` is next. A guest's files are its record, its disk and its
ephemeral disks, a part each, and lie in ``MemoryHost.files`` where no domain is made of them. Must stay true: what
comes in part is nothing.
"""
from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from common import errors
from common.models import DomainState, GuestSpec
from common.wire import from_wire
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN, ImageReader, Part, Peer, Run, VerbFailed
from compute_agent.virt.interfaces import plugs
from compute_agent.virt.memory_guest import Guest, read_disk
from compute_agent.virt.memory_host import MemoryHost, state_of
from compute_agent.virt.memory_script import QUIET, wait
from compute_agent.virt.wanted import wanted

DISK, RECORD = "disk", "guest"
CHUNK = 1 << 20


class MemoryMoves(MemoryHost):
    """The verbs of guests that move while they are off, as ``Driver`` has them."""

    def offer(self, server: str, fence: int, secret: str, run: Run) -> dict[str, Any]:
        after = self._begin("offer", server, run)
        with self._lock:
            guest = self._guest(server)
            guest.offered = _hash(secret)
            self._write(server, guest)
            size = sum(map(len, _contents(guest).values()))
        wait(after, run)
        return {"bytes": size}

    def parts(self, server: str, secret: str) -> list[Part]:
        self._begin("parts", server)
        with self._lock:
            contents = _contents(self._offered(server, secret))
        return [Part(name, len(content), len(content)) for name, content in contents.items()]

    def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
        after = self._begin("read_part", server)
        with self._lock:
            content = _contents(self._offered(server, secret)).get(name)
        if content is None:
            raise errors.NotFound("There is no such part.")

        def chunks(content: bytes) -> Iterator[tuple[int, bytes]]:
            for at in range(0, len(content), CHUNK):
                yield at, content[at:at + CHUNK]
            wait(after, QUIET)
        return chunks(content)

    def prepare(self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, run: Run) -> dict[str, Any]:
        after = self._begin("prepare", spec.server, run)
        self._refuse_what_cannot_be(spec)
        if peer is not None:
            peer.parts()
        wait(after, run)
        return {}

    def receive(self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, run: Run) -> dict[str, Any]:
        after = self._begin("receive", spec.server, run)
        with self._lock:
            here = self.guests.get(spec.server) or self.files.get(spec.server)
        size = 0
        if here is None or here.received != spec.fence:
            run.phase("copying disk 0 %")
            guest, size = self._fetched(spec, peer, run)
            wait(0, run)
            with self._lock:
                self._lay_down(spec, guest)
                self.storage[spec.server] = guest
            run.phase("copying disk 100 %")
        wait(after, run)
        return {"bytes": size}

    def install(self, spec: GuestSpec, runs: bool, run: Run) -> DomainState:
        after = self._begin("install", spec.server, run)
        with self._lock:
            guest = self.guests.get(spec.server) or self._own(spec.server)
            if guest.power_state not in (RUNNING, PAUSED):
                guest.saved = False
                guest.dress(spec)
                guest.fence = spec.fence
                self._keep(spec.server, guest)
        return self._end(self._run_or_rest(spec, guest, runs, run), after, run)

    def _run_or_rest(self, spec: GuestSpec, guest: Guest, runs: bool, run: Run) -> DomainState:
        """The guest, described anew, is started if ``runs``, else it is off."""
        if runs:
            self._before_start(spec.server, spec.interfaces, run)
        with self._lock:
            if runs:
                return self._start(spec.server, guest, spec.fence, spec.paused)
            guest.fence = spec.fence
            self._power(spec.server, guest, SHUTDOWN)
            return state_of(spec.server, guest)

    def _offered(self, server: str, secret: str) -> Guest:
        guest = self.guests.get(server)
        if guest is None or not hmac.compare_digest(guest.offered, _hash(secret)):
            raise errors.Forbidden("The server's files are not offered under this secret.")
        return guest

    def _refuse_what_cannot_be(self, spec: GuestSpec) -> None:
        wanted(spec)
        plugs(spec.interfaces)
        if spec.flavor.disk_gb > self.size.disk_gb:
            raise VerbFailed(f"The disk of {spec.flavor.disk_gb} GiB does not fit on this host.", retryable=True,
                             details=f"{self.size.disk_gb} GiB in all")

    def _fetched(self, spec: GuestSpec, peer: Peer | None, run: Run) -> tuple[Guest, int]:
        """The guest as its files say, and how many bytes travelled."""
        if peer is None:
            with self._lock:
                return self._shared(spec.server), 0
        contents = {part.name: _read(peer, part, run) for part in peer.parts()}
        try:
            guest = from_wire(Guest, json.loads(contents[RECORD]))
            guest.disk = read_disk(contents[DISK])
            for name, disk in guest.ephemeral.items():
                disk["files"] = json.loads(contents[name])
        except (ValueError, KeyError, TypeError) as problem:
            raise VerbFailed("What came of the server's files is not a guest.", details=repr(problem),
                             retryable=True) from problem
        return guest, sum(map(len, contents.values()))

    def _lay_down(self, spec: GuestSpec, guest: Guest) -> None:
        """Files without a domain, in place of whatever was here; a domain that runs stays."""
        old = self.guests.get(spec.server)
        if old is not None and old.power_state in (RUNNING, PAUSED):
            raise VerbFailed("The server runs on this host already.", details="files for a guest that is not off")
        if self.guests.pop(spec.server, None) is not None:
            self._write(spec.server, None)
        guest.dress(spec)
        guest.power_state, guest.saved, guest.offered, guest.received = SHUTDOWN, False, "", spec.fence
        self._lay(spec.server, guest)

    def _own(self, server: str) -> Guest:
        """Of files that are here. What left this host while it ran is not the server any more."""
        found = self.files.get(server)
        return found if found is not None and not found.left else self._shared(server)

    def _shared(self, server: str) -> Guest:
        """The guest on this host's storage, whoever made it: another record of the same disk."""
        found = self.storage.get(server)
        if found is None or found.left:
            raise VerbFailed("The server's files are not on the storage of this host.", details=f"no disk of {server}",
                             retryable=True)
        return replace(found, power_state=SHUTDOWN, saved=False, offered="")

def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _contents(guest: Guest) -> dict[str, bytes]:
    """The parts of a guest; of one that runs only what it cannot change."""
    bare = {name: {**disk, "files": {}} for name, disk in guest.local.items()}
    record = json.dumps(asdict(replace(guest, disk={}, local=bare, offered=""))).encode()
    if guest.power_state in (RUNNING, PAUSED):
        return {RECORD: record}
    ephemeral = {name: json.dumps(disk["files"]).encode() for name, disk in guest.ephemeral.items()}
    return {DISK: guest.disk_image(), **ephemeral, RECORD: record}


def _read(peer: Peer, part: Part, run: Run) -> bytes:
    """A part, whole."""
    content = bytearray(part.size)
    arrived = 0
    for at, chunk in peer.read(part.name):
        wait(0, run)
        content[at:at + len(chunk)] = chunk
        arrived += len(chunk)
    if (len(content), arrived) != (part.size, part.bytes):
        raise VerbFailed("What came of the server's files is not what was sent.", retryable=True,
                         details=f"{part.name}: {arrived} of {part.bytes} bytes")
    return bytes(content)
