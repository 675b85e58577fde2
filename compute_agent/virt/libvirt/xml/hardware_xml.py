# SPDX-License-Identifier: Apache-2.0
"""The hardware that flavor and image request, as libvirt's XML.

Pure functions, tested against golden files. Called by ``domain_xml`` and ``interface_xml`` with the
result of ``common.domain.hardware`` and with the CPUs and devices that the claim assigned.
docs/flavors.md lists the options.

Invariant: an option that was not requested does not change the XML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from xml.etree.ElementTree import Element, SubElement

from common.domain.hardware import Hardware
from common.domain.models import AssignedNumaNode
from compute_agent.virt.cpu_sets import listed

#: Values for a guest's disks, interfaces and screen.
DISK_BUSES = ("virtio", "scsi", "sata", "ide", "usb")
VIF_MODELS = ("virtio", "e1000", "e1000e", "ne2k_pci", "pcnet", "rtl8139", "vmxnet3")
VIDEO_MODELS = ("vga", "cirrus", "qxl", "virtio", "bochs", "none")
#: Graphics adapters with memory of their own.
VIDEO_WITH_RAM = ("vga", "cirrus", "qxl", "bochs")
#: Size in KiB of normal pages. Larger pages are huge pages.
SMALL_PAGE_KIB = 4
#: Limits of a disk, by the names of QEMU, which follow "disk_" in a flavor's options.
DISK_LIMITS = tuple(
    f"{way}_{what}_sec" for what in ("bytes", "iops") for way in ("total", "read", "write")
)
#: Limits of a volume: in addition bursts, their lengths, and the size of a request that counts as
#: one.
VOLUME_LIMITS = (
    *DISK_LIMITS,
    *(f"{name}_max" for name in DISK_LIMITS),
    "size_iops_sec",
    *(f"{name}_max_length" for name in DISK_LIMITS),
)
RATES = ("average", "peak", "burst")
#: Ports of a q35 machine for the guest's devices, including those attached later.
PCIE_PORTS = 16
Options = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """The CPUs, memory and devices of the host that a guest uses.

    Attributes:
        numa_nodes: The guest's NUMA nodes, each on a NUMA node of the host. () for a guest without
            NUMA nodes.
        devices: PCI addresses.
        shared: CPUs that guests share, by NUMA node of the host.
        cpus: CPUs of the host for a guest without NUMA nodes, () for all.
        most_shares: The largest CPU weight that the host's kernel accepts.
    """

    numa_nodes: tuple[AssignedNumaNode, ...] = ()
    devices: tuple[str, ...] = ()
    shared: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    most_shares: int = 262144

    def runs_on(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (guest CPU, host CPUs) by rising guest CPU. Without NUMA nodes, yield nothing.

        The guest CPU may run on these host CPUs. () means no restriction. A pinned CPU has one host
        CPU. Another CPU has the shared CPUs of its NUMA node on the host.
        """
        for cpu, numa_node in sorted(
            (cpu, number)
            for number, guest_node in enumerate(self.numa_nodes)
            for cpu in guest_node.cpus
        ):
            fitted = self.numa_nodes[numa_node]
            pin = fitted.pins.get(str(cpu))
            yield cpu, self.shared.get(fitted.numa_node, ()) if pin is None else (pin,)


def memory(root: Element, place: HostPlacement) -> None:
    """Add the guest's huge pages, and the NUMA nodes of the host that provide the memory.

    Nothing is added for a guest without NUMA nodes.
    """
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
    """Add the number of CPUs, their host CPUs, and the requested share, period and quota.

    The share is at most ``place.most_shares``. The emulator's threads run on all host CPUs to which
    the guest's CPUs are bound.
    """
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
    runs_on = [(cpu, host_cpus) for cpu, host_cpus in place.runs_on() if host_cpus]
    for cpu, host_cpus in runs_on:
        SubElement(tuned, "vcpupin", vcpu=str(cpu), cpuset=listed(host_cpus))
    if runs_on:
        SubElement(
            tuned,
            "emulatorpin",
            cpuset=listed(chain.from_iterable(host_cpus for _, host_cpus in runs_on)),
        )
    if len(tuned):
        root.append(tuned)


