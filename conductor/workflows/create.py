# SPDX-License-Identifier: Apache-2.0
"""Create: claim a host and build the guest there.

One command builds the guest (image, disks, domain, start), so a create needs two transactions and
one command, and one more transaction with a call if the server has ports. After the command is
sent, only a definite failure moves the server to another host. If the host is silent, the conductor
waits for it. A guest with ports that are not wired yet starts paused.
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

#: Age at which the image of a waiting request is checked again. A request that starts sooner needs
#: no call, because the API has just checked the image. The age is longer than an ordinary wait, so
#: that a busy conductor does not check every image twice.
IMAGE_AGE = 10 * SECOND


@dataclass(kw_only=True)
class CreateData(PlacementData, PortData, VolumesData):
    """Data that the steps of a create leave for later steps."""

    #: True once the image was checked after the request.
    image_checked: bool = False


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
    """Return True if the request has waited for ``IMAGE_AGE``, so that the image may have changed.

    False after a check of the image, and for a server that was not created from an image.
    """
    waited = run.locked_at - run.action.created_at
    return waited >= IMAGE_AGE and images.has_own(run) and not run.data.image_checked


def _record_image_check(tx: Connection, engine: Engine, runs: Sequence[CreateRun]) -> None:
    for run in runs:
        run.data.image_checked = True


def _record_ports(tx: Connection, engine: Engine, runs: Sequence[CreateRun]) -> None:
    networks.store_plugged(tx, engine, runs)
    for run in runs:
        run.set(task_state=states.SPAWNING)


def _clear_interfaces(tx: Connection, engine: Engine, run: CreateRun) -> None:
    run.set(interfaces=[])


def _build_command(engine: Engine, run: CreateRun) -> EnsureGuest:
    return EnsureGuest(guest=guest.spec(engine, run))


def _record_built(tx: Connection, run: CreateRun, result: Result) -> None:
    guest.record_booted(tx, run, result)
    run.set(launched_at=now())
    claims.record_successful_build(run)


def _fail_create(tx: Connection, engine: Engine, run: CreateRun, problem: StepFailed) -> None:
    """Try another host if the failure is retryable and attempts are left, else set ERROR."""
    if claims.reschedule(engine, run, problem):
        run.set(task_state=states.SCHEDULING)
        return
    run.set(vm_state=states.ERROR, power_state=states.NOSTATE, fault=fault_of(tx, problem))


CREATE = Workflow(
    "create",
    args=CreateArgs,
    data=CreateData,
    failed=_fail_create,
    steps=(
        Step(
            "volumes",
            "Before the claim, because the service must create some volumes first. Skipped "
            "without volumes.",
            call=volumes.make_ready,
            apply=volumes.await_volumes,
            lane=Lane.VOLUME,
            by_name=True,
        ),
        Step(
            "image",
            "Before the claim, because the image may have changed since the request.",
            call=images.check_own,
            apply=_record_image_check,
            condition=images.has_own,
            by_name=True,
        ),
        Step(
            "place",
            "Claim a host first, because every later step uses resources of the host.",
            prepare=_propose,
            apply=_claim,
            undo=claims.release_host,
            events=StepEvents(failed=("compute_task.build_instances.error",)),
        ),
        Step(
            "networks",
            "After the claim, so that one call creates the ports and binds them to the host.",
            call=networks.create_ports,
            apply=_record_ports,
            undo=_clear_interfaces,
            undo_call=networks.undo_ports,
            lane=Lane.NETWORK,
            condition=networks.asks_for_networks,
        ),
        volumes.CONNECT,
        Step(
            "build",
            "One command, because every message costs more time than the parts of the work.",
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
    ),
)
