# SPDX-License-Identifier: Apache-2.0
"""The host itself: what it has, which boot this is, and whether KVM works on it.

Called by ``virt.libvirt.driver``. KVM is believed only after a probe guest has run under it: /dev/kvm may exist
and yet hang every guest. The probe (probe.S) is a boot sector that enters the modes a kernel needs and then makes
QEMU exit; its answer holds until the host boots again and is kept in the state folder.
"""
from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common.models import JSON, HostInventory
from compute_agent.virt.libvirt.connection import Facts

LOG = logging.getLogger(__name__)
GIBIBYTE = 1 << 30
PROBE_SECONDS = 5.0
#: probe.S as assembled; it writes 0x10 to isa-debug-exit, which makes QEMU end with 33.
PROBE = bytes.fromhex(
    "fa31c08ed88ec08ed0bc007cfcbf0010b90018f3abc70600100320c70600200330c706003083000f0116c07c0f20c00c"
    "010f22c0ea397c080066b810008ed88ed0bc007c00009c6a08684f7c0000cf0f20e00c200f22e0b8001000000f22d8b9"
    "800000c00f3280cc010f300f20c00d000000800f22c0ea7d7c0000180066b810008ed06a1068007c00009c6a1868947c"
    "000048cf66baf400b010eef4ebfd66900000000000000000ffff0000009acf00ffff00000092cf00ffff0000009aaf00"
    "1f00a07c"
).ljust(510, b"\0") + b"\x55\xaa"
PROBE_STATUS = 33
TRAITS = ["COMPUTE_IMAGE_TYPE_QCOW2", "COMPUTE_IMAGE_TYPE_RAW", "COMPUTE_NODE"]


def boot_id() -> str:
    """Changes whenever the kernel of this host boots."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def inventory(facts: Facts, state_dir: Path, *, hostname: str = "", host_ip: str = "127.0.0.1",
              reserved_memory_mb: int = 0, reserved_disk_gb: int = 0) -> HostInventory:
    """All that this host has; the disk is the file system that holds ``state_dir``."""
    disk = os.statvfs(state_dir)
    return HostInventory(
        hypervisor_type=facts.hypervisor, hypervisor_version=facts.version,
        hypervisor_hostname=hostname or facts.hostname, vcpus=facts.cpus, memory_mb=facts.memory_mb,
        disk_gb=disk.f_frsize * disk.f_blocks // GIBIBYTE, host_ip=host_ip, cpu_info=cpu_info(facts.capabilities),
        traits=list(TRAITS), reserved_memory_mb=reserved_memory_mb, reserved_disk_gb=reserved_disk_gb)


def cpu_info(capabilities: str) -> JSON:
    """The host's processor in the words of the hypervisors API."""
    cpu = ElementTree.fromstring(capabilities).find("host/cpu")
    if cpu is None:
        return {}
    topology = cpu.find("topology")
    sizes: dict[str, Any] = {} if topology is None else {
        ours: int(topology.get(theirs, "1"))
        for ours, theirs in (("sockets", "sockets"), ("cells", "dies"), ("cores", "cores"), ("threads", "threads"))}
    return {"arch": cpu.findtext("arch", ""), "model": cpu.findtext("model", ""),
            "vendor": cpu.findtext("vendor", ""), "topology": sizes,
            "features": sorted(feature.get("name", "") for feature in cpu.findall("feature"))}


def kvm_works(state_dir: Path) -> bool:
    """Whether a guest runs under KVM: asked once a boot, at most ``PROBE_SECONDS`` long."""
    answer_file, boot = state_dir / "kvm.json", boot_id()
    try:
        answer = json.loads(answer_file.read_text())
        if answer["boot_id"] == boot:
            return bool(answer["works"])
    except (FileNotFoundError, ValueError, KeyError) as error:
        LOG.debug("KVM is not known for this boot: %s", error)
    works = probe("kvm")
    part = answer_file.with_suffix(".part")
    part.write_text(json.dumps({"boot_id": boot, "works": works}))
    os.replace(part, answer_file)
    return works


def probe(accelerator: str, seconds: float = PROBE_SECONDS) -> bool:
    """Run the probe guest under an accelerator of QEMU ("kvm" or "tcg"); False when it does not end well."""
    emulator = shutil.which("qemu-system-x86_64")
    if emulator is None:
        return False
    with tempfile.NamedTemporaryFile(suffix=".probe") as sector:
        sector.write(PROBE)
        sector.flush()
        command = [emulator, "-accel", accelerator, "-cpu", "max", "-machine", "pc", "-m", "16",
                   "-display", "none", "-nodefaults", "-no-user-config", "-no-reboot",
                   "-device", "isa-debug-exit,iobase=0xf4,iosize=1",
                   "-drive", f"file={sector.name},format=raw,if=ide,snapshot=on"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds,
                                  check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            LOG.warning("no probe guest ran under %s: %s", accelerator, error)
            return False
    if done.returncode != PROBE_STATUS:
        LOG.info("the probe guest under %s ended with %s: %s", accelerator, done.returncode,
                 done.stderr.decode(errors="replace").strip()[:300])
    return done.returncode == PROBE_STATUS
