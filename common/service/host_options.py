# SPDX-License-Identifier: Apache-2.0
"""The options of a host: its agent, and moves of servers.

These are the sections agent and migration of ``common.service.config``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from oslo_config import cfg, types


def like(pattern: str, example: str) -> types.ConfigType:
    """Return the type of texts that match the pattern.

    Args:
        pattern: The regular expression for the whole text.
        example: A valid text, which the error for other texts shows.
    """

    class Like(types.String):
        def __call__(self, value: object) -> str:
            text = str(super().__call__(value))
            if re.fullmatch(pattern, text) is None:
                raise ValueError(f"must be like {example}")
            return text

    return Like(max_length=4096)


_CPUS = r"|\s*\^?\d+(-\d+)?\s*(,\s*\^?\d+(-\d+)?\s*)*"
_PCI_ADDRESS = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"

OPTIONS: dict[str, Sequence[cfg.Opt]] = {
    "agent": (
        cfg.StrOpt(
            "key_file",
            default="",
            help="This host's keys and its name at the broker, made by kilonova host add; default: host.key in "
            "state_dir.",
        ),
        cfg.StrOpt(
            "driver",
            default="libvirt",
            choices=["libvirt", "memory"],
            help="What drives the guests.",
        ),
        cfg.StrOpt("libvirt_uri", default="qemu:///system", help="libvirt's address."),
        cfg.StrOpt(
            "virt_type",
            default="auto",
            choices=["auto", "kvm", "qemu"],
            help="auto: KVM when a probe guest proves that it works, else emulation.",
        ),
        cfg.IntOpt(
            "workers", default=12, min=1, max=64, help="Commands carried out at the same time."
        ),
        cfg.IntOpt(
            "max_concurrent_builds",
            default=10,
            min=0,
            help="Of these, the most that make disks of images; one worker is always left for others. 0: only "
            "that.",
        ),
        cfg.IntOpt(
            "max_concurrent_image_fetches",
            default=2,
            min=0,
            help="Images fetched at the same time; 0: as many as are asked for.",
        ),
        cfg.StrOpt(
            "image_user",
            default="",
            help="User as which helper processes read what tenants wrote, with nothing else that may belong to "
            "it; default: kilonova-images, or nobody where there is none. An agent that may not change its "
            "user runs them as its own.",
        ),
        cfg.IntOpt(
            "image_memory_mb", default=1024, min=256, help="Memory of such a process, in MiB."
        ),
        cfg.IntOpt(
            "image_cpu_seconds",
            default=30,
            min=1,
            help="Its processor time; one that copies a disk has one second more for each 64 MiB.",
        ),
        cfg.IntOpt(
            "fence_after",
            default=0,
            min=0,
            help="Seconds without a word of a conductor after which a host makes its own guests off, and starts "
            "them again when it is heard and they were not evacuated; 0: never.",
        ),
        cfg.IntOpt(
            "hang_timeout",
            default=120,
            min=10,
            help="Seconds without a sign of life after which a command is said to hang in the hypervisor.",
        ),
        cfg.IntOpt(
            "shutdown_timeout",
            default=60,
            min=0,
            max=3600,
            help="Seconds that a guest has to power off before its plug is pulled.",
        ),
        cfg.FloatOpt(
            "cpu_allocation_ratio", default=4.0, min=0.1, help="VCPUs handed out per real one."
        ),
        cfg.FloatOpt(
            "ram_allocation_ratio", default=1.0, min=0.1, help="Memory handed out per real MiB."
        ),
        cfg.FloatOpt(
            "disk_allocation_ratio", default=1.0, min=0.1, help="Disk handed out per real GiB."
        ),
        cfg.Opt(
            "cpu_shared_set",
            type=like(_CPUS, "0-3,^2"),
            default="",
            help="CPUs that guests share, like 0-3,^2; empty: all, or none where cpu_dedicated_set names some.",
        ),
        cfg.Opt(
            "cpu_dedicated_set",
            type=like(_CPUS, "4-7"),
            default="",
            help="CPUs that are given to one guest CPU each (hw:cpu_policy=dedicated), like 4-7.",
        ),
        cfg.ListOpt(
            "pci_devices",
            item_type=like(_PCI_ADDRESS, "0000:81:00.1"),
            default=[],
            help="PCI addresses of devices that guests can have, like 0000:81:00.1; see lspci -D.",
        ),
        cfg.ListOpt(
            "compute_monitors",
            item_type=types.String(choices=["cpu.virt_driver"]),
            default=[],
            help="What is measured once a minute, for MetricsWeigher: cpu.virt_driver or nothing.",
        ),
        cfg.HostAddressOpt(
            "console_host",
            help="This host's address at which the console service reaches its guests' consoles; default: its own.",
        ),
        cfg.HostAddressOpt(
            "share_address",
            help="Address from which this host mounts shares, as the share service's "
            "rules are to name it; default: its own.",
        ),
        cfg.ListOpt(
            "volume_folders",
            default=[],
            help="Folders of this host, separated by commas, whose files and devices may be volumes of servers, "
            "as a volume service on this host names them; default: none, only volumes that are served over "
            "a network.",
        ),
        cfg.ListOpt(
            "qemu_volume_protocols",
            item_type=types.String(choices=["iscsi", "rbd"]),
            default=[],
            help="Protocols of volumes that QEMU speaks on this host by itself, without the kernel: iscsi, rbd; both "
            "need the Debian package qemu-block-extra. Default: none, such volumes are refused.",
        ),
        cfg.ListOpt(
            "host_volume_protocols",
            item_type=types.String(choices=["iscsi", "fibre_channel", "nvmeof", "nfs"]),
            default=[],
            help="Protocols of volumes that this host's kernel speaks: iscsi, fibre_channel and nvmeof by "
            "kilonova-volumes, nfs by systemd's mounts. Default: none, such volumes are refused.",
        ),
        cfg.BoolOpt(
            "volume_use_multipath",
            default=False,
            help="Connect volumes over all paths that they have (iscsi, fibre_channel; needs multipathd).",
        ),
        cfg.StrOpt(
            "config_drive_format",
            default="iso9660",
            choices=["iso9660", "vfat"],
            help="iso9660: config drives are CD-ROMs; vfat: disks (needs dosfstools and mtools).",
        ),
        cfg.IntOpt(
            "reserved_memory_mb",
            default=512,
            min=0,
            help="Memory kept for the host itself, in MiB.",
        ),
        cfg.IntOpt(
            "reserved_disk_gb", default=0, min=0, help="Disk kept for the host itself, in GiB."
        ),
        cfg.IntOpt("memory_vcpus", default=1000, min=1, help="VCPUs of the memory driver's host."),
        cfg.IntOpt(
            "memory_mb",
            default=1024 * 1024,
            min=1,
            help="Memory of the memory driver's host, in MiB.",
        ),
        cfg.IntOpt(
            "memory_disk_gb",
            default=100_000,
            min=1,
            help="Disk of the memory driver's host, in GiB.",
        ),
    ),
    "migration": (
        cfg.PortOpt(
            "transfer_port",
            default=16599,
            min=0,
            help="Port on which a host gives the files of moving servers to others; 0: a free one, which it keeps.",
        ),
        cfg.IntOpt(
            "transfer_rate",
            default=0,
            min=0,
            help="Most MiB a second that a host sends; 0: no limit.",
        ),
        cfg.StrOpt(
            "transfer_cert",
            default="",
            help="PEM file with this host's certificate: what moves then travels over TLS, both sides proved.",
        ),
        cfg.StrOpt("transfer_key", default="", help="PEM file with its key."),
        cfg.StrOpt(
            "transfer_ca",
            default="",
            help="PEM file with the authority that signed the hosts' certificates.",
        ),
        cfg.IntOpt(
            "max_concurrent_live_migrations",
            default=1,
            min=1,
            max=64,
            help="Live migrations that leave a host at the same time; others wait.",
        ),
        cfg.PortOpt(
            "live_migration_port",
            default=0,
            min=0,
            help="Port on which this host takes servers in that move while they run, like 16598: it listens "
            "while one is on its way, for the host that it comes from. 0: no server comes here live.",
        ),
        cfg.StrOpt(
            "live_migration_inbound_addr",
            default="",
            help="Address at which other hosts reach this one, and where it takes servers in; default: the one "
            "that it would leave by, by its default route.",
        ),
        cfg.IntOpt(
            "live_migration_bandwidth",
            default=0,
            min=0,
            help="Most MiB a second of a migration; 0: no limit.",
        ),
        cfg.IntOpt(
            "live_migration_completion_timeout",
            default=800,
            min=0,
            help="Seconds a GiB of memory and disk before live_migration_timeout_action; 0: never.",
        ),
        cfg.StrOpt(
            "live_migration_timeout_action",
            default="abort",
            choices=["abort", "force_complete"],
            help="abort: the server stays; force_complete: it is moved while it stands still.",
        ),
        cfg.BoolOpt(
            "live_migration_permit_auto_converge",
            default=False,
            help="Slow a guest down that writes faster than it can be copied.",
        ),
        cfg.BoolOpt(
            "live_migration_permit_post_copy",
            default=False,
            help="Let force_complete run a guest at the destination before all of its memory is there. Where "
            "QEMU is not root, both hosts need sysctl vm.unprivileged_userfaultfd = 1.",
        ),
        cfg.BoolOpt(
            "live_migration_with_native_tls",
            default=False,
            help="Encrypt memory and disks on their way by QEMU's TLS; a host without certificates refuses.",
        ),
    ),
}
