# SPDX-License-Identifier: Apache-2.0
"""Copies a guest's files from one host to another.

Called by ``virt.libvirt.driver``. ``incoming_migration`` copies the backing file and the config
drive of a live-migrated guest with this module.

The files are called parts: ``config``, ``disk`` (the overlay only), the ephemeral disks, and the
overlay's backing file. The name of the backing file identifies the content (see ``backing_files``),
so the server's image in the API does not matter. Swap is not copied but made anew.

The offer, a file in the server's folder at the source, permits other hosts to read the parts. The
offer contains the hash of a secret and the fence at the time of the offer.

Invariant: a disk is sent only while no QEMU on this host has the disk open. The source checks this
repeatedly during the transfer.

Invariant: a received file gets the final name only when complete, inspected, and based on this
host's own backing file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from common.domain import errors
from common.domain.command_progress import CommandPhase
from common.domain.json_types import JsonObject
from common.domain.models import GuestSpec, ImageRef
from common.service.log import get_logger
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

LOG = get_logger(__name__)
OFFER, CONFIG, DISK = "offer", "config", disks.ROOT_DISK
MAX_OFFER_BYTES, LOOK_SECONDS = 4096, 1.0


# --- at the source ---
def offer(libvirt: Connection, folder: Path, server: str, fence: int, secret: str) -> JsonObject:
    """Write the offer, which permits hosts with the secret to read the files in ``parts``.

    An earlier offer is replaced. The offer is valid until ``withdraw``, or until a later command
    raises the guest's fence above ``fence``.

    Returns:
        ``{"bytes": size of the offered files without holes}``.

    Raises:
        VerbFailed: The server is suspended or has no guest on this host.
        Forbidden: A later command has raised the guest's fence.
    """
    domain = power.find(libvirt, server)
    if domain.saved:
        raise VerbFailed(
            "The server is suspended, and its saved memory cannot move with its files; resume the server first."
        )
    _write(folder / OFFER, json.dumps({"sha256": _hash(secret), "fence": fence}).encode())
    return {"bytes": sum(part.bytes for part in parts(libvirt, folder, server, secret))}


def withdraw(folder: Path) -> None:
    """Remove the offer, if there is one. A transfer in progress fails at its next check."""
    (folder / OFFER).unlink(missing_ok=True)


def parts(libvirt: Connection, folder: Path, server: str, secret: str) -> list[Part]:
    """Return the parts that a host with the secret may read.

    Of a guest that is off these are the config drive, the root disk, its backing file and the
    ephemeral disks. Of an active guest these are the config drive and the backing file. A lost
    ephemeral disk or backing file has the size 0. A lost root disk or config drive is left out.

    Raises:
        Forbidden: There is no valid offer under this secret, or the guest does not exist.
    """
    return [
        _describe_part(name, path)
        for name, path in _list_offered(libvirt, folder, server, secret).items()
    ]


def _describe_part(name: str, path: Path) -> Part:
    """Return a part with its size and bytes of data. Both are 0 if the file is missing.

    Why: the destination may have a missing backing file in its cache, and finds the name here.
    """
    return (
        Part(name, path.stat().st_size, sparse.data_bytes(path))
        if path.exists()
        else Part(name, 0, 0)
    )


def read_part(
    libvirt: Connection, folder: Path, server: str, secret: str, name: str
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, data) of a part, without holes.

    The offer is checked before the first piece, repeatedly, and after the last piece. The reader
    may use the data only if the iteration ends without an exception.

    Raises:
        NotFound: There is no part of this name.
        Forbidden: There is no valid offer under this secret, the guest was started while a disk was
            read, or the file was lost meanwhile.
        OSError: The part cannot be read, or has the size 0 in ``parts`` because the file is lost.
    """
    path = _list_offered(libvirt, folder, server, secret).get(name)
    if path is None:
        raise errors.NotFound(f"Server {server} has no file {name[:100]!r} to copy.")
    checked_at = time.monotonic()
    for piece in sparse.pieces(path, path.stat().st_size):
        if time.monotonic() - checked_at > LOOK_SECONDS:
            _check_offer(libvirt, folder, server, secret, name)
            checked_at = time.monotonic()
        yield piece
    # Check again at the end. The reader then knows that the guest wrote nothing during the
    # transfer.
    _check_offer(libvirt, folder, server, secret, name)


def _check_offer(libvirt: Connection, folder: Path, server: str, secret: str, name: str) -> None:
    if name not in _list_offered(libvirt, folder, server, secret):
        raise errors.Forbidden(
            f"Server {server} was started while its file {name[:100]!r} was read."
        )


