# SPDX-License-Identifier: Apache-2.0
"""Delete: always wins. Whatever guests the server has become debts; the server is gone when they are paid.

The action that ran before was superseded when this one was accepted. Ports go when the guest is gone and before the
server is, so that its user finds them free; a silent network service holds that up for a while. An image that the
earlier action had begun to make, or that the server was shelved into, goes last, because a silent image service must
not keep a server alive. What a neighbour refuses to remove is a pending cleanup: the server is gone all the same. Also
here: soft delete, which only stops the guest, and restore.
"""
from __future__ import annotations

from collections.abc import Sequence

from common import states
from common.clock import SECOND
from common.models import Result
from common.store import actions, migrations
from common.store.cleanups import IMAGE
from common.store.engine import Connection, now
from conductor import debts, guest, images, networks
from conductor.saga import Engine, Run, Step, Workflow

LATE = 20 * SECOND       #: longer than a call to the network service may take there after we have given it up


def _remove(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in debts.settle(tx, runs):
        before = actions.show_by_id(tx, run.data["after"]) if run.data.get("after") else None
        superseded = before if before is not None and before.state == "superseded" else None
        if run.action.args.get("was") == states.RESIZED or superseded is not None:
            run.data["moves"] = True
        run.data["images"] = _images(run, superseded.args.get("image_id") if superseded else None)
        if superseded is not None and superseded.step == "networks":
            run.data["late"] = True


def _gone(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    if moving := [run.server.id for run in runs if run.data.get("moves")]:
        migrations.end_open(tx, moving, "cancelled")
    for run in runs:
        run.set(vm_state=states.DELETED, task_state=None, power_state=states.NOSTATE, deleted=1, deleted_at=now(),
                terminated_at=now(), progress=0)


def _images(run: Run, begun: str | None) -> list[str]:
    """Images that nobody will ever want: the shelved one, and what a superseded snapshot had begun."""
    return sorted({image for image in (run.server.shelved_image_id, begun) if image})


def _wait(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        if not run.data.get("waited"):
            run.again_in(LATE, waited=True)


def _is_late(run: Run) -> bool:
    return bool(run.data.get("late"))


def _forget(engine: Engine, run: Run) -> None:
    for image in run.data["images"]:
        with run.cleaning(IMAGE, image):
            images.service(engine).delete(image)


def _kept(tx: Connection, run: Run, result: Result) -> None:
    guest.rests(tx, run, result)
    run.set(soft_deleted_at=now())


def _restored(tx: Connection, run: Run, result: Result) -> None:
    guest.runs(tx, run, result)
    run.set(soft_deleted_at=None)


DELETE = Workflow("delete", steps=(
    Step("remove", "first: there is nothing to go back to once a user has said delete", apply=_remove, pivot=True),
    Step("unplug", "after the guest: what it still sends needs its port's rules",
         outside=networks.release, neighbour=networks.NETWORK, needed=networks.has_ports),
    Step("gone", "its user sees it gone when nothing of it is in their way", apply=_gone),
    Step("wait", "a call that the superseded action gave up may still be carried out", apply=_wait, needed=_is_late),
    Step("release", "what an earlier call made late", outside=networks.release, neighbour=networks.NETWORK,
         needed=lambda run: _is_late(run) or bool(run.data.get("ports_left"))),      # as earlier releases wrote it
    Step("forget", "last: only images are left, and the server is gone for its user already",
         outside=_forget, needed=lambda run: bool(run.data.get("images", True))),
))

SOFT_DELETE = Workflow("soft_delete", steps=(
    Step("stop", "the guest's disk stays until the time to restore it is over", command=guest.stop, done=_kept),))

RESTORE = Workflow("restore", steps=(
    Step("run", "as a start", command=guest.start, before=guest.will_run, done=_restored),))
