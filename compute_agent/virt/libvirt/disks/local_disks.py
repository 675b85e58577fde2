# SPDX-License-Identifier: Apache-2.0
"""The disks of a server beside its root disk: ephemeral ones and swap, each a qcow2 file that
stands on nothing.

Called by ``guests``, ``cold_migration``, ``incoming_migration`` and ``resizes``. A disk is made
aside: the program of its file system writes on a sparse raw file, which becomes the disk's content;
when that is whole the disk gets its name. Must stay true: an ephemeral disk that is here is made
again by a rebuild only, and one that should be here and is not is never made up in silence. What
swap held is worth nothing once its guest is off.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.domain import local_disks
from common.domain.models import GuestSpec, LocalDisk
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.disks import disks
from compute_agent.virt.libvirt.disks.images import GIBIBYTE, MEBIBYTE
from compute_agent.virt.libvirt.xml.domain_xml import Disk
from compute_agent.virt.volumes import boots_from_volume

NAME = re.compile(rf"{local_disks.EPHEMERAL}\d+|{local_disks.SWAP}")
#: Tables that the guest's kernel fills in when it has time, as far as the file's holes do not do so
#: already.
_EXT = ("-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", "-L")
#: File system -> the program that makes it, and its options; the label and the file follow.
PROGRAMS: dict[str, tuple[str, ...]] = {
    **{kind: (f"mkfs.{kind}", *_EXT) for kind in ("ext2", "ext3", "ext4")},
    "xfs": ("mkfs.xfs", "-q", "-f", "-L"),
    "vfat": ("mkfs.vfat", "-n"),
    "ntfs": ("mkfs.ntfs", "--fast", "--quiet", "--force", "-L"),
    local_disks.SWAP: ("mkswap", "-L"),
}


def is_ephemeral(name: str) -> bool:
    """Is this the name of a disk that holds what a guest that was off wants to find again?"""
    return name != local_disks.SWAP and NAME.fullmatch(name) is not None


def room(spec: GuestSpec) -> int:
    """How many bytes all disks of a server may take."""
    root_gb = 0 if boots_from_volume(spec.volumes) else spec.flavor.root_gb
    return root_gb * GIBIBYTE + sum(disk.size_mb for disk in spec.disks) * MEBIBYTE


def present(folder: Path) -> list[Disk]:
    """Those that are in a server's folder, whatever its description says."""
    return [Disk(path) for path in sorted(folder.iterdir()) if NAME.fullmatch(path.name)]


def drop_others(folder: Path, spec: GuestSpec) -> None:
    """Remove those that the server has no more."""
    names = {disk.name for disk in spec.disks}
    for disk in present(folder):
        if disk.path.name not in names:
            disks.discard(folder, disk.path.name)


def abandon(folder: Path, spec: GuestSpec) -> None:
    """Remove what was made aside and nobody adopted."""
    for disk in spec.disks:
        disks.abandon(folder, disk.name)


def lay_out(folder: Path, spec: GuestSpec) -> None:
    """Disks of the right sizes that a migration fills; what has their names goes."""
    for disk in spec.disks:
        made = Disk(folder / disk.name)
        disks.blank(made, disk.size_mb * MEBIBYTE)
        disks.adopt(made)


@dataclass(frozen=True, slots=True)
class LocalDisks:
    """How they are made on this host. ``default``: the file system of those for which nobody asked
    for one; empty: the one that goes with the image's OS."""

    default: str = ""

    def make(self, folder: Path, spec: GuestSpec) -> None:
        """All of them, each unless it is here."""
        self._make(folder, [disk for disk in spec.disks if not (folder / disk.name).exists()], spec)

    def prepare(self, folder: Path, spec: GuestSpec, wanted: Sequence[LocalDisk]) -> list[Disk]:
        """Make these aside, whatever has their names. Repeatable."""
        return [self._prepare(folder, disk, spec) for disk in wanted]

    def fit(self, folder: Path, spec: GuestSpec, new: bool = False) -> None:
        """Those of a guest that is off become as large as ``spec`` says; ephemeral ones never
        shrink. ``new``: one that is not here is made; else VerbFailed. Repeatable."""
        for disk in spec.disks:
            if not is_ephemeral(disk.name):
                self._fit_swap(folder, disk, spec)
            elif new and not (folder / disk.name).exists():
                self._make(folder, [disk], spec)
            else:
                disks.grow(disks.existing(folder, disk.name), disk.size_mb // 1024)

    def _fit_swap(self, folder: Path, disk: LocalDisk, spec: GuestSpec) -> None:
        made = Disk(folder / disk.name)
        if not made.path.exists() or disks.size(made) != disk.size_mb * MEBIBYTE:
            self._make(folder, [disk], spec)

    def _make(self, folder: Path, wanted: Sequence[LocalDisk], spec: GuestSpec) -> None:
        try:
            for made in self.prepare(folder, spec, wanted):
                disks.adopt(made)
        finally:
            abandon(folder, spec)

    def _prepare(self, folder: Path, disk: LocalDisk, spec: GuestSpec) -> Disk:
        made = Disk(folder / disk.name)
        program, *options = self._program(disk, spec)
        raw = disks.aside(folder / f"{disk.name}.raw")
        try:
            raw.unlink(missing_ok=True)
            raw.touch(0o600)
            with raw.open("r+b") as file:
                file.truncate(disk.size_mb * MEBIBYTE)
            disks.bounded(program, *options, disk.name, str(raw))
            disks.fill(made, raw)
        except OSError as error:
            raise VerbFailed(
                "The host could not make the disk.", details=f"{raw}: {error}", retryable=True
            ) from error
        finally:
            raw.unlink(missing_ok=True)
        return made

    def _program(self, disk: LocalDisk, spec: GuestSpec) -> tuple[str, ...]:
        """What makes its file system. Where nobody asked for that in so many words, one that this
        host cannot make is replaced by one that every OS reads."""
        os_type = spec.image.properties.get("os_type", "") if spec.image else ""
        kind = local_disks.format_of(disk, os_type, self.default)
        if kind in PROGRAMS and shutil.which(PROGRAMS[kind][0]):
            return PROGRAMS[kind]
        if disk.format or self.default:
            raise VerbFailed(
                f"The host cannot make file systems of kind {kind}.",
                retryable=True,
                details=f"it has no program mkfs.{kind}; install it",
            )
        return PROGRAMS[local_disks.OTHERWISE]
