# SPDX-License-Identifier: Apache-2.0
"""What the configuration names is made, or the process ends and says what to do."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

from common import config
from common.models import Cell
from compute_agent import assembly


@pytest.fixture
def load(tmp_path: Path) -> Iterator[object]:
    def write_and_load(*lines: str) -> cfg.ConfigOpts:
        path = tmp_path / "kilonova.conf"
        path.write_text("\n".join(["[DEFAULT]", "host = h1", f"state_dir = {tmp_path}", "[agent]", *lines]) + "\n")
        return config.load(str(path))
    yield write_and_load
    config.CONF.clear()


def test_memory_has_the_size_and_the_cpus_of_the_configuration(load) -> None:
    conf = load("driver = memory", "memory_vcpus = 8", "memory_mb = 4096", "cpu_shared_set = 0-3,^2",
                "cpu_dedicated_set = 4-7")
    told = assembly.make_driver(conf).inventory()
    assert (told.vcpus, told.pcpus, told.memory_mb) == (3, 4, 4096)
    assert told.cells == [Cell(0, [0, 1, 3], [4, 5, 6, 7], 4096)]


def test_memory_without_sets_has_no_cells(load) -> None:
    told = assembly.make_driver(load("driver = memory", "memory_vcpus = 8")).inventory()
    assert (told.vcpus, told.pcpus, told.cells) == (8, 0, [])


@pytest.mark.parametrize(("lines", "said"), [
    (("driver = memory", "memory_vcpus = 4", "cpu_shared_set = 0-7"), "no CPU 4-7"),
    (("driver = memory", "cpu_shared_set = 0-3", "cpu_dedicated_set = 3"), "both name 3"),
    (("cpu_dedicated_set = 90000",), "no CPU 90000"),
    (("pci_devices = 0000:ff:1f.7",), "no device 0000:ff:1f.7; see lspci -D")])
def test_what_the_host_does_not_have_ends_the_process(load, lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        assembly.make_driver(load(*lines))


def test_a_console_address_of_another_machine_ends_the_process(load) -> None:
    conf = load("driver = memory", "console_host = 192.0.2.1")
    with pytest.raises(SystemExit, match="console_host 192.0.2.1"):
        assembly.make_consoles(conf, assembly.make_driver(conf))
