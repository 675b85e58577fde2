# SPDX-License-Identifier: Apache-2.0
"""The verbs of servers that move, from one host in memory to another, as commands with their
arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.domain import errors
from common.domain.models import Command, Control, FailureReason, Flavor, GuestSpec
from common.domain.verbs import VERBS, Receive, Verb
from common.domain.verbs import Destination as Arrival
from common.domain.wire import from_wire, to_wire
from compute_agent import verbs
from compute_agent.journal import Journal
from compute_agent.verb_context import ImageReader, Part, Peer, VerbContext
from compute_agent.verbs import Outcome, Tools
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import QUIET, Slow
from tests.verbs import new_command, new_verb

SMALL, LARGE = Flavor("1", "small", 1, 64, 1), Flavor("2", "large", 2, 128, 5)


def guest(fence: int = 1, flavor: Flavor = SMALL) -> GuestSpec:
    return GuestSpec("s", fence, "vm", flavor)


class Reader:
    """A guest's files, read from another host of this process."""

    def __init__(self, driver: MemoryDriver, server: str, secret: str) -> None:
        self.driver, self.server, self.secret = driver, server, secret

    def parts(self) -> list[Part]:
        return self.driver.parts(self.server, self.secret)

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        return self.driver.read_part(self.server, self.secret, name)


class Pair:
    """Two hosts; the source has a guest with something on its disk."""

    def __init__(self, storage: str = "") -> None:
        self.journal, self.told = Journal(":memory:"), [{}]
        self.requested: Control | None = None
        self.source, self.destination = (
            MemoryDriver(MemoryHost(name, storage=storage)) for name in ("h1", "h2")
        )
        self.source.ensure_guest(guest(), lambda image: iter(()), QUIET)
        self.source.host.write_file("s", "canary", "sings")

    def run(self, driver: MemoryDriver, verb: str, fence: int = 2, **args: Any) -> Any:
        run = VerbContext(
            lambda name: None,
            lambda: False,
            lambda: self.requested,
            lambda numbers: self.told.append(dict(numbers)),
        )
        tools = Tools(
            driver,
            lambda image: iter(()),
            lambda image: list,
            run,
            lambda address, server, secret: Reader({"h1:1": self.source}[address], server, secret),
        )
        made = new_verb(verb, **args)
        step = f"{verb}-{fence}-{driver.host.name}"
        ended = verbs.run(self.journal, tools, new_command(made, step=step, fence=fence), made)
        if ended is not None and ended.status == "done":
            assert to_wire(from_wire(made.Result, ended.data)) == ended.data
        return ended

    def offered(self) -> None:
        self.source.ensure_stopped("s", 2, 0, QUIET)
        assert self.run(self.source, "offer", secret="open sesame").data["bytes"] > 0

    def live(self, verb: str, **args: Any) -> Any:
        """One of the verbs of a live migration, at the host where it belongs."""
        driver = self.source if verb in ("offer", "live_migrate") else self.destination
        return self.run(driver, verb, guest=guest(2), **args)


def test_a_guest_moves_while_it_is_off_and_grows() -> None:
    pair = Pair()
    spec = guest(2, LARGE)
    source = {"secret": "open sesame", "source": "h1:1"}
    assert pair.run(pair.destination, "prepare", guest=spec, **source).status == "failed", (
        "nothing is offered yet"
    )
    pair.offered()
    assert pair.run(pair.destination, "prepare", guest=spec, **source).status == "done"
    received = pair.run(pair.destination, "receive", guest=spec, **source)
    assert received.status == "done" and received.data["bytes"] > 0
    assert pair.destination.domains() == []
    installed = pair.run(pair.destination, "install", guest=spec, runs=True)
    assert (installed.status, installed.data) == ("done", {"power_state": RUNNING})
    moved = pair.destination.host.guests["s"]
    assert (moved.disk, moved.root_gb, moved.vcpus, moved.boots) == ({"canary": "sings"}, 5, 2, 2)
    assert "open sesame" not in repr(pair.source.host.guests["s"])


def test_a_guest_of_shared_storage_is_found_there_and_left_there() -> None:
    pair = Pair(storage="shelf")
    pair.source.ensure_stopped("s", 2, 0, QUIET)
    spec = guest(2)
    found = pair.run(pair.destination, "receive", guest=spec, secret="", source=None)
    assert (found.status, found.data) == ("done", {"bytes": 0})
    assert pair.run(pair.destination, "install", guest=spec, runs=False).data == {
        "power_state": SHUTDOWN
    }
    assert pair.run(pair.source, "ensure_absent", keep_files=True).status == "done"
    assert pair.source.domains() == []
    assert pair.destination.host.guests["s"].disk == {"canary": "sings"}
    assert pair.run(pair.destination, "ensure_absent", fence=3).status == "done"
    lost = pair.run(pair.source, "receive", guest=spec, secret="", source=None)
    assert (lost.status, lost.retryable) == ("failed", True)


def test_files_of_another_host_that_cannot_be_reached_wait() -> None:
    pair = Pair()
    verb = Receive(guest=guest(2), source="h1:1", secret="")
    tools = Tools(pair.destination, lambda image: iter(()), lambda image: list, QUIET)
    assert verbs.run(pair.journal, tools, new_command(verb), verb) is None, (
        "no peer was given: it is tried again"
    )


def test_a_wrong_secret_is_a_definite_failure_that_does_not_say_it() -> None:
    pair = Pair()
    pair.offered()
    refused = pair.run(pair.destination, "receive", guest=guest(2), secret="guess", source="h1:1")
    assert refused.status == "failed" and "guess" not in repr(refused)
    assert pair.destination.host.files == {}


