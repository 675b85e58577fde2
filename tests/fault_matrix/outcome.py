# SPDX-License-Identifier: Apache-2.0
"""The checks after the fault of a cell.

The action ends in time and all invariants hold. A failed request succeeds when repeated. A delete
leaves an empty cloud.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import sqlalchemy as sa

from common.domain import states
from common.domain.clock import SECOND
from common.store import cleanups, schema
from common.store.servers import actions
from conductor.steps import cleanups as cleaning
from tests.fault_matrix import stage
from tests.fault_matrix.bench import Bench
from tests.workflows.scenarios import ARGS, KILL, SHARE

#: Seconds from the end of the fault to the end of the action, on one host and for a move.
LOCAL_SECONDS, MOVE_SECONDS = 60, 120
#: Seconds in which a returned host reports the guests.
LOOK_SECONDS = 70
#: Images that belong to the user and are kept.
KEPT_IMAGES = {ARGS[key]["image_id"] for key in ("createImage", "createBackup")}


class Verdict(StrEnum):
    """The permitted ends of an action. Of two faults, the later member of this list counts."""

    LATE = "it ends as if nothing had happened"
    BOTH = "it ends as if nothing had happened, or another action that was accepted ends"
    ENDED = "it ends done, or failed with the server as it was or in ERROR"
    DELETED = "its server is deleted"


def describe_problem(problem: BaseException) -> str:
    """Return the type and the text of an exception in one line."""
    text = " ".join(str(problem).split()) or "no message"
    return f"{type(problem).__name__}: {text[:300]}"


def judge(bench: Bench, verdicts: Sequence[Verdict]) -> None:
    """Check that the action ended in time and in a state that the injected faults permit."""
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
        check_both_ended(bench)
        return
    action = bench.read_action()
    if verdict is not Verdict.ENDED or action.state == "done":
        assert action.state == "done", f"{action.state}: {action.message}"
        bench.trial.check_expected_end()
        return
    assert action.state == "failed", f"it is {action.state}: {action.message}"
    check_failed_action(bench, len(verdicts) > 1)


def check_both_ended(bench: Bench) -> None:
    """Check that the server is at rest after two actions."""
    check_at_rest(bench, [bench.trial.server])


def check_at_rest(bench: Bench, servers: Sequence[str]) -> None:
    """Check that every action has ended, the servers are idle, and the doctor has no finding."""
    with bench.cloud.store.engine.connect() as tx:
        rows = tx.execute(sa.select(schema.actions)).all()
    unfinished = [row for row in rows if row.state not in actions.ENDED]
    assert not unfinished, f"not ended: {unfinished}"
    for server in map(bench.cloud.show, servers):
        assert (server.task_state, server.action) == (None, None)
    assert (findings := bench.cloud.findings()) == [], findings


def check_failed_action(bench: Bench, twice: bool = False) -> None:
    """Check the server of a failed action, and repeat the request if the server is unchanged.

    Args:
        bench: The cloud of the cell.
        twice: A second fault was injected. An external service may then have done the work, so the
            repeated request may fail.
    """
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
    assert (findings := cloud.findings()) == [], findings
    if trial.was is None or server.vm_state != trial.was.vm_state:
        return
    powered_off = {host.name for host in cloud.hosts.values() if not host.is_on}
    if KILL not in trial.scenario.before:
        power_on_hosts(bench)
    elif powered_off != {trial.was.host}:
        return
    # The boot of the host may have changed the state.
    if cloud.show(trial.server).vm_state != trial.was.vm_state:
        return
    if cloud.shares_of(trial.server) and trial.scenario.ask == "attach_share":
        # A failed attach leaves the share's mapping, which the user has to remove first.
        cloud.detach_share(trial.server, SHARE)
        bench.settle(LOCAL_SECONDS)
    bench.begin()
    bench.settle(MOVE_SECONDS)
    assert bench.read_action().state == "done" or twice, (
        f"the second try: {bench.read_action().message}"
    )
    assert (findings := cloud.findings()) == [], findings


def heal(bench: Bench) -> None:
    """End all scripted failures of services and hosts, and carry out the pending cleanups.

    Hosts without power stay off.
    """
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
    """Retry the pending cleanups at external services, as an operator does.

    A cleanup of a call that may still complete is awaited. A cleanup that begins an action is tried
    once more after the action.
    """
    cloud = bench.cloud
    for _ in range(2):
        rows = cloud.store.read(cleanups.list_all)
        for row in rows:
            cloud.store.write(lambda tx, row=row: cleanups.hasten(tx, row.id))
        if any(row.kind in cleanups.LATE for row in rows):
            bench.pass_time(cleanups.LATE_CALL // SECOND)
        cleaning.retry(cloud.engine)
        if not stage.read_ages(cloud)["actions"]:
            return
        bench.settle(LOCAL_SECONDS)


def power_on_hosts(bench: Bench) -> None:
    """Start every host without power, and wait for the reports of guests."""
    for host in bench.cloud.hosts.values():
        if not host.is_on:
            host.power_on()
            bench.extend_fault()
            bench.settle(LOCAL_SECONDS)
            bench.cloud.force_down(host.name, False)
            bench.pass_time(LOOK_SECONDS)
            bench.settle(LOCAL_SECONDS)


def delete_and_check(bench: Bench) -> None:
    """Delete the server, and check that no trace is left on hosts, in services or in tables."""
    cloud, server = bench.cloud, bench.trial.server
    power_on_hosts(bench)
    if not cloud.show(server).deleted:
        cloud.ask(server, "delete")
    bench.extend_fault()
    bench.settle(LOCAL_SECONDS)
    for call in bench.at_end:
        call()
    bench.settle(LOCAL_SECONDS)
    clean_up(bench)
    assert cloud.show(server).deleted, "it is not deleted"
    assert (findings := cloud.findings()) == [], findings
    left = {f"cleanup {kind}": target for kind, target in cloud.pending()}
    for host in cloud.hosts.values():
        memory = host.driver.host
        for store in ("guests", "files", "incoming", "storage"):
            if entries := dict(getattr(memory, store)):
                left[f"{store} at {host.name}"] = str(list(entries))
    left |= {f"port {port}": str(held) for port, held in cloud.networks.held.items()}
    left |= {f"image {image}": "" for image in set(cloud.images.records) - KEPT_IMAGES}
    if not set(cloud.images.records) & KEPT_IMAGES:
        left |= {
            f"snapshot {snapshot}": volume
            for snapshot, volume in cloud.volumes.state.snapshots.items()
        }
    left |= {
        f"snapshot {snapshot}": "the service waits for it"
        for snapshot in cloud.volumes.list_awaited()
    }
    left |= {f"rule of {share}": address for share, address in cloud.shares.rules}
    with cloud.store.engine.connect() as tx:
        for table in (schema.guests, schema.allocations, schema.consumers):
            if count := tx.scalar(sa.select(sa.func.count()).select_from(table)):
                left[f"rows of {table.name}"] = str(count)
    assert not left, f"left behind: {left}"
    bench.incarnations.check()
    bench.notifications.check()
