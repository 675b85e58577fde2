# SPDX-License-Identifier: Apache-2.0
"""Nova's element in a domain's metadata.

The tests read the element in the same way as Ceilometer's discovery, and with Ceilometer itself.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from common.domain.models import Flavor, GuestSpec, Interface
from deploy.environment import CEILOMETER, has_ceilometer
from tests.contract.conftest import QEMU
from tests.contract.virt_pairs import LARGER
from tests.contract.virt_rigs import QUIET, Rig

NAMESPACE = "http://openstack.org/xmlns/libvirt/nova/1.1"
NAMES = {"nova": NAMESPACE}
PROJECT = "6e4ea5f4bd2c4ba2a1f7a0a4a80a5b3f"
FLAVOR = Flavor(
    "42", "m1.<nano>", 1, 128, 1, ephemeral_gb=0, swap_mb=64, extra_specs={"hw:cpu_sockets": "1"}
)
READER = Path(__file__).parent / "ceilometer_reader.py"
NAME = '</nova:name> "naïve" \x00 ]]>'


@pytest.fixture
def libvirt_rig(rig: Rig) -> Rig:
    """Return a rig with libvirt's domains as guests."""
    if rig.kind == "memory":
        pytest.skip("a host in memory has no domains")
    return rig


def boot(rig: Rig, *interfaces: Interface) -> GuestSpec:
    spec = rig.spec(
        name=NAME,
        flavor=FLAVOR,
        image=replace(rig.image, properties={"hw_disk_bus": "virtio", "description": "of a user"}),
        instance={"hostname": "web-1", "project_id": PROJECT},
        record={"user_id": "u1", "created_at": 1_795_402_416_000_000},
        interfaces=list(interfaces),
        paused=True,
    )
    rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    return replace(spec, paused=False)


def read(rig: Rig, server: str, *, stored: bool = False) -> Element:
    """Return Nova's element of the domain."""
    root = ElementTree.fromstring(rig.describe(server, stored))
    elements = root.findall("metadata/nova:instance", NAMES)
    assert len(elements) == 1
    assert len(root.findall("metadata/*")) == 2, "Kilonova's own element is kept"
    return elements[0]


def text(element: Element, path: str) -> str | None:
    return element.findtext(path, namespaces=NAMES)


def discover(element: Element) -> dict[str, Any]:
    """Return the attributes of a guest as Ceilometer 27's libvirt_metadata discovery reads them."""

    def uuid(path: str) -> str | None:
        child = element.find(path, NAMES)
        return None if child is None else child.get("uuid")

    flavor = element.find("nova:flavor", NAMES)
    assert flavor is not None
    return {
        "name": text(element, "nova:name"),
        "user": uuid("nova:owner/nova:user"),
        "project": uuid("nova:owner/nova:project"),
        "flavor": (flavor.get("id"), flavor.get("name")),
        "numbers": {
            name: int(flavor.findtext(f"nova:{name}", "", NAMES))
            for name in ("memory", "disk", "swap", "ephemeral", "vcpus")
        },
        "extra_specs": {
            item.get("name"): item.text for item in flavor.iterfind("nova:extraSpecs/*", NAMES)
        },
        "root_image": uuid("nova:root[@type='image']"),
        "image": uuid("nova:image"),
        "disk_format": text(element, "nova:image/nova:diskFormat"),
        "properties": {
            item.get("name"): item.text
            for item in element.iterfind("nova:image/nova:properties/nova:property", NAMES)
        },
    }


def ports(element: Element) -> dict[str | None, list[tuple[str | None, str | None]]]:
    return {
        port.get("uuid"): [(ip.get("address"), ip.get("ipVersion")) for ip in port]
        for port in element.iterfind("nova:ports/nova:port", NAMES)
    }


