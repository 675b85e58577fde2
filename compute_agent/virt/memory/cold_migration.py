# SPDX-License-Identifier: Apache-2.0
"""Cold migration of guests in memory. The destination reads their files through a ``Peer``.

A guest's files are the record, the root disk and the ephemeral disks, one part each.
``MemoryHost.files`` contains files without a domain.

Invariant: incomplete files are not used.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import asdict, replace

from common.domain import errors
from common.domain.command_progress import CommandPhase
from common.domain.json_types import JsonObject
from common.domain.models import DomainState, GuestSpec
from common.domain.wire import from_wire
from compute_agent.verb_context import Part, Peer, VerbContext, VerbFailed
from compute_agent.virt.driver import SHUTDOWN, required_hardware
from compute_agent.virt.interfaces import plugs
from compute_agent.virt.memory import power
from compute_agent.virt.memory.state.guest import MemoryGuest, read_disk
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import wait

#: Names of the parts that every guest has.
DISK, RECORD = "disk", "guest"
CHUNK_BYTES = 1 << 20


# --- At the source ---
def offer(host: MemoryHost, server: str, secret: str, context: VerbContext) -> JsonObject:
    """Let hosts with the secret read the guest's files, and return {"bytes": total size}.

    An active guest offers only the record. Earlier secrets become invalid.

    Raises:
        VerbFailed: The guest is suspended or does not exist.
    """
    with host.lock:
        guest = host.guest(server)
        if guest.saved:
            raise VerbFailed(
                "The server is suspended, and its saved memory cannot move with its files; resume the server first."
            )
        guest.offered = _hash(secret)
        host.write(server, guest)
        size = sum(map(len, _contents(guest).values()))
    wait(0, context)
    return {"bytes": size}


def parts(host: MemoryHost, server: str, secret: str) -> list[Part]:
    """Return the guest's files that are offered under this secret.

    An active guest has only the record.

    Raises:
        Forbidden: No files are offered under this secret.
    """
    with host.lock:
        contents = _contents(_require_offer(host, server, secret))
    return [Part(name, len(content), len(content)) for name, content in contents.items()]


def read_part(host: MemoryHost, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
    """Return (offset, chunk) of each chunk of a part, in rising order.

    Raises:
        Forbidden: No files are offered under this secret.
        NotFound: There is no such part.
    """
    with host.lock:
        content = _contents(_require_offer(host, server, secret)).get(name)
    if content is None:
        raise errors.NotFound(f"Server {server} has no file {name[:100]!r} to copy.")
    return ((at, content[at : at + CHUNK_BYTES]) for at in range(0, len(content), CHUNK_BYTES))


def _require_offer(host: MemoryHost, server: str, secret: str) -> MemoryGuest:
    guest = host.guests.get(server)
    if guest is None or not hmac.compare_digest(guest.offered, _hash(secret)):
        raise errors.Forbidden(f"No files of server {server} are offered under this secret.")
    return guest


def _contents(guest: MemoryGuest) -> dict[str, bytes]:
    """Return the content of a guest's parts by name. An active guest has only the record."""
    bare = {name: {**disk, "files": {}} for name, disk in guest.local.items()}
    record = json.dumps(
        asdict(replace(guest, disk={}, local=bare, offered="", volumes=[], connected=[]))
    ).encode()
    if guest.is_active:
        return {RECORD: record}
    ephemeral = {name: json.dumps(disk["files"]).encode() for name, disk in guest.ephemeral.items()}
    return {DISK: guest.disk_image(), **ephemeral, RECORD: record}


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


# --- At the destination ---
def prepare(host: MemoryHost, spec: GuestSpec, peer: Peer | None, context: VerbContext) -> None:
    """Check that this host can receive the guest, and that the source offers the guest's files.

    With ``peer`` None the files are on shared storage, and no source is checked.

    Raises:
        VerbFailed: The host lacks hardware, network bindings or disk space for the guest, or the
            source does not offer the files.
        errors.Unavailable: The source does not answer.
    """
    refuse_impossible(host, spec)
    if peer is not None:
        peer.parts()
    wait(0, context)


def refuse_impossible(host: MemoryHost, spec: GuestSpec) -> None:
    """Check that this host can have the guest.

    Raises:
        VerbFailed: The hardware or an interface is not supported, a port could not be bound, or the
            disks are larger than the whole disk space of the host.
    """
    required_hardware(spec)
    plugs(spec.interfaces)
    if spec.local_gb > host.size.disk_gb:
        raise VerbFailed(
            f"The server's disks of {spec.local_gb} GiB do not fit on this host.",
            retryable=True,
            details=f"{host.size.disk_gb} GiB in all",
        )


