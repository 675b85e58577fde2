# SPDX-License-Identifier: Apache-2.0
"""What is asked of every request, whatever the operator enables: the hosts it names, traits,
resources, group, parts.

Called by ``Filters.checks``. The arithmetic of a resource class is Placement's, and must stay the
same as that of the claim (``common.store.placement.allocations``): a host passes here exactly when
a claim on it would. What NUMATopologyFilter and PciPassthroughFilter ask in Nova is asked of each
host by itself, and only when it passed all else; hosts that are alike and hold nothing are asked
once.
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
    """The host that the request names is the only one; an excluded host is none."""
    for name in {spec.force_host, spec.requested_host} - {None}:
        only = np.zeros(len(snapshot.names), np.bool_)
        if name in snapshot.rows:
            only[snapshot.rows[name]] = True
        yield Check(only, "not the requested host")
    debts = set(spec.debts)
    for text, excluded in (
        ("where it is or was tried", set(spec.excluded) - debts),
        ("where an old guest of it is still to be removed", debts),
    ):
        if excluded:
            others = np.ones(len(snapshot.names), np.bool_)
            others[[snapshot.rows[name] for name in excluded if name in snapshot.rows]] = False
            yield Check(others, text)


def alive(snapshot: Snapshot) -> Iterable[Check]:
    """Asked of a forced host instead of the operator's filters: it may be disabled, but something
    must answer there."""
    yield Check(snapshot.served, "without a compute service")
    yield Check(~snapshot.forced_down, "forced down")
    yield Check(snapshot.up, "not heard from")


def failing_hosts(snapshot: Snapshot, limit: int) -> Iterable[Check]:
    """A host where builds failed in a row is left out for a while, and then tried with one
    server."""
    if not limit or not (snapshot.failures >= limit).any():
        return
    failing = snapshot.failures >= limit
    left_out = failing & (snapshot.waits > 0)
    again = int(snapshot.waits[left_out].min()) if left_out.any() else 0
    fewest = int(snapshot.failures[left_out].min()) if left_out.any() else limit

    def text(failures: int, seconds: int) -> str:
        return f"left out after {failures} failed builds in a row, tried again in {seconds} s"

    yield Check(
        ~left_out,
        text(fewest, again),
        room=np.where(failing, 1, UNLIMITED),
        each=lambda row: text(int(snapshot.failures[row]), int(snapshot.waits[row])),
    )


def promises(snapshot: Snapshot, spec: RequestSpec, passing: Mask, count: int) -> Iterator[Check]:
    """What a host must have for the server to run there as promised. See ``Filters.checks`` for the
    arguments."""
    if spec.is_rebuild:  # it has its place; only the traits that its new image asks for are news
        yield from traits(snapshot, *_traits_of_image(spec))
        return
    yield from traits(snapshot, spec.required_traits, spec.forbidden_traits)
    yield from resources(snapshot, spec)
    yield from group(snapshot, spec)
    yield from parts(snapshot, spec, passing, count)


def _traits_of_image(spec: RequestSpec) -> tuple[list[str], list[str]]:
    if spec.flavor is None:
        return [], []
    return traits_of(replace(spec.flavor, extra_specs={}), spec.image_properties)


def traits(
    snapshot: Snapshot, required: Iterable[str], forbidden: Iterable[str]
) -> Iterable[Check]:
    """The host has these traits, and not those."""
    nobody = np.zeros(len(snapshot.names), np.bool_)
    for name in required:
        yield Check(snapshot.traits.get(name, nobody), f"without the trait {name}")
    for name in forbidden:
        yield Check(~snapshot.traits.get(name, nobody), f"with the forbidden trait {name}")


def resources(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """The host has every resource class of the request, in this amount, free."""
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
    """The hard policy of the request's server group holds with one more member there. Soft ones are
    weighed."""
    wanted = snapshot.groups.get(spec.group or "")
    if wanted is None or wanted.policy not in ("affinity", "anti-affinity"):
        return
    members = np.zeros(len(snapshot.names), np.int64)
    for row, number in wanted.members.items():
        members[row] = number
    if wanted.policy == "anti-affinity":
        text = (
            f"with {wanted.most} or more servers of the group"
            if wanted.most > 1
            else "with a server of the group"
        )
        yield Check(members < wanted.most, text, room=wanted.most - members)
    elif (members > 0).any():
        # One that moves is in two places until it has moved: no host then has all of the group.
        yield Check(members == members.sum(), "away from the servers of the group")
    else:
        yield Check(
            np.ones(len(snapshot.names), np.bool_),
            "away from the servers of the group",
            settles=True,
        )


# --- what a guest needs of its host piece by piece ---
def parts(snapshot: Snapshot, spec: RequestSpec, passing: Mask, count: int) -> Iterable[Check]:
    """The host has the NUMA nodes, and then the devices, that the guest needs; room up to
    ``count``."""
    if spec.flavor is None:
        return
    try:
        wanted = hardware(spec.flavor, spec.image_properties)
    except (
        errors.BadRequest
    ) as problem:  # of an older flavor, say: no host makes it, and others are asked beside it
        yield Check(
            np.zeros(len(snapshot.names), np.bool_),
            f"not able to make its hardware: {problem.text}",
        )
        return
    if not wanted.needs_assignment:
        return
    numa_nodes = replace(wanted, devices=())
    if numa_nodes.needs_assignment:
        yield _check(
            snapshot,
            numa_nodes,
            passing,
            count,
            _numa_nodes_text(numa_nodes, spec.flavor.memory_mb),
        )
    if wanted.devices:
        devices = ", ".join(f"{request.count} of {request.name}" for request in wanted.devices)
        yield _check(snapshot, wanted, passing, count, f"without free PCI devices ({devices})")


def _numa_nodes_text(wanted: Hardware, memory_mb: int) -> str:
    number = len(wanted.numa_nodes)
    needs = [f"{number} NUMA node{'s' * (number > 1)} with {memory_mb} MiB"] if number else []
    needs += [f"{len(wanted.dedicated)} CPUs of its own"] if wanted.dedicated else []
    needs += (
        [f"pages of {wanted.page_kb} KiB" if wanted.page_kb > 0 else "large pages"]
        if wanted.page_kb
        else []
    )
    return f"without a place for a guest with {', '.join(needs)}"


def _check(snapshot: Snapshot, wanted: Hardware, passing: Mask, count: int, text: str) -> Check:
    room = np.zeros(len(snapshot.names), np.int64)
    known: dict[
        int, int
    ] = {}  # hosts that are alike share one record: what fits there is found once
    for row in np.flatnonzero(passing).tolist():
        host = snapshot.parts.get(row)
        if host is not None:
            if id(host) not in known:
                known[id(host)] = _room(host, wanted, count)
            room[row] = known[id(host)]
    return Check(room > 0, text, room=room)


def _room(host: Parts, wanted: Hardware, count: int) -> int:
    """How many such guests fit there, counted up to ``count``."""
    held, fitted = list(host.held), 0
    while (
        fitted < count
        and (assignment := numa.fit(host.numa_nodes, host.devices, held, wanted)) is not None
    ):
        held.append(assignment)
        fitted += 1
    return fitted
