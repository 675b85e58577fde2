# SPDX-License-Identifier: Apache-2.0
"""Create: find a host that fits, claim it, and have it make the guest.

The guest is made by one verb on the host (image, disks, domain, start), so that a create is two
transactions here and one command, and one more with a call for its ports. After that command was
sent only a definite failure moves the server to another host; silence waits for the host. A guest
whose ports are not wired yet starts paused and waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.domain import states
from common.domain.clock import SECOND
from common.domain.models import RequestSpec, Result
from common.domain.verbs import EnsureGuest
from common.store.engine import Connection, now
from conductor.engine.action_args import CreateArgs
from conductor.engine.action_data import StepFailed, fault_of
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import Run
from conductor.engine.step import Step, StepEvents
from conductor.engine.workflow import Workflow
from conductor.steps import claims, guest, images, networks, volumes
from conductor.steps.claims import PlacementData
from conductor.steps.networks import PortData
from conductor.steps.volumes import VolumesData

#: Since the API asked the image service: an image of a request that waited for longer is checked
#: again, so that a create which need not wait costs no call.
IMAGE_AGE = SECOND // 2


@dataclass(kw_only=True)
class CreateData(PlacementData, PortData, VolumesData):
    """What the steps leave."""

    image_checked: bool = False  #: since the request


CreateRun = Run[CreateArgs, CreateData]


def _spec(run: CreateRun) -> RequestSpec:
    return claims.spec(run, run.args.zone, run.args.host, forced=run.args.forced)


def _propose(engine: Engine, runs: Sequence[CreateRun]) -> None:
    if ready := [run for run in runs if not run.volumes or volumes.are_reserved(run)]:
        claims.propose(engine, ready, _spec)


def _claim(tx: Connection, engine: Engine, runs: Sequence[CreateRun]) -> None:
    for run in runs:
        if run.volumes and not volumes.are_reserved(run):
            run.go_to("volumes")
        elif _must_check_image(run):
            run.go_to("image")
    ready = [run for run in runs if not run.paused]
    claims.claim_and_place(tx, engine, ready, _spec)
    for run in ready:
        if not run.paused and not run.problem:
            run.set(
                task_state=states.NETWORKING if networks.asks_for_networks(run) else states.SPAWNING
            )


def _must_check_image(run: CreateRun) -> bool:
    """True if the server waited for so long that its image may have changed."""
    waited = run.locked_at - run.action.created_at
    return waited >= IMAGE_AGE and images.has_own(run) and not run.data.image_checked


def _image_checked(tx: Connection, engine: Engine, runs: Sequence[CreateRun]) -> None:
    for run in runs:
        run.data.image_checked = True


def _plugged(tx: Connection, engine: Engine, runs: Sequence[CreateRun]) -> None:
    networks.store_plugged(tx, engine, runs)
    for run in runs:
        run.set(task_state=states.SPAWNING)


def _unplugged(tx: Connection, engine: Engine, run: CreateRun) -> None:
    run.set(interfaces=[])


def _build(engine: Engine, run: CreateRun) -> EnsureGuest:
    return EnsureGuest(guest=guest.spec(engine, run))


def _built(tx: Connection, run: CreateRun, result: Result) -> None:
    guest.record_booted(tx, run, result)
    run.set(launched_at=now())
    claims.record_successful_build(run)


def _failed(tx: Connection, engine: Engine, run: CreateRun, problem: StepFailed) -> None:
    """Another host while there are attempts and the failure was the host's own; else ERROR, with
    the reason."""
    if claims.reschedule(engine, run, problem):
        run.set(task_state=states.SCHEDULING)
        return
    run.set(vm_state=states.ERROR, power_state=states.NOSTATE, fault=fault_of(tx, problem))


CREATE = Workflow(
    "create",
    args=CreateArgs,
    data=CreateData,
    failed=_failed,
    steps=(
        Step(
            "volumes",
            "before a host is claimed, because some are made first; where it has any",
            call=volumes.make_ready,
            apply=volumes.await_volumes,
            lane=Lane.VOLUME,
            by_name=True,
        ),
        Step(
            "image",
            "before a host is claimed: the image may have changed since the request",
            call=images.check_own,
            apply=_image_checked,
            condition=images.has_own,
            by_name=True,
        ),
        Step(
            "place",
            "first, because everything after it costs something on a host",
            prepare=_propose,
            apply=_claim,
            undo=claims.release_host,
            events=StepEvents(failed=("compute_task.build_instances.error",)),
        ),
        Step(
            "networks",
            "when the host is known, so that one call makes and binds all ports",
            call=networks.create_ports,
            apply=_plugged,
            undo=_unplugged,
            undo_call=networks.undo_ports,
            lane=Lane.NETWORK,
            condition=networks.asks_for_networks,
        ),
        volumes.CONNECT,
        Step(
            "build",
            "one command, because each message costs more than all that it saves",
            command=_build,
            on_result=_built,
        ),
        networks.PLUG,
        Step(
            "run",
            "its ports are wired now",
            command=guest.start,
            on_result=guest.record_booted,
            condition=networks.starts_paused,
        ),
    ),
)
