# SPDX-License-Identifier: Apache-2.0
"""The config drive: a small disk that tells a guest who it is.

Made by the virt drivers when a server asks for one. What it holds, path by path, comes from
``common.domain.instance_data``, which serves the metadata service too; here it is written as a disk
labelled ``config-2``: ISO 9660 with Joliet and Rock Ridge (a CD-ROM), or VFAT (a disk), as the
operator chose. Must stay true: the image appears whole or not at all, readable to its owner alone;
paths are ours, never a tenant's.
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
#: The programs that make VFAT, and Debian's packages of them.
PROGRAMS = {"mkfs.vfat": "dosfstools", "mcopy": "mtools"}
# sparse; user data and five files of 10 KiB, in eleven versions, fit many times
VFAT_BYTES = 64 * 1024**2
PROGRAM_TIMEOUT_SECONDS = 60


@dataclass(frozen=True, slots=True)
class ConfigDrives:
    """How config drives are made on this host: their ``format``, what the operator tells all guests
    (None: nothing), and the services that are asked for each."""

    format: str = ISO9660
    vendor: JsonObject | None = field(default_factory=dict)
    dynamic: Dynamic | None = None

    @property
    def is_disk(self) -> bool:
        """Whether guests find it as a disk instead of a CD-ROM."""
        return self.format == VFAT

    def build(self, spec: GuestSpec, path: Path) -> None:
        """Write the drive to ``path``. OSError when the disk is full, a program that makes it
        fails, or a service that must be asked says nothing."""
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
        """What the services say, asked once for all versions of the document."""
        if self.dynamic is None:
            return {}
        try:
            return self.dynamic.of(InstanceData(spec).facts())
        except errors.Unavailable as problem:
            raise OSError(problem.text) from problem


def opened(
    drive_format: str, vendor: JsonObject | None, dynamic: Dynamic | None = None
) -> ConfigDrives:
    """As configured. ConfigError names what is missing and what to do."""
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
    short: dict[str, str] = {}
    for name, data in files.items():
        *folders, leaf = name.split("/")
        for depth in range(1, len(folders) + 1):
            folder = "/".join(folders[:depth])
            if folder not in short:
                short[folder] = f"{short.get('/'.join(folders[: depth - 1]), '')}/D{len(short):05d}"
                image.add_directory(
                    short[folder], rr_name=folders[depth - 1], joliet_path=f"/{folder}"
                )
        short[name] = f"{short['/'.join(folders)]}/F{len(short):05d}.;1"
        image.add_fp(io.BytesIO(data), len(data), short[name], rr_name=leaf, joliet_path=f"/{name}")
    with part.open("wb") as file:
        image.write_fp(file)
    image.close()


def _write_vfat(files: Mapping[str, bytes], part: Path) -> None:
    os.truncate(part, VFAT_BYTES)
    _call("mkfs.vfat", "-n", LABEL, str(part))
    with tempfile.TemporaryDirectory(dir=part.parent, prefix=f"{part.name}-") as folder:
        for name, data in files.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        tops = sorted({name.split("/")[0] for name in files})
        _call("mcopy", "-s", "-Q", "-i", str(part), *(str(Path(folder, top)) for top in tops), "::")


def _call(*command: str) -> None:
    """Raises OSError with the program's own words."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=PROGRAM_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as problem:
        raise OSError(f"{command[0]} did not end within {PROGRAM_TIMEOUT_SECONDS} s") from problem
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.decode(errors='replace')[-500:].strip()}")
