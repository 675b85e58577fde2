# SPDX-License-Identifier: Apache-2.0
"""Tests of the default cells of the fault matrix, and of the matrix itself.

``./deploy/test faults`` runs all cells.
"""

from __future__ import annotations

import zlib
from contextlib import suppress

import pytest

from common.domain import errors
from common.store import schema
from common.store.rows import NotificationRow
from common.store.servers import actions, console_tokens, guests, metadata
from compute_agent.virt.memory.state.host import MemoryHost
from conductor.notifications import notices as notifications
from conductor.notifications.messages import messages
from conductor.notifications.notification_sender import NotificationSender
from conductor.workflows import WORKFLOWS
from tests.fault_matrix import run, second, soak
from tests.fault_matrix.cells import (
    FAULTS,
    REQUESTS,
    Cell,
    Kind,
    cells,
    list_kinds,
)
from tests.fault_matrix.default_set import default_cells
from tests.fault_matrix.known import FOUND, FOUND_TWICE, KNOWN, WAIVED, find_waiver
from tests.fault_matrix.run import BY_KIND, NotInjected

EVERY = {cell.id: cell for cell in cells()}
DEFAULT = default_cells(EVERY.values())
#: One in this number of default cells also runs with a second fault.
TWICE = 20


@pytest.mark.parametrize("cell", FOUND)
def test_fault_matrix_cell_with_past_defect_passes(cell: str) -> None:
    run.check(EVERY[cell])


@pytest.mark.parametrize(
    "cell", [cell for cell in DEFAULT if cell.id not in FOUND], ids=lambda cell: cell.id
)
def test_fault_matrix_default_cell_passes(cell: Cell) -> None:
    run.check(cell)


@pytest.mark.parametrize(("first", "then", "seed"), FOUND_TWICE)
def test_fault_matrix_pair_of_faults_with_past_defect_passes(
    first: str, then: str, seed: int
) -> None:
    assert run.check_twice(EVERY[first], EVERY[then], seed), "the second was not injected"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (cell, then)
        for cell in DEFAULT
        if zlib.crc32(cell.id.encode()) % TWICE == 0 and (then := second.draw(cell, 0))
    ],
    ids=lambda cell: cell.id,
)
def test_fault_matrix_default_cell_with_second_fault_passes(first: Cell, then: Cell) -> None:
    run.check_twice(first, then)


def test_fault_matrix_second_fault_is_drawn_for_action_in_progress() -> None:
    """This is the action of the cell, the action requested meanwhile, or the final delete."""
    for first, workflow in (
        ("stop/stop/request-lost", "stop"),
        ("resize/then/delete", "delete"),
        ("stop/stop/delete-while-commanded", "delete"),
    ):
        second_faults = {second.draw(EVERY[first], seed) for seed in range(20)}
        assert len(second_faults) > 5
        assert {cell.workflow for cell in second_faults if cell} == {workflow}
    assert run.check_twice(EVERY["stop/stop/request-lost"], EVERY["stop/stop/agent-kill-mid"])
    assert not run.check_twice(EVERY["stop/stop/request-lost"], EVERY["pause/pause/reply-lost"])


def test_soak_run_with_many_faults_finds_no_problem() -> None:
    life = soak.run_life(0)
    assert (life.problem, life.story) == ("", "")
    assert life.requests >= soak.ROUNDS and life.faults


def test_soak_run_fails_when_host_does_not_remove_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reports the removal, but keeps the guest."""
    monkeypatch.setattr(MemoryHost, "remove", lambda *arguments: None)
    assert soak.run_life(0).problem


def test_fault_matrix_cells_contain_every_fault_of_every_step() -> None:
    for workflow in WORKFLOWS.values():
        for step in workflow.steps:
            for kind in list_kinds(step):
                for fault in FAULTS[kind]:
                    assert f"{workflow.name}/{step.name}/{fault}" in EVERY
    assert len(EVERY) == len(cells()), "two cells have one id"


def test_fault_matrix_faults_of_each_kind_are_implemented() -> None:
    assert {kind: set(faults) for kind, faults in BY_KIND.items()} == {
        kind: set(faults) or set(REQUESTS) for kind, faults in FAULTS.items()
    }


def test_fault_matrix_waivers_are_rare_and_known_failures_are_cells() -> None:
    assert sum(bool(find_waiver(cell)) for cell in EVERY) <= len(EVERY) / 100
    assert all(any(part in cell for cell in EVERY) for part in WAIVED)
    assert {*KNOWN, *FOUND} <= set(EVERY)
    assert not KNOWN.keys() & FOUND.keys()


def test_fault_matrix_cell_without_injected_fault_raises_not_injected() -> None:
    nowhere = Cell("stop", "no_such_step", Kind.COMMAND, "agent-kill-before")
    with pytest.raises(NotInjected):
        run.check(nowhere)


def test_fault_matrix_cell_fails_when_guest_is_left_on_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host reports the removal, but keeps the guest."""
    cell = EVERY["stop/stop/request-lost"]
    assert run.run(cell).problem == ""
    monkeypatch.setattr(MemoryHost, "remove", lambda *arguments: None)
    assert "left behind" in run.run(cell).problem or "domain" in run.run(cell).problem


def test_fault_matrix_cell_fails_when_pending_cleanup_of_host_remains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The conductor sends no cleanup to the returned host, or the host keeps the guest."""
    cell = EVERY["removals/evacuate/remover-kill-before"]
    with monkeypatch.context() as no_commands:
        no_commands.setattr(guests, "removals", lambda *arguments, **options: [])
        problem = run.run(cell).problem
        assert "not over" in problem and "removals [Pending(" in problem
    assert run.run(cell).problem == ""
    monkeypatch.setattr(MemoryHost, "remove", lambda *arguments: None)
    assert "domain" in run.run(cell).problem


def test_fault_matrix_cell_fails_when_lost_command_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actions, "outstanding", lambda *arguments, **options: [])
    assert "not over" in run.run(EVERY["stop/stop/request-lost"]).problem


def test_fault_matrix_cell_fails_when_notification_is_missing_or_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transition writes no notification, or the sender deletes a notification unsent."""
    cell = EVERY["stop/stop/request-lost"]
    with monkeypatch.context() as silent:
        for part in ("_update_notices", "_event_notices"):
            silent.setattr(notifications, part, lambda *arguments: [])
        assert (
            "notified of ['instance.power_off.start', 'instance.delete.start'], and"
            in run.run(cell).problem
        )
    monkeypatch.setattr(NotificationSender, "_send", send_and_ignore_failure)
    assert "arrived of [1, 2" in run.run(cell).problem


def send_and_ignore_failure(sender: NotificationSender, row: NotificationRow) -> bool:
    with suppress(errors.Unavailable):
        for message in messages(row, sender.form):
            sender.transport.send(message)
    return True


def test_fault_matrix_cell_fails_when_token_of_removed_guest_opens_console(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token is valid for the server on any host."""
    cell = EVERY["removals/evacuate/remover-kill-before"]
    monkeypatch.setattr(console_tokens, "_USABLE", schema.console_tokens.c.used_at.is_(None))
    assert "a token of a guest that is gone opens a console" in run.run(cell).problem


def test_fault_matrix_cell_fails_when_deleted_server_gets_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "facts", lambda tx, server: object())
    assert "its metadata" in run.run(EVERY["stop/stop/request-lost"]).problem
