# SPDX-License-Identifier: Apache-2.0
"""Hosts in memory of several processes: a running guest goes from one to the other, whichever is
killed in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.domain import errors
from common.domain.models import DomainState, Flavor, GuestSpec
from compute_agent.verb_context import Part, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.incoming import EMPTY
from compute_agent.virt.memory.state.script import QUIET

SPEC, THERE = (GuestSpec("s", fence, "vm", Flavor("1", "n", 1, 64, 1)) for fence in (1, 2))


class Nothing:
    """A peer of whose files nothing is needed."""

    def parts(self) -> list[Part]:
        return []

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        raise AssertionError(name)


def test_files_are_read_under_the_secret_of_the_move_alone() -> None:
    driver = MemoryDriver(MemoryHost("h1", vcpus=4, memory_mb=1024, disk_gb=10, script={}))
    driver.ensure_guest(SPEC, lambda image: iter(()), QUIET)
    driver.ensure_stopped("s", 1, 0, QUIET)
    driver.offer("s", 1, "secret", QUIET)
    assert driver.parts("s", "secret")
    for wrong in ("", "another"):
        with pytest.raises(errors.Forbidden):
            driver.parts("s", wrong)
        with pytest.raises(errors.Forbidden):
            next(iter(driver.read_part("s", wrong, "disk")))


class Processes:
    """Two hosts, each in a process of its own: they know each other by their URIs only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.source, self.destination = self.started("h1"), self.started("h2")
        self.source.ensure_guest(SPEC, lambda image: iter(()), QUIET)
        self.source.host.write_memory("s", "counter", "41")
        self.source.host.write_file("s", "canary", "sings")
        self.to = self.destination.prepare_incoming(
            THERE, Nothing(), False, {}, lambda image: iter(()), QUIET
        )

    def started(self, name: str) -> MemoryDriver:
        driver = MemoryDriver(MemoryHost(name, state_file=self._folder / name / "guests"))
        MemoryHost.reachable.pop(driver.host.uri)
        return driver

    def migrate(self) -> None:
        self.source.live_migrate(THERE, self.to, False, QUIET)

    def is_there(self) -> None:
        assert self.source.domains() == []
        assert self.destination.finish_incoming(THERE, QUIET) == DomainState("s", RUNNING, 2)
        guest = self.destination.host.guests["s"]
        assert (guest.memory, guest.disk, guest.boots) == (
            {"counter": "41"},
            {"canary": "sings"},
            1,
        )
        assert list(self.destination.host.incoming) == []


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


def test_a_running_guest_goes_to_a_host_of_another_process(processes: Processes) -> None:
    processes.migrate()
    assert processes.destination.domains() == [DomainState("s", RUNNING, 2)]
    processes.is_there()
    processes.migrate()
    processes.is_there()


def test_the_destination_may_be_killed_before_and_after_the_guest_came(
    processes: Processes,
) -> None:
    processes.destination = processes.started("h2")
    processes.migrate()
    processes.destination = processes.started("h2")
    processes.is_there()
    processes.destination = processes.started("h2")
    processes.is_there()


def test_a_source_that_was_killed_when_it_had_let_go_delivers_the_guest(
    processes: Processes,
) -> None:
    processes.source.ensure_paused("s", 1, QUIET)
    processes.migrate()
    processes.destination.host.incoming["s"] = EMPTY  # as if it had not got that far
    assert processes.destination.domains() == []
    processes.source = processes.started("h1")
    assert processes.source.domains() == []
    processes.migrate()
    assert processes.destination.finish_incoming(THERE, QUIET) == DomainState("s", PAUSED, 2)


def test_a_guest_that_was_let_go_of_waits_for_a_destination_that_is_away(
    processes: Processes, tmp_path: Path
) -> None:
    processes.migrate()
    processes.destination.host.incoming["s"] = EMPTY
    (tmp_path / "h2").rename(tmp_path / "unplugged")
    with pytest.raises(errors.Unavailable, match="cannot be reached just now"):
        processes.migrate()
    (tmp_path / "unplugged").rename(tmp_path / "h2")
    processes.migrate()
    processes.is_there()


def test_a_host_that_is_gone_or_not_prepared_gets_nothing(processes: Processes) -> None:
    processes.destination.ensure_absent("s", 2)
    with pytest.raises(VerbFailed, match="not prepared"):
        processes.migrate()
    processes.to = {"uri": "memory://h3/nowhere", "address": "h3"}
    with pytest.raises(VerbFailed, match="cannot be reached"):
        processes.migrate()
    assert processes.source.domains() == [DomainState("s", RUNNING, 1)]
    with pytest.raises(VerbFailed, match="did not arrive"):
        processes.destination.finish_incoming(THERE, QUIET)


def test_hosts_tell_what_storage_they_have_and_where_they_are_reached(
    processes: Processes, tmp_path: Path
) -> None:
    own, again = processes.source.inventory().facts, processes.started("h1").inventory().facts
    assert own == again, "over a restart too"
    assert own["migration"] == {"uri": processes.source.host.uri, "address": "h1"}
    assert own["storage"] != processes.destination.inventory().facts["storage"]
    shared = [
        MemoryDriver(MemoryHost(name, storage="shelf")).inventory().facts["storage"]
        for name in ("h3", "h4")
    ]
    assert shared == ["shelf", "shelf"]
