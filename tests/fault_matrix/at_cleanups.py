# SPDX-License-Identifier: Apache-2.0
"""Faults during the retry of a pending cleanup at an external service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from common.store import cleanups
from common.store.engine import Connection
from common.store.rows import CleanupRow
from compute_agent.virt.memory.state.script import Fail
from conductor.steps import cleanups as cleaning
from conductor.steps.cleanups import REMEDIES
from tests.answers import Answer
from tests.fault_matrix.aim import CONDUCTOR, Fault, kill_at_point
from tests.fault_matrix.bench import Bench
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.fault_matrix.stage import OF_VOLUMES, WITH_VOLUMES
from tests.workflows import volumes
from tests.workflows.service_doubles import ServiceDouble
from tests.workflows.simulator import Crash

#: PATIENCE_SECONDS is longer than the backoff after a refusal and the lease of a dead conductor.
PATIENCE_SECONDS, DELETING_SECONDS = 400, 20
_STRIKE = cleanups.strike


@dataclass(frozen=True)
class Origin:
    """The way in which a cleanup becomes pending.

    A call of the service fails in the workflow. Without a call, the end of the workflow or a failed
    verb of the host leaves the cleanup.

    Attributes:
        workflow: The workflow that leaves the cleanup.
        service: The attribute of ``Cloud`` with the service.
        call: The method that fails, or an empty string.
        how: The failure of the call.
        verbs: Verb -> number of failures on the host.
    """

    workflow: str
    service: str
    call: str
    how: Answer = Answer.CONFLICT
    verbs: Mapping[str, int] = field(default_factory=dict)

    @property
    def scenario(self) -> str:
        of_volumes = self.service == "volumes" and self.workflow not in OF_VOLUMES
        return f"{self.workflow}+{WITH_VOLUMES if of_volumes else ''}"


#: The origin of each kind of cleanup.
ORIGINS: dict[str, Origin] = {
    cleanups.PORT: Origin("detach_interface", "networks", "delete"),
    cleanups.PORTS: Origin("delete", "networks", "ports"),
    cleanups.BINDING: Origin("live_migrate", "networks", "unbind_at"),
    cleanups.IMAGE: Origin("unshelve", "images", "delete"),
    cleanups.BACKUPS: Origin("backup", "images", "find"),
    cleanups.SHARE: Origin("detach_share", "shares", "deny"),
    cleanups.ATTACHMENT: Origin("detach_volume", "volumes", "detach"),
    # In production, an image that was not created leaves this cleanup. Here ``PLANTERS`` adds one.
    cleanups.SNAPSHOT: Origin("attach_volume", "volumes", ""),
    cleanups.GUEST_VOLUME: Origin(
        "attach_volume", "volumes", "", verbs={"attach_volume": 1, "detach_volume": 2}
    ),
    cleanups.GONE_PORT: Origin("create", "networks", ""),
    cleanups.LATE_PORTS: Origin("create", "networks", "create", Answer.LATE),
    cleanups.LATE_ATTACHMENTS: Origin("attach_volume", "volumes", "attach", Answer.LATE),
}
assert ORIGINS.keys() == REMEDIES.keys(), "a kind of cleanup has no cells"


def find_service(bench: Bench, cell: Cell) -> ServiceDouble:
    """Return the service that still has to do the cleanup."""
    service: ServiceDouble = getattr(bench.cloud, ORIGINS[cell.step].service)
    return service


def create_cleanup(bench: Bench, cell: Cell) -> None:
    """Run the workflow that leaves the cleanup."""
    origin, service = ORIGINS[cell.step], find_service(bench, cell)
    if origin.call:
        service.next_of = {origin.call}, origin.how
    host = (
        bench.cloud.hosts[str(bench.cloud.show(bench.trial.server).host)] if origin.verbs else None
    )
    if host is not None:
        host.driver.host.script.update(
            {verb: [Fail("It broke.")] * times for verb, times in origin.verbs.items()}
        )
    bench.begin()
    bench.settle(PATIENCE_SECONDS)
    assert bench.read_action().state == ("failed" if host else "done"), bench.read_action().message
    if plant := PLANTERS.get(cell.step):
        plant(bench)
    kinds = [kind for kind, _ in bench.cloud.pending()]
    assert cell.step in kinds, f"the workflow left the cleanups {kinds}"
    service.refusing.clear()
    service.catches_up()


def _plant_snapshot(bench: Bench) -> None:
    cloud, server = bench.cloud, bench.trial.server
    snapshot = cloud.volumes.make_snapshot(next(iter(volumes.of(cloud, server))))
    row = {"kind": cleanups.SNAPSHOT, "target": snapshot, "place": "", "args": {}, "why": "Busy."}
    owner = {"server_id": server, "project_id": "project"}
    cloud.store.write(lambda tx: cleanups.add(tx, [{**row, **owner}]))


def _delete_port(bench: Bench) -> None:
    cloud, server = bench.cloud, bench.cloud.show(bench.trial.server)
    port = server.interfaces[0]["port"]
    del cloud.networks.held[port]
    cloud.store.write(lambda tx: cleanups.add_gone_port(tx, server.id, server.project_id, port))


#: Functions that create cleanups without a failed call.
PLANTERS: dict[str, Callable[[Bench], None]] = {
    cleanups.SNAPSHOT: _plant_snapshot,
    cleanups.GONE_PORT: _delete_port,
}


def carry_out(bench: Bench) -> None:
    """Let the operator retry the cleanups, and let time pass until none is pending."""
    for row in bench.cloud.store.read(cleanups.list_all):
        bench.cloud.store.write(lambda tx, row=row: cleanups.hasten(tx, row.id))
    bench.run(lambda: cleaning.retry(bench.cloud.engine))
    cloud = bench.cloud
    bench.pass_time(PATIENCE_SECONDS, has_ended=lambda: not cloud.pending())
    for service in (cloud.images, cloud.networks, cloud.shares, cloud.volumes):
        service.well()
        service.catches_up()
    bench.pass_time(PATIENCE_SECONDS, has_ended=lambda: not cloud.pending())


def _script_answer(how: Answer, bench: Bench, cell: Cell, turn: int) -> Verdict:
    service = find_service(bench, cell)
    service.next_of = set(service.call_names), how
    bench.proofs.append(lambda: service.next_of is None)
    bench.record_hit()
    return Verdict.LATE


def _kill_conductor(when: str, bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Kill the conductor before the request, at the answer, or before the row is deleted."""
    service = find_service(bench, cell)
    if when == "after":
        _kill_at_strike(bench)
        return Verdict.LATE
    name = {"before": "_speak", "mid": "_answer"}[when]
    bench.record_hit()

    def die(*arguments: object) -> None:
        delattr(service, name)
        kill_at_point(CONDUCTOR)(())

    setattr(service, name, die)
    bench.proofs.append(lambda: name not in vars(service))
    return Verdict.LATE


