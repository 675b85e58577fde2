# SPDX-License-Identifier: Apache-2.0
"""``kilonova host drain`` and ``kilonova host evacuate``: begin one, and watch it until its end.

The conductors do the work (``conductor.hosts.host_actions``), so the command may be ended and
given again at any time: then it watches the one that is open. Status 0: the host is empty; 1: it
is not, and the last line says what to do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from common.domain import errors
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.rpc import conductor, scheduler
from common.rpc.transport import Transport
from common.service import config
from common.service.notification_options import NotificationSettings
from common.store import upgrades
from common.store.engine import Store
from common.store.hosts import host_actions, host_status
from common.store.hosts.host_actions import Arguments, HostAction, Name, State
from common.store.views import host_contents
from common.store.views.host_contents import Move
from conductor.hosts import host_plan, move_progress
from conductor.hosts.host_actions import KINDS, look_ahead
from conductor.hosts.host_plan import Planned, too_many_down
from deploy.operator.output import columns

LOOK_SECONDS = 1.0
PROGRESS = 10 * SECOND  #: between two lines of a move in which nothing changes


def drain(options: argparse.Namespace) -> int:
    """Empty a host that runs."""
    return _command(options, Name.DRAIN, Arguments(options.cold, options.parallel, options.wait))


def evacuate(options: argparse.Namespace) -> int:
    """Make the servers of a dead host again elsewhere."""
    return _command(options, Name.EVACUATE, Arguments(parallel=options.parallel, force=options.yes))


def _command(options: argparse.Namespace, name: Name, args: Arguments) -> int:
    conf = config.load(options.config)
    store = Store.opened(conf, notifications=NotificationSettings.of(conf))
    upgrades.check(store)
    transport = Transport(conf)
    try:
        if options.dry_run:
            return rehearse(
                store,
                scheduler.SchedulerClient(transport).select,
                options.host,
                name,
                args,
                say,
                has_hook=bool(conf.conductor.fencing_hook),
                silence=conf.conductor.host_silence,
            )
        if options.stop:
            return stop(store, options.host, name, say)
        action = begin(store, options.host, name, args, say)
        conductor.ConductorWakeup(transport).wake()
        return watch(store, action, time.sleep, say)
    except KeyboardInterrupt:
        command = f"{KINDS[name].command} {options.host}"
        say(
            f"the conductors go on without this command; watch them again: {command}; stop them: {command} --stop"
        )
        return 1
    finally:
        transport.close()
        store.close()


def say(text: str) -> None:
    """A line at once, also into a pipe."""
    print(text, flush=True)


def begin(
    store: Store, host: str, name: Name, args: Arguments, say: Callable[[str], None]
) -> HostAction:
    """A new one; or the open one, when it is of this kind.

    Raises:
        NotFound: there is no such host. Conflict: one of another kind is open.
    """
    found = store.read(lambda tx: host_actions.open_of(tx, host))
    if found is not None and found.name is name:
        say(f"host {host} has an open {name} already, action {found.id}:")
        return found
    before, action = store.write(
        lambda tx: (
            host_status.host_state(tx, host, locked=True),
            host_actions.begin(tx, host, name, args, RequestContext.of_ourselves("")),
        )
    )
    if name is Name.DRAIN:
        say(
            f"host {host} is disabled already: {before.reason or 'nobody said why'}"
            if before.disabled
            else f"host {host} gets no more servers; kilonova host restore {host} takes that back"
        )
    return action


def stop(store: Store, host: str, name: Name, say: Callable[[str], None]) -> int:
    """Have the open one begin nothing more; 0 when there was one.

    Raises:
        NotFound: there is no such host.
    """
    store.read(lambda tx: host_status.host_state(tx, host))
    found = store.read(lambda tx: host_actions.open_of(tx, host))
    if found is None or found.name is not name:
        say(f"host {host} has no open {name}")
        return 1
    store.write(lambda tx: host_actions.stop(tx, found.id))
    say(
        f"action {found.id} begins nothing more and ends when what is under way has ended: "
        f"{found.progress.under_way} servers"
    )
    return 0


def watch(
    store: Store, action: HostAction, sleep: Callable[[float], None], say: Callable[[str], None]
) -> int:
    """Say what its journal says and how far its moves are, until it has ended; 0 when the host is
    empty."""
    watching = _Watching(store, say)
    while True:
        try:
            found = watching.look(action)
        except errors.Unavailable as problem:
            watching.say_once(f"{problem.text} Trying again.")
        else:
            if not found.is_open:
                say(found.message)
                return 0 if found.state is State.DONE else 1
        sleep(LOOK_SECONDS)


@dataclass
class _Watching:
    """What was said already."""

    store: Store
    say: Callable[[str], None]
    seq: int = 0  # of the last event
    said: str = ""
    moved: int = 0
    # move -> what was said of it, and when
    moves: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def look(self, action: HostAction) -> HostAction:
        """One look; returns the action as it is.

        Raises:
            Unavailable: the database does not answer.
        """
        found = self.store.read(lambda tx: host_actions.show(tx, action.id))
        for event in self.store.read(lambda tx: host_actions.events(tx, action.id, self.seq)):
            self.say(event.message)
            self.seq = event.seq
        if found.is_open:
            self._say_moves(action)
            if found.progress.moved != self.moved:
                self.moved = found.progress.moved
                self.say(move_progress.summary(found.progress))
        return found

    def _say_moves(self, action: HostAction) -> None:
        look = self.store.snapshot(lambda tx: host_contents.look(tx, action.host))
        kinds = KINDS[action.name].kinds
        for move in look.leaving:
            if move.kind in kinds and not move.idle:
                self._say_move(move, look.at)

    def _say_move(self, move: Move, at: int) -> None:
        *before, said_at = self.moves.get(move.uuid, (0,))
        now = [move.status, move.dest, move.stuck]
        if now != before or at - int(str(said_at)) >= PROGRESS:
            self.moves[move.uuid] = (*now, at)
            self.say(move_progress.line(move, at))

    def say_once(self, text: str) -> None:
        """Not again in every round."""
        if text != self.said:
            self.said = text
            self.say(text)


def rehearse(
    store: Store,
    select: host_plan.Select,
    host: str,
    name: Name,
    args: Arguments,
    say: Callable[[str], None],
    *,
    has_hook: bool,
    silence: int,
) -> int:
    """Say where everything would go, and change nothing; 0 when all of it can.

    Args:
        has_hook: is there a fencing hook? silence: seconds after which a host counts as down.

    Raises:
        NotFound: there is no such host. NoAnswer: no scheduler answers.
    """
    look = store.snapshot(lambda tx: host_contents.look(tx, host))
    lines = look_ahead(store, select, host, name, args, look.servers)
    going = [line for line in lines if line.way is not None]
    say(table(lines) if lines else f"no server is on host {host}")
    took = [
        seconds
        for kind in sorted({line.way.kind for line in going if line.way is not None})
        for seconds in store.read(partial(host_contents.read_durations, host=host, kind=kind))
    ]
    rest = move_progress.forecast(took, [], len(going), args.parallel, look.at)
    say(
        f"{len(going)} of {len(lines)} would go{f' in about {move_progress.words(rest)}' if rest and going else ''}; "
        "nothing was changed"
    )
    hosts = store.read(host_status.host_states).values()
    refused = name is Name.EVACUATE and (
        KINDS[name].refusal(look, has_hook)
        or (not args.force and too_many_down(hosts, look.at, silence))
    )
    if refused:
        say(f"it would be refused: {refused}")
        return 1
    return 0 if len(going) == len(lines) else 1


def table(lines: Sequence[Planned]) -> str:
    """A plan for people: who goes where; then who stays, why, and what to do."""
    going = [["server", "name", "state", "how", "to"]]
    going += [
        [one.server.id, one.server.name, one.server.vm_state, one.way.word, one.to]
        for one in lines
        if one.way
    ]
    written = [columns(going)] if len(going) > 1 else []
    return "\n".join(
        [
            *written,
            *(host_plan.stays(one.server, one.stays) for one in lines if one.stays is not None),
        ]
    )
