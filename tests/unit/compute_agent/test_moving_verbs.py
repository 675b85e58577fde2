# SPDX-License-Identifier: Apache-2.0
"""The verbs of moves, run as commands between two hosts with the memory driver."""

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
    """Two hosts. The source has a guest with a file on the disk."""

    def __init__(self, storage: str = "") -> None:
        self.journal, self.measured = Journal(":memory:"), [{}]
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
            lambda numbers: self.measured.append(dict(numbers)),
        )
        tools = Tools(
            driver,
            lambda image: iter(()),
            lambda image: list,
            run,
            lambda address, server, secret: Reader({"h1:1": self.source}[address], server, secret),
        )
        arguments = new_verb(verb, **args)
        step = f"{verb}-{fence}-{driver.host.name}"
        result = verbs.run(
            self.journal, tools, new_command(arguments, step=step, fence=fence), arguments
        )
        if result is not None and result.status == "done":
            assert to_wire(from_wire(arguments.Result, result.data)) == result.data
        return result

    def stop_and_offer(self) -> None:
        self.source.ensure_stopped("s", 2, 0, QUIET)
        assert self.run(self.source, "offer", secret="open sesame").data["bytes"] > 0

    def run_live(self, verb: str, **args: Any) -> Any:
        """Run a verb of a live migration on the source or the destination."""
        driver = self.source if verb in ("offer", "live_migrate") else self.destination
        return self.run(driver, verb, guest=guest(2), **args)


def test_cold_migration_verbs_move_and_grow_stopped_guest() -> None:
    pair = Pair()
    spec = guest(2, LARGE)
    source = {"secret": "open sesame", "source": "h1:1"}
    assert pair.run(pair.destination, "prepare", guest=spec, **source).status == "failed", (
        "nothing is offered yet"
    )
    pair.stop_and_offer()
    assert pair.run(pair.destination, "prepare", guest=spec, **source).status == "done"
    received = pair.run(pair.destination, "receive", guest=spec, **source)
    assert received.status == "done" and received.data["bytes"] > 0
    assert pair.destination.domains() == []
    installed = pair.run(pair.destination, "install", guest=spec, runs=True)
    assert (installed.status, installed.data) == ("done", {"power_state": RUNNING})
    moved = pair.destination.host.guests["s"]
    assert (moved.disk, moved.root_gb, moved.vcpus, moved.boots) == ({"canary": "sings"}, 5, 2, 2)
    assert "open sesame" not in repr(pair.source.host.guests["s"])


def test_cold_migration_verbs_leave_files_on_shared_storage() -> None:
    pair = Pair(storage="shelf")
    pair.source.ensure_stopped("s", 2, 0, QUIET)
    spec = guest(2)
    received = pair.run(pair.destination, "receive", guest=spec, secret="", source=None)
    assert (received.status, received.data) == ("done", {"bytes": 0})
    assert pair.run(pair.destination, "install", guest=spec, runs=False).data == {
        "power_state": SHUTDOWN
    }
    assert pair.run(pair.source, "ensure_absent", keep_files=True).status == "done"
    assert pair.source.domains() == []
    assert pair.destination.host.guests["s"].disk == {"canary": "sings"}
    assert pair.run(pair.destination, "ensure_absent", fence=3).status == "done"
    missing = pair.run(pair.source, "receive", guest=spec, secret="", source=None)
    assert (missing.status, missing.retryable) == ("failed", True)


def test_receive_by_agent_without_transfer_client_reports_no_result() -> None:
    pair = Pair()
    verb = Receive(guest=guest(2), source="h1:1", secret="")
    tools = Tools(pair.destination, lambda image: iter(()), lambda image: list, QUIET)
    assert verbs.run(pair.journal, tools, new_command(verb), verb) is None, (
        "no peer was given: it is tried again"
    )


def test_receive_with_wrong_secret_fails_without_showing_secret() -> None:
    pair = Pair()
    pair.stop_and_offer()
    refused = pair.run(pair.destination, "receive", guest=guest(2), secret="guess", source="h1:1")
    assert refused.status == "failed" and "guess" not in repr(refused)
    assert pair.destination.host.files == {}