def receive(
    host: MemoryHost, spec: GuestSpec, peer: Peer | None, context: VerbContext
) -> JsonObject:
    """Store the guest's files on this host, once for this fence.

    With ``peer`` None the files come from shared storage, and no bytes are copied. If the files
    were received under this fence before, nothing changes.

    Returns:
        {"bytes": number of bytes copied}.

    Raises:
        VerbFailed: The files are missing or invalid, or the guest is active on this host.
        errors.Unavailable: The source does not answer.
    """
    with host.lock:
        present_guest = host.guests.get(spec.server) or host.files.get(spec.server)
    size = 0
    if present_guest is None or present_guest.received != spec.fence:
        context.phase(CommandPhase.COPYING_DISK, 0)
        guest, size = _fetch_guest(host, spec, peer, context)
        wait(0, context)
        with host.lock:
            lay_down(host, spec, guest)
            host.storage[spec.server] = guest
        context.phase(CommandPhase.COPYING_DISK, 100)
    wait(0, context)
    return {"bytes": size}


def _fetch_guest(
    host: MemoryHost, spec: GuestSpec, peer: Peer | None, context: VerbContext
) -> tuple[MemoryGuest, int]:
    """Read the guest from the source's files, or without ``peer`` from this host's storage.

    Returns:
        The guest, and the number of bytes copied.

    Raises:
        VerbFailed: The files are missing, incomplete, or do not contain a guest.
    """
    if peer is None:
        with host.lock:
            return _on_storage(host, spec.server), 0
    contents = {part.name: _read(peer, part, context) for part in peer.parts()}
    try:
        guest = from_wire(MemoryGuest, json.loads(contents[RECORD]))
        guest.disk = read_disk(contents[DISK])
        for name, disk in guest.ephemeral.items():
            disk["files"] = json.loads(contents[name])
    except (ValueError, KeyError, TypeError) as problem:
        raise VerbFailed(
            "The server's files from the source do not contain a guest.",
            details=repr(problem),
            retryable=True,
        ) from problem
    return guest, sum(map(len, contents.values()))


def _read(peer: Peer, part: Part, context: VerbContext) -> bytes:
    """Return the content of a part, with zeros in place of holes.

    Raises:
        VerbFailed: The part is incomplete.
    """
    content = bytearray(part.size)
    count = 0
    for at, chunk in peer.read(part.name):
        wait(0, context)
        content[at : at + len(chunk)] = chunk
        count += len(chunk)
    if (len(content), count) != (part.size, part.bytes):
        raise VerbFailed(
            "A file of the server arrived incomplete from the source; try again.",
            retryable=True,
            details=f"{part.name}: {count} of {part.bytes} bytes",
        )
    return bytes(content)


def lay_down(host: MemoryHost, spec: GuestSpec, guest: MemoryGuest) -> None:
    """Store the guest's files, changed to ``spec``, in place of all earlier files.

    A domain that is off is removed. The guest is recorded as off and received under this fence.

    Raises:
        VerbFailed: The guest is active on this host.
    """
    old = host.guests.get(spec.server)
    if old is not None and old.is_active:
        raise VerbFailed(
            "The server's guest runs on this host, so its files cannot be replaced; stop the guest first.",
            details=f"power state {old.power_state}",
        )
    host.drop_domain(spec.server)
    guest.dress(spec, host.spice)
    guest.power_state, guest.saved, guest.offered, guest.received = SHUTDOWN, False, "", spec.fence
    host.keep_files(spec.server, guest)


def install(host: MemoryHost, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
    """Make a guest of the files on this host, and start the guest if ``runs``.

    An active guest with the fence of ``spec`` is not defined anew and not stopped.

    Raises:
        VerbFailed: The guest is active under another fence, or this host has no files of the guest,
            cannot reach a volume, or lacks hardware or a bridge.
        errors.Unavailable: This host may not start guests now.
    """
    with host.lock:
        guest = host.guests.get(spec.server) or _own(host, spec.server)
        if guest.is_active and guest.fence != spec.fence:
            raise VerbFailed(
                "The server's guest was started on this host meanwhile; stop the guest first.",
                details=f"the guest has fence {guest.fence}, not {spec.fence}",
            )
        if not guest.is_active:
            guest.saved = False
            guest.dress(spec, host.spice)
            guest.take_volumes(spec)
            guest.fence = spec.fence
            host.keep_guest(spec.server, guest)
    return power.run_or_stop(host, spec, guest, runs, context)


def _own(host: MemoryHost, server: str) -> MemoryGuest:
    """Return the guest from the files on this host, else from the storage.

    Files of a guest that has left by live migration are not used.

    Raises:
        VerbFailed: Neither has the guest, or the guest has left.
    """
    guest = host.files.get(server)
    return guest if guest is not None and not guest.left else _on_storage(host, server)


def _on_storage(host: MemoryHost, server: str) -> MemoryGuest:
    """Return a new record of the guest whose disk is on this host's storage.

    The new record has the same disk, which any host with this storage may have made. The guest is
    off, without volumes.

    Raises:
        VerbFailed: The storage has no such disk, or the guest has left by live migration.
    """
    guest = host.storage.get(server)
    if guest is None or guest.left:
        raise VerbFailed(
            "The server's files are not on this host's storage.",
            details=f"no disk of {server}",
            retryable=True,
        )
    return replace(guest, power_state=SHUTDOWN, saved=False, offered="", volumes=[], connected=[])
