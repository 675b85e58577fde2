# SPDX-License-Identifier: Apache-2.0
"""The guest of a server: what its host needs to know of it, and the parts of a step that many
workflows share.

``spec`` is made from the server's row and its guest record whenever a command is sent: the one
place that makes a GuestSpec, so that no verb forgets which parts of the host the guest has.
``start`` and ``stop`` are commands; ``allow_to_run`` stands in the transaction that sends one which
may start the guest, ``record_running`` or ``record_stopped`` in the one that takes its result in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.domain import states
from common.domain.instance_data import guest_spec
from common.domain.models import Belongings, GuestSpec, ImageRef, Result
from common.domain.statuses import GuestState
from common.domain.verbs import EnsureRunning, EnsureStopped, power_state
from common.store.engine import Connection
from common.store.servers import guests
from conductor.engine.engine import Engine
from conductor.engine.run import AnyRun
from conductor.steps import networks, volumes


def spec(engine: Engine, run: AnyRun, image: ImageRef | None = None) -> GuestSpec:
    """The guest; with ``image`` one whose disk is made of another image than the server's own. Its
    hardware stays what the server's own image asks for, because that was claimed."""
    if image is not None and run.server.image:
        image = replace(image, properties=run.server.image.get("properties", {}))
    secrets = run.secrets(engine)
    made = guest_spec(
        run.server,
        run.fence,
        image,
        availability_zone=run.changes.get("availability_zone"),
        files=secrets.get("files", ()),
        admin_pass=secrets.get("admin_pass", ""),
        boot_roles=run.args.roles,
    )
    user_data = engine.vault.open_text(made.user_data) if made.user_data else None
    return replace(
        made,
        user_data=user_data,
        interfaces=networks.interfaces_of(run),
        paused=networks.starts_paused(run),
        assignment=run.assignment,
        volumes=volumes.described(engine, run) if run.volumes else [],
        shares=list(run.shares),
        record={
            "user_id": run.server.user_id,
            "created_at": run.server.created_at,
            "pinned_availability_zone": run.server.pinned_availability_zone,
            "disks": run.server.disks,
        },
    )


def start(engine: Engine, run: AnyRun) -> EnsureRunning:
    """Return the verb that boots the guest, or resumes it."""
    return EnsureRunning(has=belongings(engine, run))


def belongings(engine: Engine, run: AnyRun) -> Belongings:
    """Return the volumes and shares that the guest may have when it starts.

    A host that was away during a detach still has the volume or share. Every volume with a row
    belongs to the server, whatever its status. The guest does not start without the volumes that it
    must have, because a host that could not define the guest with its volumes has disconnected
    them.
    """
    kept = [str(row.volume_id) for row in volumes.of(run) if row.volume_id]
    needed = volumes.needed(engine, run) if kept else []
    return Belongings(kept, list(run.shares), needed)


def stop(engine: Engine, run: AnyRun) -> EnsureStopped:
    """Return the verb that shuts the guest down, and powers it off after the timeout."""
    return EnsureStopped(timeout=engine.shutdown_timeout)


def allow_to_run(tx: Connection, runs: Sequence[AnyRun]) -> None:
    """From the moment the command is sent the guest may run."""
    guests.want(tx, [run.server.id for run in runs], GuestState.RUNNING, True)


def record_running(tx: Connection, run: AnyRun, result: Result) -> None:
    """Record that the guest runs, or is paused."""
    run.set(power_state=_reported(result, states.RUNNING))


def _reported(result: Result, default: int) -> int:
    """Return the reported power state.

    A result that a conductor made for a dead host has none. A host may have sent another type than
    a number: then the result cannot be written.
    """
    state = power_state(result)
    return default if state is None else int(state)


def record_booted(tx: Connection, run: AnyRun, result: Result) -> None:
    """Record that the guest was booted, which counts its disks anew."""
    record_running(tx, run, result)
    volumes.name_devices(run)


def record_stopped(tx: Connection, run: AnyRun, result: Result) -> None:
    """Record that the guest is off, and is to stay off."""
    run.set(power_state=_reported(result, states.SHUTDOWN))
    guests.want(tx, [run.server.id], GuestState.STOPPED, False)
