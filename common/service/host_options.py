# SPDX-License-Identifier: Apache-2.0
"""The options of a host: its agent, and moves of servers.

These are the sections agent and migration of ``common.service.config``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from oslo_config import cfg, types


def like(pattern: str, example: str) -> types.ConfigType:
    """Return the type of option values that match the pattern as a whole.

    Args:
        pattern: Regular expression.
        example: A valid value, which the error for other values shows.
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
            help="File with this host's keys and its user at the broker, which kilonova host add creates. Default: "
            "host.key in state_dir.",
        ),
        cfg.StrOpt(
            "driver",
            default="libvirt",
            choices=["libvirt", "memory"],
            help="Driver of the guests. memory: simulated guests, for tests.",
        ),
        cfg.StrOpt("libvirt_uri", default="qemu:///system", help="URI of libvirt."),
        cfg.StrOpt(
            "virt_type",
            default="auto",
            choices=["auto", "kvm", "qemu"],
            help="Virtualization of guests. auto: KVM if a probe guest proves that it works, otherwise emulation.",
        ),
        cfg.IntOpt(
            "workers",
            default=12,
            min=1,
            max=64,
            help="Maximum number of commands that are executed at the same time.",
        ),
        cfg.IntOpt(
            "max_concurrent_builds",
            default=10,
            min=0,
            help="Maximum number of these commands that create disks from images. One worker is always left for "
            "other commands. 0: no other limit.",
        ),
        cfg.IntOpt(
            "max_concurrent_image_fetches",
            default=2,
            min=0,
            help="Maximum number of images that are fetched at the same time. 0: no limit.",
        ),
        cfg.StrOpt(
            "image_user",
            default="",
            help="User of the helper processes that read files of tenants. The user should own nothing else. "
            "Default: kilonova-images, or nobody if there is no such user. An agent that may not change its "
            "user runs them as its own user.",
        ),
        cfg.IntOpt(
            "image_memory_mb",
            default=1024,
            min=256,
            help="Maximum memory of such a helper process, in MiB.",
        ),
        cfg.IntOpt(
            "image_cpu_seconds",
            default=30,
            min=1,
            help="Maximum processor time of such a helper process, in seconds. A process that copies a disk has one "
            "second more for each 64 MiB.",
        ),
        cfg.IntOpt(
            "fence_after",
            default=0,
            min=0,
            help="Seconds without an answer of a conductor after which a host powers off its own guests. The host "
            "starts them again when a conductor answers and they were not evacuated. 0: never.",
        ),
        cfg.IntOpt(
            "hang_timeout",
            default=120,
            min=10,
            help="Seconds without a sign of life after which a command is reported as hanging in the hypervisor.",
        ),
        cfg.IntOpt(
            "shutdown_timeout",
            default=60,
            min=0,
            max=3600,
            help="Seconds that a guest has to shut down before it is powered off.",
        ),
        cfg.FloatOpt(
            "cpu_allocation_ratio",
            default=4.0,
            min=0.1,
            help="Number of allocatable VCPUs per CPU of the host.",
        ),
        cfg.FloatOpt(
            "ram_allocation_ratio",
            default=1.0,
            min=0.1,
            help="Allocatable memory per MiB of the host's memory.",
        ),
        cfg.FloatOpt(
            "disk_allocation_ratio",
            default=1.0,
            min=0.1,
            help="Allocatable disk space per GiB of the host's disk.",
        ),
        cfg.Opt(
            "cpu_shared_set",
            type=like(_CPUS, "0-3,^2"),
            default="",
            help="CPUs that guests share, for example 0-3,^2. Empty: all CPUs, or none if cpu_dedicated_set names "
            "some.",
        ),
        cfg.Opt(
            "cpu_dedicated_set",
            type=like(_CPUS, "4-7"),
            default="",
            help="CPUs that are each assigned to one guest CPU (hw:cpu_policy=dedicated), for example 4-7.",
        ),
        cfg.ListOpt(
            "pci_devices",
            item_type=like(_PCI_ADDRESS, "0000:81:00.1"),
            default=[],
            help="PCI addresses of devices that are assigned to guests, for example 0000:81:00.1. See lspci -D.",
        ),
        cfg.ListOpt(
            "compute_monitors",
            item_type=types.String(choices=["cpu.virt_driver"]),
            default=[],
            help="Metrics that are measured once a minute for MetricsWeigher: cpu.virt_driver, or empty for no "
            "metrics.",
        ),
        cfg.HostAddressOpt(
            "console_host",
            help="Address of this host at which the console service reaches the consoles of guests. Default: the "
            "host's own address.",
        ),
        cfg.HostAddressOpt(
            "share_address",
            help="Address from which this host mounts shares, for the rules of the shared file system service. "
            "Default: the host's own address.",
        ),
        cfg.ListOpt(
            "volume_folders",
            default=[],
            help="Folders of this host, separated by commas, whose files and devices may be volumes of servers, as a "
            "volume service on this host names them. Default: none, so that only volumes served over a network "
            "are allowed.",
        ),
        cfg.ListOpt(
            "qemu_volume_protocols",
            item_type=types.String(choices=["iscsi", "rbd"]),
            default=[],
            help="Volume protocols that QEMU on this host uses without the kernel: iscsi, rbd. Both need the Debian "
            "package qemu-block-extra. Default: none, such volumes are refused.",
        ),
        cfg.ListOpt(
            "host_volume_protocols",
            item_type=types.String(choices=["iscsi", "fibre_channel", "nvmeof", "nfs"]),
            default=[],
            help="Volume protocols that this host's kernel uses: iscsi, fibre_channel and nvmeof through "
            "kilonova-volumes, nfs through systemd's mounts. Default: none, such volumes are refused.",
        ),
        cfg.BoolOpt(
            "volume_use_multipath",
            default=False,
            help="Whether volumes are connected over all their paths (iscsi, fibre_channel). Needs multipathd.",
        ),
        cfg.StrOpt(
            "config_drive_format",
            default="iso9660",
            choices=["iso9660", "vfat"],
            help="iso9660: config drives are CD-ROMs. vfat: config drives are disks, which needs dosfstools and "
            "mtools.",
        ),
        cfg.IntOpt(
            "reserved_memory_mb",
            default=512,
            min=0,
            help="Memory that is reserved for the host itself, in MiB.",
        ),
        cfg.IntOpt(
            "reserved_disk_gb",
            default=0,
            min=0,
            help="Disk space that is reserved for the host itself, in GiB.",
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
            help="Port on which a host serves the files of moving servers to other hosts. 0: a free port, which the "
            "host keeps.",
        ),
        cfg.IntOpt(
            "transfer_rate",
            default=0,
            min=0,
            help="Maximum rate at which a host sends files of moving servers, in MiB per second. 0: no limit.",
        ),
        cfg.StrOpt(
            "transfer_cert",
            default="",
            help="PEM file with this host's certificate for transfers. If set, files of moving servers are sent over "
            "TLS, and both hosts are authenticated.",
        ),
        cfg.StrOpt("transfer_key", default="", help="PEM file with the key of transfer_cert."),
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
            help="Maximum number of live migrations that leave a host at the same time. Others wait.",
        ),
        cfg.PortOpt(
            "live_migration_port",
            default=0,
            min=0,
            help="Port on which this host accepts live migrations, for example 16598. It listens only during a live "
            "migration, and only for the source host. 0: this host accepts no live migrations.",
        ),
        cfg.StrOpt(
            "live_migration_inbound_addr",
            default="",
            help="Address at which other hosts reach this host, and on which it accepts moving servers. Default: the "
            "source address of its default route.",
        ),
        cfg.IntOpt(
            "live_migration_bandwidth",
            default=0,
            min=0,
            help="Maximum bandwidth of a live migration in MiB per second. 0: no limit.",
        ),
        cfg.IntOpt(
            "live_migration_completion_timeout",
            default=800,
            min=0,
            help="Seconds per GiB of memory and disk after which live_migration_timeout_action is taken. 0: never.",
        ),
        cfg.StrOpt(
            "live_migration_timeout_action",
            default="abort",
            choices=["abort", "force_complete"],
            help="abort: the server stays on the source. force_complete: the guest is paused until the migration "
            "completes, or continues at the destination if live_migration_permit_post_copy is set.",
        ),
        cfg.BoolOpt(
            "live_migration_permit_auto_converge",
            default=False,
            help="Whether a guest that writes faster than it can be copied is slowed down.",
        ),
        cfg.BoolOpt(
            "live_migration_permit_post_copy",
            default=False,
            help="Whether force_complete may run a guest at the destination before all of its memory is copied. If "
            "QEMU does not run as root, both hosts need sysctl vm.unprivileged_userfaultfd = 1.",
        ),
        cfg.BoolOpt(
            "live_migration_with_native_tls",
            default=False,
            help="Whether memory and disks are encrypted with QEMU's TLS during a live migration. Hosts without "
            "certificates refuse such migrations.",
        ),
    ),
}
