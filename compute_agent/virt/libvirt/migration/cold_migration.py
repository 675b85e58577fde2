# SPDX-License-Identifier: Apache-2.0
"""A guest's files on their way between hosts: what one host gives, and what becomes of it at the
other.

Called by ``virt.libvirt.driver``; ``incoming_migration`` takes base and config drive of a guest
that comes while it runs. The parts are ``config``, ``disk``, the overlay alone, as the file it is,
the ephemeral disks, and what lies under the overlay, whose name says its content
(``backing_files``): which image the server is of now, or was made of, is not asked. Swap is made
anew. The offer is a file in the server's
folder: who may read, by the hash of a secret, and the fence under which it was made.
Must stay true: a disk is given away only while no QEMU of ours has it, which is seen again and
again while it is read; and what another host sent has its own name here only when it is whole,
inspected, and stands on our own base.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from common.domain import errors
from common.domain.command_progress import CommandPhase
from common.domain.json_types import JsonObject
from common.domain.models import GuestSpec, ImageRef
from compute_agent.transfer import sparse
from compute_agent.verb_context import Cancelled, ImageReader, Part, Peer, VerbContext, VerbFailed
from compute_agent.virt.libvirt.disks import backing_files, disks, local_disks
from compute_agent.virt.libvirt.disks.background_reads import read_in_background
from compute_agent.virt.libvirt.disks.images import GIBIBYTE, CachedImage, ImageCache, ImageMissing
from compute_agent.virt.libvirt.disks.local_disks import LocalDisks
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import Connection
from compute_agent.virt.libvirt.guests.guests import open_folder, root_disk
from compute_agent.virt.libvirt.xml import running_domain
from compute_agent.virt.libvirt.xml.domain_xml import Disk
from compute_agent.virt.volumes import boots_from_volume

LOG = logging.getLogger(__name__)
OFFER, CONFIG, DISK = "offer", "config", disks.ROOT_DISK
MAX_OFFER_BYTES, LOOK_SECONDS = 4096, 1.0


# --- at the source ---
def offer(libvirt: Connection, folder: Path, server: str, fence: int, secret: str) -> JsonObject:
    """Let whoever brings the secret read; how much there is."""
    found = power.find(libvirt, server)
    if found.saved:
        raise VerbFailed(
            "The server is suspended, and its memory cannot move with its files; resume it first."
        )
    _write(folder / OFFER, json.dumps({"sha256": _hash(secret), "fence": fence}).encode())
    return {"bytes": sum(part.bytes for part in parts(libvirt, folder, server, secret))}


def withdraw(folder: Path) -> None:
    """Nobody may read any more."""
    (folder / OFFER).unlink(missing_ok=True)


def parts(libvirt: Connection, folder: Path, server: str, secret: str) -> list[Part]:
    """What may be read with the secret. Raises errors.Forbidden."""
    return [_part(name, path) for name, path in _offered(libvirt, folder, server, secret).items()]


def _part(name: str, path: Path) -> Part:
    """What is gone here has no bytes; of a base another host may have them, by its name."""
    return (
        Part(name, path.stat().st_size, sparse.data_bytes(path))
        if path.exists()
        else Part(name, 0, 0)
    )


def read_part(
    libvirt: Connection, folder: Path, server: str, secret: str, name: str
) -> Iterator[tuple[int, bytes]]:
    """The data of a part, as long as it may be read. Raises errors.Forbidden, errors.NotFound."""
    path = _offered(libvirt, folder, server, secret).get(name)
    if path is None:
        raise errors.NotFound("The server has no such file.")
    looked = time.monotonic()
    for piece in sparse.pieces(path, path.stat().st_size):
        if time.monotonic() - looked > LOOK_SECONDS:
            _still_offered(libvirt, folder, server, secret, name)
            looked = time.monotonic()
        yield piece
    # Once more, so that whoever has read to the end knows that nothing was written meanwhile.
    _still_offered(libvirt, folder, server, secret, name)


def _still_offered(libvirt: Connection, folder: Path, server: str, secret: str, name: str) -> None:
    if name not in _offered(libvirt, folder, server, secret):
        raise errors.Forbidden("The server was started while its disk was read.")


def _offered(libvirt: Connection, folder: Path, server: str, secret: str) -> dict[str, Path]:
    """Name -> file. Of a guest that is active only what it cannot change."""
    try:
        with (folder / OFFER).open("rb") as file:
            offer_record = json.loads(file.read(MAX_OFFER_BYTES))
    except FileNotFoundError:
        offer_record = {"sha256": "", "fence": -1}
    found = libvirt.find(server)
    is_right = hmac.compare_digest(offer_record["sha256"], _hash(secret))
    if not is_right or found is None or found.fence > offer_record["fence"]:
        raise errors.Forbidden("Nothing of the server is offered under this secret.")
    described = libvirt.describe(server, stored=True)
    # One that boots from a volume has none of its own.
    disk = next(
        (one for one in running_domain.disks(described).values() if one.path == folder / DISK), None
    )
    files = {CONFIG: folder / CONFIG, **({DISK: disk.path} if disk and not found.active else {})}
    # One that is lost is offered too, and refused there: it must not be taken for one that never
    # was.
    ephemeral = (
        {}
        if found.active
        else {
            one.path.name: one.path
            for one in running_domain.disks(described).values()
            if local_disks.is_ephemeral(one.path.name)
        }
    )
    return {
        **{name: path for name, path in files.items() if path.exists()},
        **ephemeral,
        **({disk.base.name: disk.base} if disk and disk.base else {}),
    }


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


# --- at the destination ---
def prepare(
    images: ImageCache,
    folder: Path,
    spec: GuestSpec,
    peer: Peer | None,
    read_image: ImageReader,
    context: VerbContext,
) -> None:
    """Space, and what lies under the disk; ``peer`` None: storage is shared, and the files are
    here."""
    if peer is None:
        if (own := root_disk(folder, spec)) is not None:
            disks.verify(own, context)
        return
    disks.require_space(folder, local_disks.room(spec))
    if not boots_from_volume(spec.volumes):
        fetch_base(images, spec, Copy(peer, spec.server, context, ()), read_image)


def receive(
    images: ImageCache,
    folder: Path,
    spec: GuestSpec,
    peer: Peer | None,
    read_image: ImageReader,
    context: VerbContext,
    local: LocalDisks,
) -> JsonObject:
    """The server's files here, whole; nobody has them open."""
    if peer is None:
        if (here := root_disk(folder, spec)) is not None:
            disks.verify(here, context)
            disks.grow(here, spec.flavor.root_gb)
        open_folder(folder)
        local.fit(folder, spec, new=True)
        return {"bytes": 0}
    has_disk = not boots_from_volume(spec.volumes)
    copy = Copy(
        peer,
        spec.server,
        context,
        (*((CONFIG,) if spec.config_drive else ()), *((DISK,) if has_disk else ())),
        tuple(one.name for one in spec.disks if local_disks.is_ephemeral(one.name)),
    )
    disks.require_space(folder, copy.left)
    open_folder(folder)
    drive = folder / CONFIG
    try:
        image = fetch_base(images, spec, copy, read_image) if has_disk else None
        if spec.config_drive:
            copy.fetch(CONFIG, disks.aside(drive))
        disk = disks.planned(folder, image)
        if has_disk:
            copy.fetch(DISK, disks.aside(disk.path))
            disks.take_in(disk, image, spec.flavor.root_gb)
        beside = _beside(folder, spec, copy, local)
        if context.cancelled():
            raise Cancelled
        if spec.config_drive:
            os.replace(disks.aside(drive), drive)
        for one in (*([disk] if has_disk else []), *beside):
            disks.adopt(one)
    finally:
        disks.abandon(folder)
        local_disks.abandon(folder, spec)
        disks.aside(drive).unlink(missing_ok=True)
    return {"bytes": copy.travelled}


