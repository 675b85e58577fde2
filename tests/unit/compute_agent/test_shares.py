# SPDX-License-Identifier: Apache-2.0
"""Shares on a host: mount commands, file systems in the domain's XML, and the host's abilities."""

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


def read_shares(description: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (tag, folder) of each file system, and the elements of memoryBacking."""
    root = ElementTree.fromstring(description)
    file_systems = []
    for device in root.iterfind("devices/filesystem"):
        source, target, driver = (device.find(name) for name in ("source", "target", "driver"))
        assert source is not None and target is not None and driver is not None
        assert (device.attrib, driver.attrib) == (
            {"type": "mount", "accessmode": "passthrough"},
            {"type": "virtiofs"},
        )
        file_systems.append((target.attrib["dir"], source.attrib["dir"]))
    return file_systems, [
        ElementTree.tostring(element, encoding="unicode").strip()
        for element in root.iterfind("memoryBacking/*")
    ]


def test_with_shares_sets_exactly_given_folders_in_domain_xml() -> None:
    shared = ['<source type="memfd" />', '<access mode="shared" />']
    first = share_xml.with_shares(BARE, {"a": "/1"})
    assert read_shares(first) == ([("a", "/1")], shared)
    second = share_xml.with_shares(first, {"a": "/1", "b": "/2"})
    assert read_shares(second) == ([("a", "/1"), ("b", "/2")], shared)
    assert share_xml.with_shares(second, {"a": "/1", "b": "/2"}) == second
    assert read_shares(share_xml.with_shares(second, {"a": "/3"})) == ([("a", "/3")], shared)
    assert share_xml.with_shares(second, {}) == share_xml.with_shares(BARE, {}), (
        "as if it never had one"
    )


def test_with_shares_keeps_huge_pages_of_domain_xml() -> None:
    paged = BARE.replace("<devices>", "<memoryBacking><hugepages /></memoryBacking><devices>")
    assert read_shares(share_xml.with_shares(paged, {"a": "/1"}))[1] == [
        "<hugepages />",
        '<source type="memfd" />',
        '<access mode="shared" />',
    ]
    assert share_xml.with_shares(
        share_xml.with_shares(paged, {"a": "/1"}), {}
    ) == share_xml.with_shares(paged, {})


def test_repeated_mount_and_unmount_run_their_program_once(tmp_path: Path) -> None:
    host, folder = LocalMounts(tmp_path / "table"), tmp_path / "a folder" / "s"
    for _ in range(2):
        host.mounts.mount("NFS", LOCATION, folder)
    assert host.commands == [["mount", "-t", "nfs", "-o", OPTIONS, "--", LOCATION, str(folder)]]
    assert host.folders == [folder]
    for _ in range(2):
        host.mounts.unmount(folder)
    assert host.commands[1:] == [["umount", "--", str(folder)]] and not folder.exists()


def test_mount_uses_systemd_mount_when_systemd_runs(tmp_path: Path) -> None:
    host, folder = LocalMounts(tmp_path / "table", by_systemd=True), tmp_path / "s"
    host.mounts.mount("NFS", "[2001:db8::9]:/shares/one", folder)
    host.mounts.unmount(folder)
    assert host.commands == [
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


def test_unmount_of_unmounted_folder_with_files_raises_and_keeps_files(tmp_path: Path) -> None:
    host, folder = LocalMounts(tmp_path / "table"), tmp_path / "s"
    folder.mkdir()
    (folder / "file").write_text("kept")
    with pytest.raises(OSError, match="not empty"):
        host.mounts.unmount(folder)
    assert (folder / "file").read_text() == "kept" and host.commands == []


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
def test_mount_refuses_malformed_location(tmp_path: Path, location: str) -> None:
    host = LocalMounts(tmp_path / "table")
    with pytest.raises(VerbFailed, match="export location is not valid"):
        host.mounts.mount("NFS", location, tmp_path / "s")
    assert host.commands == [] and not (tmp_path / "s").exists()


def test_mount_refuses_unsupported_protocol_and_names_it(tmp_path: Path) -> None:
    with pytest.raises(VerbFailed, match="protocol CEPHFS"):
        LocalMounts(tmp_path / "table").mounts.mount("CEPHFS", LOCATION, tmp_path / "s")


def test_run_program_failure_has_status_and_output() -> None:
    with pytest.raises(VerbFailed) as failed:
        run(["ls", "/nowhere/at/all"])
    assert "ls ended with 2" in failed.value.details and "/nowhere/at/all" in failed.value.details
    with pytest.raises(VerbFailed) as failed:
        run(["no-such-program-here"])
    assert "no-such-program-here" in failed.value.details


def test_has_virtiofsd_requires_description_and_executable_program(tmp_path: Path) -> None:
    program = tmp_path / "virtiofsd"

    def is_found(**description: str) -> bool:
        (tmp_path / "50.json").write_text(json.dumps(description))
        return has_virtiofsd((tmp_path / "missing", tmp_path))

    assert not has_virtiofsd((tmp_path,))
    assert not is_found(type="fs", binary=str(program))
    program.touch(mode=0o755)
    assert is_found(type="fs", binary=str(program))
    assert not is_found(type="gpu", binary=str(program)) and not is_found(type="fs")
    (tmp_path / "50.json").write_text("[")
    assert not has_virtiofsd((tmp_path,))


def test_memory_sources_are_read_from_domain_capabilities() -> None:
    xml = (
        '<domainCapabilities><memoryBacking supported="yes"><enum name="sourceType"><value>file</value>'
        "<value>memfd</value></enum></memoryBacking></domainCapabilities>"
    )
    assert (
        capabilities.memory_sources(xml) == {"file", "memfd"}
        and capabilities.memory_sources("") == set()
    )
