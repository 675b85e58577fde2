# SPDX-License-Identifier: Apache-2.0
"""Reads libvirt's capabilities of the host: CPU, NUMA nodes and supported guests. Pure functions.

Called by ``virt.libvirt.host``.

Invariant: the same state of the host always gives the same result, in the order of the numbers,
because claims refer to NUMA nodes and CPUs by number.
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

#: A numeric user and group.
LABEL = re.compile(r"\+(\d+):\+(\d+)")
#: Domain types that we define, by the names in supported_instances.
KINDS = ("kvm", "qemu", "test")
#: libvirt's units of memory, in bytes.
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
    """Return the host's CPU in the format of the hypervisors API, or {} if libvirt reports none.

    Args:
        capabilities: libvirt's XML of the host's capabilities.
    """
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
    """Return libvirt's XML of a CPU with architecture and model, without features.

    Args:
        cpu: A result of ``cpu_info``.
    """
    root = Element("cpu")
    SubElement(root, "arch").text = cpu.get("arch", "")
    SubElement(root, "model").text = cpu.get("model", "")
    return ElementTree.tostring(root, encoding="unicode")


@dataclass(frozen=True, slots=True)
class GuestCpu:
    """The CPU of guests: a model of libvirt with changed features.

    Attributes:
        model: libvirt's name of the model.
        more: Features in addition to those of the model.
        without: Features of the model that are disabled.
    """

    model: str
    more: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def features(self, of_model: str) -> list[str]:
        """Return all features of this CPU, sorted.

        Args:
            of_model: libvirt's XML of the model with all features of the model.
        """
        own = {
            name
            for feature in ElementTree.fromstring(of_model).iter("feature")
            if (name := feature.get("name"))
        }
        return sorted((own | self.more) - self.without)


def host_model(domain_capabilities: str) -> GuestCpu | None:
    """Return the CPU that ``<cpu mode="host-model">`` gives a guest, or None if not supported."""
    mode = ElementTree.fromstring(domain_capabilities).find("cpu/mode[@name='host-model']")
    if mode is None or not (model := mode.findtext("model")):
        return None
    features = {
        policy: frozenset(
            feature.get("name", "") for feature in mode.iterfind(f"feature[@policy='{policy}']")
        )
        for policy in ("require", "disable")
    }
    return GuestCpu(model, features["require"], features["disable"])


def find_values(domain_capabilities: str, device: str, property_name: str) -> set[str]:
    """Return the values that the emulator supports for a property of a device.

    For example, device "disk" and property "bus" may give {"scsi", "virtio"}. Without domain
    capabilities ("") the result is empty.
    """
    if not domain_capabilities:
        return set()
    elements = ElementTree.fromstring(domain_capabilities).iterfind(
        f"devices/{device}/enum[@name='{property_name}']/value"
    )
    return {value.text or "" for value in elements}


def memory_sources(domain_capabilities: str) -> set[str]:
    """Return the types of memory that the emulator supports, for example {"memfd", "file"}.

    Without domain capabilities ("") the result is empty.
    """
    if not domain_capabilities:
        return set()
    elements = ElementTree.fromstring(domain_capabilities).iterfind(
        "memoryBacking/enum[@name='sourceType']/value"
    )
    return {value.text or "" for value in elements}


def supported_instances(capabilities: str, virt_type: str) -> list[list[str]]:
    """Return the kinds of guests that this host supports, sorted.

    Each is [architecture, hypervisor, mode], for example ["x86_64", "kvm", "hvm"]. Hypervisors
    other than kvm, qemu and test are left out, and kvm is left out unless ``virt_type`` is kvm.
    """
    supported_kinds = {kind for kind in KINDS if kind != "kvm" or virt_type == "kvm"}
    instances = set()
    for guest in ElementTree.fromstring(capabilities).iter("guest"):
        for arch in guest.iter("arch"):
            instances |= {
                (arch.get("name", ""), kind, guest.findtext("os_type", ""))
                for domain in arch.iter("domain")
                if (kind := domain.get("type", "")) in supported_kinds
            }
    return [list(instance) for instance in sorted(instances)]


def guests_user(capabilities: str) -> tuple[int, int] | None:
    """Return (user id, group id) of guests' processes, or None if libvirt does not report them.

    libvirt reports them as text, for example "+64055:+110".
    """
    for model in ElementTree.fromstring(capabilities).iterfind("host/secmodel"):
        if model.findtext("model") == "dac" and (
            match := LABEL.fullmatch(model.findtext("baselabel", ""))
        ):
            return int(match[1]), int(match[2])
    return None


def numa_nodes(capabilities: str, cpus: CpuSets) -> list[NumaNode]:
    """Return the host's NUMA nodes with CPUs, memory and pages, or [] if libvirt reports no nodes.

    Args:
        capabilities: libvirt's XML of the host's capabilities.
        cpus: The configured split into shared and dedicated CPUs.
    """
    host = ElementTree.fromstring(capabilities).find("host")
    return (
        []
        if host is None
        else [_parse_numa_node(element, cpus) for element in host.iterfind("topology/cells/cell")]
    )


def _parse_numa_node(element: Element, cpus: CpuSets) -> NumaNode:
    siblings_by_cpu = {
        int(cpu.get("id", "")): cpu.get("siblings", cpu.get("id", ""))
        for cpu in element.iterfind("cpus/cpu")
    }
    shared, dedicated = cpus.split(siblings_by_cpu)
    pages = {
        str(_read_size(page, "size") >> 10): int(page.text or 0)
        for page in element.iterfind("pages")
    }
    memory = element.find("memory")
    return NumaNode(
        int(element.get("id", "")),
        shared,
        dedicated,
        0 if memory is None else _read_memory_mb(memory),
        _list_siblings(siblings_by_cpu.values()),
        {size: number for size, number in pages.items() if number},
    )


def _list_siblings(groups: Iterable[str]) -> list[list[int]]:
    """Return the threads of each core as a sorted list, without cores of one thread.

    Args:
        groups: libvirt's text for the core of each CPU, for example "0,4". Repetitions are ignored.
    """
    cores = {frozenset(parse(group, "siblings")) for group in groups}
    return sorted(sorted(core) for core in cores if len(core) > 1)


def _read_size(element: Element, attribute: str) -> int:
    return int(element.get(attribute, "0")) * UNITS[element.get("unit", "KiB")]


def _read_memory_mb(memory: Element) -> int:
    return int(memory.text or 0) * UNITS[memory.get("unit", "KiB")] // MEBIBYTE
