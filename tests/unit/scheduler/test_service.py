# SPDX-License-Identifier: Apache-2.0
"""The scheduler's options are checked when it starts."""
from __future__ import annotations

import pytest
from oslo_config import cfg

from common import config
from scheduler.service import options


def conf(**values: object) -> cfg.ConfigOpts:
    made = cfg.ConfigOpts()
    config.register(made)
    made([], default_config_files=[], default_config_dirs=[])
    for name, value in values.items():
        made.set_override(name, value, "scheduler")
    return made


def test_defaults_become_options() -> None:
    found = options(conf(ram_weight_multiplier=-2.0))
    assert found.filters == ("ComputeFilter", "AvailabilityZoneFilter")
    assert found.multipliers == {"cpu_weight_multiplier": 1.0, "ram_weight_multiplier": -2.0,
                                 "disk_weight_multiplier": 1.0}
    assert found.hosts == 3


def test_unknown_filter_ends_the_process_naming_the_option_and_what_is_allowed() -> None:
    with pytest.raises(SystemExit, match="enabled_filters: unknown RamFilter; allowed are ComputeFilter, Avail"):
        options(conf(enabled_filters=["ComputeFilter", "RamFilter"]))