def test_libvirt_domain_has_nova_metadata_for_ceilometer(libvirt_rig: Rig) -> None:
    spec = boot(libvirt_rig)
    element = read(libvirt_rig, spec.server)
    package = element.find("nova:package", NAMES)
    assert package is not None and package.get("version")
    assert text(element, "nova:creationTime") == "2026-11-23 02:53:36"
    assert text(element, "nova:owner/nova:project") == "N/A"
    assert spec.image is not None
    assert discover(element) == {
        "name": '</nova:name> "naïve" \N{REPLACEMENT CHARACTER} ]]>',
        "user": "u1",
        "project": PROJECT,
        "flavor": ("42", "m1.<nano>"),
        "numbers": {"memory": 128, "disk": 1, "swap": 64, "ephemeral": 0, "vcpus": 1},
        "extra_specs": {"hw:cpu_sockets": "1"},
        "root_image": spec.image.id,
        "image": spec.image.id,
        "disk_format": spec.image.disk_format,
        "properties": {"hw_disk_bus": "virtio"},
    }
    domain = ElementTree.fromstring(libvirt_rig.describe(spec.server))
    if libvirt_rig.real:
        stats = domain.find("devices/memballoon/stats")
        assert stats is not None and stats.get("period") == "10"


def test_nova_metadata_survives_power_changes_and_follows_resize_and_rename(
    libvirt_rig: Rig,
) -> None:
    rig = libvirt_rig
    spec = boot(rig)
    before = discover(read(rig, spec.server))
    rig.driver.ensure_paused(spec.server, 2, QUIET)
    assert discover(read(rig, spec.server)) == before
    rig.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert discover(read(rig, spec.server)) == before
    larger = replace(spec, fence=4, flavor=LARGER, name="renamed")
    rig.driver.resize_here(larger, False, QUIET)
    after = discover(read(rig, spec.server))
    assert (after["name"], after["flavor"][1]) == ("renamed", LARGER.name)
    assert after["numbers"]["memory"] == LARGER.memory_mb
    assert (after["user"], after["project"]) == (before["user"], before["project"])


def test_domain_nova_metadata_lists_current_ports(libvirt_rig: Rig) -> None:
    rig = libvirt_rig
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up plugs nothing in")
    address = {
        "address": "10.0.0.9",
        "version": 4,
        "prefix": 24,
        "subnet": "s",
        "gateway": None,
        "dns": [],
        "routes": [],
        "dhcp": True,
        "floating": [],
    }
    first, second = replace(rig.interface(), addresses=[address]), rig.interface()
    spec = boot(rig, first)
    assert ports(read(rig, spec.server)) == {first.port: [("10.0.0.9", "4")]}
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    for _ in range(2):
        rig.driver.attach_interface(spec.server, 3, second, QUIET)
    assert ports(read(rig, spec.server)) == {first.port: [("10.0.0.9", "4")], second.port: []}
    for _ in range(2):
        rig.driver.detach_interface(spec.server, 4, first, QUIET)
    assert ports(read(rig, spec.server)) == {second.port: []}


@pytest.fixture(scope="module")
def ceilometer() -> Path:
    """Return the Python interpreter of the environment with Ceilometer."""
    if not has_ceilometer():
        if os.environ.get("KILONOVA_TEST"):
            pytest.fail("Ceilometer is not there: ./deploy/test all installs it in its first steps")
        pytest.skip("needs Ceilometer, which ./deploy/test contract installs")
    return CEILOMETER / "bin/python"


@pytest.mark.parametrize("rig", [QEMU], indirect=True)
def test_ceilometer_discovers_guests_by_default_method(ceilometer: Path, rig: Rig) -> None:
    paused, stopped = boot(rig), boot(rig)
    rig.driver.ensure_stopped(stopped.server, 2, 0, QUIET)
    process = subprocess.run(
        [ceilometer, "-W", "ignore", READER, rig.uri],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    guests = {guest["id"]: guest for guest in json.loads(process.stdout)}
    assert {server: guests[server]["status"] for server in guests} == {
        paused.server: "paused",
        stopped.server: "stopped",
    }
    assert paused.image is not None
    assert (
        guests[paused.server].items()
        >= {
            "name": '</nova:name> "naïve" \N{REPLACEMENT CHARACTER} ]]>',
            "user_id": "u1",
            "tenant_id": PROJECT,
            "flavor": {
                "id": "42",
                "name": "m1.<nano>",
                "vcpus": 1,
                "ram": 128,
                "disk": 1,
                "ephemeral": 0,
                "swap": 64,
                "extra_specs": {"hw:cpu_sockets": "1"},
            },
            "image": {"id": paused.image.id},
            "image_meta": {
                "base_image_ref": paused.image.id,
                "disk_format": paused.image.disk_format,
                "hw_disk_bus": "virtio",
            },
            "architecture": "x86_64",
        }.items()
    )
