# SPDX-License-Identifier: Apache-2.0
"""fio for a guest without packages: Debian's package and its libraries in a folder.

The small test guest has only busybox. The benchmark copies these files into the guest's memory over
ssh and runs the same files on this machine. It installs no package.
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
#: Title of a workload -> options of fio. The order matters, because the first workload writes the
#: data that the last workload reads.
WAYS = {
    f"{SIZE} written in blocks of 1 MiB": ("--rw=write", "--bs=1M"),
    "random writes of 4 KiB, 10 s": ("--rw=randwrite", "--bs=4k", "--runtime=10", "--time_based"),
    "random reads of 4 KiB, 10 s": ("--rw=randread", "--bs=4k", "--runtime=10", "--time_based"),
}


def fetch(folder: Path) -> dict[str, Path]:
    """Download fio and its libraries unless this machine has fio.

    Returns:
        Path of each file in the target folder -> the file on this machine.
    """
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


def pack(parts: dict[str, Path]) -> bytes:
    """Return an archive of the files that busybox's tar can unpack."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, path in parts.items():
            archive.add(path.resolve(), name)
    return buffer.getvalue()


def copy_to_folder(parts: dict[str, Path], folder: Path) -> Path:
    """Copy the files to a folder on this machine and return the folder."""
    for name, path in parts.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    return folder


def command(folder: str, file: str, way: Sequence[str]) -> list[str]:
    """Return the command that runs fio from a folder on a file or disk, without caches.

    The output is JSON.
    """
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


def figure(output: str) -> str:
    """Return rate and median latency from fio's output."""
    [job] = json.loads(output[output.index("{") :])["jobs"]
    direction = max(job["read"], job["write"], key=lambda side: int(side["io_bytes"]))
    median = direction["clat_ns"]["percentile"]["50.000000"] / 1e6
    return f"{direction['bw_bytes'] / 1e6:.1f} MB/s, {direction['iops']:.0f} a second, p50 {median:.2f} ms"
