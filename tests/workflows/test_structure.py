# SPDX-License-Identifier: Apache-2.0
"""How much of the product one resize enters: what an engineer who follows it has to read."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from common import states
from tests.workflows.moves import clouds, server_on
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "conductor", "scheduler", "compute_agent")
MAX_FILES = 60


@contextmanager
def entered() -> Iterator[dict[str, set[str]]]:
    """The functions that run meanwhile, by file."""
    found: dict[str, set[str]] = defaultdict(set)
    folders = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folders):
            found[frame.f_code.co_filename].add(frame.f_code.co_name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = clouds()
    yield cloud
    cloud.store.close()


def test_a_resize_enters_few_files(cloud: Cloud) -> None:
    """Until it is confirmed, and without what runs every few seconds although nothing happens. It
    follows a first one, so that what a process looks up once counts in no order of the tests."""
    server = server_on(cloud)
    cloud.watcher = lambda: None
    _resize(cloud, server_on(cloud, name="first"))
    with entered() as idle:
        for seconds in (1, 10, 100, 1000):
            cloud.time.pass_by(seconds)
            cloud.settle()
            cloud.round()
    with entered() as resize:
        _resize(cloud, server)
    assert cloud.show(server).vm_state == states.ACTIVE
    files = sorted(
        str(Path(name).relative_to(ROOT))
        for name, functions in resize.items()
        if not functions <= idle.get(name, set())
    )
    print(f"\na resize enters {len(files)} files")
    assert len(files) <= MAX_FILES, files


def _resize(cloud: Cloud, server: str) -> None:
    for key in ("resize", "confirmResize"):
        ask(cloud, server, key)
        cloud.settle()
