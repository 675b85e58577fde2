# SPDX-License-Identifier: Apache-2.0
"""Checks of every request, independent of the enabled filters.

They cover the hosts that the request names, traits, resources, the server group, NUMA nodes and
devices. ``Filters.checks`` calls them.

Invariant: a host passes exactly if a claim would succeed. The arithmetic of resource classes is
that of Placement and must equal that of the claim (``common.store.placement.allocations``).

The checks of Nova's NUMATopologyFilter and PciPassthroughFilter examine hosts one by one, and only
hosts that passed all other checks. Hosts with equal hardware and without holders are examined once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from common.domain import errors, numa
from common.domain.hardware import Hardware, hardware
from common.domain.hardware import traits as traits_of
from common.domain.models import RequestSpec
from scheduler.filters.check import UNLIMITED, Check
from scheduler.snapshot import Mask, Parts, Snapshot


def named_hosts(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Require ``force_host`` and ``requested_host`` if set, and reject ``excluded`` hosts."""
    for name in {spec.force_host, spec.requested_host} - {None}:
        is_named = np.zeros(len(snapshot.names), np.bool_)
        if name in snapshot.rows:
            is_named[snapshot.rows[name]] = True
        yield Check(is_named, "not the requested host")
    with_cleanup = set(spec.hosts_with_removals)
    for text, excluded in (
        ("where the server is or was tried", set(spec.excluded) - with_cleanup),
        ("where an old guest of the server is not deleted yet", with_cleanup),
    ):
        if excluded:
            is_other = np.ones(len(snapshot.names), np.bool_)
            is_other[[snapshot.rows[name] for name in excluded if name in snapshot.rows]] = False
            yield Check(is_other, text)


def alive(snapshot: Snapshot) -> Iterable[Check]:
    """Require a compute service that is up and not forced down.

    For a request with ``force_host`` these checks replace the enabled filters, and the checks of
    failed builds, zone, disabled hosts and damaged aggregates.
    """
    yield Check(snapshot.served, "without a compute service")
    yield Check(~snapshot.forced_down, "forced down")
    yield Check(snapshot.up, "without a recent report")


def failing_hosts(snapshot: Snapshot, limit: int) -> Iterable[Check]:
    """Reject hosts with at least ``limit`` consecutive failed builds during their pause.

    After the pause such a host is tried with one server. A limit of 0 disables the check.
    """
    if not limit or not (snapshot.failures >= limit).any():
        return
    is_failing = snapshot.failures >= limit
    is_paused = is_failing & (snapshot.waits > 0)
    seconds_left = int(snapshot.waits[is_paused].min()) if is_paused.any() else 0
    fewest_failures = int(snapshot.failures[is_paused].min()) if is_paused.any() else limit

    def text(failures: int, seconds: int) -> str:
        return f"left out after {failures} failed builds in a row, tried again in {seconds} s"

    yield Check(
        ~is_paused,
        text(fewest_failures, seconds_left),
        room=np.where(is_failing, 1, UNLIMITED),
        each=lambda row: text(int(snapshot.failures[row]), int(snapshot.waits[row])),
    )


def promises(snapshot: Snapshot, spec: RequestSpec, passing: Mask, count: int) -> Iterator[Check]:
    """Yield the checks that the claim repeats: traits, resources, server group, NUMA and devices.

    For a rebuild only the traits of the new image are checked. See ``Filters.checks`` for the
    arguments.
    """
    # The server keeps its resources, so only the traits of the new image matter.
    if spec.is_rebuild:
        yield from traits(snapshot, *_read_image_traits(spec))
        return
    yield from traits(snapshot, spec.required_traits, spec.forbidden_traits)
    yield from resources(snapshot, spec)
    yield from group(snapshot, spec)
    yield from parts(snapshot, spec, passing, count)


def _read_image_traits(spec: RequestSpec) -> tuple[list[str], list[str]]:
    if spec.flavor is None:
        return [], []
    return traits_of(replace(spec.flavor, extra_specs={}), spec.image_properties)


def traits(
    snapshot: Snapshot, required: Iterable[str], forbidden: Iterable[str]
) -> Iterable[Check]:
    """Require hosts with all required traits and without forbidden traits."""
    no_hosts = np.zeros(len(snapshot.names), np.bool_)
    for name in required:
        yield Check(snapshot.traits.get(name, no_hosts), f"without the trait {name}")
    for name in forbidden:
        yield Check(~snapshot.traits.get(name, no_hosts), f"with the forbidden trait {name}")


