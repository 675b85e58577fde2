# SPDX-License-Identifier: Apache-2.0
"""Driver, consoles and transfer service as built from the configuration.

An unusable configuration ends the process with a hint.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

from common.domain.errors import ConfigError
from common.domain.models import Flavor, GuestSpec, NumaNode
from common.service import config, service
from compute_agent import assembly
from compute_agent.virt.memory.state.script import QUIET

SERVER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"


@pytest.fixture
def load(tmp_path: Path) -> Iterator[object]:
    def write_and_load(*lines: str, migration: tuple[str, ...] = ()) -> cfg.ConfigOpts:
        path = tmp_path / "kilonova.conf"
        path.write_text(
            "\n".join(
                [
                    "[DEFAULT]",
                    "host = h1",
                    f"state_dir = {tmp_path}",
                    "[agent]",
                    *lines,
                    "[migration]",
                    *migration,
                ]
            )
            + "\n"
        )
        return config.load(str(path))

    yield write_and_load
    config.CONF.clear()


def test_memory_driver_inventory_has_configured_size_and_cpus(load) -> None:
    conf = load(
        "driver = memory",
        "memory_vcpus = 8",
        "memory_mb = 4096",
        "cpu_shared_set = 0-3,^2",
        "cpu_dedicated_set = 4-7",
    )
    inventory = assembly.make_driver(conf).inventory()
    assert (inventory.vcpus, inventory.pcpus, inventory.memory_mb) == (3, 4, 4096)
    assert inventory.numa_nodes == [NumaNode(0, [0, 1, 3], [4, 5, 6, 7], 4096)]


def test_memory_driver_without_cpu_sets_reports_no_numa_nodes(load) -> None:
    inventory = assembly.make_driver(load("driver = memory", "memory_vcpus = 8")).inventory()
    assert (inventory.vcpus, inventory.pcpus, inventory.numa_nodes) == (8, 0, [])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("driver = memory", "memory_vcpus = 4", "cpu_shared_set = 0-7"), "no CPU 4-7"),
        (("driver = memory", "cpu_shared_set = 0-3", "cpu_dedicated_set = 3"), "both name 3"),
        (("cpu_dedicated_set = 90000",), "no CPU 90000"),
        (
            ("pci_devices = 0000:ff:1f.7",),
            "no device 0000:ff:1f.7; for the addresses, see lspci -D",
        ),
    ],
)
def test_make_driver_exits_when_configured_cpus_or_devices_are_invalid(
    load, lines: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        assembly.make_driver(load(*lines))


def test_make_consoles_exits_when_console_host_is_not_local(load) -> None:
    conf = load("driver = memory", "console_host = 192.0.2.1", "[tls]", "allow_plain_text = true")
    with pytest.raises(SystemExit, match="console_host 192.0.2.1"):
        assembly.make_consoles(conf, assembly.make_driver(conf))


def test_own_address_without_default_route_names_option_to_set(
    load, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Connecting to the broadcast address fails without SO_BROADCAST.
    nowhere = {socket.AF_INET: ("255.255.255.255", 9)}
    monkeypatch.setattr(assembly, "UNUSED_ADDRESSES", nowhere)
    conf = load("driver = memory")
    with pytest.raises(
        ConfigError, match="no default route.*set .migration. live_migration_inbound"
    ):
        assembly.own_address(conf)
    with pytest.raises(SystemExit, match="live_migration_inbound_addr") as error:
        assembly.make_driver(conf)
    assert error.value.code == service.EX_CONFIG
    conf = load("driver = memory", migration=(HERE,))
    assert assembly.own_address(conf) == "127.0.0.1"
    assert assembly.make_driver(conf).inventory().host_ip == "127.0.0.1"


HERE = "live_migration_inbound_addr = 127.0.0.1"


def test_make_transfer_serves_files_of_offered_guest_to_its_client(load) -> None:
    conf = load("driver = memory", migration=(HERE, "transfer_port = 0"))
    driver = assembly.make_driver(conf)
    driver.ensure_guest(
        GuestSpec(SERVER, 1, "vm", Flavor("1", "n", 1, 64, 1)), lambda image: iter(()), QUIET
    )
    driver.offer(SERVER, 1, "open sesame", QUIET)
    transfer, peer = assembly.make_transfer(conf, driver)
    address = transfer.start()
    assert address.startswith("127.0.0.1:")
    reader = peer(address, SERVER, "open sesame")
    assert [part.name for part in reader.parts()] == ["guest"]
    assert b'"vcpus": 1' in b"".join(data for _, data in reader.read("guest"))
    transfer.close()


def test_automatic_transfer_port_is_reused_after_restart_unless_taken(load) -> None:
    conf = load("driver = memory", migration=(HERE, "transfer_port = 0"))
    driver, addresses = assembly.make_driver(conf), []
    for _ in range(2):
        transfer, _ = assembly.make_transfer(conf, driver)
        addresses.append(transfer.start())
        transfer.close()
    assert addresses[0] == addresses[1]
    with socket.create_server(("127.0.0.1", transfer.port)):  # another process uses the port
        moved, _ = assembly.make_transfer(conf, driver)
        assert moved.port != transfer.port
        moved.close()
    (Path(conf.state_dir) / "transfer-port").write_text("nonsense")
    assembly.make_transfer(conf, driver)[0].close()


def test_own_address_is_detected_when_not_configured(load) -> None:
    assert ipaddress.ip_address(assembly.own_address(load()))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("live_migration_inbound_addr = 192.0.2.1",), "192.0.2.1 is no loopback address"),
        (
            ("live_migration_inbound_addr = 192.0.2.1", "[tls]", "allow_plain_text = true"),
            "transfer_port 16599 at 192.0.2.1",
        ),
        ((HERE, "transfer_cert = /nowhere/cert.pem"), "set all three or none"),
        (
            (HERE, "transfer_cert = /n/c", "transfer_key = /n/k", "transfer_ca = /n/a"),
            "give PEM files",
        ),
    ],
)
def test_make_transfer_exits_when_configuration_is_unusable(
    load, lines: tuple[str, ...], message: str
) -> None:
    conf = load("driver = memory", migration=lines)
    with pytest.raises(SystemExit, match=message):
        assembly.make_transfer(conf, assembly.make_driver(conf))