def test_resize_here_changes_guest_and_settle_resize_reverts_it() -> None:
    pair = Pair()
    pair.source.ensure_stopped("s", 2, 0, QUIET)
    large, small = guest(3, LARGE), guest(5)
    for _ in range(2):
        resized = pair.run(pair.source, "resize_here", fence=3, guest=large, runs=True)
        assert (resized.status, resized.data) == ("done", {"power_state": RUNNING})
    assert pair.source.host.guests["s"].vcpus == 2
    refused = pair.run(pair.source, "settle_resize", fence=4, guest=small, back=True, resized=3)
    assert (refused.status, refused.error) == (
        "failed",
        "The server runs; stop the server before it is resized.",
    )
    pair.source.ensure_stopped("s", 5, 0, QUIET)
    back = pair.run(pair.source, "settle_resize", fence=5, guest=small, back=True, resized=3)
    assert (back.status, back.data) == ("done", {"power_state": SHUTDOWN})
    assert (pair.source.host.guests["s"].vcpus, pair.source.host.guests["s"].root_gb) == (1, 1)


@pytest.mark.parametrize("state", [RUNNING, PAUSED])
def test_live_migration_verbs_move_running_or_paused_guest(state: int) -> None:
    pair = Pair()
    pair.source.host.write_memory("s", "counter", "41")
    if state == PAUSED:
        pair.source.ensure_paused("s", 1, QUIET)
    assert pair.run_live("offer", secret="open sesame").status == "done"
    to = pair.run_live("prepare_arrival", secret="open sesame", shared=False, cpu={}, source="h1:1")
    assert to.data == {"details": {"uri": pair.destination.host.uri, "address": "h2"}}
    migrated = pair.run_live("live_migrate", to=from_wire(Arrival, to.data), shared=False)
    assert (
        migrated.status == "done"
        and migrated.data["bytes"] > 64 << 20
        and migrated.data["job_seconds"] < 5
    )
    assert pair.source.domains() == []
    assert pair.run_live("arrived").data == {"power_state": state}
    moved = pair.destination.host.guests["s"]
    assert (moved.memory, moved.disk, moved.boots, moved.fence) == (
        {"counter": "41"},
        {"canary": "sings"},
        1,
        2,
    )
    assert pair.measured[-1]["memory_remaining"] == 0 < pair.measured[-1]["memory_processed"]


class RecordingDriver(MemoryDriver):
    """A driver that returns the permitted source of an arriving guest."""

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
def test_prepare_arrival_takes_source_address_from_transfer_address(
    transfer: str, source: str
) -> None:
    tools = Tools(
        RecordingDriver("h2"),
        lambda image: iter(()),
        lambda image: list,
        QUIET,
        lambda address, server, secret: Reader(MemoryDriver(MemoryHost("h1")), server, secret),
    )
    verb = new_verb("prepare_arrival", source=transfer)
    result = verbs.run(Journal(":memory:"), tools, new_command(verb), verb)
    assert result is not None and result.data == {"details": {"source": source}}


def test_aborted_live_migration_fails_and_guest_stays_at_source() -> None:
    pair = Pair()
    pair.run_live("offer", secret="open sesame")
    to = pair.run_live("prepare_arrival", secret="open sesame", source="h1:1").data
    pair.requested, pair.source.host.script["live_migrate"] = Control.ABORT, [Slow(60)]
    result = pair.run_live("live_migrate", to=from_wire(Arrival, to))
    assert (result.status, result.reason, result.retryable) == (
        "failed",
        FailureReason.ABORTED,
        False,
    )
    assert [state.power_state for state in pair.source.domains()] == [RUNNING]
    assert pair.run_live("arrived").status == "failed"


def test_live_migration_requested_to_complete_ends_at_once() -> None:
    pair = Pair()
    pair.run_live("offer", secret="open sesame")
    to = pair.run_live("prepare_arrival", secret="open sesame", source="h1:1").data
    pair.requested, pair.source.host.script["live_migrate"] = Control.COMPLETE, [Slow(60)]
    assert pair.run_live("live_migrate", to=from_wire(Arrival, to)).status == "done"


def test_live_migration_is_journalled_as_begun_before_its_effect() -> None:
    def die(tools: Tools, command: Command, verb: Verb) -> Outcome:
        raise errors.Unavailable("the hypervisor is away")

    journal = Journal(":memory:")
    command, verb = new_command("live_migrate", step="migrate"), new_verb("live_migrate")
    tools = Tools(MemoryDriver(), lambda image: iter(()), lambda image: list, QUIET)
    for _ in range(2):
        assert verbs.run(journal, tools, command, verb, carry_out=die) is None
        assert journal.has_begun(str(command.key)) and journal.find(str(command.key)) is None


def test_only_listed_verbs_are_marked_migrates_or_copies_disks() -> None:
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
