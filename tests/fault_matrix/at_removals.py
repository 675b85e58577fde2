# SPDX-License-Identifier: Apache-2.0
"""Faults during a pending cleanup on a host that was down and has returned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from common.domain import errors
from compute_agent.virt.memory.state.script import Fail
from tests.fault_matrix import stage
from tests.fault_matrix.aim import CONDUCTOR, Fault, inject_once, kill_at_point
from tests.fault_matrix.at_hosts import INSIDE, LEASE_SECONDS
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import LOCAL_SECONDS, MOVE_SECONDS, Verdict, heal, power_on_hosts

VERB = "ensure_absent"


def find_scenario(cell: Cell) -> str:
    """Return the scenario of the workflow that leaves the pending cleanup, the step of the cell."""
    return f"{cell.step}+"


def create_cleanup(bench: Bench, cell: Cell) -> str:
    """Run the workflow while a host is down, and return the host with the pending cleanup."""
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
    assert bench.read_action().state == "done", bench.read_action().message
    hosts = list_hosts_with_cleanups(bench)
    assert hosts == [host], f"pending cleanups on {hosts} instead of {host}"
    return host


def list_hosts_with_cleanups(bench: Bench) -> list[str]:
    return [host for _, host, _ in stage.read_ages(bench.cloud)["removals"]]


def match_removal(*where: str) -> Callable[[Point], bool]:
    """Return a predicate for points at which a host removes the guest."""
    return lambda point: point[0] == "agent" and point[2] == VERB and point[4] in where


def _kill_agent(when: str, bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_removal(when), lambda point: kill_at_point(point[1])(point))
    return Verdict.LATE


def _kill_agent_inside(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Kill the agent at point number ``turn`` inside the removal."""
    seen = [0]

    def is_due(point: Point) -> bool:
        seen[0] += match_removal(*INSIDE)(point)
        return match_removal(*INSIDE)(point) and seen[0] > turn

    inject_once(bench, is_due, lambda point: kill_at_point(point[1])(point))
    return Verdict.LATE


def _refuse_removal(bench: Bench, cell: Cell, turn: int) -> Verdict:
    def refuse(point: Point) -> None:
        script = bench.cloud.hosts[point[1]].driver.host.script
        script[VERB] = [Fail("It broke.")]
        bench.proofs.append(lambda: not script.get(VERB))

    inject_once(bench, match_removal("before"), refuse)
    return Verdict.LATE


def _kill_conductor(when: str, bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Kill the conductor while, or after, it records the host's result."""
    removed: list[Point] = []

    def is_due(point: Point) -> bool:
        if match_removal("after")(point):
            removed.append(point)
        return bool(removed) and point == ("conductor", "sync", "reports", when)

    def check_and_kill(point: Point) -> None:
        assert list_hosts_with_cleanups(bench) == (
            [str(removed[0][1])] if when == "written" else []
        )
        kill_at_point(CONDUCTOR)(point)

    inject_once(bench, is_due, check_and_kill)
    return Verdict.LATE


def _suspend_agent(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Suspend the agent until the conductors count the host as down."""

    def suspend(point: Point) -> None:
        bench.pass_time(LEASE_SECONDS, asleep=[f"work {point[1]}", f"sync {point[1]}"])

    inject_once(bench, match_removal("before"), suspend)
    return Verdict.LATE


def _register_again(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Let the agent lose the session and register again during the removal."""

    def register(point: Point) -> None:
        host = bench.cloud.hosts[str(point[1])]
        host.agent.session = 0
        bench.cloud.sync(host)
        assert host.agent.session

    inject_once(bench, match_removal("entered"), register)
    return Verdict.LATE


def _delete_server(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_removal("before"), lambda point: bench.delete_server())
    return Verdict.DELETED


def _move_back(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Request a move back to the host. The API may refuse the move until the removal is done."""

    def move(point: Point) -> None:
        with suppress(errors.Problem):
            bench.cloud.move(bench.trial.server, "os-migrateLive", host=str(point[1]))
            bench.adopt()

    inject_once(bench, match_removal("before"), move)
    return Verdict.BOTH


FAULTS: dict[str, Fault] = {
    "remover-kill-before": partial(_kill_agent, "before"),
    "remover-kill-mid": _kill_agent_inside,
    "remover-kill-after": partial(_kill_agent, "after"),
    "removal-refused": _refuse_removal,
    "collector-kill-mid": partial(_kill_conductor, "written"),
    "collector-kill-after": partial(_kill_conductor, "committed"),
    "remover-sleeps-past-lease": _suspend_agent,
    "registers-while-removing": _register_again,
    "delete-while-removing": _delete_server,
    "moves-back-while-removing": _move_back,
}


def check(bench: Bench, cell: Cell, fault: Fault, turn: int) -> None:
    """Run a cell: create the cleanup, inject the fault, return the host, and check the cloud."""
    create_cleanup(bench, cell)
    fault(bench, cell, turn)
    power_on_hosts(bench)
    bench.settle(MOVE_SECONDS)
    bench.watchers.clear()
    heal(bench)
    bench.settle(LOCAL_SECONDS)
    server = bench.cloud.show(bench.trial.server)
    assert (server.task_state, server.action) == (None, None)
    assert (findings := bench.cloud.findings()) == [], findings
