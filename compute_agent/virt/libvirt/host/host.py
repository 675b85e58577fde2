# SPDX-License-Identifier: Apache-2.0
"""The host's inventory, boot id, and whether KVM works.

Called by ``virt.libvirt.driver``. /dev/kvm may exist although every guest hangs. Therefore KVM is
used only after a successful run of a probe guest. The probe (probe.S) is a boot sector that enters
the CPU modes of a kernel and then makes QEMU exit. The result is stored in the state folder and is
valid until the next boot.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.domain.models import Device, HardwareAssignment, HostInventory
from common.service.log import get_logger
from compute_agent.virt import machine
from compute_agent.virt.cpu_sets import CpuSets
from compute_agent.virt.driver import SPICE
from compute_agent.virt.libvirt.domains.connection import (
    BASELINE_CPU_EXPAND_FEATURES,
    Connection,
    LibvirtConnection,
)
from compute_agent.virt.libvirt.host import capabilities
from compute_agent.virt.libvirt.xml.domain_xml import ARCH, EMULATED_CPU, MACHINE
from compute_agent.virt.libvirt.xml.hardware_xml import (
    DISK_BUSES,
    VIDEO_MODELS,
    VIF_MODELS,
    HostPlacement,
)
from compute_agent.virt.traits import COMMON, VOLUMES, of_processor

#: Mode of the folder of the guests' folders. QEMU's group may pass through to the files, other
#: users may not.
FOLDER_MODE = 0o710
LOG = get_logger(__name__)
GIBIBYTE = 1 << 30
PROBE_TIMEOUT_SECONDS = 5.0
#: probe.S, assembled. The probe writes 0x10 to isa-debug-exit, so that QEMU exits with status 33.
PROBE = (
    bytes.fromhex(
        "fa31c08ed88ec08ed0bc007cfcbf0010b90018f3abc70600100320c70600200330c706003083000f0116c07c0f20c00c"
        "010f22c0ea397c080066b810008ed88ed0bc007c00009c6a08684f7c0000cf0f20e00c200f22e0b8001000000f22d8b9"
        "800000c00f3280cc010f300f20c00d000000800f22c0ea7d7c0000180066b810008ed06a1068007c00009c6a1868947c"
        "000048cf66baf400b010eef4ebfd66900000000000000000ffff0000009acf00ffff00000092cf00ffff0000009aaf00"
        "1f00a07c"
    ).ljust(510, b"\0")
    + b"\x55\xaa"
)
PROBE_STATUS = 33
STORAGE_ID = ".storage-id"
#: Folders in which packages describe vhost-user programs, for example virtiofsd.
VHOST_USER_FOLDERS = (Path("/etc/qemu/vhost-user"), Path("/usr/share/qemu/vhost-user"))


def boot_id() -> str:
    """Return a text that changes with every boot of the host's kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class HostCapabilities:
    """The host, as reported by libvirt.

    Attributes:
        hypervisor: libvirt's name of the hypervisor, for example "QEMU".
        version: Version of the hypervisor, as libvirt's number.
        hostname: Host name that libvirt reports.
        cpus: Number of the host's CPUs.
        memory_mb: Memory in MiB.
        capabilities: libvirt's XML of the host's capabilities.
        domain_capabilities: XML of the emulator's capabilities, or "" with libvirt's test driver.
        cpu_features: Features of the guests' CPU by libvirt's names.
        serves_folders: True if the host has a virtiofsd.
    """

    hypervisor: str
    version: int
    hostname: str
    cpus: int
    memory_mb: int
    capabilities: str
    domain_capabilities: str = ""
    cpu_features: tuple[str, ...] = ()
    serves_folders: bool = False


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The operator's configuration of this host.

    Attributes:
        hostname: Name of the host as hypervisor, or "" for the name that libvirt reports.
        host_ip: IP address that the hypervisors API shows.
        reserved_memory_mb: MiB that guests do not get.
        reserved_disk_gb: GiB that guests do not get.
        cpus: The shared and the dedicated CPUs.
        devices: PCI devices that guests may get.
        share_address: Address to which shares are exported, or "" if not configured.
    """

    hostname: str = ""
    host_ip: str = "127.0.0.1"
    reserved_memory_mb: int = 0
    reserved_disk_gb: int = 0
    cpus: CpuSets = CpuSets()
    devices: Sequence[Device] = ()
    share_address: str = ""


def facts(libvirt: Connection, virt_type: str) -> HostCapabilities:
    """Query libvirt for the capabilities of this host, look for virtiofsd, and return the results.

    With ``virt_type`` "test" the result has no emulator's capabilities and no CPU features.

    Args:
        libvirt: Connection to libvirtd.
        virt_type: Domain type of the guests: kvm, qemu or test.

    Raises:
        VerbFailed: libvirt refused a query.
        NoAnswer: libvirtd does not answer.
    """

    def query(connection: LibvirtConnection) -> HostCapabilities:
        _, memory_mb, cpus, *_ = connection.getInfo()
        domain_capabilities = ""
        features: tuple[str, ...] = ()
        if virt_type != "test":
            domain_capabilities = str(
                connection.getDomainCapabilities(None, ARCH, MACHINE, virt_type)
            )
            cpu = capabilities.host_model(domain_capabilities) if virt_type == "kvm" else None
            cpu = cpu or capabilities.GuestCpu(EMULATED_CPU)
            model = f"<cpu><arch>{ARCH}</arch><model>{cpu.model}</model></cpu>"
            features = tuple(
                cpu.features(connection.baselineCPU([model], BASELINE_CPU_EXPAND_FEATURES))
            )
        return HostCapabilities(
            connection.getType(),
            connection.getVersion(),
            connection.getHostname(),
            cpus,
            memory_mb,
            connection.getCapabilities(),
            domain_capabilities,
            features,
            bool(domain_capabilities) and has_virtiofsd(),
        )

    return libvirt.ask("describe the host", query)


def has_virtiofsd(folders: tuple[Path, ...] = VHOST_USER_FOLDERS) -> bool:
    """Return True if a file in ``folders`` describes a virtiofsd that the agent may execute."""
    for path in sorted(
        path for folder in folders if folder.is_dir() for path in folder.glob("*.json")
    ):
        try:
            description = json.loads(path.read_text())
            if description.get("type") == "fs" and os.access(description["binary"], os.X_OK):
                return True
        except (OSError, ValueError, KeyError, AttributeError):
            continue
    return False


def inventory(
    facts: HostCapabilities, state_dir: Path, virt_type: str, about: HostOptions
) -> HostInventory:
    """Return the host's inventory, from libvirt's ``facts`` and the operator's options ``about``.

    The disk size is that of the file system of ``state_dir``. ``vcpus`` counts the shared CPUs,
    ``pcpus`` the dedicated CPUs.
    """
    disk = os.statvfs(state_dir)
    numa_nodes = capabilities.numa_nodes(facts.capabilities, about.cpus)
    shared, dedicated = about.cpus.split(range(facts.cpus))
    return HostInventory(
        hypervisor_type=facts.hypervisor,
        hypervisor_version=facts.version,
        hypervisor_hostname=about.hostname or facts.hostname,
        vcpus=len(shared),
        memory_mb=facts.memory_mb,
        disk_gb=disk.f_frsize * disk.f_blocks // GIBIBYTE,
        host_ip=about.host_ip,
        cpu_info=capabilities.cpu_info(facts.capabilities),
        traits=traits(facts, any(numa_node.siblings for numa_node in numa_nodes)),
        reserved_memory_mb=about.reserved_memory_mb,
        reserved_disk_gb=about.reserved_disk_gb,
        pcpus=len(dedicated),
        numa_nodes=numa_nodes,
        devices=list(about.devices),
        facts={
            "supported_instances": capabilities.supported_instances(facts.capabilities, virt_type),
            **({"share_address": about.share_address} if about.share_address else {}),
        },
    )


def close_to_others(instances: Path, host_capabilities: str) -> None:
    """Restrict the folder of the guests' folders to the agent and QEMU's group.

    The group may enter the folder and may not list the content. If libvirt's capabilities do not
    name the group, the folder is not changed. A failure is logged and not raised.
    """
    user = capabilities.guests_user(host_capabilities)
    if user is None:
        return
    try:
        os.chown(instances, -1, user[1])
        instances.chmod(FOLDER_MODE)
    except OSError as problem:
        LOG.warning(
            "other users of this host can enter the folder of guests, because the group of QEMU cannot be set",
            path=instances,
            problem=problem,
        )


def give_to_guest(libvirt: Connection, files: Iterable[Path]) -> None:
    """Give these files to QEMU's user and group, as libvirt does at the start of a guest.

    If libvirt does not report the user, the files are not changed. If the agent lacks the
    permission for a file, this is logged and not raised.

    Why: after a migration over storage that libvirt does not know to be shared, the source's
    libvirt takes the files back.

    Raises:
        OSError: A file does not exist.
        VerbFailed: libvirt refused the query.
        NoAnswer: libvirtd does not answer.
    """
    user = capabilities.guests_user(
        libvirt.ask("describe its users", lambda connection: str(connection.getCapabilities()))
    )
    if user is None:
        return
    for file in files:
        status = file.stat()
        if (status.st_uid, status.st_gid) != user:
            try:
                os.chown(file, *user, follow_symlinks=False)
            except PermissionError as problem:
                LOG.warning(
                    "a guest may fail, because QEMU may not open a file of the guest",
                    problem=problem,
                )


def storage_id(instances: Path) -> str:
    """Return the id of the storage, which is the same on hosts that share this folder.

    The id is in a file of the folder. The first host that calls this function writes the file.
    """
    path = instances / STORAGE_ID
    if not path.exists():
        part = path.with_name(f"{STORAGE_ID}.{uuid.uuid4().hex}.part")
        with part.open("w") as file:
            file.write(f"{uuid.uuid4()}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            # Unlike a rename, a link never replaces the file of another host.
            os.link(part, path)
        except FileExistsError:
            LOG.debug("another host wrote a file first", path=path)
        finally:
            part.unlink()
    return path.read_text().strip()


def place(libvirt: Connection, about: HostOptions, assignment: HardwareAssignment) -> HostPlacement:
    """Return the CPUs and devices of this host for a guest with this assignment.

    The host is not changed, and no CPU or device is reserved.
    """
    shared: dict[int, tuple[int, ...]] = {}
    if assignment.numa_nodes:
        xml = libvirt.ask("describe the host", lambda connection: str(connection.getCapabilities()))
        shared = {
            numa_node.id: tuple(numa_node.cpus)
            for numa_node in capabilities.numa_nodes(xml, about.cpus)
        }
    return HostPlacement(
        tuple(assignment.numa_nodes),
        tuple(assignment.devices),
        shared,
        tuple(sorted(about.cpus.shared or ())),
        machine.most_cpu_shares(),
    )


def traits(facts: HostCapabilities, has_threads: bool) -> list[str]:
    """Return the traits of the host, sorted.

    Args:
        facts: The host, as reported by libvirt.
        has_threads: True if a core of the host has several threads.
    """
    names = {*COMMON, *VOLUMES, *of_processor(facts.cpu_features)}
    names |= {
        f"COMPUTE_STORAGE_BUS_{bus.upper()}"
        for bus in DISK_BUSES
        if bus in capabilities.find_values(facts.domain_capabilities, "disk", "bus")
    }
    names |= {
        f"COMPUTE_GRAPHICS_MODEL_{model.upper()}"
        for model in VIDEO_MODELS
        if model in capabilities.find_values(facts.domain_capabilities, "video", "modelType")
    }
    if facts.serves_folders and "virtiofs" in capabilities.find_values(
        facts.domain_capabilities, "filesystem", "driverType"
    ):
        names.add("COMPUTE_STORAGE_VIRTIO_FS")
    if "memfd" in capabilities.memory_sources(facts.domain_capabilities):
        names.add("COMPUTE_MEM_BACKING_FILE")
    if facts.domain_capabilities:
        names |= {f"COMPUTE_NET_VIF_MODEL_{model.upper()}" for model in VIF_MODELS}
        names |= {"HW_ARCH_X86_64", "COMPUTE_ARCH_X86_64", "COMPUTE_FIRMWARE_BIOS"}
    return sorted(names | ({"HW_CPU_HYPERTHREADING"} if has_threads else set()))


def has_spice(facts: HostCapabilities) -> bool:
    """Return True if this host's QEMU supports SPICE, else log an error and return False."""
    if SPICE in capabilities.find_values(facts.domain_capabilities, "graphics", "type"):
        return True
    LOG.error(
        "[spice] enabled: the QEMU of this host does not support SPICE, so its guests get VNC "
        "only; install a QEMU with SPICE (for example, Debian's package qemu-system-x86), and "
        "restart the agent"
    )
    return False