def _beside(folder: Path, spec: GuestSpec, copy: Copy, local: LocalDisks) -> list[Disk]:
    """The disks beside the root disk, aside: those that the other host offers, and new ones where
    it has none."""
    there = [
        one for one in spec.disks if local_disks.is_ephemeral(one.name) and copy.offers(one.name)
    ]
    for one in there:
        disk = Disk(folder / one.name)
        if not copy.has(one.name):
            raise VerbFailed(
                "A disk of the server is not on its host's storage any more.",
                details=f"no {one.name}",
            )
        copy.fetch(one.name, disks.aside(disk.path))
        disks.take_in(disk, None, one.size_mb // 1024)
    return [
        *(Disk(folder / one.name) for one in there),
        *local.prepare(folder, spec, [one for one in spec.disks if one not in there]),
    ]


def fetch_base(
    images: ImageCache, spec: GuestSpec, copy: Copy, read_image: ImageReader
) -> CachedImage | None:
    """What lies under the server's disk, as the host that has it says: from the cache, from the
    image service where the server's image has the same content, or from that host. Whoever it came
    from, it is verified like any image."""
    base = copy.base
    if base is None:
        return None
    name, content = base
    most = spec.flavor.root_gb * GIBIBYTE
    if spec.image and backing_files.same_content(spec.image, content):
        try:
            return images.fetch(spec.image, most, read_image, copy.context)
        except (ImageMissing, errors.Unavailable) as problem:
            if not copy.has(name):
                raise
            LOG.info("the image of server %s comes from its host: %s", spec.server, problem)
    return images.fetch(content, most, lambda image: copy.whole(name), copy.context)


class Copy:
    """Files of one server that come from a peer. ``names``: those that it must have, and ``others``
    that it may have, of which progress is told; ``left``: how much of them is still to come;
    ``travelled``: all that came, in bytes."""

    def __init__(
        self,
        peer: Peer,
        server: str,
        context: VerbContext,
        names: tuple[str, ...],
        others: tuple[str, ...] = (),
    ) -> None:
        self._peer, self._server, self.context = peer, server, context
        context.phase(CommandPhase.COPYING_FILES, 0)
        self._offered = {
            part.name: part
            for part in read_in_background(f"parts-{server}", lambda: iter(peer.parts()), context)
        }
        self._total = self.left = sum(
            self._part(name).bytes for name in (*names, *filter(self.offers, others))
        )
        self.travelled = 0

    @property
    def base(self) -> tuple[str, ImageRef] | None:
        """The part that lies under the disk, and its content; None when the disk stands on
        nothing."""
        for name in self._offered:
            if content := backing_files.image_of(name):
                return name, content
        return None

    def offers(self, name: str) -> bool:
        """Whether the peer says that it has the part."""
        return name in self._offered

    def has(self, name: str) -> bool:
        """Whether there is something of the part."""
        return self._part(name).size > 0

    def fetch(self, name: str, path: Path) -> None:
        """Write a part into a file of ours, with its holes, and read it back: that the host can
        read every byte of it is known before the other host may remove its own."""
        size = self._part(name).size
        try:
            with closing(
                read_in_background(
                    f"copy-{self._server}", lambda: self._peer.read(name), self.context
                )
            ) as pieces:
                stored = sparse.write(path, size, self._counted(pieces))
            for count in sparse.proved(path, stored):
                if self.context.cancelled():
                    raise Cancelled
                self.context.phase(
                    CommandPhase.VERIFYING_FILES, 100 * count // max(self._part(name).bytes, 1)
                )
        except (OSError, ValueError) as error:
            raise VerbFailed(
                "The host could not store the server's files.",
                retryable=True,
                details=f"{path}: {error}",
            ) from error

    def whole(self, name: str) -> Iterator[bytes]:
        """All bytes of a part."""
        for data in sparse.filled(self._part(name).size, self._peer.read(name)):
            self.travelled += len(data)
            yield data

    def _counted(self, pieces: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        for offset, data in pieces:
            yield offset, data
            self.travelled += len(data)
            self.left = max(0, self.left - len(data))
            done = self._total - self.left
            self.context.phase(CommandPhase.COPYING_FILES, 100 * done // max(self._total, 1))
            self.context.report_migration(
                {"disk_total": self._total, "disk_processed": done, "disk_remaining": self.left}
            )

    def _part(self, name: str) -> Part:
        if name not in self._offered:
            raise VerbFailed(
                "The host that has the server does not offer all of its files.",
                details=f"no part {name!r} among {', '.join(sorted(self._offered)) or 'none'}",
            )
        return self._offered[name]
