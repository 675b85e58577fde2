# SPDX-License-Identifier: Apache-2.0
"""The hardware that flavor and image ask for, as libvirt's XML: pure functions, tested against
golden files.

Called by ``domain_xml`` and ``interface_xml`` with what ``common.domain.hardware`` made of flavor
and image, and with the parts of the host that the claim gave the guest. docs/flavors.md lists the
options; one that was not asked for leaves no trace here. Must stay true: a guest that asks for
nothing looks as it always did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from xml.etree.ElementTree import Element, SubElement

from common.domain.hardware import Hardware
from common.domain.models import AssignedNumaNode
from compute_agent.virt.cpu_sets import listed

#: What a guest's disks, interfaces and screen can be.
DISK_BUSES = ("virtio", "scsi", "sata", "ide", "usb")
VIF_MODELS = ("virtio", "e1000", "e1000e", "ne2k_pci", "pcnet", "rtl8139", "vmxnet3")
VIDEO_MODELS = ("vga", "cirrus", "qxl", "virtio", "bochs", "none")
#: Screens whose memory is their own.
VIDEO_WITH_RAM = ("vga", "cirrus", "qxl", "bochs")
#: Pages of memory that need no counting, in KiB.
SMALL_PAGE_KIB = 4
#: Limits of a disk, as QEMU and the flavor both call them behind "disk_".
DISK_LIMITS = tuple(
    f"{way}_{what}_sec" for what in ("bytes", "iops") for way in ("total", "read", "write")
)
#: Limits of a volume: also bursts, their length, and the size of a request that counts as one.
VOLUME_LIMITS = (
    *DISK_LIMITS,
    *(f"{name}_max" for name in DISK_LIMITS),
    "size_iops_sec",
    *(f"{name}_max_length" for name in DISK_LIMITS),
)
RATES = ("average", "peak", "burst")
#: Ports of a q35 for devices that guests have or are given later.
PCIE_PORTS = 16
Options = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """Where on its host a guest is. numa_nodes: its own, each on a NUMA node of the host; devices:
    PCI addresses.

    shared: NUMA node of the host -> its CPUs that guests share. cpus: those that a guest without
    NUMA nodes may run on, none for any. most_shares: the largest weight of CPU time that the host's
    kernel takes.
    """

    numa_nodes: tuple[AssignedNumaNode, ...] = ()
    devices: tuple[str, ...] = ()
    shared: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    most_shares: int = 262144

    def runs_on(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(guest CPU, the host CPUs that it may run on), in the order of the guest's CPUs."""
        for cpu, numa_node in sorted(
            (cpu, number) for number, one in enumerate(self.numa_nodes) for cpu in one.cpus
        ):
            fitted = self.numa_nodes[numa_node]
            pin = fitted.pins.get(str(cpu))
            yield cpu, self.shared.get(fitted.numa_node, ()) if pin is None else (pin,)


def memory(root: Element, place: HostPlacement) -> None:
    """Huge pages, and which memory of the host is used."""
    pages = [
        (number, numa_node.page_kb)
        for number, numa_node in enumerate(place.numa_nodes)
        if numa_node.page_kb > SMALL_PAGE_KIB
    ]
    if pages:
        backing = SubElement(SubElement(root, "memoryBacking"), "hugepages")
        for number, size in pages:
            SubElement(backing, "page", size=str(size), unit="KiB", nodeset=str(number))
    if place.numa_nodes:
        tuned = SubElement(root, "numatune")
        SubElement(
            tuned,
            "memory",
            mode="strict",
            nodeset=listed(numa_node.numa_node for numa_node in place.numa_nodes),
        )
        for number, numa_node in enumerate(place.numa_nodes):
            SubElement(
                tuned,
                "memnode",
                cellid=str(number),
                mode="strict",
                nodeset=str(numa_node.numa_node),
            )


def cpus(root: Element, vcpus: int, options: Options, place: HostPlacement) -> None:
    """How many, where they run, and their part of the host's time. The emulator's own threads run
    where any of them does."""
    vcpu = SubElement(root, "vcpu")
    vcpu.text = str(vcpus)
    if place.cpus and not place.numa_nodes:
        vcpu.set("placement", "static")
        vcpu.set("cpuset", listed(place.cpus))
    tuned = Element("cputune")
    if "cpu_shares" in options:
        SubElement(tuned, "shares").text = str(min(int(options["cpu_shares"]), place.most_shares))
    for key in ("period", "quota"):
        if f"cpu_{key}" in options:
            SubElement(tuned, key).text = options[f"cpu_{key}"]
    runs_on = [(cpu, where) for cpu, where in place.runs_on() if where]
    for cpu, where in runs_on:
        SubElement(tuned, "vcpupin", vcpu=str(cpu), cpuset=listed(where))
    if runs_on:
        SubElement(
            tuned, "emulatorpin", cpuset=listed(chain.from_iterable(where for _, where in runs_on))
        )
    if len(tuned):
        root.append(tuned)


