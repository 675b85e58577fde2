# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while a pending cleanup is carried out: a neighbour has refused something before,
and is asked again."""

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
from tests.fault_matrix.aim import CONDUCTOR, Fault, dies
from tests.fault_matrix.bench import Bench
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.fault_matrix.stage import OF_VOLUMES, WITH_VOLUMES
from tests.workflows import volumes
from tests.workflows.neighbours import ServiceDouble
from tests.workflows.simulator import Crash

#: Longer than a cleanup is put off after a refusal, or held by a conductor that died.
PATIENCE_SECONDS, DELETING_SECONDS = 400, 20
_STRIKE = cleanups.strike


@dataclass(frozen=True)
class Left:
    """How a cleanup comes to be: a call of this service goes wrong in this workflow; without a call
    it is there when that has ended, or ``verbs`` of its host have failed so often."""

    workflow: str
    service: str
    call: str
    how: Answer = Answer.CONFLICT
    verbs: Mapping[str, int] = field(default_factory=dict)

    @property
    def scenario(self) -> str:
        of_volumes = self.service == "volumes" and self.workflow not in OF_VOLUMES
        return f"{self.workflow}+{WITH_VOLUMES if of_volumes else ''}"


#: Of each kind of cleanup.
LEFT: dict[str, Left] = {
    cleanups.PORT: Left("detach_interface", "networks", "delete"),
    cleanups.PORTS: Left("delete", "networks", "ports"),
    cleanups.BINDING: Left("live_migrate", "networks", "unbind_at"),
    cleanups.IMAGE: Left("unshelve", "images", "delete"),
    cleanups.BACKUPS: Left("backup", "images", "find"),
    cleanups.SHARE: Left("detach_share", "shares", "deny"),
    cleanups.ATTACHMENT: Left("detach_volume", "volumes", "detach"),
    cleanups.SNAPSHOT: Left("attach_volume", "volumes", ""),  # else of an image that was not made
    cleanups.GUEST_VOLUME: Left(
        "attach_volume", "volumes", "", verbs={"attach_volume": 1, "detach_volume": 2}
    ),
    cleanups.GONE_PORT: Left("create", "networks", ""),
    cleanups.LATE_PORTS: Left("create", "networks", "create", Answer.LATE),
    cleanups.LATE_ATTACHMENTS: Left("attach_volume", "volumes", "attach", Answer.LATE),
}
assert LEFT.keys() == REMEDIES.keys(), "a kind of cleanup has no cells"


def service_of(bench: Bench, cell: Cell) -> ServiceDouble:
    """Who is asked again."""
    found: ServiceDouble = getattr(bench.cloud, LEFT[cell.step].service)
    return found


def leave(bench: Bench, cell: Cell) -> None:
    """The workflow ends, and leaves the cleanup."""
    left, service = LEFT[cell.step], service_of(bench, cell)
    if left.call:
        service.next_of = {left.call}, left.how
    host = bench.cloud.hosts[str(bench.cloud.show(bench.trial.server).host)] if left.verbs else None
    if host is not None:
        host.driver.host.script.update(
            {verb: [Fail("It broke.")] * times for verb, times in left.verbs.items()}
        )
    bench.begin()
    bench.settle(PATIENCE_SECONDS)
    assert bench.row().state == ("failed" if host else "done"), bench.row().message
    if plant := PLANTED.get(cell.step):
        plant(bench)
    kinds = [kind for kind, _ in bench.cloud.pending()]
    assert cell.step in kinds, f"it left {kinds}"
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


#: Of cleanups that no failed call leaves.
PLANTED: dict[str, Callable[[Bench], None]] = {
    cleanups.SNAPSHOT: _plant_snapshot,
    cleanups.GONE_PORT: _delete_port,
}


def carry_out(bench: Bench) -> None:
    """Make the cleanups due, and let time pass until none is left."""
    for row in bench.cloud.store.read(cleanups.list_all):
        bench.cloud.store.write(lambda tx, row=row: cleanups.hasten(tx, row.id))
    bench.run(lambda: cleaning.retry(bench.cloud.engine))
    cloud = bench.cloud
    bench.world(PATIENCE_SECONDS, has_ended=lambda: not cloud.pending())
    for service in (cloud.images, cloud.networks, cloud.shares, cloud.volumes):
        service.well()
        service.catches_up()
    bench.world(PATIENCE_SECONDS, has_ended=lambda: not cloud.pending())


def _answers(how: Answer, bench: Bench, cell: Cell, turn: int) -> Verdict:
    service = service_of(bench, cell)
    service.next_of = set(service.call_names), how
    bench.proofs.append(lambda: service.next_of is None)
    bench.hit()
    return Verdict.LATE


def _dies(when: str, bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Before the neighbour is asked, when it has answered, or when all is done but the row."""
    service = service_of(bench, cell)
    if when == "after":
        _dies_at_strike(bench)
        return Verdict.LATE
    name = {"before": "_speak", "mid": "_answer"}[when]
    bench.hit()

    def die(*arguments: object) -> None:
        delattr(service, name)
        dies(CONDUCTOR)(())

    setattr(service, name, die)
    bench.proofs.append(lambda: name not in vars(service))
    return Verdict.LATE


def _dies_at_strike(bench: Bench) -> None:
    """The row is gone, and the transaction is not ended."""
    died: list[bool] = []

    def strike(tx: Connection, row: CleanupRow, fence: int | None) -> bool:
        struck = _STRIKE(tx, row, fence)
        if not died:
            died.append(struck)
            bench.hit()
            raise Crash(CONDUCTOR)
        return struck

    setattr(cleanups, "strike", strike)  # noqa: B010  # ``check`` sets it back
    bench.proofs.append(lambda: died == [True])


def _deleted(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The server is deleted while the neighbour is asked."""
    service = service_of(bench, cell)
    service.next_of = set(service.call_names), Answer.SLOW
    bench.proofs.append(lambda: service.next_of is None)
    bench.hit()

    def delete() -> None:
        if not bench.cloud.show(bench.trial.server).deleted:
            bench.user_deletes()
            bench.world(DELETING_SECONDS)

    service.meanwhile = delete
    return Verdict.DELETED


FAULTS: dict[str, Fault] = {
    "cleaner-kill-before": partial(_dies, "before"),
    "cleaner-kill-mid": partial(_dies, "mid"),
    "cleaner-kill-after": partial(_dies, "after"),
    "cleaning-refused": partial(_answers, Answer.CONFLICT),
    "cleaning-forbidden": partial(_answers, Answer.FORBIDDEN),
    "cleaning-silent": partial(_answers, Answer.SILENT),
    "cleaning-unanswered": partial(_answers, Answer.LOST),
    "cleaning-answered-by-half": partial(_answers, Answer.HALF),
    "cleaning-done-late": partial(_answers, Answer.LATE),
    "delete-while-cleaning": _deleted,
}


def check(bench: Bench, cell: Cell, fault: Callable[..., Verdict]) -> None:
    """It is done in the end, and nothing is wrong."""
    leave(bench, cell)
    try:
        fault(bench, cell, 0)
        carry_out(bench)
    finally:
        setattr(cleanups, "strike", _STRIKE)  # noqa: B010  # as above
    assert (left := bench.cloud.pending()) == [], left
    assert (found := bench.cloud.findings()) == [], found
