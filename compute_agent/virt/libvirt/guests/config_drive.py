# SPDX-License-Identifier: Apache-2.0
"""The config drive: a small disk with a guest's metadata.

The libvirt driver builds a config drive for each server with this option. The files come from
``common.domain.instance_data``, which also serves the metadata service. This module writes them to
a disk labelled ``config-2``, in the format that the operator chose: ISO 9660 with Joliet and Rock
Ridge (a CD-ROM), or VFAT (a disk).

Invariant: the image file appears complete or not at all, and only the owner may read the file. A
path in the image never comes from a tenant.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pycdlib

from common.clients.vendor_data import Dynamic
from common.domain import errors
from common.domain.errors import ConfigError
from common.domain.instance_data import SEED_BYTES, InstanceData
from common.domain.json_types import JsonObject
from common.domain.models import GuestSpec

LABEL = "config-2"
ISO9660, VFAT = "iso9660", "vfat"
#: The programs that make a VFAT image, and their Debian packages.
PROGRAMS = {"mkfs.vfat": "dosfstools", "mcopy": "mtools"}
# The file is sparse. User data and five files of 10 KiB in eleven versions need much less.
VFAT_BYTES = 64 * 1024**2
PROGRAM_TIMEOUT_SECONDS = 60


@dataclass(frozen=True, slots=True)
class ConfigDrives:
    """Builds config drives on this host, in the configured format.

    Attributes:
        format: ``ISO9660`` or ``VFAT``.
        vendor: Static vendor data of the operator for all guests, or None.
        dynamic: Services that are called for vendor data of each guest, or None.
    """

    format: str = ISO9660
    vendor: JsonObject | None = field(default_factory=dict)
    dynamic: Dynamic | None = None

    @property
    def is_disk(self) -> bool:
        """True if guests see the drive as a disk, False for a CD-ROM."""
        return self.format == VFAT

    def build(self, spec: GuestSpec, path: Path) -> None:
        """Write the guest's config drive to ``path``, in place of an older drive.

        Raises:
            OSError: The disk is full, a program fails, or a required vendor data service is
                unavailable.
        """
        dynamic_data = self._dynamic_data(spec)
        files = InstanceData(spec, self.vendor, lambda: dynamic_data).drive(
            secrets.token_bytes(SEED_BYTES)
        )
        part = path.with_name(f"{path.name}.part")
        part.unlink(missing_ok=True)
        part.touch(0o600)
        (_write_vfat if self.is_disk else _write_iso9660)(files, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)

    def _dynamic_data(self, spec: GuestSpec) -> JsonObject:
        """Call the vendor data services once, and return service name -> answer.

        The result is {} without services. A failed service has the answer {}. All metadata versions
        on the drive contain these answers.

        Raises:
            OSError: A service failed, and [vendor_data] dynamic_failure_fatal is set.
        """
        if self.dynamic is None:
            return {}
        try:
            return self.dynamic.of(InstanceData(spec).facts())
        except errors.Unavailable as problem:
            raise OSError(problem.text) from problem


def open_config_drives(
    drive_format: str, vendor: JsonObject | None, dynamic: Dynamic | None = None
) -> ConfigDrives:
    """Return the ``ConfigDrives`` for these options.

    Args:
        drive_format: ``ISO9660`` or ``VFAT``.
        vendor: Static vendor data, or None.
        dynamic: Services for vendor data of each guest, or None.

    Raises:
        ConfigError: A program for VFAT is missing. The text names the package to install.
    """
    missing = (
        [name for name in PROGRAMS if shutil.which(name) is None] if drive_format == VFAT else []
    )
    if missing:
        packages = ", ".join(sorted({PROGRAMS[name] for name in missing}))
        raise ConfigError(
            f"[agent] config_drive_format = vfat needs {', '.join(missing)}; install {packages}."
        )
    return ConfigDrives(drive_format, vendor, dynamic)


def _write_iso9660(files: Mapping[str, bytes], part: Path) -> None:
    image = pycdlib.PyCdlib()
    image.new(
        interchange_level=3,
        joliet=3,
        rock_ridge="1.09",
        vol_ident=LABEL,
        sys_ident="LINUX",
        app_ident_str="KILONOVA",
    )
    short_paths: dict[str, str] = {}
    for name, data in files.items():
        *folders, leaf = name.split("/")
        for depth in range(1, len(folders) + 1):
            folder = "/".join(folders[:depth])
            if folder not in short_paths:
                short_paths[folder] = (
                    f"{short_paths.get('/'.join(folders[: depth - 1]), '')}/D{len(short_paths):05d}"
                )
                image.add_directory(
                    short_paths[folder], rr_name=folders[depth - 1], joliet_path=f"/{folder}"
                )
        short_paths[name] = f"{short_paths['/'.join(folders)]}/F{len(short_paths):05d}.;1"
        image.add_fp(
            io.BytesIO(data), len(data), short_paths[name], rr_name=leaf, joliet_path=f"/{name}"
        )
    with part.open("wb") as file:
        image.write_fp(file)
    image.close()


def _write_vfat(files: Mapping[str, bytes], part: Path) -> None:
    os.truncate(part, VFAT_BYTES)
    _run_program("mkfs.vfat", "-n", LABEL, str(part))
    with tempfile.TemporaryDirectory(dir=part.parent, prefix=f"{part.name}-") as folder:
        for name, data in files.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        top_names = sorted({name.split("/")[0] for name in files})
        _run_program(
            "mcopy",
            "-s",
            "-Q",
            "-i",
            str(part),
            *(str(Path(folder, name)) for name in top_names),
            "::",
        )


def _run_program(*command: str) -> None:
    """Run a program.

    Raises:
        OSError: The program fails, is missing, or takes longer than ``PROGRAM_TIMEOUT_SECONDS``.
            After a failure the text contains the end of the program's error output.
    """
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=PROGRAM_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as problem:
        raise OSError(f"{command[0]} did not end within {PROGRAM_TIMEOUT_SECONDS} s") from problem
    if result.returncode:
        raise OSError(
            f"{command[0]} failed: {result.stderr.decode(errors='replace')[-500:].strip()}"
        )