def topology(root: Element, cpu: Element | None, hardware: Hardware, place: HostPlacement) -> None:
    """Add sockets, cores, threads and NUMA nodes to the element ``cpu``.

    With ``cpu`` None a new element is added to ``root``, unless there is nothing to add.
    """
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


def features(element: Element, options: Options, virt_type: str) -> None:
    """Add the requested features of the platform, and for Windows on KVM the Hyper-V features."""
    if options.get("hide_hypervisor") == "yes":
        SubElement(SubElement(element, "kvm"), "hidden", state="on")
    if "pmu" in options:
        SubElement(element, "pmu", state=_format_state(options["pmu"]))
    if options.get("os_type") == "windows" and virt_type == "kvm":
        hyperv = SubElement(element, "hyperv")
        for name, attributes in (
            ("relaxed", {}),
            ("vapic", {}),
            ("spinlocks", {"retries": "8191"}),
        ):
            SubElement(hyperv, name, {"state": "on", **attributes})


def clock(root: Element, options: Options) -> None:
    """Add the clock: in local time for Windows, else in UTC. Add the HPET's state if requested."""
    element = SubElement(
        root, "clock", offset="localtime" if options.get("os_type") == "windows" else "utc"
    )
    if "hpet" in options:
        SubElement(element, "timer", name="hpet", present=options["hpet"])


def disk_limits(disk: Element, options: Options) -> None:
    """Add the QoS limits of a disk, from the options with the prefix "disk_"."""
    limits = [name for name in VOLUME_LIMITS if f"disk_{name}" in options]
    tuned = SubElement(disk, "iotune") if limits else disk
    for name in limits:
        SubElement(tuned, name).text = options[f"disk_{name}"]


def interface(vif: Element, options: Options) -> None:
    """Add the requested queues and bandwidth to an interface's element."""
    if "vif_queues" in options:
        SubElement(vif, "driver", queues=options["vif_queues"])
    bandwidth = Element("bandwidth")
    for direction in ("inbound", "outbound"):
        rates = {
            rate: options[f"vif_{direction}_{rate}"]
            for rate in RATES
            if f"vif_{direction}_{rate}" in options
        }
        if rates:
            SubElement(bandwidth, direction, rates)
    if len(bandwidth):
        vif.append(bandwidth)


def controllers(devices: Element, options: Options, buses: set[str]) -> None:
    """Add the USB, SCSI and SATA controllers for ``buses``. Disable USB if ``buses`` lacks "usb".

    A q35 machine also gets a PCIe root with ``PCIE_PORTS`` root ports.
    """
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
    """Add the graphics adapter of the requested model, or vga.

    A model in ``VIDEO_WITH_RAM`` gets the requested video memory, or 16 MiB. Other models ignore
    the request.
    """
    model = options.get("video_model", "vga")
    element = SubElement(SubElement(devices, "video"), "model", type=model)
    if model in VIDEO_WITH_RAM:
        element.set(
            "vram",
            str(int(options["video_ram_mb"]) * 1024) if "video_ram_mb" in options else "16384",
        )


def rest(devices: Element, options: Options, place: HostPlacement) -> None:
    """Add the random number generator unless disabled, and the PCI devices of the host.

    A USB tablet and a watchdog are added if requested.
    """
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
        device = SubElement(devices, "hostdev", mode="subsystem", type="pci", managed="yes")
        SubElement(
            SubElement(device, "source"),
            "address",
            domain=f"0x{domain}",
            bus=f"0x{bus}",
            slot=f"0x{slot}",
            function=f"0x{function}",
        )


def _format_state(word: str) -> str:
    return "on" if word == "yes" else "off"