def test_a_guest_is_resized_where_it_is_and_back() -> None:
    pair = Pair()
    pair.source.ensure_stopped("s", 2, 0, QUIET)
    large, small = guest(3, LARGE), guest(5)
    for _ in range(2):
        done = pair.run(pair.source, "resize_here", fence=3, guest=large, runs=True)
        assert (done.status, done.data) == ("done", {"power_state": RUNNING})
    assert pair.source.host.guests["s"].vcpus == 2
    refused = pair.run(pair.source, "settle_resize", fence=4, guest=small, back=True, resized=3)
    assert (refused.status, refused.error) == (
        "failed",
        "The server runs; stop it before it is resized.",
    )
    pair.source.ensure_stopped("s", 5, 0, QUIET)
    back = pair.run(pair.source, "settle_resize", fence=5, guest=small, back=True, resized=3)
    assert (back.status, back.data) == ("done", {"power_state": SHUTDOWN})
    assert (pair.source.host.guests["s"].vcpus, pair.source.host.guests["s"].root_gb) == (1, 1)


@pytest.mark.parametrize("state", [RUNNING, PAUSED])
def test_a_guest_moves_while_it_runs(state: int) -> None:
    pair = Pair()
    pair.source.host.write_memory("s", "counter", "41")
    if state == PAUSED:
        pair.source.ensure_paused("s", 1, QUIET)
    assert pair.live("offer", secret="open sesame").status == "done"
    to = pair.live("prepare_arrival", secret="open sesame", shared=False, cpu={}, source="h1:1")
    assert to.data == {"details": {"uri": pair.destination.host.uri, "address": "h2"}}
    gone = pair.live("live_migrate", to=from_wire(Arrival, to.data), shared=False)
    assert gone.status == "done" and gone.data["bytes"] > 64 << 20 and gone.data["job_seconds"] < 5
    assert pair.source.domains() == []
    assert pair.live("arrived").data == {"power_state": state}
    moved = pair.destination.host.guests["s"]
    assert (moved.memory, moved.disk, moved.boots, moved.fence) == (
        {"counter": "41"},
        {"canary": "sings"},
        1,
        2,
    )
    assert pair.told[-1]["memory_remaining"] == 0 < pair.told[-1]["memory_processed"]


class Destination(MemoryDriver):
    """It keeps from where guests may come."""

    def prepare_incoming(
        self,
        spec: GuestSpec,
        peer: Peer,
        shared: bool,
        cpu: dict[str, Any],
        read_image: ImageReader,
        run: VerbContext,
        source: str = "",
    ) -> dict[str, Any]:
        return {"source": source}


@pytest.mark.parametrize(
    ("transfer", "source"),
    [
        ("192.0.2.1:16599", "192.0.2.1"),
        ("[2001:db8::1]:16599", "2001:db8::1"),
        ("h1.example:16599", "h1.example"),
    ],
)
def test_a_guest_comes_from_the_host_that_has_its_files(transfer: str, source: str) -> None:
    nothing = Tools(
        Destination("h2"),
        lambda image: iter(()),
        lambda image: list,
        QUIET,
        lambda address, server, secret: Reader(MemoryDriver(MemoryHost("h1")), server, secret),
    )
    verb = new_verb("prepare_arrival", source=transfer)
    result = verbs.run(Journal(":memory:"), nothing, new_command(verb), verb)
    assert result is not None and result.data == {"details": {"source": source}}


def test_a_migration_that_is_aborted_fails_and_leaves_the_guest_as_it_was() -> None:
    pair = Pair()
    pair.live("offer", secret="open sesame")
    to = pair.live("prepare_arrival", secret="open sesame", source="h1:1").data
    pair.requested, pair.source.host.script["live_migrate"] = Control.ABORT, [Slow(60)]
    ended = pair.live("live_migrate", to=from_wire(Arrival, to))
    assert (ended.status, ended.reason, ended.retryable) == ("failed", FailureReason.ABORTED, False)
    assert [state.power_state for state in pair.source.domains()] == [RUNNING]
    assert pair.live("arrived").status == "failed"


def test_a_migration_that_is_to_complete_goes_through_at_once() -> None:
    pair = Pair()
    pair.live("offer", secret="open sesame")
    to = pair.live("prepare_arrival", secret="open sesame", source="h1:1").data
    pair.requested, pair.source.host.script["live_migrate"] = Control.COMPLETE, [Slow(60)]
    assert pair.live("live_migrate", to=from_wire(Arrival, to)).status == "done"


def test_a_migration_is_journalled_as_begun_before_it_has_an_effect() -> None:
    def die(tools: Tools, command: Command, verb: Verb) -> Outcome:
        raise errors.Unavailable("the hypervisor is away")

    journal = Journal(":memory:")
    command, verb = new_command("live_migrate", step="migrate"), new_verb("live_migrate")
    tools = Tools(MemoryDriver(), lambda image: iter(()), lambda image: list, QUIET)
    for _ in range(2):
        assert verbs.run(journal, tools, command, verb, carry_out=die) is None
        assert journal.has_begun(str(command.key)) and journal.find(str(command.key)) is None


def test_what_lets_a_running_guest_go_says_so() -> None:
    assert {name for name, verb in VERBS.items() if verb.migrates} == {"live_migrate"}
    assert {name for name, verb in VERBS.items() if verb.copies_disks} == {
        "ensure_guest",
        "rebuild",
        "rescue",
        "snapshot",
        "prepare",
        "receive",
        "prepare_arrival",
        "live_migrate",
        "resize_here",
        "copy_volume",
        "merge_volume",
    }
