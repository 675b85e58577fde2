# SPDX-License-Identifier: Apache-2.0
"""The plan of a drain or an evacuation: which server goes where.

Free of effects except for calls of the scheduler. One call contains all servers, so that each
selection accounts for the earlier ones. The request equals the request of the later move
(``common.domain.request_spec``). A plan reserves no resources: every move selects and claims again.
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
#: From this number of hosts on, an evacuation needs ``force`` if more than this share is down.
MAX_DOWN_HOSTS, MAX_DOWN_SHARE = 5, 0.2
# Servers in one call of a scheduler.
AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Way:
    """How a server leaves a host.

    ``key`` is the action in ``states.ACTIONS``, ``kind`` the type of the migration, and ``word``
    the short name in texts.
    """

    key: str
    kind: MigrationType
    word: str


@dataclass(frozen=True, slots=True)
class Stays:
    """Why a server cannot leave now, and the command or change that helps."""

    why: str
    then: str


LIVE = Way("os-migrateLive", MigrationType.LIVE, "live")
COLD = Way("migrate", MigrationType.COLD, "cold")
EVACUATION = Way("evacuate", MigrationType.EVACUATION, "evacuate")

_WAITS = Stays(
    "it waits to be confirmed or reverted",
    "openstack server resize confirm {id}, or resize revert {id}",
)
#: Reasons to stay on a running host, by vm_state. Servers in other states can leave.
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
    "it is paused, and can only migrate live",
    "openstack server unpause {id}, or drain without --cold",
)
_LOST = Stays(
    "it is {state}, and only active, stopped and failed servers are evacuated",
    "openstack server set --state active {id}; its memory is lost with the host",
)
#: Reasons to stay on a dead host, by vm_state.
_DEAD = {
    **_STAYS,
    states.SUSPENDED: _LOST,
    states.RESCUED: _LOST,
    states.PAUSED: _LOST,
    states.RESIZED: Stays(
        _WAITS.why, "openstack server resize revert {id}, which returns it to its previous host"
    ),
}
_NO_LIVE = Stays(
    "none of the suitable hosts accepts live migrations",
    "set [migration] live_migration_port on the hosts, or drain with --cold",
)
_SHARES = Stays(
    "it has shares, and only its present host can mount them",
    "stop it and detach them: DELETE /servers/{id}/shares/…",
)
#: Shares on a dead host: only the shares of a server in ERROR can be detached.
_DEAD_SHARES = Stays(
    _SHARES.why, "openstack server set --state error {id}, then DELETE /servers/{id}/shares/…"
)
_NOWHERE = (
    "make room, or change its requirements; for the reason of each host: kilonova explain {id}"
)


@dataclass(frozen=True, slots=True)
class Planned:
    """One line of a plan: the destination, or the reason to stay.

    ``soon`` is True if no host can take the server now, but a host that must still remove an old
    guest of the server may take it afterwards.
    """

    server: Resident
    way: Way | None = None
    to: str = ""
    stays: Stays | None = None
    soon: bool = False


def plan_drain(server: Resident, cold: bool) -> Way | Stays:
    """Return how a server leaves a running host, or why the server stays.

    Active and paused servers migrate live, stopped servers cold. With ``cold``, active servers
    migrate cold, and paused servers stay. Servers with shares or in another state stay.
    """
    if server.shares:
        return _find_stay({server.vm_state: _SHARES}, server)
    if server.vm_state == states.PAUSED and cold:
        return _find_stay({states.PAUSED: _PAUSED}, server)
    if server.vm_state in (states.ACTIVE, states.PAUSED):
        return COLD if cold else LIVE
    return COLD if server.vm_state == states.STOPPED else _find_stay(_STAYS, server)


def plan_evacuation(server: Resident) -> Way | Stays:
    """Return how a server leaves a dead host, or why the server stays.

    Servers with shares, or in a state that permits no evacuation, stay.
    """
    if server.shares:
        return _find_stay({server.vm_state: _DEAD_SHARES}, server)
    if server.vm_state in states.row(EVACUATION.key).vm:
        return EVACUATION
    return _find_stay(_DEAD, server)


def is_busy(server: Resident, way: Way | Stays) -> bool:
    """Return True if the server's running action must end first.

    An action that the planned move may supersede need not end.
    """
    if not server.busy or isinstance(way, Stays):
        return bool(server.busy)
    row = states.row(way.key)
    return not (row.supersedes and server.task_state is not None and server.task_state in row.task)


def _find_stay(table: Mapping[str, Stays], server: Resident) -> Stays:
    stay = table.get(server.vm_state, Stays("it is {state}", "openstack server show {id}"))
    return Stays(stay.why.format(state=server.vm_state), stay.then.format(id=server.id))


def plan(
    servers: Sequence[Resident],
    way: Callable[[Resident], Way | Stays],
    select: Select,
    *,
    host: str,
    owing: Mapping[str, Collection[str]],
    live_capable: Collection[str],
) -> list[Planned]:
    """Return a line of the plan for each server, in their order.

    Within a call of a scheduler (``AT_ONCE`` servers), earlier servers take resources first. A
    server with an invalid request stays.

    Args:
        servers: The servers that are to leave.
        way: Returns how a server leaves, or why the server stays.
        select: Calls a scheduler.
        host: The host that the servers leave.
        owing: By server, the hosts that must still remove an old guest of the server.
        live_capable: Hosts that accept live migrations.

    Raises:
        NoAnswer: No scheduler answers.
    """
    lines, specs = {}, []
    for server in servers:
        decision = way(server)
        if isinstance(decision, Stays):
            lines[server.id] = Planned(server, stays=decision)
            continue
        try:
            hosts_with_guest = list(owing.get(server.id, ()))
            specs.append(
                replace(
                    spec(server),
                    excluded=[host, *hosts_with_guest],
                    hosts_with_removals=hosts_with_guest,
                )
            )
            lines[server.id] = Planned(server, decision)
        except errors.BadRequest as problem:
            lines[server.id] = Planned(
                server, stays=Stays(problem.text, _NOWHERE.format(id=server.id))
            )
    for start in range(0, len(specs), AT_ONCE):
        for selection in select(specs[start : start + AT_ONCE], start == 0):
            line = _add_destination(lines[selection.server], selection, live_capable)
            lines[selection.server] = replace(
                line, soon=line.way is None and bool(owing.get(selection.server))
            )
    return [lines[server.id] for server in servers]


def spec(server: Resident) -> RequestSpec:
    """Return the server's requirements for a host, as a request to the scheduler.

    Raises:
        BadRequest: A requested trait, resource, CPU policy or device model is invalid, hosts do not
            provide a requested resource, or the server would use no resource.
    """
    return request_spec.of(
        server.id,
        server.project_id,
        server.flavor,
        server.image,
        hints=server.hints,
        availability_zone=server.zone,
    )


def _add_destination(line: Planned, selection: Selection, live_capable: Collection[str]) -> Planned:
    if not selection.hosts:
        return Planned(
            line.server,
            stays=Stays(f"no valid host: {selection.reason}", _NOWHERE.format(id=line.server.id)),
        )
    hosts = [name for name in selection.hosts if line.way is not LIVE or name in live_capable]
    return replace(line, to=hosts[0]) if hosts else Planned(line.server, stays=_NO_LIVE)


def text(line: Planned) -> str:
    """Return the text of a plan's line, for the journal and the CLI."""
    if line.stays is not None:
        return stays(line.server, line.stays)
    assert line.way is not None, "a server that does not stay has a way"
    return f"{line.server.name} ({line.server.id}, {line.server.vm_state}) can go to {line.to}, {line.way.word}"


