# SPDX-License-Identifier: Apache-2.0
"""Build the parts of an agent from the configuration: driver, console listener, transfer service.

``compute_agent.service`` calls these functions when the process starts.

Invariant: if the host lacks something that the configuration requires, the process ends with a
message that contains the remedy.
"""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from oslo_config import cfg

from common.domain import errors
from common.security import tls
from common.service import service
from compute_agent import verbs
from compute_agent.consoles.consoles import Consoles
from compute_agent.consoles.direct_consoles import DirectConsoles
from compute_agent.transfer import client
from compute_agent.transfer import service as transfer
from compute_agent.virt import cpu_sets, machine
from compute_agent.virt.driver import Driver

#: Documentation addresses, which no host has. The default route leads to them.
UNUSED_ADDRESSES = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}


def make_driver(conf: cfg.ConfigOpts) -> Driver:
    """Create the driver that ``[agent] driver`` names. A configuration error ends the process."""
    try:
        if conf.agent.driver == "memory":
            return _memory_driver(conf)
        return _libvirt_driver(conf)
    except (errors.ConfigError, ValueError) as problem:
        service.refuse("agent", problem)


def _memory_driver(conf: cfg.ConfigOpts) -> Driver:
    from compute_agent.virt.memory.driver import MemoryDriver
    from compute_agent.virt.memory.state.host import MemoryHost, make_inventory

    options = conf.agent
    inventory = make_inventory(
        conf.host,
        options.memory_vcpus,
        options.memory_mb,
        options.memory_disk_gb,
        _cpus(conf, range(options.memory_vcpus)),
    )
    # A process has no storage, so no host can share storage with it.
    inventory = replace(
        inventory, facts={**inventory.facts, "diskless": True}, host_ip=own_address(conf)
    )
    state_file = Path(conf.state_dir) / "memory-guests.json"
    return MemoryDriver(
        MemoryHost(
            conf.host,
            inventory=inventory,
            state_file=state_file,
            image_fetches=options.max_concurrent_image_fetches,
            spice=conf.spice.enabled,
        )
    )


def _libvirt_driver(conf: cfg.ConfigOpts) -> Driver:
    from common.clients import vendor_data
    from compute_agent.sandbox import client
    from compute_agent.virt.libvirt.disks.local_disks import LocalDisks
    from compute_agent.virt.libvirt.driver import LibvirtDriver
    from compute_agent.virt.libvirt.guests import config_drive
    from compute_agent.virt.libvirt.host.host import HostOptions
    from compute_agent.virt.libvirt.migration.live_migration import MigrationOptions
    from compute_agent.virt.libvirt.volumes import connectors

    options = conf.agent
    client.configure(
        client.SandboxSettings(
            options.image_user, options.image_memory_mb << 20, options.image_cpu_seconds
        )
    )
    host_options = HostOptions(
        reserved_memory_mb=options.reserved_memory_mb,
        reserved_disk_gb=options.reserved_disk_gb,
        cpus=_cpus(conf, machine.cpus()),
        devices=machine.devices(options.pci_devices),
        host_ip=own_address(conf),
        share_address=options.share_address or "",
    )
    section = conf.migration
    migration = MigrationOptions(
        port=section.live_migration_port,
        address=own_address(conf),
        bandwidth=section.live_migration_bandwidth,
        completion_timeout=section.live_migration_completion_timeout,
        timeout_action=section.live_migration_timeout_action,
        auto_converge=section.live_migration_permit_auto_converge,
        post_copy=section.live_migration_permit_post_copy,
        native_tls=section.live_migration_with_native_tls,
        plain_text=conf.tls.allow_plain_text,
        tls=_transfer_proof(conf, own_address(conf)),
    )
    if migration.port and (reason := migration.plain_text_to(migration.facts)):
        raise errors.ConfigError(
            f"live migrations to this host would send guests' memory as plain text: {reason}. Set [tls] ca_file "
            "and [migration] live_migration_with_native_tls, or set [tls] allow_plain_text = true if only the "
            "cloud's machines reach that network"
        )
    return LibvirtDriver(
        options.libvirt_uri,
        conf.state_dir,
        virt_type=options.virt_type,
        about=host_options,
        image_fetches=options.max_concurrent_image_fetches,
        migration=migration,
        local_disks=LocalDisks(conf.default_ephemeral_format),
        config_drives=config_drive.open_config_drives(
            options.config_drive_format, vendor_data.static(conf), vendor_data.configured(conf)
        ),
        connectors=connectors.of_host(
            connectors.Protocols(
                options.volume_folders,
                options.qemu_volume_protocols,
                options.host_volume_protocols,
                options.volume_use_multipath,
                Path(conf.state_dir) / "volume-mounts",
            ),
            tls.of(conf),
            conf.tls.allow_plain_text,
            connectors.describe_host(conf.host, own_address(conf)),
        ),
        spice=conf.spice.enabled,
    )


def _cpus(conf: cfg.ConfigOpts, present: Iterable[int]) -> cpu_sets.CpuSets:
    return cpu_sets.read_cpu_sets(conf.agent.cpu_shared_set, conf.agent.cpu_dedicated_set, present)


