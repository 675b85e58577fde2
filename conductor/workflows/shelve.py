# SPDX-License-Identifier: Apache-2.0
"""Shelve, offload and unshelve.

A shelved server is stopped and has an image of its disk. The guest stays on the host until the
server is offloaded. An offloaded server has no host. An unshelve only starts the guest if the
server still has a host, and otherwise builds the guest from the image on any host.

The image is deleted once the server runs again. An image that cannot be deleted, for example a
protected one, becomes a pending cleanup.
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
from conductor.steps import claims, guest, images, networks, removals, volumes
from conductor.steps.claims import PlacementData
from conductor.steps.images import ImageData
from conductor.steps.networks import PortData


# --- shelve, offload ---
@dataclass(kw_only=True)
class ShelveData(ImageData):
    """Data that the steps of shelve leave for later steps."""

    #: True if the server leaves its host at once.
    offloads: bool = False


ShelveRun = Run[ImageArgs, ShelveData]


def _record_image(tx: Connection, engine: Engine, runs: Sequence[ShelveRun]) -> None:
    for run in runs:
        has_disk = _has_disk(run)
        run.data.offloads = engine.shelved_offload_time == 0 or not has_disk
        run.set(
            shelved_image_id=run.args.image_id if has_disk else None,
            shelved_at=now(),
            task_state=states.SHELVING_OFFLOADING if run.data.offloads else states.SHELVING,
        )


def _leave_host(tx: Connection, engine: Engine, runs: Sequence[AnyRun]) -> None:
    for run in removals.collect(tx, runs):
        run.set(
            vm_state=states.SHELVED_OFFLOADED,
            host=None,
            availability_zone=None,
            power_state=states.NOSTATE,
        )


def _mark_offloaded(tx: Connection, engine: Engine, runs: Sequence[AnyRun]) -> None:
    for run in runs:
        run.set(vm_state=states.SHELVED_OFFLOADED)


_UNBIND = Step(
    "unbind",
    "The server keeps its ports, without a host.",
    call=networks.unbind,
    apply=_mark_offloaded,
    lane=Lane.NETWORK,
    condition=networks.has_ports,
)


_RESERVE: Step[Any, Any] = Step(
    "reserve_volumes",
    "The server keeps its volumes, without a host.",
    call=volumes.reserve_again,
    apply=_mark_offloaded,
    lane=Lane.VOLUME,
    condition=Run.has_volumes,
)


def _is_offloaded(run: ShelveRun) -> bool:
    return run.data.offloads


def _is_offloaded_with_ports(run: ShelveRun) -> bool:
    return run.data.offloads and networks.has_ports(run)


def _is_offloaded_with_volumes(run: ShelveRun) -> bool:
    return run.data.offloads and run.has_volumes()


def _has_disk(run: AnyRun) -> bool:
    """Return True if the server has a local root disk, from which an image is made."""
    return not volumes.boots_from_volume(run)


def _was_running(run: ShelveRun) -> bool:
    return run.args.was == states.ACTIVE


def _fail_shelve(tx: Connection, engine: Engine, run: ShelveRun, problem: StepFailed) -> None:
    """Record a server that was ACTIVE as running, because the undo starts the guest again.

    Other servers become STOPPED, also paused and suspended servers, and servers that the undo could
    not start.
    """
    if _was_running(run) and not run.is_left_off:
        guests.want(tx, [run.server.id], GuestState.RUNNING, True)
        run.set(power_state=states.RUNNING)
    else:
        run.set(vm_state=states.STOPPED)


SHELVE = Workflow(
    "shelve",
    args=ImageArgs,
    data=ShelveData,
    failed=_fail_shelve,
    steps=(
        Step(
            "stop",
            "First, because data written after the copy would be lost.",
            command=guest.stop,
            on_result=guest.record_stopped,
        ),
        Step(
            "restart",
            "Undo only: start a server that ran before.",
            undo_command=guest.start,
            undo_starts_guest=True,
            condition=_was_running,
        ),
        replace(images.RECORD, condition=_has_disk),
        replace(images.UPLOAD, condition=_has_disk),
        Step(
            "keep",
            "The image is complete, and contains the server from here on.",
            apply=_record_image,
            pivot=True,
        ),
        Step(
            "offload",
            "Last, and only if shelved servers leave their host at once.",
            apply=_leave_host,
            condition=_is_offloaded,
        ),
        replace(_UNBIND, condition=_is_offloaded_with_ports),
        replace(_RESERVE, condition=_is_offloaded_with_volumes),
    ),
)

OFFLOAD = Workflow(
    "offload",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step(
            "remove",
            "The image exists. The guest becomes a pending cleanup of its host.",
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
    """Data that the steps of unshelve leave for later steps."""

    #: Image of the shelved server.
    image: ImageRef | None = None
    #: Id of the image that is to be deleted.
    image_id: str | None = None


UnshelveRun = Run[UnshelveArgs, UnshelveData]


def _read_image(engine: Engine, run: UnshelveRun) -> None:
    """Read the description of the shelved server's image from the image service into the run.

    Why: the image has a checksum only since the upload was completed.
    """
    # An offloaded server has an image.
    assert run.server.shelved_image_id is not None
    run.data.image = images.service(engine).show(run.server.shelved_image_id)


def _spec(run: UnshelveRun) -> RequestSpec:
    zone = None if run.args.unpin else run.args.zone or run.server.pinned_availability_zone
    return claims.spec(run, zone, run.args.host, forced=run.args.forced)


def _propose(engine: Engine, runs: Sequence[UnshelveRun]) -> None:
    claims.exclude_hosts_with_removals(engine, runs)
    claims.propose(engine, runs, _spec)


def _claim(tx: Connection, engine: Engine, runs: Sequence[UnshelveRun]) -> None:
    claims.claim_and_place(tx, engine, runs, _spec)


def _build_command(engine: Engine, run: UnshelveRun) -> EnsureGuest:
    return EnsureGuest(guest=guest.spec(engine, run, run.data.image))


def _record_built(tx: Connection, run: UnshelveRun, result: Result) -> None:
    guest.record_booted(tx, run, result)
    claims.record_successful_build(run)


def _end_shelved(tx: Connection, engine: Engine, runs: Sequence[UnshelveRun]) -> None:
    for run in runs:
        run.data.image_id = run.server.shelved_image_id
        run.set(shelved_image_id=None, shelved_at=None)


def _fail_unshelve(tx: Connection, engine: Engine, run: UnshelveRun, problem: StepFailed) -> None:
    """Try another host if the failure is retryable and attempts are left.

    Otherwise the server stays shelved and offloaded.
    """
    claims.reschedule(engine, run, problem)


def _delete_image(engine: Engine, run: UnshelveRun) -> None:
    assert run.data.image_id is not None, "a shelved server with a local disk has an image"
    with run.cleanup_on_failure(IMAGE, run.data.image_id):
        images.service(engine).delete(run.data.image_id)


_END_SHELVED = Step(
    "back",
    "From here on the guest contains the server, and the image is no longer needed.",
    apply=_end_shelved,
    pivot=True,
)
_DELETE_IMAGE = Step(
    "forget",
    "Last: the server runs, and its disk has replaced the image.",
    call=_delete_image,
    condition=_has_disk,
)

UNSHELVE = Workflow(
    "unshelve",
    args=UnshelveArgs,
    data=UnshelveData,
    failed=_fail_unshelve,
    steps=(
        Step(
            "look",
            "Before the claim, because the image's requirements affect the choice of a host.",
            call=_read_image,
            condition=_has_disk,
        ),
        Step(
            "place",
            "Claim a host as for a new server.",
            prepare=_propose,
            apply=_claim,
            undo=claims.release_host,
        ),
        Step(
            "networks",
            "After the claim, because the ports are bound to the host.",
            call=networks.rebind,
            apply=networks.store_plugged,
            undo_call=networks.unbind,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        volumes.CONNECT,
        Step(
            "build",
            "Build the guest from the image.",
            command=_build_command,
            on_result=_record_built,
        ),
        networks.PLUG,
        Step(
            "run",
            "The ports are wired, so the paused guest continues.",
            command=guest.start,
            on_result=guest.record_booted,
            condition=networks.starts_paused,
        ),
        _END_SHELVED,
        _DELETE_IMAGE,
    ),
)

UNSHELVE_HERE = Workflow(
    "unshelve_here",
    args=UnshelveArgs,
    data=UnshelveData,
    steps=(
        Step(
            "run",
            "The stopped guest is still on the host.",
            command=guest.start,
            on_start=guest.allow_to_run,
            on_result=guest.record_booted,
        ),
        _END_SHELVED,
        _DELETE_IMAGE,
    ),
)
