# SPDX-License-Identifier: Apache-2.0
"""What the configuration of an agent names, made: its driver, its listener for consoles, its
service for files of servers that move, its limits.

Called by ``compute_agent.service`` when the process starts. Must stay true: what the configuration
asks for and this host does not have ends the process, and says what to do.
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

#: No host has these addresses; the way to them is the way to others.
ELSEWHERE = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}


def make_driver(conf: cfg.ConfigOpts) -> Driver:
    """The driver that the configuration names."""
    try:
        if conf.agent.driver == "memory":
            return _memory_driver(conf)
        return _libvirt_driver(conf)
    except (errors.ConfigError, ValueError) as problem:
        service.refuse("agent", problem)


def _memory_driver(conf: cfg.ConfigOpts) -> Driver:
    from compute_agent.virt.memory.driver import MemoryDriver
    from compute_agent.virt.memory.state.host import MemoryHost, described

    options = conf.agent
    inventory = described(
        conf.host,
        options.memory_vcpus,
        options.memory_mb,
        options.memory_disk_gb,
        _cpus(conf, range(options.memory_vcpus)),
    )
    # As a process it has no storage that it could share or not, whatever its guests remember.
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
    about = HostOptions(
        reserved_memory_mb=options.reserved_memory_mb,
        reserved_disk_gb=options.reserved_disk_gb,
        cpus=_cpus(conf, machine.cpus()),
        devices=machine.devices(options.pci_devices),
        host_ip=own_address(conf),
        share_address=options.share_address or "",
    )
    moving = conf.migration
    migration = MigrationOptions(
        port=moving.live_migration_port,
        address=own_address(conf),
        bandwidth=moving.live_migration_bandwidth,
        completion_timeout=moving.live_migration_completion_timeout,
        timeout_action=moving.live_migration_timeout_action,
        auto_converge=moving.live_migration_permit_auto_converge,
        post_copy=moving.live_migration_permit_post_copy,
        native_tls=moving.live_migration_with_native_tls,
        plain_text=conf.tls.allow_plain_text,
        tls=_transfer_proof(conf, own_address(conf)),
    )
    if migration.port and (reason := migration.plain_text_to(migration.facts)):
        raise errors.ConfigError(
            f"servers would come here as plain text: {reason}. Set both, or [tls] "
            "allow_plain_text = true where nobody else reaches that network"
        )
    return LibvirtDriver(
        options.libvirt_uri,
        conf.state_dir,
        virt_type=options.virt_type,
        about=about,
        image_fetches=options.max_concurrent_image_fetches,
        migration=migration,
        local_disks=LocalDisks(conf.default_ephemeral_format),
        config_drives=config_drive.opened(
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
    return cpu_sets.opened(conf.agent.cpu_shared_set, conf.agent.cpu_dedicated_set, present)


def make_consoles(conf: cfg.ConfigOpts, driver: Driver) -> Consoles:
    """The listener for consoles, where the configuration says."""
    try:
        address = conf.agent.console_host or own_address(conf)
        proof = tls.protecting(conf, "[agent] console_host", [address], listens=True)
        direct = DirectConsoles(driver.console, address, conf.spice.direct_proxies, tls=proof)
        return Consoles(driver.console, address, tls=proof, direct=direct)
    except errors.ConfigError as problem:
        service.refuse("agent", problem)
    except OSError as problem:
        sys.exit(
            f"kilonova-agent: [agent] console_host {address}: {problem}; give an address of this "
            "host that the console service reaches"
        )


def make_transfer(
    conf: cfg.ConfigOpts, driver: Driver
) -> tuple[transfer.TransferService, verbs.PeerOpener]:
    """The service that gives files to other hosts, and what reads theirs."""
    options = conf.migration
    try:
        address = own_address(conf)
        proof = _transfer_proof(conf, address)
        listen = functools.partial(
            transfer.TransferService, driver, address, rate=options.transfer_rate, tls=proof
        )
        made = (
            listen(options.transfer_port)
            if options.transfer_port
            else _on_port_of_before(listen, Path(conf.state_dir) / "transfer-port")
        )
    except errors.ConfigError as problem:
        service.refuse("agent", problem)
    except OSError as problem:
        sys.exit(
            f"kilonova-agent: [migration] transfer_port {options.transfer_port} at {address}: {problem}; give a "
            "port that is free, and as live_migration_inbound_addr an address of this host that others reach"
        )
    return made, functools.partial(client.peer, tls=proof)


def _on_port_of_before(
    listen: Callable[[int], transfer.TransferService], kept: Path
) -> transfer.TransferService:
    """On a free port: the one of the last start if it can be had, since a host that copies from
    this one goes on there. Raises OSError."""
    made = None
    with suppress(OSError, ValueError, OverflowError):
        made = listen(int(kept.read_text()))
    if made is None:
        made = listen(0)
    part = kept.with_suffix(".part")
    part.write_text(str(made.port))
    part.replace(kept)
    return made


def _transfer_proof(conf: cfg.ConfigOpts, address: str) -> tls.Tls | None:
    """[migration]'s files where it has its own, else those of [tls]."""
    options = conf.migration
    files = options.transfer_cert, options.transfer_key, options.transfer_ca
    if not any(files):
        return tls.protecting(
            conf, "[migration] live_migration_inbound_addr", [address], listens=True
        )
    if not all(files):
        raise errors.ConfigError(
            "[migration] transfer_cert, transfer_key and transfer_ca belong together: set all or "
            "none"
        )
    return tls.load(*files, "[migration] transfer_cert {}, transfer_key {}, transfer_ca {}")


def own_address(conf: cfg.ConfigOpts) -> str:
    """Where other hosts reach this one: as configured, or the address that it would leave by.

    Raises:
        ConfigError: this host has no way to others, and nobody has said that it needs none.
    """
    if conf.migration.live_migration_inbound_addr:
        return str(conf.migration.live_migration_inbound_addr)
    for family, elsewhere in ELSEWHERE.items():
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(elsewhere)  # sends nothing
            return str(probe.getsockname()[0])
    raise errors.ConfigError(
        "this host has no default route that would show its address: set [migration] "
        "live_migration_inbound_addr to the address at which other hosts reach it, or to 127.0.0.1 where "
        "it is the only one"
    )


def copies_at_a_time(workers: int) -> int:
    """However many whole disks are to be moved, one worker is left for what is quick."""
    return max(1, workers - 1)


def builds_at_a_time(workers: int, most: int) -> int:
    """The copies that may be builds; ``most`` 0: all of them."""
    return min(most or workers, copies_at_a_time(workers))
