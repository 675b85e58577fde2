# SPDX-License-Identifier: Apache-2.0
"""Tickets of image downloads: the agent uses the ticket of a command until the command ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest

from common.domain import errors
from common.domain.models import Access, Command, ImageRef
from common.domain.verbs import EnsureGuest
from tests.unit.compute_agent.test_service import GUEST, Rig
from tests.verbs import new_command
from tests.waiting import await_true


def build(server: str, image: str) -> Command:
    guest = replace(GUEST, server=server, image=ImageRef(image, "raw"))
    verb = EnsureGuest(guest=guest)
    return new_command(verb, f"a-{server}", "build", server=server, session=7)


def access(ticket: str) -> Access:
    return Access("http://gateway", ticket)


class Url(str):
    """A string that supports weak references."""


class GatedRig(Rig):
    """A process with one worker, which waits in each download until ``gate`` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, read = threading.Event(), self.images.download

        def download(ticket: Access, image: str) -> Iterator[bytes]:
            yield from read(ticket, image)
            self.gate.wait(10)

        self.images.download = download  # type: ignore[method-assign]


@pytest.fixture
def rig() -> Iterator[GatedRig]:
    new_rig = GatedRig()
    yield new_rig
    new_rig.gate.set()
    new_rig.close()


def test_command_downloads_image_with_its_own_ticket(rig: GatedRig) -> None:
    rig.host.do([build("s1", "one")], access("first"))
    await_true(lambda: rig.images.downloads, 5, "the worker is in the first image")
    rig.host.do([build("s2", "two")], access("second"))
    rig.host.do(
        [build("s3", "three"), new_command("ensure_paused", "b", "stop", server="s4", session=7)],
        access("third"),
    )
    rig.host.do([new_command("ensure_paused", "c", "stop", server="s5", session=7)], None)
    rig.gate.set()
    await_true(lambda: len(rig.images.downloads) == 3, 5, "all images are read")
    assert rig.images.downloads == [("first", "one"), ("second", "two"), ("third", "three")]


def test_ticket_is_released_when_command_ends(rig: GatedRig) -> None:
    rig.gate.set()
    url = Url("http://gateway")
    reference = weakref.ref(url)
    rig.host.do([build("s1", "one")], Access(url, "first"))
    del url
    rig.conductor.await_sync(
        lambda request: [result.status for result in request.results] == ["done"]
    )
    await_true(lambda: reference() is None, 5, "the ticket is not kept")


def test_command_with_rejected_ticket_runs_with_new_ticket(rig: GatedRig) -> None:
    rig.gate.set()
    rig.images.problem = errors.Unavailable(
        "the image gateway does not accept the ticket (any more)"
    )
    rig.host.do([build("s1", "one")], access("old"))
    await_true(lambda: rig.images.downloads, 5, "the image is asked for")
    rig.conductor.await_sync(lambda request: not request.working and not request.results)
    rig.images.problem = None
    rig.host.do([build("s1", "one")], access("new"))
    request = rig.conductor.await_sync(lambda request: request.results)
    assert request.results[0].status == "done"
    assert rig.images.downloads == [("old", "one"), ("new", "one")]


def test_command_without_ticket_is_not_run_and_not_reported(rig: GatedRig) -> None:
    rig.host.do([build("s1", "one")], None)
    rig.conductor.await_sync(lambda request: not request.working and not request.results)
    assert rig.images.downloads == []
    assert rig.journal.find("a-s1/build/1") is None, (
        "nothing is reported: the command is sent again"
    )
