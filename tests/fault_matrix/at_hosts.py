# SPDX-License-Identifier: Apache-2.0
"""Faults of a command: in transit, in the agent, in the hypervisor, and of the host."""

from __future__ import annotations

from collections.abc import Callable

from common.domain import errors
from common.domain.models import Command
from compute_agent.virt.memory.state.script import Fail
from tests.fault_matrix.aim import Fault, inject_once, kill_at_point, match_agent
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict

#: LEASE_SECONDS is longer than a host's lease, BROKER_SECONDS than a restart of the broker, and
#: HANG_SECONDS than the time limit of a verb without progress.
LEASE_SECONDS, BROKER_SECONDS, HANG_SECONDS = 45, 10, 130
#: Points inside a verb.
INSIDE = ("entered", "asks", "writes", "left")


def kill_before(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_agent(cell, "before"), _kill_agent)
    return Verdict.LATE


def kill_mid(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Kill the agent at point number ``turn`` inside the verb.

    The points are before the effect, between two writes, and after the effect.
    """
    seen = [0]

    def is_due(point: Point) -> bool:
        if not match_agent(cell, *INSIDE)(point):
            return False
        seen[0] += 1
        return seen[0] > turn

    inject_once(bench, is_due, _kill_agent)
    return Verdict.LATE


def kill_after(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Kill the agent before the result is in the agent's journal."""
    inject_once(bench, match_agent(cell, "after"), _kill_agent)
    return Verdict.LATE


def _kill_agent(point: Point) -> None:
    kill_at_point(point[1])(point)


def kill_conductor(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_agent(cell, "before"), lambda point: bench.restart_conductor())
    return Verdict.LATE


def suspend_agent(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Suspend the agent until the conductors count the host as down."""

    def suspend(point: Point) -> None:
        bench.pass_time(LEASE_SECONDS, asleep=[f"work {point[1]}", f"sync {point[1]}"])

    inject_once(bench, match_agent(cell, "before"), suspend)
    return Verdict.ENDED


def restart_broker(bench: Bench, cell: Cell, turn: int) -> Verdict:
    def stop(point: Point) -> None:
        until = bench.time.monotonic() + BROKER_SECONDS
        bench.lose = lambda kind: bench.time.monotonic() < until
        bench.extend_fault(BROKER_SECONDS)

    inject_once(bench, _match_send(cell), stop)
    return Verdict.LATE


def lose_request(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, _match_send(cell), lambda point: lose_next_message(bench, "do"))
    return Verdict.LATE


def lose_reply(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, _match_result(cell), lambda point: lose_next_message(bench, "sync"))
    return Verdict.LATE


def double_messages(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Deliver the command three times, two of them at once, and the host's result twice."""

    def double(point: Point) -> None:
        host, command = str(point[1]), _read_command(point)
        bench.deliver(host, [command])
        bench.schedule(2, lambda: bench.deliver(host, [command]))

    def lose_answer(point: Point) -> None:
        if _match_result(cell)(point):
            bench.watchers.remove(lose_answer)
            lose_next_message(bench, "answer")

    bench.watchers.append(lose_answer)
    inject_once(bench, _match_send(cell), double)
    return Verdict.LATE


def deliver_late(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Deliver the first command after the end of the action, and again after the delete."""

    def hold(point: Point) -> None:
        host, command = str(point[1]), _read_command(point)
        lose_next_message(bench, "do")
        bench.at_end.append(lambda: bench.deliver(host, [command]))

    inject_once(bench, _match_send(cell), hold)
    return Verdict.LATE


def refuse_command(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(
        bench,
        match_agent(cell, "before"),
        lambda point: _fail_command(bench, point, Fail("It broke.")),
    )
    return Verdict.ENDED


def report_no_space(bench: Bench, cell: Cell, turn: int) -> Verdict:
    full = Fail("No space is left on the host.", retryable=True, details="ENOSPC")
    inject_once(bench, match_agent(cell, "before"), lambda point: _fail_command(bench, point, full))
    return Verdict.ENDED


def hang_hypervisor(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Let the hypervisor hang until the verb's time limit, while the rest of the host continues."""

    def hang(point: Point) -> None:
        bench.pass_time(HANG_SECONDS, asleep=[f"work {point[1]}"])
        raise errors.Unavailable("The hypervisor did not answer in time.")

    inject_once(bench, match_agent(cell, "entered"), hang)
    return Verdict.LATE


def restart_hypervisor(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """End libvirtd after a part of the call's effect, and restart it after three seconds."""
    until = [0.0]

    def refuse(point: Point) -> None:
        if point[0] == "agent" and point[4] == "entered" and bench.time.monotonic() < until[0]:
            raise errors.Unavailable("The hypervisor is away.")

    def end(point: Point) -> None:
        until[0] = bench.time.monotonic() + 3
        raise errors.Unavailable("The hypervisor went away.")

    inject_once(bench, match_agent(cell, "writes", "left"), end)
    bench.watchers.append(refuse)
    return Verdict.LATE


def cut_power(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Cut the power of the host. An admin forces the host down after the end of the lease."""

    def cut(point: Point) -> None:
        host = str(point[1])
        bench.cloud.hosts[host].power_cut()
        bench.schedule(LEASE_SECONDS, lambda: bench.cloud.force_down(host))
        _kill_agent(point)

    inject_once(bench, match_agent(cell, "before"), cut)
    return Verdict.ENDED


def cut_network(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Cut the network of a running host until the host counts as down."""

    def cut(point: Point) -> None:
        host = str(point[1])
        bench.cloud.cut.add(host)
        bench.schedule(LEASE_SECONDS, lambda: bench.cloud.cut.discard(host))

    inject_once(bench, match_agent(cell, "before"), cut)
    return Verdict.ENDED


def delete_during_command(bench: Bench, cell: Cell, turn: int) -> Verdict:
    def request(point: Point) -> None:
        bench.delete_server()

    inject_once(bench, match_agent(cell, "before"), request)
    return Verdict.DELETED


# --- points and effects ---
def _match_send(cell: Cell) -> Callable[[Point], bool]:
    return lambda point: point[0] == "send" and point[2] == cell.step


def _match_result(cell: Cell) -> Callable[[Point], bool]:
    return lambda point: point[0] == "result" and point[2] == cell.step


def _read_command(point: Point) -> Command:
    command = point[3]
    assert isinstance(command, Command)
    return command


def lose_next_message(bench: Bench, kind: str) -> None:
    """Lose the next message of this kind, for example "do" or "sync"."""
    before = bench.lose

    def lose_once(message_kind: str) -> bool:
        if message_kind != kind:
            return False
        bench.lose = before
        bench.extend_fault()
        return True

    bench.lose = lose_once


def _fail_command(bench: Bench, point: Point, failure: Fail) -> None:
    host = bench.cloud.hosts[point[1]].driver.host
    host.script[point[2]] = [failure]
    bench.proofs.append(lambda: not host.script.get(point[2]))


FAULTS: dict[str, Fault] = {
    "agent-kill-before": kill_before,
    "agent-kill-mid": kill_mid,
    "agent-kill-after": kill_after,
    "conductor-kill-waiting": kill_conductor,
    "agent-sleeps-past-lease": suspend_agent,
    "broker-restarts": restart_broker,
    "request-lost": lose_request,
    "reply-lost": lose_reply,
    "duplicated": double_messages,
    "comes-after-newer-fence": deliver_late,
    "hypervisor-refuses": refuse_command,
    "hypervisor-hangs": hang_hypervisor,
    "hypervisor-restarts": restart_hypervisor,
    "host-gone": cut_power,
    "partition-past-lease": cut_network,
    "no-space": report_no_space,
    "delete-while-commanded": delete_during_command,
}
