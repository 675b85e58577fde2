# SPDX-License-Identifier: Apache-2.0
"""What must hold when a cell's fault is over: the action has ended in time, every invariant holds,
what failed can be asked for again, and a delete leaves an empty cloud."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import sqlalchemy as sa

from common.domain import states
from common.store import cleanups, schema
from common.store.servers import actions
from conductor.steps import cleanups as cleaning
from tests.fault_matrix import stage
from tests.fault_matrix.bench import Bench
from tests.workflows.scenarios import ARGS, KILL, SHARE

#: Seconds after the fault's end in which an action has ended: of one that stays on its host, and of
#: a move.
LOCAL_SECONDS, MOVE_SECONDS = 60, 120
#: Within which a host that is back has told of its guests.
LOOK_SECONDS = 70
#: Images that their user has asked for and keeps.
KEPT_IMAGES = {ARGS[key]["image_id"] for key in ("createImage", "createBackup")}


class Verdict(StrEnum):
    """What may become of the action. Of two faults, what the later one of these allows."""

    LATE = "it ends as if nothing had happened"
    BOTH = "it ends as if nothing had happened, or another action that was accepted ends"
    ENDED = "it ends done, or failed with the server as it was or in ERROR"
    DELETED = "its server is deleted"


def worded(problem: BaseException) -> str:
    """What went wrong, in a line."""
    said = " ".join(str(problem).split()) or "no words"
    return f"{type(problem).__name__}: {said[:300]}"


def judge(bench: Bench, verdicts: Sequence[Verdict]) -> None:
    """The action's end, in time; ``verdicts``: of the faults that were injected."""
    moves = bench.trial.scenario.keeps is not None
    bench.settle(MOVE_SECONDS if moves else LOCAL_SECONDS)
    bench.watchers.clear()
    heal(bench)
    bench.incarnations.check()
    bench.incarnations.open()
    verdict = max(verdicts, key=list(Verdict).index)
    if verdict is Verdict.DELETED:
        return
    if Verdict.BOTH in verdicts and bench.accepted:
        both(bench)
        return
    ended = bench.row()
    if verdict is not Verdict.ENDED or ended.state == "done":
        assert ended.state == "done", f"{ended.state}: {ended.message}"
        bench.trial.check_expected_end()
        return
    assert ended.state == "failed", f"it is {ended.state}: {ended.message}"
    failed(bench, len(verdicts) > 1)


def both(bench: Bench) -> None:
    """Every action has ended, and the server is at rest."""
    at_rest(bench, [bench.trial.server])


def at_rest(bench: Bench, servers: Sequence[str]) -> None:
    """Every action has ended, nothing has these servers, and the doctor finds nothing."""
    with bench.cloud.store.engine.connect() as tx:
        rows = tx.execute(sa.select(schema.actions)).all()
    left = [row for row in rows if row.state not in actions.ENDED]
    assert not left, f"not ended: {left}"
    for server in map(bench.cloud.show, servers):
        assert (server.task_state, server.action) == (None, None)
    assert (found := bench.cloud.findings()) == [], found


def failed(bench: Bench, twice: bool = False) -> None:
    """The action has failed: its server is at rest, and where it is as before, the same can be
    asked for again; ``twice``: a neighbour may have done it when it failed by another fault, and
    says so then."""
    trial, cloud = bench.trial, bench.cloud
    server = cloud.show(trial.server)
    allowed = {
        trial.scenario.fails_as,
        trial.scenario.ends,
        states.ERROR,
        *([trial.was.vm_state] if trial.was else []),
    }
    assert server.vm_state in allowed, f"{server.vm_state} is none of {allowed}"
    assert (server.task_state, server.action) == (None, None)
    assert (found := cloud.findings()) == [], found
    if trial.was is None or server.vm_state != trial.was.vm_state:
        return
    off = {host.name for host in cloud.hosts.values() if not host.is_on}
    if KILL not in trial.scenario.before:
        return_hosts(bench)
    elif off != {trial.was.host}:
        return
    if cloud.show(trial.server).vm_state != trial.was.vm_state:  # its host was booted
        return
    if cloud.shares_of(trial.server) and trial.scenario.ask == "attach_share":
        cloud.detach_share(trial.server, SHARE)  # as its user is told
        bench.settle(LOCAL_SECONDS)
    bench.begin()
    bench.settle(MOVE_SECONDS)
    assert bench.row().state == "done" or twice, f"the second try: {bench.row().message}"
    assert (found := cloud.findings()) == [], found


def heal(bench: Bench) -> None:
    """Everybody is well again, but for hosts that have no power."""
    cloud = bench.cloud
    fencer = getattr(cloud, "fencer", None)
    for service in (
        cloud.images,
        cloud.networks,
        cloud.shares,
        cloud.volumes,
        *([fencer] if fencer else ()),
    ):
        service.well()
    cloud.cut.clear()
    for host in cloud.hosts.values():
        host.driver.host.script.clear()
    bench.settle(LOCAL_SECONDS)
    clean_up(bench)


def clean_up(bench: Bench) -> None:
    """The operator has what neighbours have still to remove tried again; one that begins an action
    is looked at once more when that has ended."""
    cloud = bench.cloud
    for _ in range(2):
        for row in cloud.store.read(cleanups.list_all):
            cloud.store.write(lambda tx, row=row: cleanups.hasten(tx, row.id))
        cleaning.retry(cloud.engine)
        if not stage.ages(cloud)["actions"]:
            return
        bench.settle(LOCAL_SECONDS)


def return_hosts(bench: Bench) -> None:
    """Every host is there."""
    for host in bench.cloud.hosts.values():
        if not host.is_on:
            host.power_on()
            bench.is_over()
            bench.settle(LOCAL_SECONDS)
            bench.cloud.force_down(host.name, False)
            bench.world(LOOK_SECONDS)
            bench.settle(LOCAL_SECONDS)


def empty(bench: Bench) -> None:
    """The server is deleted, and nothing of it is left anywhere."""
    cloud, server = bench.cloud, bench.trial.server
    return_hosts(bench)
    if not cloud.show(server).deleted:
        cloud.ask(server, "delete")
    bench.is_over()
    bench.settle(LOCAL_SECONDS)
    for late in bench.at_end:
        late()
    bench.settle(LOCAL_SECONDS)
    clean_up(bench)
    assert cloud.show(server).deleted, "it is not deleted"
    assert (found := cloud.findings()) == [], found
    left = {f"cleanup {kind}": target for kind, target in cloud.pending()}
    for host in cloud.hosts.values():
        memory = host.driver.host
        for what in ("guests", "files", "incoming", "storage"):
            if kept := dict(getattr(memory, what)):
                left[f"{what} at {host.name}"] = str(list(kept))
    left |= {f"port {port}": str(held) for port, held in cloud.networks.held.items()}
    left |= {f"image {image}": "" for image in set(cloud.images.records) - KEPT_IMAGES}
    if not set(cloud.images.records) & KEPT_IMAGES:
        left |= {f"snapshot {one}": of for one, of in cloud.volumes.state.snapshots.items()}
    left |= {f"snapshot {one}": "the service waits for it" for one in cloud.volumes.list_awaited()}
    left |= {f"rule of {share}": address for share, address in cloud.shares.rules}
    with cloud.store.engine.connect() as tx:
        for table in (schema.guests, schema.allocations, schema.consumers):
            if count := tx.scalar(sa.select(sa.func.count()).select_from(table)):
                left[f"rows of {table.name}"] = str(count)
    assert not left, f"left behind: {left}"
    bench.incarnations.check()
    bench.notifications.check()
