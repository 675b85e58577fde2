# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while a host removes what it still owes: it was dead while its server left it, or
was deleted, and has come back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from common.domain import errors
from compute_agent.virt.memory.state.script import Fail
from tests.fault_matrix import stage
from tests.fault_matrix.aim import CONDUCTOR, Fault, dies, once
from tests.fault_matrix.at_hosts import INSIDE, LEASE_SECONDS
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import LOCAL_SECONDS, MOVE_SECONDS, Verdict, heal, return_hosts

VERB = "ensure_absent"


def scenario(cell: Cell) -> str:
    """Where the cell begins: its step is the workflow that leaves the debt."""
    return f"{cell.step}+"


def leave(bench: Bench, cell: Cell) -> str:
    """The workflow ends while a host is dead, which owes the removal; returns the host."""
    cloud, server = bench.cloud, bench.trial.server
    host = str(
        cloud.migration(server).source_host
        if cell.step == "confirm_resize"
        else cloud.show(server).host
    )
    if cloud.hosts[host].is_on:
        cloud.hosts[host].power_cut()
        cloud.force_down(host)
    bench.begin()
    bench.settle(MOVE_SECONDS)
    assert bench.row().state == "done", bench.row().message
    assert owed(bench) == [host], f"{owed(bench)} owe something, and not {host}"
    return host


def owed(bench: Bench) -> list[str]:
    """The hosts that have still to remove something."""
    return [host for _, host, _ in stage.ages(bench.cloud)["debts"]]


def removes(*where: str) -> Callable[[Point], bool]:
    """A host that owes it removes the guest."""
    return lambda point: point[0] == "agent" and point[2] == VERB and point[4] in where


def _agent_dies(when: str, bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, removes(when), lambda point: dies(point[1])(point))
    return Verdict.LATE


def _agent_dies_inside(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """At each point inside the removal, one after the other."""
    seen = [0]

    def is_due(point: Point) -> bool:
        seen[0] += removes(*INSIDE)(point)
        return removes(*INSIDE)(point) and seen[0] > turn

    once(bench, is_due, lambda point: dies(point[1])(point))
    return Verdict.LATE


def _refused(bench: Bench, cell: Cell, turn: int) -> Verdict:
    def refuse(point: Point) -> None:
        script = bench.cloud.hosts[point[1]].driver.host.script
        script[VERB] = [Fail("It broke.")]
        bench.proofs.append(lambda: not script.get(VERB))

    once(bench, removes("before"), refuse)
    return Verdict.LATE


def _conductor_dies(when: str, bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The host has said that it is done, which is being written, or was just committed."""
    removed: list[Point] = []

    def is_due(point: Point) -> bool:
        if removes("after")(point):
            removed.append(point)
        return bool(removed) and point == ("conductor", "sync", "reports", when)

    def die(point: Point) -> None:
        assert owed(bench) == ([str(removed[0][1])] if when == "written" else [])
        dies(CONDUCTOR)(point)

    once(bench, is_due, die)
    return Verdict.LATE


def _sleeps(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The host stands still until it counts as down, and goes on."""

    def sleep(point: Point) -> None:
        bench.world(LEASE_SECONDS, asleep=[f"work {point[1]}", f"sync {point[1]}"])

    once(bench, removes("before"), sleep)
    return Verdict.LATE


def _registers(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Its agent has lost its session, and gets another while it removes."""

    def register(point: Point) -> None:
        host = bench.cloud.hosts[str(point[1])]
        host.agent.session = 0
        bench.cloud.sync(host)
        assert host.agent.session

    once(bench, removes("entered"), register)
    return Verdict.LATE


def _deleted(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, removes("before"), lambda point: bench.user_deletes())
    return Verdict.DELETED


def _moves_back(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """An admin wants the server on that host again; that may be refused until it is rid of it."""

    def move(point: Point) -> None:
        with suppress(errors.Problem):
            bench.cloud.move(bench.trial.server, "os-migrateLive", host=str(point[1]))
            bench.adopt()

    once(bench, removes("before"), move)
    return Verdict.BOTH


FAULTS: dict[str, Fault] = {
    "remover-kill-before": partial(_agent_dies, "before"),
    "remover-kill-mid": _agent_dies_inside,
    "remover-kill-after": partial(_agent_dies, "after"),
    "removal-refused": _refused,
    "collector-kill-mid": partial(_conductor_dies, "written"),
    "collector-kill-after": partial(_conductor_dies, "committed"),
    "remover-sleeps-past-lease": _sleeps,
    "registers-while-removing": _registers,
    "delete-while-removing": _deleted,
    "moves-back-while-removing": _moves_back,
}


def check(bench: Bench, cell: Cell, fault: Fault, turn: int) -> None:
    """The host returns; in the end it owes nothing, and nothing is wrong."""
    leave(bench, cell)
    fault(bench, cell, turn)
    return_hosts(bench)
    bench.settle(MOVE_SECONDS)
    bench.watchers.clear()
    heal(bench)
    bench.settle(LOCAL_SECONDS)
    server = bench.cloud.show(bench.trial.server)
    assert (server.task_state, server.action) == (None, None)
    assert (found := bench.cloud.findings()) == [], found
