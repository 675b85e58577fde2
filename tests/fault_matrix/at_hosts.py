# SPDX-License-Identifier: Apache-2.0
"""What happens to a command: on its way, in the agent, in the hypervisor, and to the host."""

from __future__ import annotations

from collections.abc import Callable

from common.domain import errors
from common.domain.models import Command
from compute_agent.virt.memory.state.script import Fail
from tests.fault_matrix.aim import Fault, agent, dies, once
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict

#: Longer than a host's lease; longer than a broker's restart takes; longer than a verb may be
#: silent.
LEASE_SECONDS, BROKER_SECONDS, HANG_SECONDS = 45, 10, 130
#: Where a verb can be interrupted.
INSIDE = ("entered", "asks", "writes", "left")


def kill_before(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, agent(cell, "before"), _agent_dies)
    return Verdict.LATE


def kill_mid(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """At each point inside the verb, one after the other: before its effect, between two writes,
    and when nothing is left to do."""
    seen = [0]

    def is_due(point: Point) -> bool:
        if not agent(cell, *INSIDE)(point):
            return False
        seen[0] += 1
        return seen[0] > turn

    once(bench, is_due, _agent_dies)
    return Verdict.LATE


def kill_after(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Its result is not in the journal yet."""
    once(bench, agent(cell, "after"), _agent_dies)
    return Verdict.LATE


def _agent_dies(point: Point) -> None:
    dies(point[1])(point)


def conductor_dies(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, agent(cell, "before"), lambda point: bench.restart_conductor())
    return Verdict.LATE


def sleeps(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The agent stands still until its host counts as down, and goes on as if nothing had been."""

    def sleep(point: Point) -> None:
        bench.pass_time(LEASE_SECONDS, asleep=[f"work {point[1]}", f"sync {point[1]}"])

    once(bench, agent(cell, "before"), sleep)
    return Verdict.ENDED


def broker_restarts(bench: Bench, cell: Cell, turn: int) -> Verdict:
    def away(point: Point) -> None:
        until = bench.time.monotonic() + BROKER_SECONDS
        bench.lose = lambda kind: bench.time.monotonic() < until
        bench.extend_fault(BROKER_SECONDS)

    once(bench, _sent(cell), away)
    return Verdict.LATE


def request_lost(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, _sent(cell), lambda point: lose(bench, "do"))
    return Verdict.LATE


def reply_lost(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, _answers(cell), lambda point: lose(bench, "sync"))
    return Verdict.LATE


def duplicated(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The command comes three times, the first two at once; the host's answer comes twice."""

    def double(point: Point) -> None:
        host, command = str(point[1]), _command(point)
        bench.deliver(host, [command])
        bench.schedule(2, lambda: bench.deliver(host, [command]))

    def answered(point: Point) -> None:
        if _answers(cell)(point):
            bench.watchers.remove(answered)
            lose(bench, "answer")

    bench.watchers.append(answered)
    once(bench, _sent(cell), double)
    return Verdict.LATE


def comes_late(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The first sending arrives when all is over, and again when the server is gone."""

    def keep(point: Point) -> None:
        host, command = str(point[1]), _command(point)
        lose(bench, "do")
        bench.at_end.append(lambda: bench.deliver(host, [command]))

    once(bench, _sent(cell), keep)
    return Verdict.LATE


def refuses(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, agent(cell, "before"), lambda point: _fail(bench, point, Fail("It broke.")))
    return Verdict.ENDED


def no_space(bench: Bench, cell: Cell, turn: int) -> Verdict:
    full = Fail("No space is left on the host.", retryable=True, details="ENOSPC")
    once(bench, agent(cell, "before"), lambda point: _fail(bench, point, full))
    return Verdict.ENDED


def hangs(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The hypervisor is silent until its time is over; the rest of the host goes on."""

    def hang(point: Point) -> None:
        bench.pass_time(HANG_SECONDS, asleep=[f"work {point[1]}"])
        raise errors.Unavailable("The hypervisor did not answer in time.")

    once(bench, agent(cell, "entered"), hang)
    return Verdict.LATE


def restarts(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """libvirtd ends in the middle of the call, after a part of its effect, and is away a moment."""
    until = [0.0]

    def is_away(point: Point) -> None:
        if point[0] == "agent" and point[4] == "entered" and bench.time.monotonic() < until[0]:
            raise errors.Unavailable("The hypervisor is away.")

    def end(point: Point) -> None:
        until[0] = bench.time.monotonic() + 3
        raise errors.Unavailable("The hypervisor went away.")

    once(bench, agent(cell, "writes", "left"), end)
    bench.watchers.append(is_away)
    return Verdict.LATE


def gone(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Its power is cut, for good as far as anybody knows; an admin says so when it counts as
    down."""

    def cut(point: Point) -> None:
        host = str(point[1])
        bench.cloud.hosts[host].power_cut()
        bench.schedule(LEASE_SECONDS, lambda: bench.cloud.force_down(host))
        _agent_dies(point)

    once(bench, agent(cell, "before"), cut)
    return Verdict.ENDED


def partition(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Nobody hears the host, which goes on; it heals when the host counts as down."""

    def cut(point: Point) -> None:
        host = str(point[1])
        bench.cloud.cut.add(host)
        bench.schedule(LEASE_SECONDS, lambda: bench.cloud.cut.discard(host))

    once(bench, agent(cell, "before"), cut)
    return Verdict.ENDED


def delete(bench: Bench, cell: Cell, turn: int) -> Verdict:
    def ask(point: Point) -> None:
        bench.delete_server()

    once(bench, agent(cell, "before"), ask)
    return Verdict.DELETED


# --- how ---
def _sent(cell: Cell) -> Callable[[Point], bool]:
    return lambda point: point[0] == "send" and point[2] == cell.step


def _answers(cell: Cell) -> Callable[[Point], bool]:
    return lambda point: point[0] == "result" and point[2] == cell.step


def _command(point: Point) -> Command:
    command = point[3]
    assert isinstance(command, Command)
    return command


def lose(bench: Bench, kind: str) -> None:
    """The next message of this kind."""
    before = bench.lose

    def lose(what: str) -> bool:
        if what != kind:
            return False
        bench.lose = before
        bench.extend_fault()
        return True

    bench.lose = lose


def _fail(bench: Bench, point: Point, how: Fail) -> None:
    host = bench.cloud.hosts[point[1]].driver.host
    host.script[point[2]] = [how]
    bench.proofs.append(lambda: not host.script.get(point[2]))


FAULTS: dict[str, Fault] = {
    "agent-kill-before": kill_before,
    "agent-kill-mid": kill_mid,
    "agent-kill-after": kill_after,
    "conductor-kill-waiting": conductor_dies,
    "agent-sleeps-past-lease": sleeps,
    "broker-restarts": broker_restarts,
    "request-lost": request_lost,
    "reply-lost": reply_lost,
    "duplicated": duplicated,
    "comes-after-newer-fence": comes_late,
    "hypervisor-refuses": refuses,
    "hypervisor-hangs": hangs,
    "hypervisor-restarts": restarts,
    "host-gone": gone,
    "partition-past-lease": partition,
    "no-space": no_space,
    "delete-while-commanded": delete,
}
