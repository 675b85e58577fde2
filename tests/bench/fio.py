# SPDX-License-Identifier: Apache-2.0
"""fio where there is none: Debian's own package with every library that it asks for, in a folder.

The tiny guest has busybox alone, and no image is made for a bench: what is fetched here goes into
the guest's memory over ssh, and the same bytes run on this machine. Nothing is installed.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from deploy.images.boot_disk import libraries
from deploy.progress import run

LOADER, LIBRARIES, PROGRAM = "lib64/ld-linux-x86-64.so.2", "lib", "fio"
ADVICE = "See what apt-get says; ./deploy/test updates its lists."
SIZE = "64M"
#: What is done, and how fio is told to do it; in this order, since the first one writes what the
#: last one reads.
WAYS = {
    f"{SIZE} written in blocks of 1 MiB": ("--rw=write", "--bs=1M"),
    "random writes of 4 KiB, 10 s": ("--rw=randwrite", "--bs=4k", "--runtime=10", "--time_based"),
    "random reads of 4 KiB, 10 s": ("--rw=randread", "--bs=4k", "--runtime=10", "--time_based"),
}


def fetch(folder: Path) -> dict[str, Path]:
    """Where each part is to stand -> the file on this machine, below the folder unless it was here
    already."""
    archives, tree = folder / "archives", folder / "tree"
    (archives / "partial").mkdir(parents=True)
    installed = shutil.which(PROGRAM)
    if installed is None:
        run(
            [
                "apt-get",
                "install",
                "-qq",
                "--no-install-recommends",
                "--download-only",
                f"--option=Dir::Cache::archives={archives}",
                "--option=APT::Sandbox::User=root",
                PROGRAM,
            ],
            ADVICE,
        )
        for package in archives.glob("*.deb"):
            run(["dpkg-deb", "-x", package, tree], ADVICE)
    program = Path(installed) if installed else tree / "usr/bin" / PROGRAM
    places = os.pathsep.join(str(path.parent) for path in tree.rglob("*.so.*"))
    linked = run(["ldd", program], ADVICE, env=os.environ | {"LD_LIBRARY_PATH": places})
    return {PROGRAM: program, **libraries(linked)}


def packed(parts: dict[str, Path]) -> bytes:
    """As an archive that busybox's tar unpacks."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, path in parts.items():
            archive.add(path.resolve(), name)
    return buffer.getvalue()


def laid(parts: dict[str, Path], folder: Path) -> Path:
    """The same on this machine: the folder."""
    for name, path in parts.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    return folder


def command(folder: str, file: str, way: Sequence[str]) -> list[str]:
    """fio in this folder, on this file or disk, past all caches; it answers with JSON."""
    return [
        f"{folder}/{LOADER}",
        "--library-path",
        f"{folder}/{LIBRARIES}",
        f"{folder}/{PROGRAM}",
        "--name=bench",
        f"--filename={file}",
        f"--size={SIZE}",
        "--direct=1",
        "--ioengine=psync",
        "--thread",
        "--output-format=json",
        *way,
    ]


def figure(said: str) -> str:
    """What an answer comes to."""
    [job] = json.loads(said[said.index("{") :])["jobs"]
    done = max(job["read"], job["write"], key=lambda side: int(side["io_bytes"]))
    median = done["clat_ns"]["percentile"]["50.000000"] / 1e6
    return f"{done['bw_bytes'] / 1e6:.1f} MB/s, {done['iops']:.0f} a second, p50 {median:.2f} ms"
