# SPDX-License-Identifier: Apache-2.0
"""What libvirt's capabilities say of the host: its processor, its NUMA nodes, which guests it runs.
Pure functions.

Called by ``virt.libvirt.host``. Must stay true: NUMA nodes are what the claim gives out piece by
piece, so the same host in the same state is always described alike, in the order of its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from common.domain.json_types import JsonObject
from common.domain.models import NumaNode
from compute_agent.virt.cpu_sets import CpuSets, parse

#: A user and a group in numbers.
LABEL = re.compile(r"\+(\d+):\+(\d+)")
#: Kinds of domains that we define, as supported_instances calls their hypervisor.
KINDS = ("kvm", "qemu", "test")
#: Bytes of libvirt's units of memory.
UNITS = {
    "b": 1,
    "bytes": 1,
    "KB": 1000,
    "KiB": 1 << 10,
    "k": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}
MEBIBYTE = 1 << 20


def cpu_info(capabilities: str) -> JsonObject:
    """The host's processor in the words of the hypervisors API."""
    cpu = ElementTree.fromstring(capabilities).find("host/cpu")
    if cpu is None:
        return {}
    topology = cpu.find("topology")
    sizes: JsonObject = (
        {}
        if topology is None
        else {
            ours: int(topology.get(theirs, "1"))
            for ours, theirs in (
                ("sockets", "sockets"),
                ("cells", "dies"),
                ("cores", "cores"),
                ("threads", "threads"),
            )
        }
    )
    return {
        "arch": cpu.findtext("arch", ""),
        "model": cpu.findtext("model", ""),
        "vendor": cpu.findtext("vendor", ""),
        "topology": sizes,
        "features": sorted(feature.get("name", "") for feature in cpu.findall("feature")),
    }


def cpu_xml(cpu: JsonObject) -> str:
    """A processor that ``cpu_info`` describes, in libvirt's words, its model alone."""
    root = Element("cpu")
    SubElement(root, "arch").text = cpu.get("arch", "")
    SubElement(root, "model").text = cpu.get("model", "")
    return ElementTree.tostring(root, encoding="unicode")


@dataclass(frozen=True, slots=True)
class GuestCpu:
    """The processor that guests see: a model of libvirt's, with more features and without some of
    its own."""

    model: str
    more: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def features(self, of_model: str) -> list[str]:
        """All of its features; ``of_model``: the model as libvirt spells it out."""
        own = {
            name
            for feature in ElementTree.fromstring(of_model).iter("feature")
            if (name := feature.get("name"))
        }
        return sorted((own | self.more) - self.without)


def host_model(domain_capabilities: str) -> GuestCpu | None:
    """What ``<cpu mode="host-model">`` gives a guest; None when it gives nothing."""
    mode = ElementTree.fromstring(domain_capabilities).find("cpu/mode[@name='host-model']")
    if mode is None or not (model := mode.findtext("model")):
        return None
    asked = {
        policy: frozenset(
            feature.get("name", "") for feature in mode.iterfind(f"feature[@policy='{policy}']")
        )
        for policy in ("require", "disable")
    }
    return GuestCpu(model, asked["require"], asked["disable"])


def offered(domain_capabilities: str, device: str, what: str) -> set[str]:
    """The values that the emulator has for a property of a kind of device: ("disk", "bus")."""
    if not domain_capabilities:
        return set()
    found = ElementTree.fromstring(domain_capabilities).iterfind(
        f"devices/{device}/enum[@name='{what}']/value"
    )
    return {value.text or "" for value in found}


def memory_sources(domain_capabilities: str) -> set[str]:
    """What can lie under the memory of guests."""
    if not domain_capabilities:
        return set()
    found = ElementTree.fromstring(domain_capabilities).iterfind(
        "memoryBacking/enum[@name='sourceType']/value"
    )
    return {value.text or "" for value in found}


def supported_instances(capabilities: str, virt_type: str) -> list[list[str]]:
    """[architecture, hypervisor, mode] of the guests that this host runs; kvm only where guests run
    under it."""
    runs = {kind for kind in KINDS if kind != "kvm" or virt_type == "kvm"}
    found = set()
    for guest in ElementTree.fromstring(capabilities).iter("guest"):
        for arch in guest.iter("arch"):
            found |= {
                (arch.get("name", ""), kind, guest.findtext("os_type", ""))
                for domain in arch.iter("domain")
                if (kind := domain.get("type", "")) in runs
            }
    return [list(one) for one in sorted(found)]


def guests_user(capabilities: str) -> tuple[int, int] | None:
    """The numbers of the user and group that guests' processes run as, where libvirt says them:
    "+64055:+110"."""
    for model in ElementTree.fromstring(capabilities).iterfind("host/secmodel"):
        if model.findtext("model") == "dac" and (
            found := LABEL.fullmatch(model.findtext("baselabel", ""))
        ):
            return int(found[1]), int(found[2])
    return None


def numa_nodes(capabilities: str, cpus: CpuSets) -> list[NumaNode]:
    """The NUMA nodes, with the CPUs and pages of each."""
    host = ElementTree.fromstring(capabilities).find("host")
    return (
        []
        if host is None
        else [_numa_node(element, cpus) for element in host.iterfind("topology/cells/cell")]
    )


def _numa_node(element: Element, cpus: CpuSets) -> NumaNode:
    here = {
        int(cpu.get("id", "")): cpu.get("siblings", cpu.get("id", ""))
        for cpu in element.iterfind("cpus/cpu")
    }
    shared, dedicated = cpus.split(here)
    pages = {
        str(_size(page, "size") >> 10): int(page.text or 0) for page in element.iterfind("pages")
    }
    memory = element.find("memory")
    return NumaNode(
        int(element.get("id", "")),
        shared,
        dedicated,
        0 if memory is None else _memory_mb(memory),
        _siblings(here.values()),
        {size: number for size, number in pages.items() if number},
    )


def _siblings(groups: Iterable[str]) -> list[list[int]]:
    """Threads that share a core, where more than one does."""
    cores = {frozenset(parse(group, "siblings")) for group in groups}
    return sorted(sorted(core) for core in cores if len(core) > 1)


def _size(element: Element, attribute: str) -> int:
    return int(element.get(attribute, "0")) * UNITS[element.get("unit", "KiB")]


def _memory_mb(memory: Element) -> int:
    return int(memory.text or 0) * UNITS[memory.get("unit", "KiB")] // MEBIBYTE
