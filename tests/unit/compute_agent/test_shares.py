# SPDX-License-Identifier: Apache-2.0
"""Shares on a host: what is asked of mount and systemd, what libvirt is told, and which hosts
can."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.host import capabilities
from compute_agent.virt.libvirt.host.host import has_virtiofsd
from compute_agent.virt.libvirt.xml import share_xml
from compute_agent.virt.mounts import run
from tests.contract.local_mounts import LocalMounts

LOCATION, OPTIONS = "192.0.2.9:/shares/a-b_c", "nosuid,nodev,noexec"
BARE = (
    '<domain type="kvm"><name>n</name><metadata><kilonova:server xmlns:kilonova="urn:kilonova:server:1" id="s" '
    'fence="1" /></metadata><devices><disk type="file" /></devices></domain>'
)


def parts(described: str) -> tuple[list[tuple[str, str]], list[str]]:
    """(tag, folder) of each file system; what lies under the memory."""
    root = ElementTree.fromstring(described)
    found = []
    for device in root.iterfind("devices/filesystem"):
        source, target, driver = (device.find(name) for name in ("source", "target", "driver"))
        assert source is not None and target is not None and driver is not None
        assert (device.attrib, driver.attrib) == (
            {"type": "mount", "accessmode": "passthrough"},
            {"type": "virtiofs"},
        )
        found.append((target.attrib["dir"], source.attrib["dir"]))
    return found, [
        ElementTree.tostring(one, encoding="unicode").strip()
        for one in root.iterfind("memoryBacking/*")
    ]


def test_a_domain_has_these_folders_and_no_others() -> None:
    shared = ['<source type="memfd" />', '<access mode="shared" />']
    one = share_xml.with_shares(BARE, {"a": "/1"})
    assert parts(one) == ([("a", "/1")], shared)
    two = share_xml.with_shares(one, {"a": "/1", "b": "/2"})
    assert parts(two) == ([("a", "/1"), ("b", "/2")], shared)
    assert share_xml.with_shares(two, {"a": "/1", "b": "/2"}) == two
    assert parts(share_xml.with_shares(two, {"a": "/3"})) == ([("a", "/3")], shared)
    assert share_xml.with_shares(two, {}) == share_xml.with_shares(BARE, {}), (
        "as if it never had one"
    )


def test_huge_pages_stay() -> None:
    paged = BARE.replace("<devices>", "<memoryBacking><hugepages /></memoryBacking><devices>")
    assert parts(share_xml.with_shares(paged, {"a": "/1"}))[1] == [
        "<hugepages />",
        '<source type="memfd" />',
        '<access mode="shared" />',
    ]
    assert share_xml.with_shares(
        share_xml.with_shares(paged, {"a": "/1"}), {}
    ) == share_xml.with_shares(paged, {})


def test_mount_and_umount_are_told_once(tmp_path: Path) -> None:
    host, folder = LocalMounts(tmp_path / "table"), tmp_path / "a folder" / "s"
    for _ in range(2):
        host.mounts.mount("NFS", LOCATION, folder)
    assert host.asked == [["mount", "-t", "nfs", "-o", OPTIONS, "--", LOCATION, str(folder)]]
    assert host.folders == [folder]
    for _ in range(2):
        host.mounts.unmount(folder)
    assert host.asked[1:] == [["umount", "--", str(folder)]] and not folder.exists()


def test_where_systemd_rules_it_mounts(tmp_path: Path) -> None:
    host, folder = LocalMounts(tmp_path / "table", by_systemd=True), tmp_path / "s"
    host.mounts.mount("NFS", "[2001:db8::9]:/shares/one", folder)
    host.mounts.unmount(folder)
    assert host.asked == [
        [
            "systemd-mount",
            "--quiet",
            "--collect",
            "--type=nfs",
            f"--options={OPTIONS}",
            "--",
            "[2001:db8::9]:/shares/one",
            str(folder),
        ],
        ["systemd-umount", "--quiet", "--", str(folder)],
    ]


def test_what_is_not_mounted_but_full_stays(tmp_path: Path) -> None:
    host, folder = LocalMounts(tmp_path / "table"), tmp_path / "s"
    folder.mkdir()
    (folder / "file").write_text("kept")
    with pytest.raises(OSError, match="not empty"):
        host.mounts.unmount(folder)
    assert (folder / "file").read_text() == "kept" and host.asked == []


@pytest.mark.parametrize(
    "location",
    [
        "",
        "/shares/one",
        "-o:/x",
        "host",
        "host:x",
        "host:/a b",
        "host:/a,b",
        "h;o:/x",
        "host:/x\n",
        "[::1:/x",
    ],
)
def test_what_is_no_location_is_never_mounted(tmp_path: Path, location: str) -> None:
    host = LocalMounts(tmp_path / "table")
    with pytest.raises(VerbFailed, match="export location is none"):
        host.mounts.mount("NFS", location, tmp_path / "s")
    assert host.asked == [] and not (tmp_path / "s").exists()


def test_other_protocols_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(VerbFailed, match="protocol CEPHFS"):
        LocalMounts(tmp_path / "table").mounts.mount("CEPHFS", LOCATION, tmp_path / "s")


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(VerbFailed) as failed:
        run(["ls", "/nowhere/at/all"])
    assert "ls ended with 2" in failed.value.details and "/nowhere/at/all" in failed.value.details
    with pytest.raises(VerbFailed) as failed:
        run(["no-such-program-here"])
    assert "no-such-program-here" in failed.value.details


def test_a_host_needs_a_virtiofsd_that_it_can_run(tmp_path: Path) -> None:
    program = tmp_path / "virtiofsd"

    def says(**told: str) -> bool:
        (tmp_path / "50.json").write_text(json.dumps(told))
        return has_virtiofsd((tmp_path / "missing", tmp_path))

    assert not has_virtiofsd((tmp_path,))
    assert not says(type="fs", binary=str(program))
    program.touch(mode=0o755)
    assert says(type="fs", binary=str(program))
    assert not says(type="gpu", binary=str(program)) and not says(type="fs")
    (tmp_path / "50.json").write_text("[")
    assert not has_virtiofsd((tmp_path,))


def test_memory_that_can_be_shared_is_told_by_libvirt() -> None:
    told = (
        '<domainCapabilities><memoryBacking supported="yes"><enum name="sourceType"><value>file</value>'
        "<value>memfd</value></enum></memoryBacking></domainCapabilities>"
    )
    assert (
        capabilities.memory_sources(told) == {"file", "memfd"}
        and capabilities.memory_sources("") == set()
    )
