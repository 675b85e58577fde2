# SPDX-License-Identifier: Apache-2.0
"""The images of test guests.

The tests cover their disks and archives, the packages that their builds need, and the fingerprint
that decides about a rebuild.
"""

from __future__ import annotations

import importlib.util
import lzma
import subprocess
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from deploy import packages
from deploy.images import boot_disk

IMAGES = Path(boot_disk.__file__).parent
BUILDS = sorted(IMAGES.glob("*/build"))
MIB = 1 << 20


def load_script(script: Path) -> ModuleType:
    loader = SourceFileLoader(f"build_{script.parent.name}", str(script))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def read_entries(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """Return the entries of a "newc" cpio archive: name -> (mode, content)."""
    contents: dict[str, tuple[int, bytes]] = {}
    at = 0
    while "TRAILER!!!" not in contents:
        assert archive[at : at + 6] == b"070701"
        numbers = [
            int(archive[at + 6 + 8 * field : at + 14 + 8 * field], 16) for field in range(13)
        ]
        mode, size, name_size = numbers[1], numbers[6], numbers[11]
        start = at + 110 + name_size
        name = archive[at + 110 : start - 1].decode()
        start += -start % 4
        contents[name] = (mode, archive[start : start + size])
        at = start + size + -size % 4
    return contents


@pytest.mark.parametrize("script", BUILDS, ids=lambda path: path.parent.name)
def test_image_build_lists_required_packages_and_refuses_wrong_arguments(script: Path) -> None:
    assert {"busybox-static", "syslinux", "mtools", "qemu-utils"} <= set(
        packages.image_packages(script.parent.name)
    )
    done = subprocess.run([script, "one", "two"], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and (
        "usage: build OUTPUT.qcow2" in done.stderr or "is missing" in done.stderr
    )


@pytest.mark.parametrize(
    "script",
    [path for path in IMAGES.glob("*/*") if path.is_file() and b"sh\n" in path.read_bytes()[:20]],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_guest_scripts_are_valid_shell(script: Path) -> None:
    checked = subprocess.run(["sh", "-n", script], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_packages_for_test_include_packages_for_up_and_more() -> None:
    assert set(packages.for_up()) < set(packages.for_test())
    network = {"dnsmasq-base", "dnsmasq-utils", "nftables", "conntrack", "iproute2"}
    assert network | {"novnc", "dropbear-bin"} <= set(packages.for_up())
    assert {"chromium", "mmdebstrap", "tcpdump"} <= set(packages.for_test()) - set(
        packages.for_up()
    )


def test_initramfs_contains_files_and_modules_in_dependency_order(tmp_path: Path) -> None:
    tree = tmp_path / "lib/modules/6.1.0-1-cloud-amd64"
    tree.mkdir(parents=True)
    (tree / "modules.dep").write_text(
        "net/virtio_net.ko: net/failover.ko core/base.ko\ncore/base.ko:\n"
        "net/failover.ko: core/base.ko\nfs/nls-x.ko:\nfs/isofs.ko.xz: core/base.ko\n"
    )
    for name in ("net/virtio_net.ko", "net/failover.ko", "core/base.ko", "fs/nls-x.ko"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(name)
    (tree / "fs/isofs.ko.xz").write_bytes(lzma.compress(b"fs/isofs.ko"))
    kernel = tmp_path / "boot/vmlinuz-6.1.0-1-cloud-amd64"
    if not boot_disk.BUSYBOX.exists():
        pytest.skip("busybox-static is not installed")
    archive_entries = read_entries(
        boot_disk.initramfs(
            ["bin"], {"init": b"#!/bin/sh\n"}, kernel, ["virtio_net", "nls_x", "isofs", "builtin"]
        )
    )
    assert archive_entries["init"] == (0o100755, b"#!/bin/sh\n")
    assert (
        archive_entries["bin/sh"] == (0o120777, b"busybox") and archive_entries["bin"][0] == 0o40755
    )
    assert (
        archive_entries["modules/order"][1]
        == b"base.ko\nfailover.ko\nvirtio_net.ko\nnls-x.ko\nisofs.ko\n"
    )
    assert archive_entries["modules/isofs.ko"][1] == b"fs/isofs.ko"
    assert archive_entries["modules/failover.ko"][1] == b"net/failover.ko"


@pytest.mark.skipif(not boot_disk.BOOT_CODE.exists(), reason="syslinux-common is not installed")
def test_strip_module_removes_signature_and_btf_types_of_kernel_module() -> None:
    plain = b"\x7fELF code\0.text\0.data\0"
    assert boot_disk.strip_module(plain) == plain
    signed = b"\x7fELF code\0.text\0.BTF\0.data\0" + b"PKCS7~Module signature appended~\n"
    lean_module = boot_disk.strip_module(signed)
    assert b".BTF\0" not in lean_module and not lean_module.endswith(b"appended~\n")
    assert lean_module.startswith(b"\x7fELF code\0.text\0") and lean_module.index(
        b".data"
    ) == signed.index(b".data")


@pytest.mark.parametrize(
    ("root_size", "partitions"),
    [
        (8 * MIB, [(0x80, 0x0E, 1, 39), (0, 0x83, 40, 8)]),
        (800 * MIB, [(0x80, 0x0E, 1, 39), (0, 0x83, 40, 800)]),
    ],
    ids=["tiny", "debian"],
)
def test_master_boot_record_contains_partitions(
    root_size: int, partitions: list[tuple[int, ...]]
) -> None:
    record = boot_disk.master_boot_record(root_size)
    assert len(record) == 512 and record[510:] == b"\x55\xaa"
    rows = [record[446 + 16 * number : 462 + 16 * number] for number in range(4)]
    assert [
        (
            row[0],
            row[4],
            int.from_bytes(row[8:12], "little") * 512 // MIB,
            int.from_bytes(row[12:], "little") * 512 // MIB,
        )
        for row in rows
        if any(row)
    ] == partitions


def test_libraries_of_ldd_output_go_to_lib_and_loader_keeps_its_folder() -> None:
    ldd_output = (
        "\tlinux-vdso.so.1 (0x00007f)\n\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f)\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n"
    )
    assert boot_disk.libraries(ldd_output) == {
        "lib/libz.so.1": Path("/lib/x86_64-linux-gnu/libz.so.1"),
        "lib64/ld-linux-x86-64.so.2": Path("/lib64/ld-linux-x86-64.so.2"),
    }


def test_fingerprint_of_image_build_changes_with_every_file(tmp_path: Path) -> None:
    own, installed = tmp_path / "own", tmp_path / "installed"
    own.write_text("a")
    installed.write_text("a")
    first = boot_disk.fingerprint([own], [installed])
    assert boot_disk.fingerprint([own], [installed]) == first
    own.write_text("b")
    second = boot_disk.fingerprint([own], [installed])
    installed.write_text("ab")
    assert len({first, second, boot_disk.fingerprint([own], [installed])}) == 3


def test_debian_build_uses_mirrors_and_proxy_of_this_machine() -> None:
    build = load_script(IMAGES / "debian/build")
    sources = (
        "http://a/debian/ bookworm main\nhttp://a/debian/ bookworm main\nhttp://a/debian/ bookworm contrib\n"
        "http://a/security/ bookworm-security main\nhttp://b/tools cloud-bookworm main\nhttp://c/ trixie main\n"
    )
    assert build.mirrors(sources, "bookworm") == [
        "deb http://a/debian/ bookworm main",
        "deb http://a/security/ bookworm-security main",
    ]
    assert build.mirrors(sources, "trixie") == ["deb http://c/ bookworm main"]
    assert build.mirrors("", "bookworm") == []
    apt_config = (
        'Acquire "";\nAcquire::http::Proxy "http://p:3128";\nAcquire::https::CaInfo "/ca";\n'
        'Acquire::http::Proxy "";\nAcquire::http::Timeout "9";\n'
    )
    assert build.apt_options(apt_config) == [
        'Acquire::http::Proxy "http://p:3128";',
        'Acquire::https::CaInfo "/ca";',
    ]


def test_debian_image_has_no_keys_or_configuration_of_build_machine(tmp_path: Path) -> None:
    build = load_script(IMAGES / "debian/build")
    for name in (
        "etc/ssh/ssh_host_rsa_key",
        "etc/apt/sources.list",
        "etc/apt/apt.conf.d/99mmdebstrap",
        "etc/resolv.conf",
        "etc/hostname",
        "etc/systemd/system/kept.timer",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("of the maker")
    build.customize(tmp_path)
    assert [
        path.name
        for path in tmp_path.rglob("*")
        if path.is_file() and path.read_text() == "of the maker"
    ] == ["kept.timer"]
    assert (tmp_path / "etc/systemd/system/apt-daily.timer").readlink() == Path("/dev/null")
    assert (tmp_path / "etc/resolv.conf").is_symlink()
