# SPDX-License-Identifier: Apache-2.0
"""Shelve, offload, unshelve: a server rests as an image, and comes back as it was, on any host.

A shelved server still has its guest, stopped, on its host; offloaded it has only its image.
Unshelving a server that is still on its host only starts it. The image goes when the server runs
again; where it is kept from that, by being protected say, the server runs all the same, and the
image is a pending cleanup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.domain import states
from common.domain.models import ImageRef, RequestSpec, Result
from common.domain.statuses import GuestState
from common.domain.verbs import EnsureGuest
from common.store.cleanups import IMAGE
from common.store.engine import Connection, now
from common.store.servers import guests
from conductor.engine.action_args import ActionArgs, ImageArgs, UnshelveArgs
from conductor.engine.action_data import ActionData, StepFailed
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import AnyRun, Run
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.steps import claims, debts, guest, images, networks, volumes
from conductor.steps.claims import PlacementData
from conductor.steps.images import ImageData
from conductor.steps.networks import PortData


# --- shelve, offload ---
@dataclass(kw_only=True)
class ShelveData(ImageData):
    """What the steps of shelve leave."""

    offloads: bool = False  #: the host is given up at once


ShelveRun = Run[ImageArgs, ShelveData]


def _keep(tx: Connection, engine: Engine, runs: Sequence[ShelveRun]) -> None:
    for run in runs:
        has_disk = _has_disk(run)
        run.data.offloads = engine.shelved_offload_time == 0 or not has_disk
        run.set(
            shelved_image_id=run.args.image_id if has_disk else None,
            shelved_at=now(),
            task_state=states.SHELVING_OFFLOADING if run.data.offloads else states.SHELVING,
        )


def _leave_host(tx: Connection, engine: Engine, runs: Sequence[AnyRun]) -> None:
    for run in debts.collect(tx, runs):
        run.set(
            vm_state=states.SHELVED_OFFLOADED,
            host=None,
            availability_zone=None,
            power_state=states.NOSTATE,
        )


def _unbound(tx: Connection, engine: Engine, runs: Sequence[AnyRun]) -> None:
    for run in runs:
        run.set(vm_state=states.SHELVED_OFFLOADED)


_UNBIND = Step(
    "unbind",
    "its ports stay the server's, on no host",
    call=networks.unbind,
    apply=_unbound,
    lane=Lane.NETWORK,
    condition=networks.has_ports,
)


_RESERVE: Step[Any, Any] = Step(
    "reserve_volumes",
    "its volumes stay the server's, on no host",
    call=volumes.reserve_again,
    apply=_unbound,
    lane=Lane.VOLUME,
    condition=Run.has_volumes,
)


def _offloads(run: ShelveRun) -> bool:
    return run.data.offloads


def _offloads_with_ports(run: ShelveRun) -> bool:
    return run.data.offloads and networks.has_ports(run)


def _offloads_with_volumes(run: ShelveRun) -> bool:
    return run.data.offloads and run.has_volumes()


def _has_disk(run: AnyRun) -> bool:
    """Has it a disk of its own, that an image is made of?"""
    return not volumes.boots_from_volume(run)


def _was_running(run: ShelveRun) -> bool:
    return run.args.was == states.ACTIVE


def _shelve_failed(tx: Connection, engine: Engine, run: ShelveRun, problem: StepFailed) -> None:
    """As before; one that was paused or suspended has been stopped."""
    if _was_running(run):
        guests.want(tx, [run.server.id], GuestState.RUNNING, True)
        run.set(power_state=states.RUNNING)
    else:
        run.set(vm_state=states.STOPPED)


SHELVE = Workflow(
    "shelve",
    args=ImageArgs,
    data=ShelveData,
    failed=_shelve_failed,
    steps=(
        Step(
            "stop",
            "first: what is written after the copy would be lost",
            command=guest.stop,
            on_result=guest.record_stopped,
        ),
        Step(
            "restart",
            "only on the way back: a server that ran runs again",
            undo_command=guest.start,
            condition=_was_running,
        ),
        replace(images.RECORD, condition=_has_disk),
        replace(images.UPLOAD, condition=_has_disk),
        Step("keep", "the image is whole: from here on it is the server", apply=_keep, pivot=True),
        Step(
            "offload",
            "last, and only where shelving gives the host up at once",
            apply=_leave_host,
            condition=_offloads,
        ),
        replace(_UNBIND, condition=_offloads_with_ports),
        replace(_RESERVE, condition=_offloads_with_volumes),
    ),
)

OFFLOAD = Workflow(
    "offload",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step(
            "remove",
            "the image is there; the guest is a debt of its host",
            apply=_leave_host,
            pivot=True,
        ),
        _UNBIND,
        _RESERVE,
    ),
)


# --- unshelve ---
@dataclass(kw_only=True)
class UnshelveData(PlacementData, PortData):
    """What the steps of unshelve leave."""

    image: ImageRef | None = None  #: that the server was shelved into
    image_id: str | None = None  #: the same, to be removed


UnshelveRun = Run[UnshelveArgs, UnshelveData]


def _look(engine: Engine, run: UnshelveRun) -> None:
    """The image as the image service describes it now: its checksum was not known before it was
    whole."""
    assert run.server.shelved_image_id is not None  # a server that is offloaded has one
    run.data.image = images.service(engine).show(run.server.shelved_image_id)


def _spec(run: UnshelveRun) -> RequestSpec:
    zone = None if run.args.unpin else run.args.zone or run.server.pinned_availability_zone
    return claims.spec(run, zone, run.args.host, forced=run.args.forced)


def _propose(engine: Engine, runs: Sequence[UnshelveRun]) -> None:
    claims.exclude_hosts_with_debts(engine, runs)
    claims.propose(engine, runs, _spec)


def _claim(tx: Connection, engine: Engine, runs: Sequence[UnshelveRun]) -> None:
    claims.claim_and_place(tx, engine, runs, _spec)


def _build(engine: Engine, run: UnshelveRun) -> EnsureGuest:
    return EnsureGuest(guest=guest.spec(engine, run, run.data.image))


def _built(tx: Connection, run: UnshelveRun, result: Result) -> None:
    guest.record_booted(tx, run, result)
    claims.record_successful_build(run)


def _back(tx: Connection, engine: Engine, runs: Sequence[UnshelveRun]) -> None:
    for run in runs:
        run.data.image_id = run.server.shelved_image_id
        run.set(shelved_image_id=None, shelved_at=None)


def _unshelve_failed(tx: Connection, engine: Engine, run: UnshelveRun, problem: StepFailed) -> None:
    """Another host, or shelved as before."""
    claims.reschedule(engine, run, problem)


def _delete_image(engine: Engine, run: UnshelveRun) -> None:
    assert run.data.image_id is not None, "it was shelved"
    with run.cleanup_on_failure(IMAGE, run.data.image_id):
        images.service(engine).delete(run.data.image_id)


_BACK = Step("back", "from here on the guest is the server, not its image", apply=_back, pivot=True)
_FORGET = Step(
    "forget",
    "last: the server runs, and its disk is the truth again",
    call=_delete_image,
    condition=_has_disk,
)

UNSHELVE = Workflow(
    "unshelve",
    args=UnshelveArgs,
    data=UnshelveData,
    failed=_unshelve_failed,
    steps=(
        Step("look", "before a host is claimed for it", call=_look, condition=_has_disk),
        Step(
            "place", "as for a new server", prepare=_propose, apply=_claim, undo=claims.release_host
        ),
        Step(
            "networks",
            "when the host is known",
            call=networks.rebind,
            apply=networks.store_plugged,
            undo_call=networks.unbind,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        volumes.CONNECT,
        Step("build", "the guest is made of the shelved image", command=_build, on_result=_built),
        networks.PLUG,
        Step(
            "run",
            "its ports are wired now",
            command=guest.start,
            on_result=guest.record_booted,
            condition=networks.starts_paused,
        ),
        _BACK,
        _FORGET,
    ),
)

UNSHELVE_HERE = Workflow(
    "unshelve_here",
    args=UnshelveArgs,
    data=UnshelveData,
    steps=(
        Step(
            "run",
            "the guest is still there, stopped",
            command=guest.start,
            on_start=guest.allow_to_run,
            on_result=guest.record_booted,
        ),
        _BACK,
        _FORGET,
    ),
)