def topology(root: Element, cpu: Element | None, hardware: Hardware, place: HostPlacement) -> None:
    """Sockets, cores, threads, and the guest's NUMA nodes, below ``cpu``, which is made when there
    is none."""
    if not hardware.sockets and not place.numa_nodes:
        return
    cpu = SubElement(root, "cpu") if cpu is None else cpu
    if hardware.sockets:
        SubElement(
            cpu,
            "topology",
            sockets=str(hardware.sockets),
            cores=str(hardware.cores),
            threads=str(hardware.threads_per_core),
        )
    if place.numa_nodes:
        numa = SubElement(cpu, "numa")
        for number, numa_node in enumerate(place.numa_nodes):
            SubElement(
                numa,
                "cell",
                id=str(number),
                cpus=listed(numa_node.cpus),
                memory=str(numa_node.memory_mb),
                unit="MiB",
            )


def features(found: Element, options: Options, virt_type: str) -> None:
    """What of the platform is shown or hidden. What makes Windows fast is KVM's alone."""
    if options.get("hide_hypervisor") == "yes":
        SubElement(SubElement(found, "kvm"), "hidden", state="on")
    if "pmu" in options:
        SubElement(found, "pmu", state=_state(options["pmu"]))
    if options.get("os_type") == "windows" and virt_type == "kvm":
        hyperv = SubElement(found, "hyperv")
        for name, more in (("relaxed", {}), ("vapic", {}), ("spinlocks", {"retries": "8191"})):
            SubElement(hyperv, name, {"state": "on", **more})


def clock(root: Element, options: Options) -> None:
    """Windows takes the hardware's clock for local time."""
    made = SubElement(
        root, "clock", offset="localtime" if options.get("os_type") == "windows" else "utc"
    )
    if "hpet" in options:
        SubElement(made, "timer", name="hpet", present=options["hpet"])


def disk_limits(disk: Element, options: Options) -> None:
    """Bytes and requests a second."""
    found = [name for name in VOLUME_LIMITS if f"disk_{name}" in options]
    tuned = SubElement(disk, "iotune") if found else disk
    for name in found:
        SubElement(tuned, name).text = options[f"disk_{name}"]


def interface(vif: Element, options: Options) -> None:
    """Queues and bandwidth of an interface; its model stands there already."""
    if "vif_queues" in options:
        SubElement(vif, "driver", queues=options["vif_queues"])
    bandwidth = Element("bandwidth")
    for way in ("inbound", "outbound"):
        rates = {
            rate: options[f"vif_{way}_{rate}"] for rate in RATES if f"vif_{way}_{rate}" in options
        }
        if rates:
            SubElement(bandwidth, way, rates)
    if len(bandwidth):
        vif.append(bandwidth)


def controllers(devices: Element, options: Options, buses: set[str]) -> None:
    """Of the buses that are used, where the machine does not have them anyway, and no USB where
    nothing is on it."""
    if options.get("machine_type") == "q35":
        SubElement(devices, "controller", type="pci", index="0", model="pcie-root")
        for number in range(1, PCIE_PORTS + 1):
            SubElement(devices, "controller", type="pci", index=str(number), model="pcie-root-port")
    if "usb" in buses:
        SubElement(devices, "controller", type="usb", index="0", model="qemu-xhci")
    else:
        SubElement(devices, "controller", type="usb", model="none")
    if "scsi" in buses:
        SubElement(
            devices,
            "controller",
            type="scsi",
            index="0",
            model=options.get("scsi_model", "virtio-scsi"),
        )
    if "sata" in buses:
        SubElement(devices, "controller", type="sata", index="0")


def screen(devices: Element, options: Options) -> None:
    """The graphics adapter."""
    model = options.get("video_model", "vga")
    found = SubElement(SubElement(devices, "video"), "model", type=model)
    if model in VIDEO_WITH_RAM:
        found.set(
            "vram",
            str(int(options["video_ram_mb"]) * 1024) if "video_ram_mb" in options else "16384",
        )


def rest(devices: Element, options: Options, place: HostPlacement) -> None:
    """Source of random numbers, pointer, watchdog, PCI devices of the host."""
    if options.get("rng") != "no":
        random = SubElement(devices, "rng", model="virtio")
        if "rng_bytes" in options:
            SubElement(
                random, "rate", bytes=options["rng_bytes"], period=options.get("rng_period", "1000")
            )
        SubElement(random, "backend", model="random").text = "/dev/urandom"
    if options.get("pointer_model") == "usbtablet":
        SubElement(devices, "input", type="tablet", bus="usb")
    if "watchdog_action" in options:
        SubElement(devices, "watchdog", model="i6300esb", action=options["watchdog_action"])
    for address in place.devices:
        domain, bus, slot, function = address.replace(".", ":").split(":")
        given = SubElement(devices, "hostdev", mode="subsystem", type="pci", managed="yes")
        SubElement(
            SubElement(given, "source"),
            "address",
            domain=f"0x{domain}",
            bus=f"0x{bus}",
            slot=f"0x{slot}",
            function=f"0x{function}",
        )


def _state(word: str) -> str:
    return "on" if word == "yes" else "off"
