# SPDX-License-Identifier: Apache-2.0
"""Create: find a host that fits, claim it, and have it make the guest.

The guest is made by one verb on the host (image, disks, domain, start), so that a create is two
transactions here and one command. After that command was sent only a definite failure moves the server to
another host; silence waits for the host.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import states
from common.models import Flavor, GuestSpec, ImageRef, RequestSpec, Result
from common.store.engine import Connection, now
from common.wire import from_wire, to_wire
from conductor import placing
from conductor.saga import Engine, Run, Step, StepFailed, Workflow, fault_of


def _spec(run: Run) -> RequestSpec:
    """What this server wants of a host."""
    server, args = run.server, run.action.args
    flavor = from_wire(Flavor, server.flavor)
    return RequestSpec(
        server=server.id, project_id=server.project_id,
        resources={"VCPU": flavor.vcpus, "MEMORY_MB": flavor.memory_mb, "DISK_GB": flavor.disk_gb},
        flavor_id=server.flavor_id, image_id=server.image_id, availability_zone=args.get("zone"),
        force_host=args.get("host"), excluded=list(run.data.get("failed_hosts", ())), hints=server.scheduler_hints)


def _propose(engine: Engine, runs: Sequence[Run]) -> None:
    placing.propose(engine, runs, _spec)


def _claim(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    placing.claim(tx, runs, _spec)
    for run in runs:
        if not run.paused and not run.problem:
            run.set(task_state=states.SPAWNING)


def _leave(tx: Connection, engine: Engine, run: Run) -> None:
    """The claim is given back when the host has confirmed that nothing is left there."""
    host = run.host
    if host is not None:
        run.data.setdefault("failed_hosts", []).append(host)
        placing.leave(tx, run, host)
    run.set(host=None, availability_zone=None)


def guest_spec(run: Run) -> GuestSpec:
    """The guest as its host needs it."""
    server = run.server
    keys = [{"name": server.key_name, "type": "ssh", "data": server.key_data}] if server.key_name else []
    return GuestSpec(
        server=server.id, fence=run.action.fence, name=server.name, flavor=from_wire(Flavor, server.flavor),
        image=from_wire(ImageRef, server.image) if server.image else None, config_drive=bool(server.config_drive),
        user_data=server.user_data,
        instance={"name": server.name, "hostname": server.hostname, "project_id": server.project_id,
                  "availability_zone": run.changes.get("availability_zone", server.availability_zone),
                  "launch_index": server.launch_index, "meta": server.meta, "keys": keys,
                  "files": run.action.args.get("files", [])})


def _build(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "ensure_guest", {"guest": to_wire(guest_spec(run))}


def _built(tx: Connection, run: Run, result: Result) -> None:
    run.set(power_state=int(result.data.get("power_state", states.RUNNING)), launched_at=now())


def _failed(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """Another host while there are attempts and the failure was the host's own; else ERROR, with the reason."""
    if problem.retryable and run.attempt < engine.max_attempts:
        run.set(task_state=states.SCHEDULING)
        run.head.update(state="due", phase="do", step=None, attempt=run.attempt + 1, due_at=now(), host=None,
                        owner=None, lease_until=None, data=run.data)
        return
    run.set(vm_state=states.ERROR, power_state=states.NOSTATE,
            fault=fault_of(tx, problem))


CREATE = Workflow("create", failed=_failed, steps=(
    Step("place", "first, because everything after it costs something on a host",
         propose=_propose, apply=_claim, undo=_leave),
    Step("build", "one command, because each message costs more than all that it saves",
         command=_build, done=_built),
))

