# SPDX-License-Identifier: Apache-2.0
"""Which ticket a host uses for which image: the one that came with the command, for as long as this
is in hand."""

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
    """A text that a weak reference can watch."""


class Gated(Rig):
    """Its one worker waits in each download until ``gate`` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, read = threading.Event(), self.images.download

        def download(given: Access, image: str) -> Iterator[bytes]:
            yield from read(given, image)
            self.gate.wait(10)

        self.images.download = download  # type: ignore[method-assign]


@pytest.fixture
def rig() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()
    made.close()


def test_each_command_uses_the_ticket_that_came_with_it(rig: Gated) -> None:
    rig.host.do([build("s1", "one")], access("first"))
    await_true(lambda: rig.images.asked, 5, "the worker is in the first image")
    rig.host.do([build("s2", "two")], access("second"))
    rig.host.do(
        [build("s3", "three"), new_command("ensure_paused", "b", "stop", server="s4", session=7)],
        access("third"),
    )
    rig.host.do([new_command("ensure_paused", "c", "stop", server="s5", session=7)], None)
    rig.gate.set()
    await_true(lambda: len(rig.images.asked) == 3, 5, "all images are read")
    assert rig.images.asked == [("first", "one"), ("second", "two"), ("third", "three")]


def test_tickets_of_commands_that_have_ended_are_forgotten(rig: Gated) -> None:
    rig.gate.set()
    url = Url("http://gateway")
    reference = weakref.ref(url)
    rig.host.do([build("s1", "one")], Access(url, "first"))
    del url
    rig.conductor.hears(lambda said: [result.status for result in said.results] == ["done"])
    await_true(lambda: reference() is None, 5, "the ticket is not kept")


def test_a_ticket_that_is_not_accepted_is_replaced(rig: Gated) -> None:
    rig.gate.set()
    rig.images.problem = errors.Unavailable(
        "the image gateway does not accept the ticket (any more)"
    )
    rig.host.do([build("s1", "one")], access("old"))
    await_true(lambda: rig.images.asked, 5, "the image is asked for")
    rig.conductor.hears(lambda said: not said.working and not said.results)
    rig.images.problem = None
    rig.host.do([build("s1", "one")], access("new"))
    told = rig.conductor.hears(lambda said: said.results)
    assert told.results[0].status == "done"
    assert rig.images.asked == [("old", "one"), ("new", "one")]


def test_a_command_without_a_ticket_waits(rig: Gated) -> None:
    rig.host.do([build("s1", "one")], None)
    rig.conductor.hears(lambda said: not said.working and not said.results)
    assert rig.images.asked == []
    assert rig.journal.find("a-s1/build/1") is None, (
        "nothing is reported: the command is sent again"
    )
