# SPDX-License-Identifier: Apache-2.0
"""Where each server of a host would go now, or why it cannot: the plan of a drain and of an
evacuation.

Pure, but for the scheduler that it asks: all servers in one call, so that each sees those before
it. The request is the one that the conductor makes when it moves the server
(``common.domain.request_spec``). A plan promises nothing: every move asks again, and claims.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from common.domain import errors, request_spec, states
from common.domain.clock import SECOND
from common.domain.models import RequestSpec, Selection
from common.domain.statuses import MigrationType
from common.store.hosts.host_status import HostState
from common.store.views.host_contents import Resident

Select = Callable[[list[RequestSpec], bool], list[Selection]]
#: from so many hosts on: the share of them that may be down at once
MAX_DOWN_HOSTS, MAX_DOWN_SHARE = 5, 0.2
AT_ONCE = 200  # servers in one call to a scheduler


@dataclass(frozen=True, slots=True)
class Way:
    """How a server leaves: the action (a key of ``states.ACTIONS``), the kind of its migration, and
    the word for it."""

    key: str
    kind: MigrationType
    word: str


@dataclass(frozen=True, slots=True)
class Stays:
    """Why a server cannot leave now, and what somebody can do about it."""

    why: str
    then: str


LIVE = Way("os-migrateLive", MigrationType.LIVE, "live")
COLD = Way("migrate", MigrationType.COLD, "cold")
EVACUATION = Way("evacuate", MigrationType.EVACUATION, "evacuate")

_WAITS = Stays(
    "it waits to be confirmed or reverted",
    "openstack server resize confirm {id}, or resize revert {id}",
)
#: What stays where the host still runs, by vm_state; the rest goes.
_STAYS = {
    states.SUSPENDED: Stays("it is suspended", "openstack server resume {id}"),
    states.RESCUED: Stays("it is rescued", "openstack server unrescue {id}"),
    states.RESIZED: _WAITS,
    states.ERROR: Stays("it is in ERROR", "openstack server reboot --hard {id}, or delete it"),
    states.BUILDING: Stays("it was never built", "openstack server delete {id}"),
    states.SHELVED: Stays("it is shelved here", "openstack server shelve --offload {id}"),
    states.SOFT_DELETED: Stays(
        "it is deleted and can be restored",
        "openstack server delete --force {id}, or openstack server restore {id}",
    ),
}
_PAUSED = Stays(
    "it is paused, and moves only while it is on",
    "openstack server unpause {id}, or drain without --cold",
)
_LOST = Stays(
    "it is {state}, and only what is active, stopped or in error is evacuated",
    "openstack server set --state active {id}: what was in its memory is lost with the host",
)
#: The same where the host is dead.
_DEAD = {
    **_STAYS,
    states.SUSPENDED: _LOST,
    states.RESCUED: _LOST,
    states.PAUSED: _LOST,
    states.RESIZED: Stays(
        _WAITS.why, "openstack server resize revert {id} takes it back to where it came from"
    ),
}
_NO_LIVE = Stays(
    "no host that could have it takes servers in while they run",
    "set [migration] live_migration_port on the hosts, or drain with --cold",
)
_SHARES = Stays(
    "it has shares, and these are mounted by its host alone",
    "detach them while it is stopped: DELETE /servers/{id}/shares/…",
)
#: The same where the host is dead: only a server in error loses its shares there.
_DEAD_SHARES = Stays(
    _SHARES.why, "openstack server set --state error {id}, then DELETE /servers/{id}/shares/…"
)
_NOWHERE = "make room, or change what it asks for (kilonova explain {id} says more of each host)"


@dataclass(frozen=True, slots=True)
class Planned:
    """One line of a plan: to where, or why not. ``soon``: hosts have still to remove old guests of
    the server, and it may have one of them when they have."""

    server: Resident
    way: Way | None = None
    to: str = ""
    stays: Stays | None = None
    soon: bool = False


def drained(server: Resident, cold: bool) -> Way | Stays:
    """How a server leaves a host that runs."""
    if server.shares:
        return _of({server.vm_state: _SHARES}, server)
    if server.vm_state == states.PAUSED and cold:
        return _of({states.PAUSED: _PAUSED}, server)
    if server.vm_state in (states.ACTIVE, states.PAUSED):
        return COLD if cold else LIVE
    return COLD if server.vm_state == states.STOPPED else _of(_STAYS, server)


def evacuated(server: Resident) -> Way | Stays:
    """How a server leaves a host that is dead."""
    if server.shares:
        return _of({server.vm_state: _DEAD_SHARES}, server)
    if server.vm_state in states.row(EVACUATION.key).vm:
        return EVACUATION
    return _of(_DEAD, server)


def is_busy(server: Resident, way: Way | Stays) -> bool:
    """Has another action the server, which must end first?"""
    if not server.busy or isinstance(way, Stays):
        return bool(server.busy)
    row = states.row(way.key)
    return not (row.supersedes and server.task_state is not None and server.task_state in row.task)


def _of(table: Mapping[str, Stays], server: Resident) -> Stays:
    found = table.get(server.vm_state, Stays("it is {state}", "openstack server show {id}"))
    return Stays(found.why.format(state=server.vm_state), found.then.format(id=server.id))


def plan(
    servers: Sequence[Resident],
    way: Callable[[Resident], Way | Stays],
    select: Select,
    *,
    host: str,
    owing: Mapping[str, Collection[str]],
    live_capable: Collection[str],
) -> list[Planned]:
    """A line for each server, in their order, which is the order in which they take room.

    Args:
        host: the one that they leave. owing: by server, hosts that have not removed an old guest of
        it yet.
        lively: hosts that take servers in while they run.
    Raises:
        NoAnswer: no scheduler answers.
    """
    lines, wanted = {}, []
    for server in servers:
        found = way(server)
        if isinstance(found, Stays):
            lines[server.id] = Planned(server, stays=found)
            continue
        try:
            debts = list(owing.get(server.id, ()))
            wanted.append(replace(spec(server), excluded=[host, *debts], debts=debts))
            lines[server.id] = Planned(server, found)
        except errors.BadRequest as problem:
            lines[server.id] = Planned(
                server, stays=Stays(problem.text, _NOWHERE.format(id=server.id))
            )
    for start in range(0, len(wanted), AT_ONCE):
        for selection in select(wanted[start : start + AT_ONCE], start == 0):
            placed = _placed(lines[selection.server], selection, live_capable)
            lines[selection.server] = replace(
                placed, soon=placed.way is None and bool(owing.get(selection.server))
            )
    return [lines[server.id] for server in servers]


def spec(server: Resident) -> RequestSpec:
    """What it wants of another host.

    Raises:
        BadRequest: its flavor or image ask for what no host can carry out.
    """
    return request_spec.of(
        server.id,
        server.project_id,
        server.flavor,
        server.image,
        hints=server.hints,
        availability_zone=server.zone,
    )


def _placed(line: Planned, selection: Selection, live_capable: Collection[str]) -> Planned:
    if not selection.hosts:
        return Planned(
            line.server,
            stays=Stays(f"no valid host: {selection.reason}", _NOWHERE.format(id=line.server.id)),
        )
    hosts = [name for name in selection.hosts if line.way is not LIVE or name in live_capable]
    return replace(line, to=hosts[0]) if hosts else Planned(line.server, stays=_NO_LIVE)


def text(line: Planned) -> str:
    """A line of a plan for people."""
    if line.stays is not None:
        return stays(line.server, line.stays)
    assert line.way is not None, "who does not stay has a way"
    return f"{line.server.name} ({line.server.id}, {line.server.vm_state}) can go to {line.to}, {line.way.word}"


def stays(server: Resident, why: Stays) -> str:
    """Two lines about a server that does not go."""
    return f"{server.id} ({server.name}, {server.vm_state}) stays: {why.why}\n    {why.then}"


def too_many_down(hosts: Iterable[HostState], at: int, silence: int) -> str:
    """Why it is likely that the hosts are well and our network is not; "" when it is not.

    Looks at their last signs of life too, because conductors call no host down while most of them
    are silent.
    """
    known = list(hosts)
    down = [
        one.name for one in known if not one.answers or (one.seen_at or 0) < at - silence * SECOND
    ]
    if len(known) < MAX_DOWN_HOSTS or len(down) <= MAX_DOWN_SHARE * len(known):
        return ""
    return (
        f"{len(down)} of {len(known)} hosts are down at once ({', '.join(sorted(down)[:MAX_DOWN_HOSTS])}"
        f"{' …' if len(down) > MAX_DOWN_HOSTS else ''}): that is our network more likely than their hosts. Look at "
        "it first; when they are dead all the same, say --yes."
    )