def kvm_works(state_dir: Path) -> bool:
    """Return True if guests run under KVM on this host.

    The first call after a boot runs the probe guest, which may take ``PROBE_TIMEOUT_SECONDS``, and
    stores the result in ``state_dir``. Later calls return the stored result.
    """
    answer_file, boot = state_dir / "kvm.json", boot_id()
    try:
        answer = json.loads(answer_file.read_text())
        if answer["boot_id"] == boot:
            return bool(answer["works"])
    except (FileNotFoundError, ValueError, KeyError) as error:
        LOG.debug("no probe guest has run under KVM since the boot", problem=error)
    works = probe("kvm")
    part = answer_file.with_suffix(".part")
    part.write_text(json.dumps({"boot_id": boot, "works": works}))
    os.replace(part, answer_file)
    return works


def probe(accelerator: str, seconds: float = PROBE_TIMEOUT_SECONDS) -> bool:
    """Run the probe guest, and return True if it ran to its end within the time limit.

    Without QEMU the result is False.

    Args:
        accelerator: QEMU's accelerator, "kvm" or "tcg".
        seconds: The time limit.
    """
    emulator = shutil.which("qemu-system-x86_64")
    if emulator is None:
        return False
    with tempfile.NamedTemporaryFile(suffix=".probe") as sector:
        sector.write(PROBE)
        sector.flush()
        command = [
            emulator,
            "-accel",
            accelerator,
            "-cpu",
            "max",
            "-machine",
            "pc",
            "-m",
            "16",
            "-display",
            "none",
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
            "-device",
            "isa-debug-exit,iobase=0xf4,iosize=1",
            "-drive",
            f"file={sector.name},format=raw,if=ide,snapshot=on",
        ]
        try:
            result = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            LOG.warning("the probe guest did not run", accelerator=accelerator, problem=error)
            return False
    if result.returncode != PROBE_STATUS:
        LOG.info(
            "the probe guest ended early",
            accelerator=accelerator,
            status=result.returncode,
            output=result.stderr.decode(errors="replace").strip()[:300],
        )
    return result.returncode == PROBE_STATUS
