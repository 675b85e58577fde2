# SPDX-License-Identifier: Apache-2.0
"""Live migration between memory hosts of two processes, each of which may be killed meanwhile."""

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

SPEC, SPEC_AT_DESTINATION = (
    GuestSpec("s", fence, "vm", Flavor("1", "n", 1, 64, 1)) for fence in (1, 2)
)


class EmptyPeer:
    """A peer without files. Reading one fails the test."""

    def parts(self) -> list[Part]:
        return []

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        raise AssertionError(name)


def test_memory_host_files_are_readable_only_with_secret_of_move() -> None:
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
    """Two hosts as if in two processes. They reach each other only by URI and state file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.source, self.destination = self.start("h1"), self.start("h2")
        self.source.ensure_guest(SPEC, lambda image: iter(()), QUIET)
        self.source.host.write_memory("s", "counter", "41")
        self.source.host.write_file("s", "canary", "sings")
        self.to = self.destination.prepare_incoming(
            SPEC_AT_DESTINATION, EmptyPeer(), False, {}, lambda image: iter(()), QUIET
        )

    def start(self, name: str) -> MemoryDriver:
        driver = MemoryDriver(MemoryHost(name, state_file=self._folder / name / "guests"))
        MemoryHost.reachable.pop(driver.host.uri)
        return driver

    def migrate(self) -> None:
        self.source.live_migrate(SPEC_AT_DESTINATION, self.to, False, QUIET)

    def check_arrived(self) -> None:
        assert self.source.domains() == []
        assert self.destination.finish_incoming(SPEC_AT_DESTINATION, QUIET) == DomainState(
            "s", RUNNING, 2
        )
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


def test_memory_live_migration_reaches_host_of_other_process(processes: Processes) -> None:
    processes.migrate()
    assert processes.destination.domains() == [DomainState("s", RUNNING, 2)]
    processes.check_arrived()
    processes.migrate()
    processes.check_arrived()


def test_memory_live_migration_survives_kills_of_destination(
    processes: Processes,
) -> None:
    processes.destination = processes.start("h2")
    processes.migrate()
    processes.destination = processes.start("h2")
    processes.check_arrived()
    processes.destination = processes.start("h2")
    processes.check_arrived()


def test_memory_live_migration_completes_when_repeated_by_restarted_source(
    processes: Processes,
) -> None:
    processes.source.ensure_paused("s", 1, QUIET)
    processes.migrate()
    # As if the source was killed before the guest reached the destination.
    processes.destination.host.incoming["s"] = EMPTY
    assert processes.destination.domains() == []
    processes.source = processes.start("h1")
    assert processes.source.domains() == []
    processes.migrate()
    assert processes.destination.finish_incoming(SPEC_AT_DESTINATION, QUIET) == DomainState(
        "s", PAUSED, 2
    )


def test_memory_live_migration_raises_unavailable_until_destination_returns(
    processes: Processes, tmp_path: Path
) -> None:
    processes.migrate()
    processes.destination.host.incoming["s"] = EMPTY
    (tmp_path / "h2").rename(tmp_path / "unplugged")
    with pytest.raises(errors.Unavailable, match="cannot be reached; the command"):
        processes.migrate()
    (tmp_path / "unplugged").rename(tmp_path / "h2")
    processes.migrate()
    processes.check_arrived()


def test_memory_live_migration_fails_to_missing_or_unprepared_host(processes: Processes) -> None:
    processes.destination.ensure_absent("s", 2)
    with pytest.raises(VerbFailed, match="not prepared"):
        processes.migrate()
    processes.to = {"uri": "memory://h3/nowhere", "address": "h3"}
    with pytest.raises(VerbFailed, match="cannot be reached"):
        processes.migrate()
    assert processes.source.domains() == [DomainState("s", RUNNING, 1)]
    with pytest.raises(VerbFailed, match="did not arrive"):
        processes.destination.finish_incoming(SPEC_AT_DESTINATION, QUIET)


def test_memory_host_reports_storage_and_migration_address(
    processes: Processes, tmp_path: Path
) -> None:
    facts, facts_after_restart = (
        processes.source.inventory().facts,
        processes.start("h1").inventory().facts,
    )
    assert facts == facts_after_restart, "over a restart too"
    assert facts["migration"] == {"uri": processes.source.host.uri, "address": "h1"}
    assert facts["storage"] != processes.destination.inventory().facts["storage"]
    storages = [
        MemoryDriver(MemoryHost(name, storage="shelf")).inventory().facts["storage"]
        for name in ("h3", "h4")
    ]
    assert storages == ["shelf", "shelf"]
