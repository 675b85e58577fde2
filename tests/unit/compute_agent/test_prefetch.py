# SPDX-License-Identifier: Apache-2.0
"""Prefetched images: sequential downloads, the report of each, and the limit of downloads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from common.domain import errors
from common.domain.models import Access, ImageRef
from compute_agent.prefetch import Prefetch
from compute_agent.verb_context import Cancelled, VerbContext
from compute_agent.virt.download_limit import DownloadLimit
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import QUIET, Fail
from tests.phases import Phases

ACCESS = Access("http://images", "token")
IMAGES = [ImageRef("one"), ImageRef("two")]


class Rig:
    """A host whose downloads wait until ``gate`` is set, if there is a gate.

    ``reports`` receives (image, problem) of each image.
    """

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.driver = MemoryDriver(MemoryHost(read_images=True))
        self.gate, self.has_begun = gate, threading.Event()
        self.reads: list[tuple[str, str]] = []
        self.problems: dict[str, Exception] = {}
        self.reports: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.prefetch = Prefetch(
            self.driver, self.download, lambda *report: self.reports.put(report)
        )
        self.thread = threading.Thread(target=self.prefetch.work, daemon=True)
        self.thread.start()

    def download(self, access: Access, image: str) -> Iterator[bytes]:
        self.reads.append((access.token, image))
        self.has_begun.set()
        if image in self.problems:
            raise self.problems[image]
        while self.gate and not self.gate.wait(0.01):
            yield b"part"
        yield b"whole"

    def close(self) -> None:
        self.prefetch.close()
        self.thread.join(5)
        assert not self.thread.is_alive()


@pytest.fixture
def rig() -> Iterator[Rig]:
    new_rig = Rig()
    yield new_rig
    new_rig.close()


def test_prefetch_fetches_and_reports_each_image(rig: Rig) -> None:
    rig.prefetch.add(IMAGES, ACCESS)
    assert [rig.reports.get(timeout=5) for _ in IMAGES] == [("one", ""), ("two", "")]
    assert rig.driver.host.images == {"one", "two"}
    assert rig.reads == [("token", "one"), ("token", "two")]


@pytest.mark.parametrize(
    "problem", [Fail("The host has no space."), errors.NotFound("No image."), ValueError("bug")]
)
def test_prefetch_reports_failed_image_and_fetches_next(
    rig: Rig, problem: Exception | Fail
) -> None:
    if isinstance(problem, Fail):
        rig.driver.host.script["ensure_image"] = [problem]
        message = problem.text
    else:
        rig.problems["one"] = problem
        message = (
            "The host failed unexpectedly; its log says more."
            if isinstance(problem, ValueError)
            else str(problem)
        )
    rig.prefetch.add(IMAGES, ACCESS)
    assert [rig.reports.get(timeout=5) for _ in IMAGES] == [("one", message), ("two", "")]


def test_prefetch_fetches_image_once_when_added_again_meanwhile() -> None:
    rig = Rig(threading.Event())
    rig.prefetch.add(IMAGES[:1], ACCESS)
    assert rig.has_begun.wait(5)
    rig.prefetch.add(IMAGES[:1], Access("http://images", "newer"))
    rig.prefetch.add(IMAGES[1:], Access("http://images", "newer"))
    assert rig.gate is not None
    rig.gate.set()
    assert [rig.reports.get(timeout=5) for _ in IMAGES] == [("one", ""), ("two", "")]
    assert rig.reads == [("token", "one"), ("newer", "two")]
    rig.close()


def test_prefetch_close_ends_running_download() -> None:
    rig = Rig(threading.Event())
    rig.prefetch.add(IMAGES, ACCESS)
    assert rig.has_begun.wait(5)
    rig.close()
    assert rig.reports.empty()


def test_download_beyond_limit_waits_and_can_be_cancelled() -> None:
    fetches, phases = DownloadLimit(1), Phases()
    cancelled = threading.Event()
    run = VerbContext(phases, cancelled.is_set)
    with fetches.one(run):
        assert phases == []
        threading.Timer(0.05, cancelled.set).start()
        with pytest.raises(Cancelled), fetches.one(run):
            pytest.fail("two at a time")
        assert phases == ["waiting to fetch image"]
    with fetches.one(QUIET):
        pass
    unlimited = DownloadLimit(0)
    with unlimited.one(QUIET), unlimited.one(QUIET), unlimited.one(QUIET):
        pass
