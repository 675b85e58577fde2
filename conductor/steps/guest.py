# SPDX-License-Identifier: Apache-2.0
"""The guest of a server: its definition for the host, and step functions that many workflows share.

``spec`` builds the definition from the server's row and guest record for every command. No other
function builds a GuestSpec, so that no command omits the guest's hardware assignment. ``start`` and
``stop`` return commands. ``allow_to_run`` runs in the transaction that sends a command which may
start the guest. ``record_running`` and ``record_stopped`` run in the transaction that processes the
result.
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
    """Return the definition of the guest for its host, with the changes of the run.

    Args:
        engine: The conductor's engine.
        run: The run of an action of the server.
        image: Another image for the guest's disk. The hardware still follows the server's own
            image, because that hardware was claimed. None: the server's own image.

    Raises:
        Unavailable: This conductor has no key that decrypts the request's secrets, the user data or
            the volumes' connections.
    """
    if image is not None and run.server.image:
        image = replace(image, properties=run.server.image.get("properties", {}))
    secrets = run.secrets(engine)
    definition = guest_spec(
        run.server,
        run.fence,
        image,
        availability_zone=run.changes.get("availability_zone"),
        files=secrets.get("files", ()),
        admin_pass=secrets.get("admin_pass", ""),
        boot_roles=run.args.roles,
    )
    user_data = engine.vault.open_text(definition.user_data) if definition.user_data else None
    return replace(
        definition,
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
    """Return the verb that boots or resumes the guest."""
    return EnsureRunning(has=belongings(engine, run))


def belongings(engine: Engine, run: AnyRun) -> Belongings:
    """Return the volumes and shares that the guest may have when it starts.

    A host that was away during a detach still has the volume or share, and removes it before the
    start. Every volume with a row belongs to the server, in any status. The result also contains
    the volumes that the host must connect before the start (``needed``), because a host that failed
    to define the guest has disconnected its volumes.
    """
    volume_ids = [str(row.volume_id) for row in volumes.of(run) if row.volume_id]
    needed = volumes.needed(engine, run) if volume_ids else []
    return Belongings(volume_ids, list(run.shares), needed)


def stop(engine: Engine, run: AnyRun) -> EnsureStopped:
    """Return the verb that shuts the guest down, and powers it off after ``shutdown_timeout``."""
    return EnsureStopped(timeout=engine.shutdown_timeout)


def allow_to_run(tx: Connection, runs: Sequence[AnyRun]) -> None:
    """Record that the guest should run, before the command that starts the guest is sent."""
    guests.want(tx, [run.server.id for run in runs], GuestState.RUNNING, True)


def record_running(tx: Connection, run: AnyRun, result: Result) -> None:
    """Record the power state that the host reports, or RUNNING if the result contains none.

    Steps that start or pause a guest use this. The wanted state in the guest record stays
    unchanged.

    Raises:
        TypeError, ValueError: The host has sent a value that is not a number.
    """
    run.set(power_state=_read_power_state(result, states.RUNNING))


def _read_power_state(result: Result, default: int) -> int:
    """Return the power state in the result, or ``default`` if the result contains none.

    Raises:
        TypeError, ValueError: The host has sent a value that is not a number.
    """
    state = power_state(result)
    return default if state is None else int(state)


def record_booted(tx: Connection, run: AnyRun, result: Result) -> None:
    """Record the power state after a boot, and the device names that the boot gives to volumes.

    Raises:
        TypeError, ValueError: As in ``record_running``.
    """
    record_running(tx, run, result)
    volumes.name_devices(run)


def record_stopped(tx: Connection, run: AnyRun, result: Result) -> None:
    """Record the reported power state, or SHUTDOWN without one, and that the guest must not run.

    Raises:
        TypeError, ValueError: As in ``record_running``.
    """
    run.set(power_state=_read_power_state(result, states.SHUTDOWN))
    guests.want(tx, [run.server.id], GuestState.STOPPED, False)