def _list_offered(libvirt: Connection, folder: Path, server: str, secret: str) -> dict[str, Path]:
    """Return the paths of the offered parts by name. Disks of an active guest are left out.

    Raises:
        Forbidden: There is no offer, the secret is wrong, the guest does not exist, or a later
            command has raised the guest's fence.
    """
    try:
        with (folder / OFFER).open("rb") as file:
            offer_record = json.loads(file.read(MAX_OFFER_BYTES))
    except FileNotFoundError:
        offer_record = {"sha256": "", "fence": -1}
    domain = libvirt.find(server)
    is_secret_right = hmac.compare_digest(offer_record["sha256"], _hash(secret))
    if not is_secret_right or domain is None or domain.fence > offer_record["fence"]:
        raise errors.Forbidden(f"No files of server {server} are offered under this secret.")
    xml = libvirt.describe(server, stored=True)
    # A guest that boots from a volume has no root disk.
    disk = next(
        (
            disk_entry
            for disk_entry in running_domain.disks(xml).values()
            if disk_entry.path == folder / DISK
        ),
        None,
    )
    files = {CONFIG: folder / CONFIG, **({DISK: disk.path} if disk and not domain.active else {})}
    # A lost ephemeral disk is offered too. The destination then fails, instead of making a new,
    # empty disk.
    ephemeral = (
        {}
        if domain.active
        else {
            disk_entry.path.name: disk_entry.path
            for disk_entry in running_domain.disks(xml).values()
            if local_disks.is_ephemeral(disk_entry.path.name)
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
    """Check the free space and fetch the backing file of the root disk into the image cache.

    With ``peer`` None the storage is shared and the files are here. Then the root disk is verified
    instead. A server that boots from a volume has no root disk.

    Raises:
        VerbFailed: There is not enough space, or a file is missing or damaged.
        Unavailable: The source or the image service does not answer.
        Cancelled: The verb was cancelled.
    """
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
    """Copy the server's files from the source, and grow the disks to the sizes of ``spec``.

    Swap, and ephemeral disks that the source does not offer, are made anew. With ``peer`` None the
    storage is shared and the files are here. Then nothing is copied, and the disks get the sizes of
    ``spec``.

    Returns:
        ``{"bytes": number of bytes transferred}``.

    Raises:
        VerbFailed: There is not enough space, a file is missing or damaged, or a disk cannot be
            made or grown.
        Unavailable: The source or the image service does not answer.
        Cancelled: The verb was cancelled. No disk of the server was replaced or grown.
    """
    if peer is None:
        if (shared_disk := root_disk(folder, spec)) is not None:
            disks.verify(shared_disk, context)
            disks.grow(shared_disk, spec.flavor.root_gb)
        open_folder(folder)
        local.fit(folder, spec, new=True)
        return {"bytes": 0}
    has_disk = not boots_from_volume(spec.volumes)
    copy = Copy(
        peer,
        spec.server,
        context,
        (*((CONFIG,) if spec.config_drive else ()), *((DISK,) if has_disk else ())),
        tuple(extra.name for extra in spec.disks if local_disks.is_ephemeral(extra.name)),
    )
    disks.require_space(folder, copy.left)
    open_folder(folder)
    drive = folder / CONFIG
    try:
        image = fetch_base(images, spec, copy, read_image) if has_disk else None
        if spec.config_drive:
            copy.fetch(CONFIG, disks.aside(drive))
        root = disks.plan(folder, image)
        if has_disk:
            copy.fetch(DISK, disks.aside(root.path))
            disks.take_in(root, image, spec.flavor.root_gb)
        extra_disks = _prepare_extra_disks(folder, spec, copy, local)
        if context.cancelled():
            raise Cancelled
        if spec.config_drive:
            os.replace(disks.aside(drive), drive)
        for disk in (*([root] if has_disk else []), *extra_disks):
            disks.adopt(disk)
    finally:
        disks.abandon(folder)
        local_disks.abandon(folder, spec)
        disks.aside(drive).unlink(missing_ok=True)
    return {"bytes": copy.travelled}


def _prepare_extra_disks(
    folder: Path, spec: GuestSpec, copy: Copy, local: LocalDisks
) -> list[Disk]:
    """Prepare the disks other than the root disk under temporary names, and return them.

    Ephemeral disks that the source offers are copied, and grown to the sizes of ``spec``. The
    others, and swap, are made anew. The caller renames the disks with ``disks.adopt``.

    Raises:
        VerbFailed: The source has lost an ephemeral disk, or a disk cannot be copied or made.
        Unavailable: The connection to the source is lost.
        Cancelled: The verb was cancelled.
    """
    copied_specs = [
        disk_spec
        for disk_spec in spec.disks
        if local_disks.is_ephemeral(disk_spec.name) and copy.offers(disk_spec.name)
    ]
    for disk_spec in copied_specs:
        disk = Disk(folder / disk_spec.name)
        if not copy.has(disk_spec.name):
            raise VerbFailed(
                f"The source has lost the disk {disk_spec.name} of the server, so the server cannot move; restore the "
                "disk there.",
                details=f"the source offers {disk_spec.name} without data",
            )
        copy.fetch(disk_spec.name, disks.aside(disk.path))
        disks.take_in(disk, None, disk_spec.size_mb // 1024)
    return [
        *(Disk(folder / disk_spec.name) for disk_spec in copied_specs),
        *local.prepare(
            folder, spec, [disk_spec for disk_spec in spec.disks if disk_spec not in copied_specs]
        ),
    ]


def fetch_base(
    images: ImageCache, spec: GuestSpec, copy: Copy, read_image: ImageReader
) -> CachedImage | None:
    """Return the backing file of the server's root disk from the image cache.

    The result is None if the source offers no backing file. A missing file is fetched into the
    cache first.

    The content comes from the cache, else from the image service if the server's image has the same
    content, else from the source. In every case the content is verified like an image.

    Raises:
        VerbFailed: The file cannot be fetched, is not valid, or exceeds the flavor's root disk.
        Unavailable: The source or the image service does not answer.
        Cancelled: The verb was cancelled.
    """
    base = copy.base
    if base is None:
        return None
    name, content = base
    max_bytes = spec.flavor.root_gb * GIBIBYTE
    if spec.image and backing_files.same_content(spec.image, content):
        try:
            return images.fetch(spec.image, max_bytes, read_image, copy.context)
        except (ImageMissing, errors.Unavailable) as problem:
            if not copy.has(name):
                raise
            LOG.info(
                "the image of a server is copied from the source of the move",
                server=spec.server,
                problem=problem,
            )
    return images.fetch(content, max_bytes, lambda image: copy.whole(name), copy.context)


class Copy:
    """A copy of one server's files from another host, with progress.

    Args:
        peer: The source.
        server: Id of the server.
        context: Context of the verb.
        names: Parts that the source must offer. The progress counts them.
        others: Parts that the progress counts if the source offers them.

    Attributes:
        left: Bytes of ``names`` and ``others`` still to copy.
        travelled: Bytes of all parts received so far.

    Raises:
        VerbFailed: The source does not offer the files, or a part of ``names`` is missing.
    """

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
        self._list_offered = {
            part.name: part
            for part in read_in_background(f"parts-{server}", lambda: iter(peer.parts()), context)
        }
        self._total = self.left = sum(
            self._describe_part(name).bytes for name in (*names, *filter(self.offers, others))
        )
        self.travelled = 0

    @property
    def base(self) -> tuple[str, ImageRef] | None:
        """The backing file that the source offers: name, and format and checksum from the name.

        None if the source offers no backing file.
        """
        for name in self._list_offered:
            if content := backing_files.image_of(name):
                return name, content
        return None

    def offers(self, name: str) -> bool:
        """Return True if the source lists the part, even if its file is lost."""
        return name in self._list_offered

    def has(self, name: str) -> bool:
        """Return True if the source has the part's file.

        Raises:
            VerbFailed: The source does not list the part.
        """
        return self._describe_part(name).size > 0

    def fetch(self, name: str, path: Path) -> None:
        """Receive a part into the file ``path``, with holes, and verify the file by reading it.

        An existing file is replaced. Why the verification: the source may remove the original
        afterwards, so this host must be able to read every byte.

        Raises:
            VerbFailed: The source does not offer the part, or the file cannot be written or read.
            Unavailable: The connection to the source is lost.
            Cancelled: The verb was cancelled.
        """
        size = self._describe_part(name).size
        try:
            with closing(
                read_in_background(
                    f"copy-{self._server}", lambda: self._peer.read(name), self.context
                )
            ) as pieces:
                stored = sparse.write(path, size, self._count(pieces))
            for count in sparse.verify(path, stored):
                if self.context.cancelled():
                    raise Cancelled
                self.context.phase(
                    CommandPhase.VERIFYING_FILES,
                    100 * count // max(self._describe_part(name).bytes, 1),
                )
        except (OSError, ValueError) as error:
            raise VerbFailed(
                "The destination could not store the server's files.",
                retryable=True,
                details=f"{path}: {error}",
            ) from error

    def whole(self, name: str) -> Iterator[bytes]:
        """Yield all bytes of a part from the source, with zeros for the holes.

        Raises:
            VerbFailed: The source does not offer the part.
            Unavailable: The connection to the source is lost.
        """
        for data in sparse.fill_holes(self._describe_part(name).size, self._peer.read(name)):
            self.travelled += len(data)
            yield data

    def _count(self, pieces: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        for offset, data in pieces:
            yield offset, data
            self.travelled += len(data)
            self.left = max(0, self.left - len(data))
            copied = self._total - self.left
            self.context.phase(CommandPhase.COPYING_FILES, 100 * copied // max(self._total, 1))
            self.context.report_migration(
                {"disk_total": self._total, "disk_processed": copied, "disk_remaining": self.left}
            )

    def _describe_part(self, name: str) -> Part:
        if name not in self._list_offered:
            raise VerbFailed(
                f"The source does not offer the file {name} of the server.",
                details=f"the source offers: {', '.join(sorted(self._list_offered)) or 'no files'}",
            )
        return self._list_offered[name]
