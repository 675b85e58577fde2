# SPDX-License-Identifier: Apache-2.0
"""``kilonova host drain`` and ``kilonova host evacuate``: start and watch a host action.

The conductors do the work (``conductor.hosts.host_actions``), so the command may be interrupted and
repeated at any time. A repeated command watches the open action. Status 0: the host is empty. 1:
the host is not empty, and the last line has the next step.
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
#: The time between two lines about an unchanged move.
PROGRESS = 10 * SECOND


def drain(options: argparse.Namespace) -> int:
    """Disable a host, let the conductors move the servers away, and print the progress to the end.

    If the host has an open drain, only print the progress. Ctrl-C ends only this command, with
    status 1. Return 0 if the host is empty at the end, else 1. With ``--dry-run`` return the result
    of ``rehearse``, with ``--stop`` that of ``stop``.

    Raises:
        NotFound: There is no such host.
        Conflict: An evacuation of the host is open.
        NoAnswer: No scheduler answers ``--dry-run``.
    """
    return _command(options, Name.DRAIN, Arguments(options.cold, options.parallel, options.wait))


def evacuate(options: argparse.Namespace) -> int:
    """Let the conductors recreate a dead host's servers elsewhere, and print the progress.

    If the host has an open evacuation, only print the progress. Ctrl-C ends only this command, with
    status 1. Return 0 if the host has no servers at the end, else 1. With ``--dry-run`` return the
    result of ``rehearse``, with ``--stop`` that of ``stop``.

    Raises:
        NotFound: There is no such host.
        Conflict: A drain of the host is open.
        NoAnswer: No scheduler answers ``--dry-run``.
    """
    return _command(options, Name.EVACUATE, Arguments(parallel=options.parallel, force=options.yes))


def _command(options: argparse.Namespace, name: Name, args: Arguments) -> int:
    conf = config.load(options.config)
    store = Store.open(conf, notifications=NotificationSettings.of(conf))
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
        if options.dry_run:
            say("the dry run was interrupted; nothing was changed")
            return 1
        command = f"{KINDS[name].command} {options.host}"
        say(
            f"the conductors continue without this command. To watch them again: {command}. To stop them: "
            f"{command} --stop"
        )
        return 1
    finally:
        transport.close()
        store.close()


def say(text: str) -> None:
    """Print a line and flush standard output."""
    print(text, flush=True)


def begin(
    store: Store, host: str, name: Name, args: Arguments, say: Callable[[str], None]
) -> HostAction:
    """Record a new host action for the conductors, or find the open action with this name.

    Return the action. A new drain also disables the host.

    Args:
        store: The database.
        host: Name of the host.
        name: Drain or evacuation.
        args: Arguments of a new action. An open action keeps its own.
        say: Prints a line.

    Raises:
        NotFound: There is no such host.
        Conflict: An action of another kind is open, or an action was begun during this call.
    """
    open_action = store.read(lambda tx: host_actions.open_of(tx, host))
    if open_action is not None and open_action.name is name:
        say(f"host {host} has an open {name} already, action {open_action.id}:")
        return open_action
    state, action = store.write(
        lambda tx: (
            host_status.host_state(tx, host, locked=True),
            host_actions.begin(tx, host, name, args, RequestContext.of_ourselves("")),
        )
    )
    if name is Name.DRAIN:
        say(
            f"host {host} is disabled already: {state.reason or 'no reason given'}"
            if state.disabled
            else f"host {host} gets no more servers; kilonova host restore {host} reverts this"
        )
    return action


def stop(store: Store, host: str, name: Name, say: Callable[[str], None]) -> int:
    """Let the host's open action with this name start no more moves. Moves under way continue.

    Returns:
        0, or 1 if the host has no such action.

    Raises:
        NotFound: There is no such host.
        Conflict: The action ended during this call.
    """
    store.read(lambda tx: host_status.host_state(tx, host))
    action = store.read(lambda tx: host_actions.open_of(tx, host))
    if action is None or action.name is not name:
        say(f"host {host} has no open {name}")
        return 1
    store.write(lambda tx: host_actions.stop(tx, action.id))
    say(
        f"action {action.id} starts no more moves, and ends after the {action.progress.under_way} moves that are "
        "under way"
    )
    return 0


def watch(
    store: Store, action: HostAction, sleep: Callable[[float], None], say: Callable[[str], None]
) -> int:
    """Print the action's events and moves until the action has ended.

    Return 0 if the action has emptied the host, else 1. While the database does not answer, try
    again.

    Raises:
        NotFound: The action or the host does not exist any more.
    """
    watcher = _Watcher(store, say)
    while True:
        try:
            current = watcher.look(action)
        except errors.Unavailable as problem:
            watcher.say_once(f"{problem.text} Trying again.")
        else:
            if not current.is_open:
                say(current.message)
                return 0 if current.state is State.DONE else 1
        sleep(LOOK_SECONDS)


@dataclass
class _Watcher:
    """Prints new events and moves of a host action, and remembers the lines already printed."""

    store: Store
    say: Callable[[str], None]
    # Number of the last printed event.
    seq: int = 0
    last_text: str = ""
    moved: int = 0
    # Move -> the state in the last line, and the time of that line.
    moves: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def look(self, action: HostAction) -> HostAction:
        """Print the changes since the last call, and return the action's current row.

        The changes are new events and, while the action is open, changed moves, and a summary if
        more servers have moved. An unchanged move is printed again after every ``PROGRESS``.

        Raises:
            NotFound: The action or the host does not exist any more.
            Unavailable: The database does not answer.
        """
        current = self.store.read(lambda tx: host_actions.show(tx, action.id))
        for event in self.store.read(lambda tx: host_actions.events(tx, action.id, self.seq)):
            self.say(event.message)
            self.seq = event.seq
        if current.is_open:
            self._say_moves(action)
            if current.progress.moved != self.moved:
                self.moved = current.progress.moved
                self.say(move_progress.summary(current.progress))
        return current

    def _say_moves(self, action: HostAction) -> None:
        look = self.store.snapshot(lambda tx: host_contents.look(tx, action.host))
        kinds = KINDS[action.name].kinds
        for move in look.leaving:
            if move.kind in kinds and not move.idle:
                self._say_move(move, look.at)

    def _say_move(self, move: Move, at: int) -> None:
        *last_state, printed_at = self.moves.get(move.uuid, (0,))
        state = [move.status, move.dest, move.stuck]
        if state != last_state or at - int(str(printed_at)) >= PROGRESS:
            self.moves[move.uuid] = (*state, at)
            self.say(move_progress.line(move, at))

    def say_once(self, text: str) -> None:
        """Print a text unless it is the text of the last call."""
        if text != self.last_text:
            self.last_text = text
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
    """Print the destination of each server, or why the server stays, and change nothing.

    Return 0 if all servers can move, otherwise 1. Also return 1 if an evacuation would be refused
    because the host is not proved dead or, without ``args.force``, too many hosts are down. Open
    actions of the host are ignored.

    Args:
        store: The database.
        select: Requests destinations from a scheduler.
        host: Name of the host.
        name: Drain or evacuation.
        args: Arguments of the action.
        say: Prints a text.
        has_hook: True if a fencing hook is configured.
        silence: Seconds of silence after which a host counts as down.

    Raises:
        NotFound: There is no such host.
        NoAnswer: No scheduler answers.
    """
    contents = store.snapshot(lambda tx: host_contents.look(tx, host))
    lines = look_ahead(store, select, host, name, args, contents.servers)
    going = [line for line in lines if line.way is not None]
    say(table(lines) if lines else f"no server is on host {host}")
    durations = [
        seconds
        for kind in sorted({line.way.kind for line in going if line.way is not None})
        for seconds in store.read(partial(host_contents.read_durations, host=host, kind=kind))
    ]
    seconds_left = move_progress.forecast(durations, [], len(going), args.parallel, contents.at)
    in_time = f" in about {move_progress.words(seconds_left)}" if seconds_left and going else ""
    say(f"{len(going)} of {len(lines)} servers would move{in_time}; nothing was changed")
    hosts = store.read(host_status.host_states).values()
    refusal = name is Name.EVACUATE and (
        KINDS[name].refusal(contents, has_hook)
        or (not args.force and too_many_down(hosts, contents.at, silence))
    )
    if refusal:
        say(f"the evacuation would be refused: {refusal}")
        return 1
    return 0 if len(going) == len(lines) else 1


def table(lines: Sequence[Planned]) -> str:
    """Return a plan as text: servers with destinations, then servers that stay, with the reason."""
    going = [["server", "name", "state", "how", "to"]]
    going += [
        [
            planned.server.id,
            planned.server.name,
            planned.server.vm_state,
            planned.way.word,
            planned.to,
        ]
        for planned in lines
        if planned.way
    ]
    parts = [columns(going)] if len(going) > 1 else []
    return "\n".join(
        [
            *parts,
            *(
                host_plan.stays(planned.server, planned.stays)
                for planned in lines
                if planned.stays is not None
            ),
        ]
    )
