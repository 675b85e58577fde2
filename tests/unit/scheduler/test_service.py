# SPDX-License-Identifier: Apache-2.0
"""Checks of the scheduler's options at the start of the process."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

from common.service import service
from scheduler.service import LIVE, options, read_options
from tests.unit.scheduler.conftest import conf


def test_options_contain_multiplier_of_each_weigher_from_configuration() -> None:
    defaults = options(conf(ram_weight_multiplier=-2.0))
    assert {weigher.key: weigher.multiplier for weigher in defaults.weighers} == {
        "ram_weight_multiplier": -2.0,
        "cpu_weight_multiplier": 1.0,
        "disk_weight_multiplier": 1.0,
        "metrics_weight_multiplier": 1.0,
        "io_ops_weight_multiplier": -1.0,
        "pci_weight_multiplier": 1.0,
        "soft_affinity_weight_multiplier": 1.0,
        "soft_anti_affinity_weight_multiplier": 1.0,
        "build_failure_weight_multiplier": 1e6,
        "hypervisor_version_weight_multiplier": 1.0,
        "num_instances_weight_multiplier": 0.0,
        "image_props_weight_multiplier": 0.0,
    }
    assert (defaults.hosts, defaults.metrics) == (3, ())


class Recorder:
    """Records the full names of the options that are read."""

    def __init__(self, values: Any, names: set[str], section: str = "") -> None:
        self._values, self._names, self._section = values, names, section

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._values, name)
        if not self._section:
            return Recorder(value, self._names, name)
        self._names.add(f"{self._section}.{name}")
        return value

    __getitem__ = __getattr__


def test_scheduler_reload_logs_all_applied_options_as_in_force() -> None:
    """One changed option applies all options of the selection, so none may need a restart."""
    names: set[str] = set()
    options(Recorder(conf(metrics__weight_setting=["cpu.percent=-1"]), names))
    assert "scheduler.ram_weight_multiplier" in names
    assert [
        name for name in sorted(names) if not any(fnmatchcase(name, live) for live in LIVE)
    ] == []


def test_read_options_include_metrics_and_server_images_only_if_weighed() -> None:
    assert (read_options(conf()).metrics, read_options(conf()).images) == (False, False)
    assert read_options(conf(metrics__weight_setting=["cpu.percent=-1"])).metrics
    assert read_options(conf(image_props_weight_multiplier=1.0)).images
    assert read_options(conf(build_failure_pause=60, default_availability_zone="az1")).pause == 60


def test_options_have_no_required_metrics_if_metrics_required_is_false() -> None:
    assert options(conf(metrics__weight_setting=["a=1", "b = -0.5"])).metrics == ("a", "b")
    assert options(conf(metrics__weight_setting=["a=1"], metrics__required=False)).metrics == ()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"enabled_filters": ["ComputeFilter", "RamFilter"]},
            "enabled_filters: unknown RamFilter; allowed are .*Compute",
        ),
        (
            {"enabled_weighers": ["RAMWeigher", "LuckWeigher"]},
            "enabled_weighers: unknown LuckWeigher; allowed are .*RAMW",
        ),
        (
            {"metrics__weight_setting": ["cpu.percent"]},
            r"\[metrics\] weight_setting: 'cpu.percent' is not name=number",
        ),
        (
            {"image_props_weight_setting": ["=1"]},
            r"\[scheduler\] image_props_weight_setting: '=1' is not name=number",
        ),
    ],
)
def test_invalid_scheduler_option_ends_process_and_names_invalid_value(
    values: dict[str, list[str]], text: str
) -> None:
    with pytest.raises(SystemExit, match=text):
        service.exit_on_config_error("scheduler", lambda: options(conf(**values)))