def _kill_at_strike(bench: Bench) -> None:
    """Kill the conductor when the row is deleted and the transaction is still open."""
    died: list[bool] = []

    def strike_and_crash(tx: Connection, row: CleanupRow, fence: int | None) -> bool:
        result = _STRIKE(tx, row, fence)
        if not died:
            died.append(result)
            bench.record_hit()
            raise Crash(CONDUCTOR)
        return result

    # ``check`` restores the function.
    setattr(cleanups, "strike", strike_and_crash)  # noqa: B010
    bench.proofs.append(lambda: died == [True])


def _delete_server(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Delete the server during the request to the service."""
    service = find_service(bench, cell)
    service.next_of = set(service.call_names), Answer.SLOW
    bench.proofs.append(lambda: service.next_of is None)
    bench.record_hit()

    def delete() -> None:
        if not bench.cloud.show(bench.trial.server).deleted:
            bench.delete_server()
            bench.pass_time(DELETING_SECONDS)

    service.meanwhile = delete
    return Verdict.DELETED


FAULTS: dict[str, Fault] = {
    "cleaner-kill-before": partial(_kill_conductor, "before"),
    "cleaner-kill-mid": partial(_kill_conductor, "mid"),
    "cleaner-kill-after": partial(_kill_conductor, "after"),
    "cleaning-refused": partial(_script_answer, Answer.CONFLICT),
    "cleaning-forbidden": partial(_script_answer, Answer.FORBIDDEN),
    "cleaning-silent": partial(_script_answer, Answer.SILENT),
    "cleaning-unanswered": partial(_script_answer, Answer.LOST),
    "cleaning-answered-by-half": partial(_script_answer, Answer.HALF),
    "cleaning-done-late": partial(_script_answer, Answer.LATE),
    "delete-while-cleaning": _delete_server,
}


def check(bench: Bench, cell: Cell, fault: Callable[..., Verdict]) -> None:
    """Run a cell: create the cleanup, inject the fault, and check that the cleanup is done."""
    create_cleanup(bench, cell)
    try:
        fault(bench, cell, 0)
        carry_out(bench)
    finally:
        setattr(cleanups, "strike", _STRIKE)  # noqa: B010
    assert (pending := bench.cloud.pending()) == [], pending
    assert (findings := bench.cloud.findings()) == [], findings
