# SPDX-License-Identifier: Apache-2.0
"""Fixtures and settings of all rings.

Property tests use the same examples in each run, regardless of the machine's speed. The option
``--hypothesis-profile=explore`` tries more and new examples.
"""

import gc

import pytest
from hypothesis import HealthCheck, settings

from common.service.log import TextFormatter
from tests import statements
from tests.services import (
    database_url,
    new_database,
    rabbitmq_url,
    servers,
    upgraded_database,
    upgraded_url,
)

pytest_plugins = ["tests.failures", "tests.selection"]
settings.register_profile(
    "rings",
    deadline=None,
    database=None,
    # Each run uses the same examples, so a larger number would not find more over time.
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", settings.get_profile("rings"), derandomize=False, max_examples=5000
)
settings.load_profile("rings")

statements.share()
#: New objects between two collections. Python's 700 would cost a tenth of the cheap rings' time.
COLLECT_AFTER_OBJECTS = 20_000


def pytest_sessionstart(session: pytest.Session) -> None:
    """Show the fields of log lines in the report of a failed test."""
    if plugin := session.config.pluginmanager.get_plugin("logging-plugin"):
        plugin.report_handler.setFormatter(TextFormatter())


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules and tests, which exist until the process ends.

    After this, most objects are gone when their test ends, so the collector runs rarely.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS)


__all__ = [
    "database_url",
    "new_database",
    "rabbitmq_url",
    "servers",
    "upgraded_database",
    "upgraded_url",
]
