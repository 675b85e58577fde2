# SPDX-License-Identifier: Apache-2.0
"""Live migration of guests in memory.

A prepared destination has an empty record under the server's id in ``MemoryHost.incoming``. The
source releases the guest and writes the guest into the record. At its next call the destination
adds the guest to its own guests.

Invariant: at most one host has the guest active, and a released guest is handed over, even if calls
are repeated and either process is killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from common.domain import errors
from common.domain.command_progress import CommandPhase
from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import Control, DomainState, GuestSpec
from compute_agent.verb_context import MigrationAborted, Peer, VerbContext, VerbFailed
from compute_agent.virt.memory import cold_migration
from compute_agent.virt.memory.state.guest import MemoryGuest, make_guest
from compute_agent.virt.memory.state.host import MemoryHost, state_of
from compute_agent.virt.memory.state.incoming import EMPTY, folder_at
from compute_agent.virt.memory.state.script import LOOK_SECONDS, wait

MEBIBYTE = 1 << 20


# --- At the destination ---
def prepare(
    host: MemoryHost,
    spec: GuestSpec,
    peer: Peer,
    shared: bool,
    cpu: JsonObject,
    context: VerbContext,
) -> JsonObject:
    """Prepare this host for the arrival of a running guest.

    The host stores empty files for the guest, or with ``shared`` uses those on the storage, and
    removes a domain that is off. A call after the guest has arrived under this fence changes
    nothing. For the arguments see ``Driver.prepare_incoming``.

    Returns:
        {"uri": ..., "address": ...} of this host, for the source.

    Raises:
        VerbFailed: The host lacks CPU features, hardware or space, or the shared files, the
            server's guest is active on this host, or the source does not offer files.
        errors.Unavailable: This host may not start guests now, or the source does not answer.
    """
    cold_migration.refuse_impossible(host, spec)
    if missing_features := _lacking(host.size.cpu_info, cpu):
        raise VerbFailed(
            f"The destination's CPU lacks {', '.join(missing_features)}, which the server may use.",
            retryable=True,
        )
    peer.parts()
    context.require_lease()
    with host.lock:
        if shared and spec.server not in host.storage:
            raise VerbFailed("The server's files are not on this host's storage.", retryable=True)
        present_guest = host.guests.get(spec.server)
        if present_guest is None or present_guest.received != spec.fence:
            guest = make_guest(spec, {}, host.spice)
            cold_migration.lay_down(host, spec, guest)
            if shared:
                guest.disk, guest.local = (
                    host.storage[spec.server].disk,
                    host.storage[spec.server].local,
                )
            host.incoming[spec.server] = EMPTY
    wait(0, context)
    return {"uri": host.uri, "address": host.name}


def _lacking(ours: JsonObject, cpu: JsonObject) -> list[str]:
    """Return the features of ``cpu`` that ``ours`` lacks, sorted.

    If the architectures differ, the result is only that of ``cpu``: ["the architecture aarch64"].
    """
    if "arch" in cpu and cpu["arch"] != ours.get("arch"):
        return [f"the architecture {cpu['arch']}"]
    return sorted(set(cpu.get("features", ())) - set(ours.get("features", ())))


def finish(host: MemoryHost, spec: GuestSpec) -> DomainState:
    """Change the guest that has arrived to ``spec``, except for the volumes, and record the fence.

    Raises:
        VerbFailed: No guest has arrived, or the hardware is not supported.
    """
    with host.lock:
        guest = host.guests.get(spec.server)
        if guest is None:
            raise VerbFailed(
                "The server did not arrive on this host.", details=f"no domain {spec.server}"
            )
        guest.dress(spec, host.spice)
        guest.fence = spec.fence
        host.write(spec.server, guest)
        return state_of(spec.server, guest)


# --- At the source ---
def migrate(
    host: MemoryHost,
    spec: GuestSpec,
    to: JsonMapping,
    shared: bool,
    context: VerbContext,
    pass_by: Callable[[float, VerbContext], None],
) -> int:
    """Hand the guest over to the destination, unless an earlier call has done so.

    Args:
        host: The source.
        spec: The guest as it will be at the destination.
        to: Result of ``prepare`` at the destination.
        shared: True if both hosts share the storage.
        context: Context of the verb.
        pass_by: Waits for the duration of the migration, see ``progress``.

    Returns:
        The number of bytes of memory, and of the disk unless ``shared``.

    Raises:
        VerbFailed: The guest is off or does not exist, or the destination is not prepared or cannot
            be reached. The guest is unchanged.
        MigrationAborted: A user aborted the migration. The guest is unchanged.
        errors.Unavailable: The guest was released, and the destination cannot be reached. Or this
            host may not start guests now, and the guest is unchanged.
    """
    with host.lock:
        left_files = host.files.get(spec.server)
        has_left = (
            spec.server not in host.guests and left_files is not None and bool(left_files.left)
        )
        guest = left_files if has_left and left_files else host.active_guest(spec.server)
    if not has_left:
        context.phase(CommandPhase.MIGRATING)
        pass_by(0, context)
        context.require_lease()
    _hand_over(host, spec, guest, to["uri"], shared)
    return guest.memory_mb * MEBIBYTE + (0 if shared else len(guest.disk_image()))


def progress(host: MemoryHost, server: str, shared: bool) -> Callable[[float, VerbContext], None]:
    """Return the function ``pass_by(seconds, context)``, which waits while the guest migrates.

    The function reports the progress. On a request to abort, the function raises MigrationAborted.
    On a request to complete, it returns early. If the verb is cancelled, it raises Cancelled. With
    ``shared`` no disk is copied, so the disk counts as 0 bytes.
    """
    guest = host.guests.get(server)
    totals = {
        "memory": guest.memory_mb * MEBIBYTE if guest else 0,
        "disk": len(guest.disk_image()) if guest and not shared else 0,
    }

    def pass_by(seconds: float, context: VerbContext) -> None:
        begun = time.monotonic()
        while True:
            part = min(1.0, (time.monotonic() - begun) / seconds) if seconds else 1.0
            context.report_migration(
                {
                    f"{what}_{name}": size
                    for what, total in totals.items()
                    for name, size in (
                        ("total", total),
                        ("processed", int(total * part)),
                        ("remaining", total - int(total * part)),
                    )
                }
            )
            if context.requested_control() is Control.ABORT:
                raise MigrationAborted
            if part == 1.0 or context.requested_control() is Control.COMPLETE:
                wait(0, context)
                return
            wait(LOOK_SECONDS, context)

    return pass_by


def _hand_over(
    host: MemoryHost, spec: GuestSpec, guest: MemoryGuest, uri: str, shared: bool
) -> None:
    """Release the guest and write it to the destination's ``incoming``, unless done before.

    Raises:
        VerbFailed: The destination cannot be reached or is not prepared, or the guest is off. The
            guest is not released.
        errors.Unavailable: The guest was released, and the destination cannot be reached.
    """
    destination = host.reachable.get(uri)
    incoming = destination.incoming if destination is not None else folder_at(uri)
    if spec.server in host.guests:
        if incoming is None:
            raise VerbFailed(
                "The destination of the migration cannot be reached.",
                details=f"no host at {uri}",
                retryable=True,
            )
        if spec.server not in incoming:
            raise VerbFailed(
                "The destination is not prepared for the server.",
                retryable=True,
                details=f"{uri} expects no {spec.server}",
            )
        host.release_guest(spec.server, guest, uri)
    if incoming is None:
        raise errors.Unavailable(
            f"The destination {uri} of server {spec.server} cannot be reached; the command is repeated."
        )
    if incoming.get(spec.server) == EMPTY:
        record = asdict(replace(guest, left="", offered="", volumes=[], connected=[]))
        incoming[spec.server] = json.dumps(
            {"guest": record, "fence": spec.fence, "shared": shared}
        ).encode()
    if destination is not None:
        destination.receive_guests()
