# SPDX-License-Identifier: Apache-2.0
"""``kilonova hosts``: where servers can go: zone, state, what is free of what there is, and which hosts are left out.

Read only, from the database alone, so it also answers while no scheduler does. A class with no room left is one of
the numbers here; why a certain server finds no host is what ``kilonova explain`` says.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from common import config
from common.clock import SECOND
from common.store import aggregates, host_keys, upgrades
from common.store import hosts as store_hosts
from common.store.engine import Store, moment

#: What filters may ask of a host beside what its agent calls facts.
_FACTS = ("hypervisor_type", "hypervisor_version", "hypervisor_hostname", "cpu_info")


def hosts(options: argparse.Namespace) -> int:
    """Print them; 1 when none of them takes new servers."""
    conf = config.load(options.config)
    store = Store.opened(conf.database)
    upgrades.check(store)
    rows = store.read(lambda tx: overview(tx, conf.scheduler.default_availability_zone,
                                          conf.scheduler.build_failure_limit, conf.scheduler.build_failure_pause))
    store.close()
    print(json.dumps(rows, indent=1) if options.json else table(rows))
    return 0 if any(row["open"] for row in rows) else 1


def overview(tx: Any, default_zone: str, limit: int, pause: int) -> list[dict[str, Any]]:
    """One dict a host. limit, pause: failed builds in a row after which it is left out, and for how many seconds."""
    zones, at, keys = aggregates.zones(tx, default_zone), moment(tx), host_keys.generations(tx)
    return sorted(({**_row(host, zones[host["name"]], at, limit, pause), "has_key": host["name"] in keys}
                   for host in store_hosts.list_all(tx)), key=lambda row: str(row["name"]))


def _row(host: dict[str, Any], zone: str, at: int, limit: int, pause: int) -> dict[str, Any]:
    failures, wait = int(host["failures"]), None
    if 0 < limit <= failures:
        wait = max(0, -(-((host["failed_at"] or 0) + pause * SECOND - at) // SECOND))
    state = "forced down" if host["forced_down"] else "up" if host["up"] else "down"
    classes = {}
    for name, stock in sorted(host["inventory"].items()):
        total = int((stock["total"] - stock["reserved"]) * stock["ratio"])
        classes[name] = {"total": total, "used": stock["used"], "free": total - stock["used"]}
    return {"name": host["name"], "zone": zone, "state": state, "enabled": not host["disabled"],
            "disabled_reason": host["disabled_reason"], "servers": host["running_vms"], "classes": classes,
            "failures": failures, "left_out": bool(wait), "tried_again_in": wait,
            "open": state == "up" and not host["disabled"] and not wait, "traits": host["traits"],
            "facts": {**(host["facts"] or {}), **{name: host[name] for name in _FACTS}}}


def table(rows: list[dict[str, Any]]) -> str:
    """One line a host; the columns are as wide as what stands in them."""
    names = sorted({name for row in rows for name in row["classes"]})
    lines = [["host", "zone", "state", "servers", *(f"{name} free/total" for name in names), ""]]
    for row in rows:
        stock = [row["classes"].get(name) for name in names]
        lines.append([row["name"], row["zone"], state(row), str(row["servers"]),
                      *(f"{one['free']}/{one['total']}" if one else "-" for one in stock), trouble(row)])
    opened = sum(row["open"] for row in rows)
    return f"{columns(lines)}\n{len(rows)} hosts, {opened} of them take new servers"


def state(row: dict[str, Any]) -> str:
    """up, down or forced down; and disabled."""
    return str(row["state"]) + ("" if row["enabled"] else ", disabled")


def trouble(row: dict[str, Any]) -> str:
    """Why it takes no servers, where its state alone does not say it."""
    said = [row["disabled_reason"]] if row["disabled_reason"] and not row["enabled"] else []
    if row["left_out"]:
        said.append(f"left out after {row['failures']} failed builds in a row, tried again in "
                    f"{row['tried_again_in']} s")
    elif row["tried_again_in"] is not None:
        said.append(f"{row['failures']} builds failed in a row; the next server tries it")
    if not row["has_key"]:
        said.append(f"it has no key, so nobody hears it: kilonova host add {row['name']}")
    return "; ".join(said)


def columns(lines: Iterable[list[str]]) -> str:
    """The cells under one another."""
    lines = list(lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                     for line in lines)