def resources(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Require the free amount of every resource class of the request.

    The host must also permit this amount for a single server. On ``holds_on``, the resources that
    the server holds there already count as free.
    """
    for name, amount in sorted(spec.resources.items()):
        if amount <= 0:
            continue
        stock = snapshot.stock.get(name)
        if stock is None:
            yield Check(np.zeros(len(snapshot.names), np.bool_), f"without {name}")
            continue
        free = stock.free
        if spec.holds_on in snapshot.rows:
            free = free.copy()
            free[snapshot.rows[spec.holds_on]] += spec.holds.get(name, 0)
        yield Check(stock.most > 0, f"without {name}")
        yield Check(free >= amount, f"short of {name}", amount, free, free // amount)
        allowed = (amount >= stock.least) & (amount <= stock.most) & (amount % stock.step == 0)
        most = int(stock.most[~allowed].max(initial=0))
        yield Check(
            allowed,
            f"not able to give one server {amount} of {name}"
            + f" (at most {most})" * (most < amount),
        )


def group(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Require that the hard policy of the request's server group holds with one more member.

    Weighers apply the soft policies.
    """
    server_group = snapshot.groups.get(spec.group or "")
    if server_group is None or server_group.policy not in ("affinity", "anti-affinity"):
        return
    members = np.zeros(len(snapshot.names), np.int64)
    for row, number in server_group.members.items():
        members[row] = number
    if server_group.policy == "anti-affinity":
        text = (
            f"with {server_group.most} or more servers of the group"
            if server_group.most > 1
            else "with a server of the group"
        )
        yield Check(members < server_group.most, text, room=server_group.most - members)
    elif (members > 0).any():
        # While a member moves, it counts on two hosts. Then no host has all members.
        yield Check(members == members.sum(), "away from the servers of the group")
    else:
        yield Check(
            np.ones(len(snapshot.names), np.bool_),
            "away from the servers of the group",
            settles=True,
        )


# --- NUMA nodes, dedicated CPUs, large pages and PCI devices ---
def parts(snapshot: Snapshot, spec: RequestSpec, passing: Mask, count: int) -> Iterable[Check]:
    """Require free NUMA nodes and dedicated CPUs, and then free devices too, for the guest.

    A request without a flavor, or for a guest that needs none of these, has no check. If the
    hardware options of flavor and image are invalid, no host passes.

    Args:
        snapshot: The hosts.
        spec: The request.
        passing: Only these hosts are examined.
        count: Largest room that is counted per host.
    """
    if spec.flavor is None:
        return
    try:
        needed = hardware(spec.flavor, spec.image_properties)
    # For example, an older flavor. Other requests of the call must not fail, so no host passes.
    except errors.BadRequest as problem:
        yield Check(
            np.zeros(len(snapshot.names), np.bool_),
            f"not able to give the server its hardware: {problem.text}",
        )
        return
    if not needed.needs_assignment:
        return
    numa_nodes = replace(needed, devices=())
    if numa_nodes.needs_assignment:
        yield _check_parts(
            snapshot,
            numa_nodes,
            passing,
            count,
            _describe_numa_nodes(numa_nodes, spec.flavor.memory_mb),
        )
    if needed.devices:
        devices = ", ".join(f"{request.count} of {request.name}" for request in needed.devices)
        yield _check_parts(
            snapshot, needed, passing, count, f"without free PCI devices ({devices})"
        )


def _describe_numa_nodes(needed: Hardware, memory_mb: int) -> str:
    number = len(needed.numa_nodes)
    needs = [f"{number} NUMA node{'s' * (number > 1)} with {memory_mb} MiB"] if number else []
    needs += [f"{len(needed.dedicated)} CPUs of its own"] if needed.dedicated else []
    needs += (
        [f"pages of {needed.page_kb} KiB" if needed.page_kb > 0 else "large pages"]
        if needed.page_kb
        else []
    )
    return f"without a place for a guest with {', '.join(needs)}"


def _check_parts(
    snapshot: Snapshot, needed: Hardware, passing: Mask, count: int, text: str
) -> Check:
    room = np.zeros(len(snapshot.names), np.int64)
    # Equal hosts share one ``Parts`` object, so the room is computed once per object.
    rooms: dict[int, int] = {}
    for row in np.flatnonzero(passing).tolist():
        host = snapshot.parts.get(row)
        if host is not None:
            if id(host) not in rooms:
                rooms[id(host)] = _count_room(host, needed, count)
            room[row] = rooms[id(host)]
    return Check(room > 0, text, room=room)


def _count_room(host: Parts, needed: Hardware, count: int) -> int:
    """Return how many such guests fit on the host, up to ``count``."""
    assignments, number = list(host.held), 0
    while (
        number < count
        and (assignment := numa.fit(host.numa_nodes, host.devices, assignments, needed)) is not None
    ):
        assignments.append(assignment)
        number += 1
    return number
