# SPDX-License-Identifier: Apache-2.0
"""Hardware as a flavor asks for it, in a real guest: what the guest sees, and what libvirt was
told."""

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

LOOK = (
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
    made = admin.call(
        "POST", "/flavors", {"flavor": {"name": name, "vcpus": 2, "ram": 192, "disk": 1, **more}}
    )
    assert made.status == 200, made.body
    flavor = str(made.body["flavor"]["id"])
    if not specs:
        return flavor
    said = admin.call("POST", f"/flavors/{flavor}/os-extra_specs", {"extra_specs": specs})
    assert said.status == 200, said.body
    return flavor


#: The disks' sectors, and what the metadata service calls them.
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
def wide(admin: Rest) -> Iterator[str]:
    """A flavor with one socket of two cores, and limits."""
    flavor = make_flavor(admin, "e2e.wide", SPECS)
    yield flavor
    assert admin.call("DELETE", f"/flavors/{flavor}").status == 202


def domain(cloud: Live, server: str) -> ElementTree.Element:
    return ElementTree.fromstring(cloud.virsh("dumpxml", server))


def looks(found: ElementTree.Element) -> dict[str, Any]:
    """Of a domain, what ``SPECS`` ask for."""
    topology = found.find("cpu/topology")
    watchdog = found.find("devices/watchdog")
    return {
        "sizes": [topology.get(name) for name in ("sockets", "cores", "threads")]
        if topology is not None
        else None,
        "shares": found.findtext("cputune/shares"),
        "iops": found.findtext("devices/disk/iotune/write_iops_sec"),
        "watchdog": watchdog.get("action") if watchdog is not None else None,
    }


def test_guest_has_the_hardware_of_its_flavor_and_keeps_it(
    cloud: Live, demo: Rest, wide: str
) -> None:
    server = demo.create(
        image=cloud.image(),
        flavor=wide,
        config_drive=True,
        user_data=base64.b64encode(LOOK.encode()).decode(),
    )
    demo.await_status(server, "ACTIVE")
    assert "cpus: 2, sockets: 1, cores: 2" in demo.await_ready(server)
    wanted = {"sizes": ["1", "2", "1"], "shares": "512", "iops": "500", "watchdog": "reset"}
    assert looks(domain(cloud, server)) == wanted
    assert demo.act(server, "reboot", {"type": "HARD"}).status == 202
    demo.await_status(server, "ACTIVE")
    assert demo.await_ready(server, times=2).count("cpus: 2, sockets: 1, cores: 2") >= 1
    assert looks(domain(cloud, server)) == wanted


def test_guest_without_extra_specs_has_none_of_it(cloud: Live, demo: Rest) -> None:
    server = demo.create(image=cloud.image(), flavor=cloud.flavor())
    demo.await_status(server, "ACTIVE")
    assert set(looks(domain(cloud, server)).values()) == {None}


def test_guest_has_the_disks_that_the_client_asked_for(
    admin: Rest, cloud: Live, demo: Rest, tmp_path: Path
) -> None:
    script = tmp_path / "disks"
    script.write_text(DISKS)
    flavor = make_flavor(admin, "e2e.disks", {}, swap=64, **{"OS-FLV-EXT-DATA:ephemeral": 2})
    try:
        [told] = cloud.openstack(
            "server create --image tiny --flavor e2e.disks --network private "
            f"--user-data {script} --ephemeral size=1,format=ext3 --swap 32 --wait disks -f json"
        )
        server = str(told["id"])
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
        cloud.await_nothing_of(server, 10)
        cloud.judge()
    finally:
        assert admin.call("DELETE", f"/flavors/{flavor}").status == 202


@contextmanager
def dedicated(cloud: Live, host: int = 2) -> Iterator[None]:
    """One CPU of the host is for guests that want it alone, and one is shared."""
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
    """The host's agent starts anew with this configuration, and offers so many CPUs of one's
    own."""
    cloud.cloud.config(cloud.cloud.hosts[host - 1]).write_text(text)
    assert process_control.kill(cloud.cloud, f"agent-{host}")
    await_true(lambda: pcpus(cloud) == offered, SETTLE, lambda: pcpus(cloud))


def pcpus(cloud: Live) -> list[int]:
    """What the hosts that have any offer of CPUs of one's own."""
    return [
        total
        for (total,) in cloud.rows("SELECT total FROM inventories WHERE resource_class = 'PCPU'")
    ]


@pytest.mark.skipif(os.cpu_count() == 1, reason="this machine has one CPU, which is shared")
def test_guest_has_a_cpu_of_its_own_and_another_does_not_get_it(
    admin: Rest, cloud: Live, demo: Rest
) -> None:
    flavor = make_flavor(
        admin, "e2e.pinned", {"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "1"}
    )
    try:
        with dedicated(cloud), cloud.only(2):
            server = demo.create(image=cloud.image(), flavor=flavor)
            demo.await_status(server, "ACTIVE")
            demo.await_ready(server)
            found = ElementTree.fromstring(cloud.virsh("dumpxml", server, host=2))
            pins = {pin.get("vcpu"): pin.get("cpuset") for pin in found.iterfind("cputune/vcpupin")}
            assert pins == {"0": "0", "1": "1"}
            assert re.findall(
                r"CPU Affinity: +(\S\S)", cloud.virsh("vcpuinfo", server, host=2)
            ) == ["y-", "-y"]
            cloud.judge()
            other = demo.create(image=cloud.image(), flavor=flavor)
            assert "PCPU" in demo.await_status(other, "ERROR")["fault"]["message"]
            for one in (server, other):
                assert demo.call("DELETE", f"/servers/{one}").status == 204
                demo.await_gone(one)
            cloud.judge()
    finally:
        assert admin.call("DELETE", f"/flavors/{flavor}").status == 202


def test_cpus_of_their_own_are_not_to_be_had_where_no_host_gives_any(
    admin: Rest, cloud: Live, demo: Rest
) -> None:
    flavor = make_flavor(admin, "e2e.dedicated", {"hw:cpu_policy": "dedicated"})
    try:
        server = demo.create(image=cloud.image(), flavor=flavor)
        fault = demo.await_status(server, "ERROR")["fault"]
        assert "PCPU" in fault["message"], fault
    finally:
        assert admin.call("DELETE", f"/flavors/{flavor}").status == 202


def test_hosts_tell_what_they_are_and_how_long_they_are_up(admin: Rest, cloud: Live) -> None:
    reply = admin.call("GET", "/os-hypervisors/detail", version="2.88")
    assert reply.status == 200, reply.body
    for host in reply.body["hypervisors"]:
        assert host["hypervisor_type"] == "QEMU"
        assert re.match(
            r"\s*\d\d:\d\d:\d\d up .+,\s+\d+ users?,\s+load average: ", host["uptime"]
        ), host
    traits = {
        trait for (told,) in cloud.rows("SELECT traits FROM hosts") for trait in json.loads(told)
    }
    assert {"COMPUTE_NODE", "COMPUTE_STORAGE_BUS_VIRTIO", "HW_CPU_X86_SSE2"} <= traits
