# SPDX-License-Identifier: Apache-2.0
"""The hardware that a flavor requests, as the guest prints it and as libvirt defines it."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from deploy.one_machine.cloud import process_control
from tests.e2e.live import SETTLE, Live, Rest
from tests.local_disks import read_local_disks
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")

PRINT_CPUS = (
    "#!/bin/sh\n"
    "echo \"cpus: $(grep -c ^processor /proc/cpuinfo), sockets: $(grep '^physical id' /proc/cpuinfo | sort -u | "
    "wc -l), cores: $(sed -n 's/^cpu cores.*: //p' /proc/cpuinfo | head -n 1)\"\n"
)
SPECS = {
    "hw:cpu_sockets": "1",
    "hw:cpu_cores": "2",
    "quota:cpu_shares": "512",
    "quota:disk_write_iops_sec": "500",
    "hw:watchdog_action": "reset",
}


def make_flavor(admin: Rest, name: str, specs: dict[str, str], **more: Any) -> str:
    reply = admin.call(
        "POST", "/flavors", {"flavor": {"name": name, "vcpus": 2, "ram": 192, "disk": 1, **more}}
    )
    assert reply.status == 200, reply.body
    flavor = str(reply.body["flavor"]["id"])
    if not specs:
        return flavor
    specs_reply = admin.call("POST", f"/flavors/{flavor}/os-extra_specs", {"extra_specs": specs})
    assert specs_reply.status == 200, specs_reply.body
    return flavor


#: A script that prints the sectors of the disks, and their names in the metadata service.
DISKS = """#!/bin/sh
said=http://169.254.169.254/latest/meta-data/block-device-mapping
for disk in ephemeral0 swap; do
    name=$(wget -q -O - $said/$disk)
    echo "$disk is $name of $(cat /sys/block/${name#/dev/}/size)."
done
"""


@pytest.fixture
def admin(cloud: Live) -> Rest:
    return cloud.rest("kilonova-admin")


@pytest.fixture
def wide_flavor(admin: Rest) -> Iterator[str]:
    """Yield a flavor with a socket of two cores, and limits."""
    flavor = make_flavor(admin, "e2e.wide", SPECS)
    yield flavor
    assert admin.call("DELETE", f"/flavors/{flavor}").status == 202


def read_domain(cloud: Live, server: str) -> ElementTree.Element:
    return ElementTree.fromstring(cloud.virsh("dumpxml", server))


def read_hardware(domain_xml: ElementTree.Element) -> dict[str, Any]:
    """Return the properties of a domain that ``SPECS`` request."""
    topology = domain_xml.find("cpu/topology")
    watchdog = domain_xml.find("devices/watchdog")
    return {
        "sizes": [topology.get(name) for name in ("sockets", "cores", "threads")]
        if topology is not None
        else None,
        "shares": domain_xml.findtext("cputune/shares"),
        "iops": domain_xml.findtext("devices/disk/iotune/write_iops_sec"),
        "watchdog": watchdog.get("action") if watchdog is not None else None,
    }


def test_guest_has_hardware_of_flavor_also_after_reboot(
    cloud: Live, demo: Rest, wide_flavor: str
) -> None:
    server = demo.create(
        image=cloud.image(),
        flavor=wide_flavor,
        config_drive=True,
        user_data=base64.b64encode(PRINT_CPUS.encode()).decode(),
    )
    demo.await_status(server, "ACTIVE")
    assert "cpus: 2, sockets: 1, cores: 2" in demo.await_ready(server)
    expected = {"sizes": ["1", "2", "1"], "shares": "512", "iops": "500", "watchdog": "reset"}
    assert read_hardware(read_domain(cloud, server)) == expected
    assert demo.act(server, "reboot", {"type": "HARD"}).status == 202
    demo.await_status(server, "ACTIVE")
    assert demo.await_ready(server, times=2).count("cpus: 2, sockets: 1, cores: 2") >= 1
    assert read_hardware(read_domain(cloud, server)) == expected


def test_guest_without_extra_specs_has_default_hardware(cloud: Live, demo: Rest) -> None:
    server = demo.create(image=cloud.image(), flavor=cloud.flavor())
    demo.await_status(server, "ACTIVE")
    assert set(read_hardware(read_domain(cloud, server)).values()) == {None}


def test_guest_has_requested_ephemeral_and_swap_disks(
    admin: Rest, cloud: Live, demo: Rest, tmp_path: Path
) -> None:
    script = tmp_path / "disks"
    script.write_text(DISKS)
    flavor = make_flavor(admin, "e2e.disks", {}, swap=64, **{"OS-FLV-EXT-DATA:ephemeral": 2})
    try:
        [server_record] = cloud.openstack(
            "server create --image tiny --flavor e2e.disks --network private "
            f"--user-data {script} --ephemeral size=1,format=ext3 --swap 32 --wait disks -f json"
        )
        server = str(server_record["id"])
        console = demo.await_ready(server)
        assert (
            "ephemeral0 is /dev/vdb of 2097152." in console
            and "swap is /dev/vdc of 65536." in console
        ), console
        demo.act(server, "os-stop")
        demo.await_status(server, "SHUTOFF")
        assert read_local_disks(cloud.cloud.state_folder(1) / "instances" / server) == {
            "ephemeral0": (1024, "ext3"),
            "swap": (32, "swap"),
        }
        assert demo.call("DELETE", f"/servers/{server}").status == 204
        demo.await_gone(server)
        cloud.await_removed(server, 10)
        cloud.assert_healthy()
    finally:
        assert admin.call("DELETE", f"/flavors/{flavor}").status == 202


@contextmanager
def dedicate_cpu(cloud: Live, host: int = 2) -> Iterator[None]:
    """Configure a host with a dedicated and a shared CPU for a with block."""
    file = cloud.cloud.config(cloud.cloud.hosts[host - 1])
    before = file.read_text()
    restart_with(
        cloud,
        host,
        before.replace("[agent]\n", "[agent]\ncpu_shared_set = 0\ncpu_dedicated_set = 1\n"),
        [1],
    )
    try:
        yield
    finally:
        restart_with(cloud, host, before, [])


def restart_with(cloud: Live, host: int, text: str, offered: list[int]) -> None:
    """Restart the host's agent with a configuration, and wait for its number of dedicated CPUs."""
    cloud.cloud.config(cloud.cloud.hosts[host - 1]).write_text(text)
    assert process_control.kill(cloud.cloud, f"agent-{host}")
    await_true(
        lambda: list_dedicated_cpus(cloud) == offered, SETTLE, lambda: list_dedicated_cpus(cloud)
    )