def make_consoles(conf: cfg.ConfigOpts, driver: Driver) -> Consoles:
    """Create the listener for consoles, at [agent] console_host or at ``own_address``.

    The caller starts the listener. The process ends if the address or the TLS files cannot be
    used, or if TLS is required and not configured.
    """
    try:
        address = conf.agent.console_host or own_address(conf)
        proof = tls.protecting(conf, "[agent] console_host", [address], listens=True)
        direct = DirectConsoles(driver.console, address, conf.spice.direct_proxies, tls=proof)
        return Consoles(driver.console, address, tls=proof, direct=direct)
    except errors.ConfigError as problem:
        service.refuse("agent", problem)
    except OSError as problem:
        sys.exit(
            f"kilonova-agent: [agent] console_host {address}: {problem}; set it to an "
            "address of this host that the console service reaches"
        )


def make_transfer(
    conf: cfg.ConfigOpts, driver: Driver
) -> tuple[transfer.TransferService, verbs.PeerOpener]:
    """Create the service that sends files to other hosts, and the client for their files.

    The caller starts the service. The process ends if the address, the port or the TLS files
    cannot be used, or if TLS is required and not configured.

    Returns:
        The service, and the function that opens files of other hosts.
    """
    options = conf.migration
    try:
        address = own_address(conf)
        proof = _transfer_proof(conf, address)
        listen = functools.partial(
            transfer.TransferService, driver, address, rate=options.transfer_rate, tls=proof
        )
        transfer_service = (
            listen(options.transfer_port)
            if options.transfer_port
            else _open_on_previous_port(listen, Path(conf.state_dir) / "transfer-port")
        )
    except errors.ConfigError as problem:
        service.refuse("agent", problem)
    except OSError as problem:
        sys.exit(
            f"kilonova-agent: [migration] transfer_port {options.transfer_port} at {address}: {problem}; set "
            "it to a free port, and live_migration_inbound_addr to an address of this host that other hosts reach"
        )
    return transfer_service, functools.partial(client.peer, tls=proof)


def _open_on_previous_port(
    listen: Callable[[int], transfer.TransferService], port_file: Path
) -> transfer.TransferService:
    """Open the service on the port of the last start if that is free, else on any free port.

    Because the port stays the same, another host can resume its copy of files of this host after
    a restart.

    Args:
        listen: Opens the service on a port, 0 for any free port.
        port_file: File with the port of the last start.

    Raises:
        OSError: No port can be opened, or ``port_file`` cannot be written.
    """
    transfer_service = None
    with suppress(OSError, ValueError, OverflowError):
        transfer_service = listen(int(port_file.read_text()))
    if transfer_service is None:
        transfer_service = listen(0)
    part = port_file.with_suffix(".part")
    part.write_text(str(transfer_service.port))
    part.replace(port_file)
    return transfer_service


def _transfer_proof(conf: cfg.ConfigOpts, address: str) -> tls.Tls | None:
    """Return the TLS files of [migration] if they are configured, else those of [tls].

    Returns:
        None if no TLS files are configured, and plain connections at ``address`` are permitted.

    Raises:
        ConfigError: [migration] names only some of the files, a file cannot be used, [tls] has no
            certificate but an authority, or plain connections are not permitted.
    """
    options = conf.migration
    files = options.transfer_cert, options.transfer_key, options.transfer_ca
    if not any(files):
        return tls.protecting(
            conf, "[migration] live_migration_inbound_addr", [address], listens=True
        )
    if not all(files):
        raise errors.ConfigError(
            "only some of [migration] transfer_cert, transfer_key and transfer_ca are set: set all "
            "three or none"
        )
    return tls.load(*files, "[migration] transfer_cert {}, transfer_key {}, transfer_ca {}")


def own_address(conf: cfg.ConfigOpts) -> str:
    """Return the address at which other hosts reach this host.

    This is live_migration_inbound_addr, or else the local address of the default route.

    Raises:
        ConfigError: The option is not set, and the host has no default route.
    """
    if conf.migration.live_migration_inbound_addr:
        return str(conf.migration.live_migration_inbound_addr)
    for family, unused_address in UNUSED_ADDRESSES.items():
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket chooses the local address, and sends no packet.
            probe.connect(unused_address)
            return str(probe.getsockname()[0])
    raise errors.ConfigError(
        "the address of this host is unknown, because it has no default route: set [migration] "
        "live_migration_inbound_addr to the address at which other hosts reach it, or to 127.0.0.1 if the "
        "cloud has no other host"
    )


def copies_at_a_time(workers: int) -> int:
    """Return the number of workers that may copy whole disks.

    If there are several workers, one stays free for quick verbs.
    """
    return max(1, workers - 1)


def builds_at_a_time(workers: int, most: int) -> int:
    """Return the number of workers that may build guests, at most ``copies_at_a_time``.

    Args:
        workers: Number of workers.
        most: Configured limit. 0: no limit other than ``copies_at_a_time``.
    """
    return min(most or workers, copies_at_a_time(workers))
