# SPDX-License-Identifier: Apache-2.0
"""Real guests restored from the saved memory of another guest, in a fraction of a boot's time.

An emulated guest takes seconds of CPU time to boot, and many tests only need a guest that is ready.
One guest per user data is booted, and libvirt saves its memory. Each other guest is created by the
driver and restored from that memory, after the new folder and id are written into the header. Such
a guest still has the identity of the first guest in memory and on the console. So tests of
identity, boot or written data boot their own guest.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compute_agent.verb_context import VerbContext

if TYPE_CHECKING:
    from common.domain.models import GuestSpec
    from tests.contract.virt_rigs import Rig

#: libvirt's header before the memory: magic, version, length of description and cookie together,
#: CPU state, compression, and offset of the cookie. A reserve, the description and the cookie
#: follow.
HEADER, RESERVE = struct.Struct("=16s5I"), 56
QUIET = VerbContext(report_progress=lambda name: None, cancelled=lambda: False)


@dataclass(frozen=True, slots=True)
class Saved:
    """The saved memory of ``server``, the console output, and the folder of the hypervisor."""

    server: str
    folder: Path
    file: Path
    console: bytes


def save(rig: Rig, spec: GuestSpec) -> Saved:
    """Save the memory of a ready guest without interfaces or written data. This stops the guest."""
    file = rig.folder / f"saved-{spec.server}"
    with _domain(rig.uri, spec.server) as domain:
        domain.save(str(file))
    return Saved(spec.server, rig.folder, file, _console(rig, spec.server).read_bytes())


def go_on(rig: Rig, saved: Saved, spec: GuestSpec) -> None:
    """Create this server's guest with the same hardware, and resume it from the saved memory."""
    rig.driver.ensure_guest(replace(spec, paused=True), rig.read_image, QUIET)
    rig.driver.ensure_stopped(spec.server, spec.fence, 0, QUIET)
    _console(rig, spec.server).write_bytes(saved.console)
    own = rig.folder / "goes-on"
    with saved.file.open("rb") as file, own.open("wb") as target:
        magic, version, length, is_running, compression, cookie = HEADER.unpack(
            file.read(HEADER.size)
        )
        reserve, description = file.read(RESERVE), file.read(length)
        text, rest = (
            _replace_identity(part, saved, rig, spec)
            for part in (description[:cookie], description[cookie:])
        )
        target.write(
            HEADER.pack(magic, version, len(text) + len(rest), is_running, compression, len(text))
        )
        target.write(reserve + text + rest)
        shutil.copyfileobj(file, target, 1 << 20)
    with _domain(rig.uri, spec.server) as domain:
        domain.connect().restore(str(own))
    own.unlink()
    rig.driver.ensure_guest(spec, rig.read_image, QUIET)


def _replace_identity(text: bytes, saved: Saved, rig: Rig, spec: GuestSpec) -> bytes:
    return text.replace(bytes(saved.folder), bytes(rig.folder)).replace(
        saved.server.encode(), spec.server.encode()
    )


def _console(rig: Rig, server: str) -> Path:
    return rig.folder / "instances" / server / "console.log"


@contextmanager
def _domain(uri: str, server: str) -> Iterator[Any]:
    import libvirt

    connection = libvirt.open(uri)
    try:
        yield connection.lookupByUUIDString(server)
    finally:
        connection.close()