def list_dedicated_cpus(cloud: Live) -> list[int]:
    """Return the numbers of dedicated CPUs of the hosts that have any."""
    return [
        total
        for (total,) in cloud.rows("SELECT total FROM inventories WHERE resource_class = 'PCPU'")
    ]


@pytest.mark.skipif(os.cpu_count() == 1, reason="this machine has one CPU, which is shared")
def test_dedicated_cpu_is_given_to_one_guest_only(admin: Rest, cloud: Live, demo: Rest) -> None:
    flavor = make_flavor(
        admin, "e2e.pinned", {"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "1"}
    )
    try:
        with dedicate_cpu(cloud), cloud.only(2):
            server = demo.create(image=cloud.image(), flavor=flavor)
            demo.await_status(server, "ACTIVE")
            demo.await_ready(server)
            domain_xml = ElementTree.fromstring(cloud.virsh("dumpxml", server, host=2))
            pins = {
                pin.get("vcpu"): pin.get("cpuset") for pin in domain_xml.iterfind("cputune/vcpupin")
            }
            assert pins == {"0": "0", "1": "1"}
            assert re.findall(
                r"CPU Affinity: +(\S\S)", cloud.virsh("vcpuinfo", server, host=2)
            ) == ["y-", "-y"]
            cloud.assert_healthy()
            other = demo.create(image=cloud.image(), flavor=flavor)
            assert "PCPU" in demo.await_status(other, "ERROR")["fault"]["message"]
            for server_id in (server, other):
                assert demo.call("DELETE", f"/servers/{server_id}").status == 204
                demo.await_gone(server_id)
            cloud.assert_healthy()
    finally:
        assert admin.call("DELETE", f"/flavors/{flavor}").status == 202


def test_server_with_dedicated_cpus_ends_in_error_when_no_host_offers_any(
    admin: Rest, cloud: Live, demo: Rest
) -> None:
    flavor = make_flavor(admin, "e2e.dedicated", {"hw:cpu_policy": "dedicated"})
    try:
        server = demo.create(image=cloud.image(), flavor=flavor)
        fault = demo.await_status(server, "ERROR")["fault"]
        assert "PCPU" in fault["message"], fault
    finally:
        assert admin.call("DELETE", f"/flavors/{flavor}").status == 202


def test_hypervisors_report_type_uptime_and_traits(admin: Rest, cloud: Live) -> None:
    reply = admin.call("GET", "/os-hypervisors/detail", version="2.88")
    assert reply.status == 200, reply.body
    for host in reply.body["hypervisors"]:
        assert host["hypervisor_type"] == "QEMU"
        assert re.match(
            r"\s*\d\d:\d\d:\d\d up .+,\s+\d+ users?,\s+load average: ", host["uptime"]
        ), host
    traits = {
        trait
        for (traits_json,) in cloud.rows("SELECT traits FROM hosts")
        for trait in json.loads(traits_json)
    }
    assert {"COMPUTE_NODE", "COMPUTE_STORAGE_BUS_VIRTIO", "HW_CPU_X86_SSE2"} <= traits
