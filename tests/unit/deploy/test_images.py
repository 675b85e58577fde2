# SPDX-License-Identifier: Apache-2.0
"""The guests' images: what their disks and archives hold, what they are made of, when they are made
anew."""

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


def loaded(script: Path) -> ModuleType:
    loader = SourceFileLoader(f"build_{script.parent.name}", str(script))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def entries(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """Name -> mode and content of a "newc" cpio archive."""
    found: dict[str, tuple[int, bytes]] = {}
    at = 0
    while "TRAILER!!!" not in found:
        assert archive[at : at + 6] == b"070701"
        numbers = [
            int(archive[at + 6 + 8 * field : at + 14 + 8 * field], 16) for field in range(13)
        ]
        mode, size, name_size = numbers[1], numbers[6], numbers[11]
        start = at + 110 + name_size
        name = archive[at + 110 : start - 1].decode()
        start += -start % 4
        found[name] = (mode, archive[start : start + size])
        at = start + size + -size % 4
    return found


@pytest.mark.parametrize("script", BUILDS, ids=lambda path: path.parent.name)
def test_each_build_names_its_packages_and_how_it_is_used(script: Path) -> None:
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
def test_scripts_of_guests_are_shell(script: Path) -> None:
    checked = subprocess.run(["sh", "-n", script], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_tests_have_all_that_the_commands_have_and_no_package_twice_is_asked_for() -> None:
    assert set(packages.for_up()) < set(packages.for_test())
    network = {"dnsmasq-base", "dnsmasq-utils", "nftables", "conntrack", "iproute2"}
    assert network | {"novnc", "dropbear-bin"} <= set(packages.for_up())
    assert {"chromium", "mmdebstrap", "tcpdump"} <= set(packages.for_test()) - set(
        packages.for_up()
    )


def test_archive_holds_what_was_given(tmp_path: Path) -> None:
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
    held = entries(
        boot_disk.initramfs(
            ["bin"], {"init": b"#!/bin/sh\n"}, kernel, ["virtio_net", "nls_x", "isofs", "builtin"]
        )
    )
    assert held["init"] == (0o100755, b"#!/bin/sh\n")
    assert held["bin/sh"] == (0o120777, b"busybox") and held["bin"][0] == 0o40755
    assert held["modules/order"][1] == b"base.ko\nfailover.ko\nvirtio_net.ko\nnls-x.ko\nisofs.ko\n"
    assert held["modules/isofs.ko"][1] == b"fs/isofs.ko"
    assert held["modules/failover.ko"][1] == b"net/failover.ko"


@pytest.mark.skipif(not boot_disk.BOOT_CODE.exists(), reason="syslinux-common is not installed")
def test_lean_module_has_neither_signature_nor_types() -> None:
    plain = b"\x7fELF code\0.text\0.data\0"
    assert boot_disk.strip_module(plain) == plain
    signed = b"\x7fELF code\0.text\0.BTF\0.data\0" + b"PKCS7~Module signature appended~\n"
    made = boot_disk.strip_module(signed)
    assert b".BTF\0" not in made and not made.endswith(b"appended~\n")
    assert made.startswith(b"\x7fELF code\0.text\0") and made.index(b".data") == signed.index(
        b".data"
    )


@pytest.mark.parametrize(
    ("root_size", "partitions"),
    [
        (8 * MIB, [(0x80, 0x0E, 1, 39), (0, 0x83, 40, 8)]),
        (800 * MIB, [(0x80, 0x0E, 1, 39), (0, 0x83, 40, 800)]),
    ],
    ids=["tiny", "debian"],
)
def test_partitions_are_in_the_first_sector(
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


def test_libraries_are_put_where_the_guest_looks() -> None:
    told = (
        "\tlinux-vdso.so.1 (0x00007f)\n\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f)\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n"
    )
    assert boot_disk.libraries(told) == {
        "lib/libz.so.1": Path("/lib/x86_64-linux-gnu/libz.so.1"),
        "lib64/ld-linux-x86-64.so.2": Path("/lib64/ld-linux-x86-64.so.2"),
    }


def test_fingerprint_follows_every_part(tmp_path: Path) -> None:
    own, installed = tmp_path / "own", tmp_path / "installed"
    own.write_text("a")
    installed.write_text("a")
    first = boot_disk.fingerprint([own], [installed])
    assert boot_disk.fingerprint([own], [installed]) == first
    own.write_text("b")
    second = boot_disk.fingerprint([own], [installed])
    installed.write_text("ab")
    assert len({first, second, boot_disk.fingerprint([own], [installed])}) == 3


def test_debian_comes_from_the_mirrors_and_by_the_proxy_of_this_machine() -> None:
    build = loaded(IMAGES / "debian/build")
    told = (
        "http://a/debian/ bookworm main\nhttp://a/debian/ bookworm main\nhttp://a/debian/ bookworm contrib\n"
        "http://a/security/ bookworm-security main\nhttp://b/tools cloud-bookworm main\nhttp://c/ trixie main\n"
    )
    assert build.mirrors(told, "bookworm") == [
        "deb http://a/debian/ bookworm main",
        "deb http://a/security/ bookworm-security main",
    ]
    assert build.mirrors(told, "trixie") == ["deb http://c/ bookworm main"]
    assert build.mirrors("", "bookworm") == []
    dumped = (
        'Acquire "";\nAcquire::http::Proxy "http://p:3128";\nAcquire::https::CaInfo "/ca";\n'
        'Acquire::http::Proxy "";\nAcquire::http::Timeout "9";\n'
    )
    assert build.apt_options(dumped) == [
        'Acquire::http::Proxy "http://p:3128";',
        'Acquire::https::CaInfo "/ca";',
    ]


def test_debian_image_keeps_nothing_of_the_machine_that_made_it(tmp_path: Path) -> None:
    build = loaded(IMAGES / "debian/build")
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
