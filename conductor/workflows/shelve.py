# SPDX-License-Identifier: Apache-2.0
"""Shelve, offload, unshelve: a server rests as an image, and comes back as it was, on any host.

A shelved server still has its guest, stopped, on its host; offloaded it has only its image. Unshelving a server that
is still on its host only starts it. The image goes when the server runs again; where it is kept from that, by being
protected say, the server runs all the same, and the image is a pending cleanup.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import states
from common.models import ImageRef, RequestSpec, Result
from common.store import guests
from common.store.cleanups import IMAGE
from common.store.engine import Connection, now
from common.wire import from_wire, to_wire
from conductor import debts, guest, images, networks, placing
from conductor.saga import Engine, Run, Step, StepFailed, Workflow


def _keep(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.data["offloads"] = engine.shelved_offload_time == 0
        run.set(shelved_image_id=images.image_id(run), shelved_at=now(), task_state=states.SHELVING_OFFLOADING
                if run.data["offloads"] else states.SHELVING)


def _leave_host(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in debts.settle(tx, runs):
        run.set(vm_state=states.SHELVED_OFFLOADED, host=None, availability_zone=None, power_state=states.NOSTATE)


def _unbound(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.set(vm_state=states.SHELVED_OFFLOADED)


_UNBIND = Step("unbind", "its ports stay the server's, on no host", outside=networks.unbind,
               apply=_unbound, neighbour=networks.NETWORK, needed=networks.has_ports)


def _offloads(run: Run) -> bool:
    return bool(run.data.get("offloads"))


def _was_running(run: Run) -> bool:
    return bool(run.action.args.get("was") == states.ACTIVE)


def _shelve_failed(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """As before; one that was paused or suspended has been stopped."""
    if _was_running(run):
        guests.want(tx, [run.server.id], guests.RUNNING, True)
        run.set(power_state=states.RUNNING)
    else:
        run.set(vm_state=states.STOPPED)


SHELVE = Workflow("shelve", failed=_shelve_failed, steps=(
    Step("stop", "first: what is written after the copy would be lost", command=guest.stop, done=guest.rests),
    Step("restart", "only on the way back: a server that ran runs again", undo_command=guest.start,
         needed=_was_running),
    images.RECORD, images.UPLOAD,
    Step("keep", "the image is whole: from here on it is the server", apply=_keep, pivot=True),
    Step("offload", "last, and only where shelving gives the host up at once", apply=_leave_host,
         needed=_offloads),
    replace(_UNBIND, needed=lambda run: _offloads(run) and networks.has_ports(run)),
))

OFFLOAD = Workflow("offload", steps=(
    Step("remove", "the image is there; the guest is a debt of its host", apply=_leave_host, pivot=True),
    _UNBIND))


def _look(engine: Engine, run: Run) -> None:
    """The image as the image service describes it now: its checksum was not known before it was whole."""
    run.left["image"] = to_wire(images.service(engine).show(run.server.shelved_image_id))


def _spec(run: Run) -> RequestSpec:
    args = run.action.args
    zone = None if args.get("unpin") else args.get("zone") or run.server.pinned_availability_zone
    return placing.spec(run, zone, args.get("host"), forced=bool(args.get("forced")))


def _propose(engine: Engine, runs: Sequence[Run]) -> None:
    placing.look_for_debts(engine, runs)
    placing.propose(engine, runs, _spec)


def _claim(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    placing.claim(tx, engine, runs, _spec)


def _build(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "ensure_guest", {"guest": to_wire(guest.spec(engine, run, from_wire(ImageRef, run.data["image"])))}


def _built(tx: Connection, run: Run, result: Result) -> None:
    guest.runs(tx, run, result)
    placing.worked(run)


def _back(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.data["image_id"] = run.server.shelved_image_id
        run.set(shelved_image_id=None, shelved_at=None)


def _unshelve_failed(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """Another host, or shelved as before."""
    placing.elsewhere(engine, run, problem)


def _forget(engine: Engine, run: Run) -> None:
    with run.cleaning(IMAGE, run.data["image_id"]):
        images.service(engine).delete(run.data["image_id"])


_BACK = Step("back", "from here on the guest is the server, not its image", apply=_back, pivot=True)
_FORGET = Step("forget", "last: the server runs, and its disk is the truth again", outside=_forget)

UNSHELVE = Workflow("unshelve", failed=_unshelve_failed, steps=(
    Step("look", "before a host is claimed for it", outside=_look),
    Step("place", "as for a new server", propose=_propose, apply=_claim, undo=placing.leave),
    Step("networks", "when the host is known", outside=networks.rebind, apply=networks.keep_plugged,
         undo_outside=networks.unbind, neighbour=networks.NETWORK, needed=networks.has_ports),
    Step("build", "the guest is made of the shelved image", command=_build, done=_built),
    networks.PLUG,
    Step("run", "its ports are wired now", command=guest.start, done=guest.runs, needed=networks.is_waiting),
    _BACK, _FORGET,
))

UNSHELVE_HERE = Workflow("unshelve_here", steps=(
    Step("run", "the guest is still there, stopped", command=guest.start,
         before=guest.will_run, done=guest.runs),
    _BACK, _FORGET,
))
