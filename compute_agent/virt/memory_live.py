# SPDX-License-Identifier: Apache-2.0
"""Guests in memory that move while they run.

The part of ``virt.memory`` above the moves of files. A destination that is prepared has an empty letter with the
server's name among its ``arrivals``, a folder beside its state file or a table in this process; the source writes the
guest into it, as it is, when it has let go of it; whatever the destination does next it does with the guest. Must stay
true: whatever is repeated, and whichever of both is killed in between, at most one has the guest running, and one that
was let go of is delivered.
"""
from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from common import errors
from common.models import DomainState, GuestSpec
from common.wire import from_wire
from compute_agent.virt.driver import ABORTED, ImageReader, Peer, Run, VerbFailed
from compute_agent.virt.memory_arrivals import EMPTY, folder_at
from compute_agent.virt.memory_guest import Guest, made
from compute_agent.virt.memory_host import state_of
from compute_agent.virt.memory_moves import MemoryMoves
from compute_agent.virt.memory_script import QUIET, nap, wait

MEBIBYTE = 1 << 20


class MemoryLive(MemoryMoves):
    """The verbs of guests that move while they run, as ``Driver`` has them."""

    def prepare_arrival(self, spec: GuestSpec, peer: Peer, shared: bool, cpu: dict[str, Any], read_image: ImageReader,
                        run: Run) -> dict[str, Any]:
        after = self._begin("prepare_arrival", spec.server, run)
        self._refuse_what_cannot_be(spec)
        if lacking := _lacking(self.size.cpu_info, cpu):
            raise VerbFailed(f"The host's CPU lacks {', '.join(lacking)}, which the server may use.", retryable=True)
        peer.parts()
        run.require_lease()
        with self._lock:
            if shared and spec.server not in self.storage:
                raise VerbFailed("The server's files are not on the storage of this host.", retryable=True)
            here = self.guests.get(spec.server)
            if here is None or here.received != spec.fence:
                waiting = made(spec, {})
                self._lay_down(spec, waiting)
                if shared:
                    waiting.disk, waiting.local = self.storage[spec.server].disk, self.storage[spec.server].local
                self.arrivals[spec.server] = EMPTY
        wait(after, run)
        return {"uri": self.uri, "address": self.name}

    def live_migrate(self, spec: GuestSpec, to: dict[str, Any], shared: bool, run: Run) -> dict[str, Any]:
        begun = time.monotonic()
        journey = self._journey(spec.server, shared)
        after = self._begin("live_migrate", spec.server, run, journey)
        with self._lock:
            gone = self.files.get(spec.server)
            has_left = spec.server not in self.guests and gone is not None and bool(gone.left)
            guest = gone if has_left and gone else self._active(spec.server)
        if not has_left:
            run.phase("migrating")
            journey(0, run)
            run.require_lease()
        self._hand_over(spec, guest, to["uri"], shared)
        size = guest.memory_mb * MEBIBYTE + (0 if shared else len(guest.disk_image()))
        seconds = time.monotonic() - begun
        self._tell()
        wait(after, run)
        return {"bytes": size, "job_seconds": seconds}

    def arrived(self, spec: GuestSpec, run: Run) -> DomainState:
        after = self._begin("arrived", spec.server, run)
        with self._lock:
            guest = self.guests.get(spec.server)
            if guest is None:
                raise VerbFailed("The server did not arrive on this host.", details=f"no domain {spec.server}")
            guest.dress(spec)
            guest.fence = spec.fence
            self._write(spec.server, guest)
            state = state_of(spec.server, guest)
        return self._end(state, after, run)

    # --- while it runs ---
    def _journey(self, server: str, shared: bool) -> Callable[[float, Run], None]:
        """What passes the time of a migration: it tells how far it is, and does what is wished."""
        guest = self.guests.get(server)
        totals = {"memory": guest.memory_mb * MEBIBYTE if guest else 0,
                  "disk": len(guest.disk_image()) if guest and not shared else 0}

        def pass_by(seconds: float, run: Run) -> None:
            begun = time.monotonic()
            while True:
                part = min(1.0, (time.monotonic() - begun) / seconds) if seconds else 1.0
                run.measured({f"{what}_{name}": size for what, total in totals.items() for name, size in (
                    ("total", total), ("processed", int(total * part)), ("remaining", total - int(total * part)))})
                if run.wish() == "abort":
                    raise VerbFailed(ABORTED)
                if part == 1.0 or run.wish() == "complete":
                    wait(0, run)
                    return
                nap(run)
        return pass_by

    def _hand_over(self, spec: GuestSpec, guest: Guest, uri: str, shared: bool) -> None:
        """Let go of the guest, unless that was done before, and deliver it, unless that was done too."""
        there = self.reachable.get(uri)
        arrivals = there.arrivals if there is not None else folder_at(uri)
        if not guest.left:
            if arrivals is None:
                raise VerbFailed("The destination cannot be reached.", details=f"no host at {uri}", retryable=True)
            if spec.server not in arrivals:
                raise VerbFailed("The destination is not prepared for the server.", retryable=True,
                                 details=f"{uri} awaits no {spec.server}")
            self._let_go(spec.server, guest, uri)
        if arrivals is None:
            raise errors.Unavailable(f"The destination of server {spec.server}, {uri}, cannot be reached just now.")
        if arrivals.get(spec.server) == EMPTY:
            record = asdict(replace(guest, left="", offered=""))
            arrivals[spec.server] = json.dumps({"guest": record, "fence": spec.fence, "shared": shared}).encode()
        if isinstance(there, MemoryLive):
            there.take_in()

    def _let_go(self, server: str, guest: Guest, uri: str) -> None:
        with self._lock:
            self._active(server)
            del self.guests[server]
            guest.left = uri
            self._lay(server, guest)
            self._write(server, None)
            self._changed.append(server)
            self._consoles.end(server)

    def take_in(self) -> None:
        """The guests that were delivered go on here."""
        with self._lock:
            letters = {server: letter for server, letter in self.arrivals.items() if letter != EMPTY}
            for server, letter in letters.items():
                told = json.loads(letter)
                guest = from_wire(Guest, told["guest"])
                if told["shared"]:
                    guest.disk, guest.local = self.storage[server].disk, self.storage[server].local
                guest.fence = guest.received = told["fence"]
                self.guests[server] = guest
                self._write(server, guest)
                self._keep(server, guest)
                self._changed.append(server)
        self._tell()

    def _begin(self, verb: str, server: str = "", run: Run = QUIET,
               pass_by: Callable[[float, Run], None] | None = None) -> float:
        self.take_in()
        return super()._begin(verb, server, run, pass_by)


def _lacking(ours: dict[str, Any], cpu: dict[str, Any]) -> list[str]:
    """What ``cpu`` has and ours has not."""
    if "arch" in cpu and cpu["arch"] != ours.get("arch"):
        return [f"the architecture {cpu['arch']}"]
    return sorted(set(cpu.get("features", ())) - set(ours.get("features", ())))


