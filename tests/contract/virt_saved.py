# SPDX-License-Identifier: Apache-2.0
"""Real guests that go on from memory that another one has left: ready in a fraction of a boot.

A boot costs an emulated guest seconds of CPU time, and many tests need no more of it than a guest
that is ready. One is booted for each user data, and libvirt saves its memory; the others, whose
driver has made them as ever, go on from there once folder and id in front of the memory are theirs.
Such a guest believes that it is the first one, and its console says so: tests of who a guest is, of
how it boots and of what it has written boot their own.
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

#: What libvirt writes before the memory: a magic word, its version, how long description and cookie
#: are together, whether the CPUs ran, the compression, where the cookie begins; then a reserve, the
#: description and the cookie.
HEADER, RESERVE = struct.Struct("=16s5I"), 56
QUIET = VerbContext(report_progress=lambda name: None, cancelled=lambda: False)


@dataclass(frozen=True, slots=True)
class Saved:
    """The memory of ``server``, and what it had said on its console. ``folder``: its
    hypervisor's."""

    server: str
    folder: Path
    file: Path
    console: bytes


def save(rig: Rig, spec: GuestSpec) -> Saved:
    """Save the memory of a guest without interfaces that is ready and has written nothing; it is
    off then."""
    file = rig.folder / f"saved-{spec.server}"
    with _domain(rig.uri, spec.server) as domain:
        domain.save(str(file))
    return Saved(spec.server, rig.folder, file, _console(rig, spec.server).read_bytes())


def go_on(rig: Rig, saved: Saved, spec: GuestSpec) -> None:
    """Make this server's guest, of the same hardware, and let it run on from the memory."""
    rig.driver.ensure_guest(replace(spec, paused=True), rig.read_image, QUIET)
    rig.driver.ensure_stopped(spec.server, spec.fence, 0, QUIET)
    _console(rig, spec.server).write_bytes(saved.console)
    own = rig.folder / "goes-on"
    with saved.file.open("rb") as file, own.open("wb") as written:
        magic, version, length, ran, compression, cookie = HEADER.unpack(file.read(HEADER.size))
        reserve, described = file.read(RESERVE), file.read(length)
        text, rest = (
            _of(part, saved, rig, spec) for part in (described[:cookie], described[cookie:])
        )
        written.write(
            HEADER.pack(magic, version, len(text) + len(rest), ran, compression, len(text))
        )
        written.write(reserve + text + rest)
        shutil.copyfileobj(file, written, 1 << 20)
    with _domain(rig.uri, spec.server) as domain:
        domain.connect().restore(str(own))
    own.unlink()
    rig.driver.ensure_guest(spec, rig.read_image, QUIET)


def _of(text: bytes, saved: Saved, rig: Rig, spec: GuestSpec) -> bytes:
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
