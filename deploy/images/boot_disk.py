# SPDX-License-Identifier: Apache-2.0
"""Bootable disks for a BIOS.

A disk has a FAT partition with syslinux, a kernel and an initramfs, then a Linux partition. The
build scripts in the folders beside this file use this module. They run on the system's Python, so
only the standard library is imported. No loop device and no mount is used, so the build works in
any container. The kernel is Debian's cloud kernel, either unpacked in build/kernel by
``deploy.packages`` or installed.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = (ROOT / "build/kernel/boot", Path("/boot"))
BUSYBOX = Path("/bin/busybox")
BOOT_CODE = Path("/usr/lib/syslinux/mbr/mbr.bin")
SECTOR, BOOT_START, BOOT_SIZE = 512, 1 << 20, 39 << 20
ROOT_START = BOOT_START + BOOT_SIZE
FAT16, LINUX = 0x0E, 0x83
#: The end of a kernel module that has a signature.
SIGNED = b"~Module signature appended~\n"
LOADER = """DEFAULT kilonova
PROMPT 0
LABEL kilonova
KERNEL vmlinuz
INITRD initrd
APPEND console=tty0 console=ttyS0,115200 nokaslr mitigations=off panic=5 random.trust_cpu=on """


def build_once(
    script: Path,
    arguments: list[str],
    make: Callable[[Path, Path, Path], None],
    own: Iterable[Path] = (),
    installed: Iterable[Path] = (),
    compressed: bool = False,
) -> int:
    """Build the image, unless it exists and was built from the same parts.

    Args:
        script: The build script. The header lists the Debian packages of the tools.
        arguments: The arguments of the command line: the path of the qcow2 image.
        make: Called as ``make(folder, kernel, disk)`` to write a raw disk.
        own: Files of this repository that go into the image.
        installed: Files from Debian packages that go into the image.
        compressed: Make a smaller image that boots more slowly.

    Returns:
        The exit status: 0, or 2 if ``arguments`` is not a single path.

    Raises:
        SystemExit: A part is missing, or a tool fails.
        FileNotFoundError: A tool is not installed.
    """
    if len(arguments) != 1:
        print("usage: build OUTPUT.qcow2", file=sys.stderr)
        return 2
    output, kernel = Path(arguments[0]).resolve(), newest_kernel()
    parts = [kernel, BUSYBOX, BOOT_CODE, *installed]
    absent = [part for part in parts if not part.exists()]
    if absent:
        raise SystemExit(
            f"{absent[0]} is missing: install the packages named at the top of {script}"
        )
    stamp, recipe = output.with_suffix(".stamp"), fingerprint([Path(__file__), script, *own], parts)
    if output.exists() and stamp.exists() and stamp.read_text() == recipe:
        return 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        disk = Path(name, "disk")
        make(Path(name), kernel, disk)
        part = Path(name, output.name)
        run(
            "qemu-img",
            "convert",
            *(["-c"] * compressed),
            "-m",
            "4",
            "-W",
            "-f",
            "raw",
            "-O",
            "qcow2",
            disk,
            part,
        )
        os.replace(part, output)
    stamp.write_text(recipe)
    return 0


def newest_kernel() -> Path:
    """Return the newest cloud kernel, by file time, of the first folder in ``KERNELS`` with one.

    Raises:
        SystemExit: There is no cloud kernel.
    """
    for folder in KERNELS:
        kernels = sorted(
            folder.glob("vmlinuz-*-cloud-amd64"), key=lambda path: path.stat().st_mtime
        )
        if kernels:
            return kernels[-1]
    raise SystemExit(
        "no vmlinuz-*-cloud-amd64 in build/kernel/boot or /boot: run ./deploy/up or ./deploy/test"
    )


def modules_of(kernel: Path) -> Path:
    """Return the folder with the modules of a kernel."""
    return kernel.parent.parent / "lib/modules" / kernel.name.removeprefix("vmlinuz-")


def fingerprint(own: Iterable[Path], installed: Iterable[Path]) -> str:
    """Return a digest that changes with any part of the image.

    Args:
        own: Files that count with their content.
        installed: Files that count with path, size and time of change.
    """
    digest = hashlib.sha256()
    for path in own:
        digest.update(path.read_bytes())
    for path in installed:
        digest.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()


def run(*command: str | Path) -> str:
    """Run a tool and return its standard output.

    Raises:
        SystemExit: The tool fails. The message contains the errors.
        FileNotFoundError: The tool is not installed.
    """
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if result.returncode != 0:
        raise SystemExit(
            f"{command[0]} failed ({result.returncode}): {result.stderr.strip() or result.stdout.strip()}"
        )
    return result.stdout


def write_boot_disk(
    disk: Path,
    kernel: Path,
    initrd: bytes,
    kernel_options: str,
    root_size: int,
    *mke2fs: str | Path,
) -> None:
    """Write a raw disk for a BIOS, whose loader starts ``kernel``.

    Args:
        disk: The path of the raw disk. Temporary files are written beside it.
        kernel: The kernel.
        initrd: The content of the initramfs.
        kernel_options: Options for the kernel, after those of ``LOADER``.
        root_size: The size of partition 2, which is ext4, in bytes.
        mke2fs: Options of mke2fs for partition 2.

    Raises:
        SystemExit: A tool fails.
        FileNotFoundError: A tool is not installed.
    """
    with disk.open("wb") as file:
        file.truncate(ROOT_START + root_size)
        file.write(master_boot_record(root_size))
    files = {
        "vmlinuz": kernel,
        "initrd": disk.with_name("initrd"),
        "syslinux.cfg": disk.with_name("syslinux.cfg"),
    }
    files["initrd"].write_bytes(initrd)
    files["syslinux.cfg"].write_text(f"{LOADER}{kernel_options}\n")
    partition = f"{disk}@@{BOOT_START}"
    run(
        "mformat",
        "-i",
        partition,
        "-T",
        str(BOOT_SIZE // SECTOR),
        "-h",
        "64",
        "-s",
        "32",
        "-H",
        str(BOOT_START // SECTOR),
        "-c",
        "8",
        "-v",
        "KILONOVA",
        "::",
    )
    for name, path in files.items():
        run("mcopy", "-i", partition, path, f"::/{name}")
    run("syslinux", "--install", "--offset", str(BOOT_START), disk)
    run(
        "mke2fs",
        "-q",
        "-t",
        "ext4",
        "-O",
        "^metadata_csum",
        *mke2fs,
        "-E",
        f"offset={ROOT_START},root_owner=0:0,lazy_itable_init=0",
        disk,
        f"{root_size >> 10}k",
    )


def master_boot_record(root_size: int) -> bytes:
    """Return a disk's first sector: the boot code, an active FAT16 (LBA) and a Linux partition.

    ``root_size`` is the size of the Linux partition in bytes.
    """
    entries = _entry(0x80, FAT16, BOOT_START, BOOT_SIZE) + _entry(0, LINUX, ROOT_START, root_size)
    return BOOT_CODE.read_bytes()[:440].ljust(446, b"\0") + entries.ljust(64, b"\0") + b"\x55\xaa"


def _entry(flag: int, kind: int, start: int, size: int) -> bytes:
    return (
        bytes((flag, 0xFE, 0xFF, 0xFF, kind, 0xFE, 0xFF, 0xFF))
        + (start // SECTOR).to_bytes(4, "little")
        + (size // SECTOR).to_bytes(4, "little")
    )


def initramfs(
    folders: Iterable[str], files: dict[str, bytes], kernel: Path, modules: Iterable[str]
) -> bytes:
    """Return an initramfs as a cpio archive.

    The archive is not compressed, because unpacking takes longer than reading. The archive has
    busybox as /bin/sh, and the modules with their dependencies in /modules. /modules/order lists
    their file names in the order in which they can be loaded.

    Args:
        folders: Folders to create, parents first. They must include bin, dev and modules.
        files: Path -> content of more files. All files are executable.
        kernel: The kernel to which the modules belong.
        modules: Names of the modules.
    """
    archive = bytearray()
    for folder in folders:
        add(archive, folder, stat.S_IFDIR | 0o755)
    add(archive, "dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    add(archive, "bin/sh", stat.S_IFLNK | 0o777, b"busybox")
    loaded = sort_modules(modules_of(kernel), modules)
    content = {f"{module_name(module)}.ko": strip_module(read_module(module)) for module in loaded}
    files = {
        "bin/busybox": BUSYBOX.read_bytes(),
        "modules/order": "".join(f"{name}\n" for name in content).encode(),
        **{f"modules/{name}": data for name, data in content.items()},
        **files,
    }
    for name, data in files.items():
        add(archive, name, stat.S_IFREG | 0o755, data)
    add(archive, "TRAILER!!!", 0)
    return bytes(archive)


def module_name(path: Path) -> str:
    """Return a module's name: virtio_net for virtio_net.ko and for Debian 13's virtio_net.ko.xz."""
    return path.name.partition(".ko")[0]


def read_module(path: Path) -> bytes:
    """Return a module's content, decompressed if the file's name ends with .xz.

    Why: the guest's busybox cannot load compressed modules.
    """
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def strip_module(module: bytes) -> bytes:
    """Return a kernel module in which the kernel finds neither a signature nor BPF types.

    The kernel would check both at each boot.
    """
    return module.removesuffix(SIGNED).replace(b"\0.BTF\0", b"\0.btf\0")


def sort_modules(tree: Path, modules: Iterable[str]) -> list[Path]:
    """Return the files of the modules and their dependencies, each after its own dependencies.

    Modules that modules.dep does not list are left out, for example built-in modules.

    Args:
        tree: The folder with the kernel's modules.
        modules: Names of the modules.
    """
    entries = {
        module_name(Path(name)): (name, rest.split())
        for name, rest in (
            line.split(":", 1) for line in (tree / "modules.dep").read_text().splitlines()
        )
    }
    ordered: list[Path] = []
    for module in modules:
        name, dependencies = next(
            (entries[key] for key in (module, module.replace("_", "-")) if key in entries), ("", [])
        )
        ordered += [
            tree / path
            for path in [*reversed(dependencies), name]
            if path and tree / path not in ordered
        ]
    return ordered


def libraries(ldd: str) -> dict[str, Path]:
    """Return the libraries in the output of ldd: path in the guest -> file on this machine."""
    loaded = {
        f"lib/{name}": Path(path)
        for name, path in re.findall(r"^\s(\S+) => (/\S+) ", ldd, re.MULTILINE)
    }
    return loaded | {
        path[1:]: Path(path) for path in re.findall(r"^\s(/lib64/\S+) ", ldd, re.MULTILINE)
    }


def add(
    archive: bytearray, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)
) -> None:
    """Append an entry to a cpio archive in the format "newc".

    Args:
        archive: The archive.
        name: The path in the archive, without a leading slash.
        mode: Type and permissions of the file.
        data: The content, or the target of a symbolic link.
        device: Major and minor number of a device.
    """
    path = name.encode() + b"\0"
    numbers = (len(archive), mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
    archive += b"070701" + b"".join(b"%08X" % number for number in numbers) + path
    archive += bytes(-len(archive) % 4) + data
    archive += bytes(-len(archive) % 4)
