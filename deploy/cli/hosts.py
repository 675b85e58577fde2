# SPDX-License-Identifier: Apache-2.0
"""``kilonova hosts``: where servers can go: zone, state, what is free of what there is, and which
hosts are left out.

Read only, from the database alone, so it also answers while no scheduler does. A class with no room
left is one of the numbers here; why a certain server finds no host is what ``kilonova explain``
says.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from common import config
from common.clock import SECOND, iso
from common.json_types import JsonObject
from common.store import upgrades
from common.store.engine import Connection, Store, moment
from common.store.hosts import aggregates, host_keys
from common.store.hosts import hosts as store_hosts
from common.store.servers import failed_builds
from common.text import one_line

CAUSES = 3  # that are spelled out for a host or an image; all of them in --json
#: For how long ``hosts`` shows that messages of a host were refused; --json always has them.
REFUSALS_SHOWN_SECONDS = 3600
#: What filters may ask of a host beside what its agent calls facts.
_FACTS = ("hypervisor_type", "hypervisor_version", "hypervisor_hostname", "cpu_info")


def hosts(options: argparse.Namespace) -> int:
    """Print them; 1 when none of them takes new servers."""
    conf = config.load(options.config)
    store = Store.opened(conf)
    upgrades.check(store)
    rows = store.read(
        lambda tx: overview(
            tx,
            conf.scheduler.default_availability_zone,
            conf.scheduler.build_failure_limit,
            conf.scheduler.build_failure_pause,
        )
    )
    store.close()
    print(json.dumps(rows, indent=1) if options.json else table(rows))
    return 0 if any(row["open"] for row in rows) else 1


def overview(tx: Connection, default_zone: str, limit: int, pause: int) -> list[JsonObject]:
    """One dict a host. limit, pause: failed builds in a row after which it is left out, and for how
    many seconds."""
    zones, at, keys = aggregates.zones(tx, default_zone), moment(tx), host_keys.generations(tx)
    failed = [one._asdict() for one in failed_builds.recent_failures(tx)]
    return sorted(
        (
            {
                **_row(host, zones[host["name"]], at, limit, pause),
                "has_key": host["name"] in keys,
                "failed_builds": [one for one in failed if one["host"] == host["name"]],
            }
            for host in store_hosts.list_all(tx)
        ),
        key=lambda row: str(row["name"]),
    )


def _row(host: JsonObject, zone: str, at: int, limit: int, pause: int) -> JsonObject:
    failures, wait = int(host["failures"]), None
    if 0 < limit <= failures:
        wait = max(0, -(-((host["failed_at"] or 0) + pause * SECOND - at) // SECOND))
    state = "forced down" if host["forced_down"] else "up" if host["up"] else "down"
    classes = {}
    for name, stock in sorted(host["inventory"].items()):
        total = int((stock["total"] - stock["reserved"]) * stock["ratio"])
        classes[name] = {"total": total, "used": stock["used"], "free": total - stock["used"]}
    return {
        "name": host["name"],
        "zone": zone,
        "state": state,
        "last_heard": iso(host["seen_at"]),
        "enabled": not host["disabled"],
        "disabled_reason": host["disabled_reason"],
        "servers": host["running_vms"],
        "classes": classes,
        "failures": failures,
        "left_out": bool(wait),
        "tried_again_in": wait,
        "open": state == "up" and not host["disabled"] and not wait,
        "traits": host["traits"],
        "refused_messages": host["refused_messages"],
        "refused_ago": None
        if host["refused_at"] is None
        else max(0, (at - host["refused_at"]) // SECOND),
        "facts": {**(host["facts"] or {}), **{name: host[name] for name in _FACTS}},
    }


def table(rows: list[JsonObject]) -> str:
    """One line a host; the columns are as wide as what stands in them."""
    names = sorted({name for row in rows for name in row["classes"]})
    lines = [["host", "zone", "state", "servers", *(f"{name} free/total" for name in names), ""]]
    for row in rows:
        stock = [row["classes"].get(name) for name in names]
        lines.append(
            [
                row["name"],
                row["zone"],
                state(row),
                str(row["servers"]),
                *(f"{one['free']}/{one['total']}" if one else "-" for one in stock),
                trouble(row),
            ]
        )
    opened = sum(row["open"] for row in rows)
    return "\n".join(
        [columns(lines), *_images(rows), f"{len(rows)} hosts, {opened} of them take new servers"]
    )


def _images(rows: list[JsonObject]) -> list[str]:
    """Images of which builds failed more than once lately: what is wrong may be theirs."""
    found: dict[str, list[JsonObject]] = {}
    for failed in (one for row in rows for one in row["failed_builds"] if one["image"]):
        found.setdefault(failed["image"], []).append(failed)
    said = []
    for image, all_failed in sorted(found.items()):
        count, on = sum(one["builds"] for one in all_failed), {one["host"] for one in all_failed}
        if count > 1:
            said.append(
                f"image {image}: {count} builds failed on {len(on)} of the hosts in the last hour: "
                f"{_causes(all_failed)}"
            )
    return said


def _causes(failed: list[JsonObject]) -> str:
    """Each cause once, the most frequent first."""
    counts: dict[str, int] = {}
    for one in failed:
        counts[one["cause"]] = counts.get(one["cause"], 0) + one["builds"]
    most = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{count} times: {cause}" if count > 1 else cause for cause, count in most[:CAUSES]]
    return one_line(
        "; ".join([*shown, *([f"and {len(most) - CAUSES} others"] if len(most) > CAUSES else [])])
    )


def state(row: JsonObject) -> str:
    """up, down or forced down; and disabled."""
    return str(row["state"]) + ("" if row["enabled"] else ", disabled")


def trouble(row: JsonObject) -> str:
    """What is wrong with it, where its state alone does not say it."""
    said = [row["disabled_reason"]] if row["disabled_reason"] and not row["enabled"] else []
    if row["left_out"]:
        said.append(
            f"left out after {row['failures']} failed builds in a row, tried again in "
            f"{row['tried_again_in']} s"
        )
    elif row["tried_again_in"] is not None:
        said.append(f"{row['failures']} builds failed in a row; the next server tries it")
    if row["failed_builds"]:
        count = sum(one["builds"] for one in row["failed_builds"])
        said.append(
            f"{count} builds failed there in the last hour: {_causes(row['failed_builds'])}"
        )
    if row["refused_ago"] is not None and row["refused_ago"] < REFUSALS_SHOWN_SECONDS:
        said.append(
            f"{row['refused_messages']} messages in its name were refused, the last one "
            f"{row['refused_ago']} s ago: a conductor's log says why"
        )
    if not row["has_key"]:
        said.append(f"it has no key, so nobody hears it: kilonova host add {row['name']}")
    return "; ".join(said)


def columns(lines: Iterable[list[str]]) -> str:
    """Return the cells under one another, each on one line."""
    lines = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
