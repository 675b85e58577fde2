# SPDX-License-Identifier: Apache-2.0
"""The guest of a server: what its host needs to know of it, and the parts of a step that many stories share.

``spec`` is made from the server's row and its guest record whenever a command is sent: the one door to a GuestSpec,
so that no verb forgets which parts of the host the guest has. ``start`` and ``stop`` are commands; ``will_run``
stands in the transaction that sends one which may start the guest, ``runs`` or ``rests`` in the one that takes its
result in.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import states
from common.instance_data import guest_spec
from common.models import GuestSpec, ImageRef, Result
from common.store import guests
from common.store.engine import Connection
from common.wire import from_wire
from conductor import networks
from conductor.saga import Engine, Run


def spec(engine: Engine, run: Run, image: ImageRef | None = None) -> GuestSpec:
    """The guest; with ``image`` one whose disk is made of another image than the server's own. Its hardware stays what
    the server's own image asks for, because that was claimed."""
    if image is not None and run.server.image:
        image = replace(image, properties=run.server.image.get("properties", {}))
    secrets = run.secrets(engine)
    made = guest_spec(
        run.server, run.fence, image, availability_zone=run.changes.get("availability_zone"),
        # In args they are of an action that was accepted before 0008.
        files=secrets.get("files") or run.action.args.get("files", []), admin_pass=secrets.get("admin_pass", ""))
    return replace(made, interfaces=networks.of(run), paused=networks.is_waiting(run), fitting=run.fitting)


def own_image(run: Run) -> ImageRef | None:
    """The image that the server was made of."""
    return from_wire(ImageRef, run.server.image) if run.server.image else None


def start(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    """Have it run: booted, or going on from where it was paused or suspended."""
    return "ensure_running", {}


def stop(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    """Have it off: asked first, then without its plug."""
    return "ensure_stopped", {"timeout": engine.shutdown_timeout}


def will_run(tx: Connection, runs: Sequence[Run]) -> None:
    """From the moment the command is sent the guest may run."""
    guests.want(tx, [run.server.id for run in runs], guests.RUNNING, True)


def runs(tx: Connection, run: Run, result: Result) -> None:
    """It runs, or is paused, as its host says."""
    run.set(power_state=int(result.data.get("power_state", states.RUNNING)))


def rests(tx: Connection, run: Run, result: Result) -> None:
    """It is off, and should be."""
    run.set(power_state=int(result.data.get("power_state", states.SHUTDOWN)))
    guests.want(tx, [run.server.id], guests.STOPPED, False)
