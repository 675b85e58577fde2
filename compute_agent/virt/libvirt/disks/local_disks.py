# SPDX-License-Identifier: Apache-2.0
"""The disks of a server other than the root disk: ephemeral disks and swap, without backing files.

Called by ``guests``, ``cold_migration``, ``incoming_migration`` and ``resizes``. To make a disk,
mkfs or mkswap formats a sparse raw file, which is then converted to the disk.

Invariant: only a rebuild replaces an existing ephemeral disk. A missing ephemeral disk is an error
and is not replaced by an empty one. The content of swap may be lost whenever the guest is off.
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
#: The guest's kernel initializes these tables later. Most of them are holes in the file already.
_EXT = ("-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", "-L")
#: File system -> program and options. The label and the file follow.
PROGRAMS: dict[str, tuple[str, ...]] = {
    **{kind: (f"mkfs.{kind}", *_EXT) for kind in ("ext2", "ext3", "ext4")},
    "xfs": ("mkfs.xfs", "-q", "-f", "-L"),
    "vfat": ("mkfs.vfat", "-n"),
    "ntfs": ("mkfs.ntfs", "--fast", "--quiet", "--force", "-L"),
    local_disks.SWAP: ("mkswap", "-L"),
}


def is_ephemeral(name: str) -> bool:
    """Return True for the name of an ephemeral disk. Its content is kept while the guest is off."""
    return name != local_disks.SWAP and NAME.fullmatch(name) is not None


def room(spec: GuestSpec) -> int:
    """Return the sizes of the root disk and all local disks in ``spec``, added up, in bytes.

    Volumes, also as root disks, are not counted. The flavor's size of the root disk counts, also 0.
    """
    root_gb = 0 if boots_from_volume(spec.volumes) else spec.flavor.root_gb
    return root_gb * GIBIBYTE + sum(disk.size_mb for disk in spec.disks) * MEBIBYTE


def present(folder: Path) -> list[Disk]:
    """Return the ephemeral and swap disks in a server's folder, ordered by name."""
    return [Disk(path) for path in sorted(folder.iterdir()) if NAME.fullmatch(path.name)]


def drop_others(folder: Path, spec: GuestSpec) -> None:
    """Remove the ephemeral and swap disks in the folder that ``spec`` does not contain."""
    names = {disk.name for disk in spec.disks}
    for disk in present(folder):
        if disk.path.name not in names:
            disks.discard(folder, disk.path.name)


def abandon(folder: Path, spec: GuestSpec) -> None:
    """Remove local disks that ``LocalDisks.prepare`` made and that were not adopted."""
    for disk in spec.disks:
        disks.abandon(folder, disk.name)


def lay_out(folder: Path, spec: GuestSpec) -> None:
    """Make empty local disks of the sizes in ``spec``, into which a live migration copies the data.

    Existing disks are replaced. The new disks have no file system.

    Raises:
        VerbFailed: A disk cannot be written.
    """
    for disk in spec.disks:
        new_disk = Disk(folder / disk.name)
        disks.blank(new_disk, disk.size_mb * MEBIBYTE)
        disks.adopt(new_disk)


@dataclass(frozen=True, slots=True)
class LocalDisks:
    """Makes local disks on this host.

    Attributes:
        default: File system of disks for which the user requests none. "" selects the file system
            by the OS of the image.
    """

    default: str = ""

    def make(self, folder: Path, spec: GuestSpec) -> None:
        """Make the server's local disks that do not exist, or raise VerbFailed if that fails."""
        self._make(folder, [disk for disk in spec.disks if not (folder / disk.name).exists()], spec)

    def prepare(
        self, folder: Path, spec: GuestSpec, requested_disks: Sequence[LocalDisk]
    ) -> list[Disk]:
        """Make these disks under temporary names, and return them. ``disks.adopt`` renames them.

        Existing disks are not changed. Repeatable.

        Raises:
            VerbFailed: A disk cannot be made, or the host lacks the program for a requested file
                system.
        """
        return [self._prepare(folder, disk, spec) for disk in requested_disks]

    def fit(self, folder: Path, spec: GuestSpec, new: bool = False) -> None:
        """Change the local disks of a guest that is off to the sizes in ``spec``. Repeatable.

        Ephemeral disks only grow. A swap disk that is missing or has another size is made anew.
        Disks that ``spec`` does not contain stay.

        Args:
            folder: Folder of the server.
            spec: The guest with the new disks.
            new: True to make a missing ephemeral disk.

        Raises:
            VerbFailed: An ephemeral disk is missing and ``new`` is False, or a disk is malformed or
                cannot be changed or made.
        """
        for disk in spec.disks:
            if not is_ephemeral(disk.name):
                self._fit_swap(folder, disk, spec)
            elif new and not (folder / disk.name).exists():
                self._make(folder, [disk], spec)
            else:
                disks.grow(disks.existing(folder, disk.name), disk.size_mb // 1024)

    def _fit_swap(self, folder: Path, disk: LocalDisk, spec: GuestSpec) -> None:
        swap = Disk(folder / disk.name)
        if not swap.path.exists() or disks.size(swap) != disk.size_mb * MEBIBYTE:
            self._make(folder, [disk], spec)

    def _make(self, folder: Path, requested_disks: Sequence[LocalDisk], spec: GuestSpec) -> None:
        try:
            for new_disk in self.prepare(folder, spec, requested_disks):
                disks.adopt(new_disk)
        finally:
            abandon(folder, spec)

    def _prepare(self, folder: Path, disk: LocalDisk, spec: GuestSpec) -> Disk:
        new_disk = Disk(folder / disk.name)
        program, *options = self._select_program(disk, spec)
        raw = disks.aside(folder / f"{disk.name}.raw")
        try:
            raw.unlink(missing_ok=True)
            raw.touch(0o600)
            with raw.open("r+b") as file:
                file.truncate(disk.size_mb * MEBIBYTE)
            disks.run_bounded(program, *options, disk.name, str(raw))
            disks.fill(new_disk, raw)
        except OSError as error:
            raise VerbFailed(
                "The host could not make a disk of the server.",
                details=f"{raw}: {error}",
                retryable=True,
            ) from error
        finally:
            raw.unlink(missing_ok=True)
        return new_disk

    def _select_program(self, disk: LocalDisk, spec: GuestSpec) -> tuple[str, ...]:
        """Return the program that formats the disk, with its options.

        If neither the user nor the operator requested a file system, and the host cannot make the
        file system for the image's OS, the result is the program for "vfat"
        (``common.domain.local_disks.OTHERWISE``).

        Raises:
            VerbFailed: The host lacks the program for the file system that was requested.
        """
        os_type = spec.image.properties.get("os_type", "") if spec.image else ""
        kind = local_disks.format_of(disk, os_type, self.default)
        if kind in PROGRAMS and shutil.which(PROGRAMS[kind][0]):
            return PROGRAMS[kind]
        if disk.format or self.default:
            raise VerbFailed(
                f"The host cannot make file systems of kind {kind}, which a disk of the server needs.",
                retryable=True,
                details=f"the host has no program mkfs.{kind}; install it",
            )
        return PROGRAMS[local_disks.OTHERWISE]