def stays(server: Resident, why: Stays) -> str:
    """Return two lines about a server that stays: the reason, and the remedy."""
    return f"{server.id} ({server.name}, {server.vm_state}) stays: {why.why}\n    {why.then}"


def too_many_down(hosts: Iterable[HostState], at: int, silence: int) -> str:
    """Return a warning if so many hosts are down that a broken network is more likely, else "".

    The limit is the share ``MAX_DOWN_SHARE``. Hosts that are forced down count as down. The check
    also counts hosts by their last contact, because conductors mark no host as down while most
    hosts are silent.

    Args:
        hosts: All hosts. With fewer than ``MAX_DOWN_HOSTS`` hosts, the result is "".
        at: The current time, in µs.
        silence: Seconds of silence after which a host counts as down.
    """
    all_hosts = list(hosts)
    down = [
        host.name
        for host in all_hosts
        if not host.answers or (host.seen_at or 0) < at - silence * SECOND
    ]
    if len(all_hosts) < MAX_DOWN_HOSTS or len(down) <= MAX_DOWN_SHARE * len(all_hosts):
        return ""
    return (
        f"{len(down)} of {len(all_hosts)} hosts are down at once ({', '.join(sorted(down)[:MAX_DOWN_HOSTS])}"
        f"{' …' if len(down) > MAX_DOWN_HOSTS else ''}), so a broken network is more likely than dead hosts. Check "
        "the network first. If the hosts are dead, repeat the command with --yes."
    )
