# SPDX-License-Identifier: Apache-2.0
"""``kilonova hosts``: zone, state, free resources and problems of each host.

The command reads only the database, so it works without a scheduler. For the reason why a
particular server finds no host, see ``kilonova explain``.
"""

from __future__ import annotations

import argparse
import json

from common.domain.clock import SECOND, iso
from common.domain.json_types import JsonObject
from common.domain.statuses import HostState
from common.domain.text import one_line
from common.service import config
from common.store import upgrades
from common.store.engine import Connection, Store, moment
from common.store.hosts import aggregates, host_keys, services
from common.store.hosts import hosts as store_hosts
from common.store.servers import failed_builds
from deploy.operator.output import columns

CAUSES = 3  # The number of causes shown for a host or an image. --json has all.
#: Seconds for which ``hosts`` shows refused messages of a host. --json always has them.
REFUSALS_SHOWN_SECONDS = 3600
#: Facts for filters besides the facts that the agent reports.
_FACTS = ("hypervisor_type", "hypervisor_version", "hypervisor_hostname", "cpu_info")


def hosts(options: argparse.Namespace) -> int:
    """Print all hosts as a table, or with ``--json`` as JSON.

    Return 0 if a host takes new servers, otherwise 1.
    """
    conf = config.load(options.config)
    store = Store.open(conf)
    upgrades.check(store)
    rows = store.read(
        lambda tx: overview(
            tx,
            conf.scheduler.default_availability_zone,
            conf.scheduler.build_failure_limit,
            conf.scheduler.build_failure_pause,
            conf.conductor.host_silence,
        )
    )
    store.close()
    print(json.dumps(rows, indent=1) if options.json else table(rows))
    return 0 if any(row["open"] for row in rows) else 1


def overview(
    tx: Connection, default_zone: str, limit: int, pause: int, silence: int
) -> list[JsonObject]:
    """Return one dictionary per host with state, resources and problems, sorted by name.

    Args:
        tx: The transaction.
        default_zone: Availability zone of hosts without one.
        limit: Number of failed builds in a row after which the scheduler leaves a host out. 0: the
            scheduler leaves no host out.
        pause: Seconds for which the scheduler leaves the host out.
        silence: Seconds of silence after which conductors declare a host down.
    """
    zones, at, keys = aggregates.zones(tx, default_zone), moment(tx), host_keys.generations(tx)
    failures = [failure._asdict() for failure in failed_builds.recent_failures(tx)]
    heard = services.hosts_heard(tx, silence)
    return sorted(
        (
            {
                **_row(
                    host,
                    zones[host["name"]],
                    at,
                    limit,
                    pause,
                    silence_of(host["seen_at"], host["up"], at, silence, heard),
                ),
                "has_key": host["name"] in keys,
                "failed_builds": [
                    failure for failure in failures if failure["host"] == host["name"]
                ],
            }
            for host in store_hosts.list_all(tx)
        ),
        key=lambda row: str(row["name"]),
    )


def _row(host: JsonObject, zone: str, at: int, limit: int, pause: int, silent: str) -> JsonObject:
    failures, wait = int(host["failures"]), None
    if 0 < limit <= failures:
        wait = max(0, -(-((host["failed_at"] or 0) + pause * SECOND - at) // SECOND))
    state = state_of(host["up"], host["forced_down"], silent)
    classes = {}
    for name, stock in sorted(host["inventory"].items()):
        total = int((stock["total"] - stock["reserved"]) * stock["ratio"])
        classes[name] = {"total": total, "used": stock["used"], "free": total - stock["used"]}
    return {
        "name": host["name"],
        "zone": zone,
        "state": state,
        "silent": silent,
        "last_heard": iso(host["seen_at"]),
        "enabled": not host["disabled"],
        "disabled_reason": host["disabled_reason"],
        "servers": host["running_vms"],
        "classes": classes,
        "failures": failures,
        "left_out": bool(wait),
        "tried_again_in": wait,
        "open": state == HostState.UP and not host["disabled"] and not wait,
        "traits": host["traits"],
        "refused_hostname": host["refused_hostname"],
        "refused_messages": host["refused_messages"],
        "refused_ago": None
        if host["refused_at"] is None
        else max(0, (at - host["refused_at"]) // SECOND),
        "facts": {**(host["facts"] or {}), **{name: host[name] for name in _FACTS}},
    }


def table(rows: list[JsonObject]) -> str:
    """Return a table with one line per host, and lines about images with several failed builds.

    The last line has the number of hosts that take new servers.

    Args:
        rows: The rows of ``overview``.
    """
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
                *(f"{amounts['free']}/{amounts['total']}" if amounts else "-" for amounts in stock),
                trouble(row),
            ]
        )
    open_hosts = sum(row["open"] for row in rows)
    return "\n".join(
        [
            columns(lines),
            *_images(rows),
            f"{len(rows)} hosts, {open_hosts} of them take new servers",
        ]
    )


def _images(rows: list[JsonObject]) -> list[str]:
    """Return a line for each image with several failed builds in the last hour.

    The cause may be the image and not the host.

    Args:
        rows: The rows of ``overview``.
    """
    failures_by_image: dict[str, list[JsonObject]] = {}
    for failure in (
        failure for row in rows for failure in row["failed_builds"] if failure["image"]
    ):
        failures_by_image.setdefault(failure["image"], []).append(failure)
    lines = []
    for image, failures in sorted(failures_by_image.items()):
        count, on = (
            sum(failure["builds"] for failure in failures),
            {failure["host"] for failure in failures},
        )
        if count > 1:
            lines.append(
                f"image {image}: {count} builds failed on {len(on)} of the hosts in the last hour: "
                f"{_causes(failures)}"
            )
    return lines


def _causes(failed: list[JsonObject]) -> str:
    """Return the ``CAUSES`` most frequent causes of failed builds in one line, most frequent first.

    The line ends with the number of the other causes, if any.
    """
    counts: dict[str, int] = {}
    for failure in failed:
        counts[failure["cause"]] = counts.get(failure["cause"], 0) + failure["builds"]
    causes = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{count} times: {cause}" if count > 1 else cause for cause, count in causes[:CAUSES]]
    return one_line(
        "; ".join(
            [*shown, *([f"and {len(causes) - CAUSES} others"] if len(causes) > CAUSES else [])]
        )
    )


def state(row: JsonObject) -> str:
    """Return the text of the host's ``HostState``, and then ", disabled" if it is not enabled.

    Args:
        row: A row of ``overview``.
    """
    return str(row["state"]) + ("" if row["enabled"] else ", disabled")


def state_of(is_up: bool | None, is_forced_down: bool, silent: str) -> HostState:
    """Return the state of a service.

    Args:
        is_up: True if the conductors count the service as up.
        is_forced_down: True if an admin or a fencing declared the host dead.
        silent: The text of ``silence_of``.
    """
    if is_forced_down:
        return HostState.FORCED_DOWN
    if not is_up:
        return HostState.DOWN
    return HostState.UNKNOWN if silent else HostState.UP


def silence_of(
    seen_at: int | None, is_up: bool | None, at: int, limit: int, heard: services.HostsHeard
) -> str:
    """Return a text about a silent host that still counts as up, or "" for any other host.

    The text has the duration of the silence and the operator's next check. If conductors hear too
    few hosts to declare this host down, the text also has the numbers.

    Args:
        seen_at: The time of the host's last sign of life in µs, or None without any.
        is_up: True if the host counts as up.
        at: The present time of the database, in µs.
        limit: Seconds of silence after which conductors declare a host down.
        heard: How many of the compute hosts that are up conductors hear.

    Returns:
        The text, or "" if the host counts as down, or if its last report is missing or recent.
    """
    if not is_up or seen_at is None or at - seen_at <= limit * SECOND:
        return ""
    text = f"last heard {(at - seen_at) // SECOND} s ago"
    if heard.are_too_few:
        return (
            f"{text}: not declared down, because only {heard.heard} of {heard.known} hosts are heard. Check "
            "the broker, the conductors and the network first"
        )
    return f"{text}: no conductor has declared it down yet. Check whether a conductor runs"


def notices(tx: Connection) -> list[str]:
    """Return two lines for each refusal of a host: the refusal and the next step.

    A refusal is about messages in the host's name, or about a hypervisor name that another host
    has. Refused messages older than ``REFUSALS_SHOWN_SECONDS`` are left out.
    """
    lines = []
    for row in store_hosts.list_refused(tx, REFUSALS_SHOWN_SECONDS):
        if row.refused_ago is not None:
            lines += [
                f"host {row.name}: {refused_messages(row.refused_messages, row.refused_ago)}",
                "    next    read the reason in the log of the conductors: journalctl -u "
                f"kilonova-conductor --grep 'name of a host is refused.*{row.name}'. If you know the sender, "
                f"give it new keys: kilonova host rotate {row.name}. If not, its keys may be "
                f"stolen: kilonova host remove {row.name}",
            ]
        if row.refused_hostname is not None:
            lines += [
                f"host {row.name}: {refused_hostname(row.refused_hostname, row.hypervisor_hostname)}",
                "    next    give one of the two machines another host name. If this machine never "
                f"had that name, it may be stolen: kilonova host remove {row.name}",
            ]
    return [one_line(line, 1000) for line in lines]


def refused_messages(number: int, ago: int) -> str:
    """Return a text about refused messages in the name of a host.

    Args:
        number: The number of refused messages.
        ago: Seconds since the last one.
    """
    messages = "1 message" if number == 1 else f"{number} messages"
    return f"refused in its name: {messages}, the last one {ago} s ago"


def refused_hostname(refused: str, shown: str) -> str:
    """Return a text about a host that reports the hypervisor name of another host.

    Args:
        refused: The name that the host reports.
        shown: The name that the host keeps.
    """
    return (
        f"it reports the hypervisor name {refused}, which another host has, and is shown as {shown}"
    )


def trouble(row: JsonObject) -> str:
    """Return the host's problems, with the reasons of its state, separated by semicolons, or "".

    Args:
        row: A row of ``overview``.
    """
    problems = [row["disabled_reason"]] if row["disabled_reason"] and not row["enabled"] else []
    if row["silent"]:
        problems.append(row["silent"])
    if row["left_out"]:
        problems.append(
            f"left out after {row['failures']} failed builds in a row, tried again in "
            f"{row['tried_again_in']} s"
        )
    elif row["tried_again_in"] is not None:
        problems.append(f"{row['failures']} builds failed in a row; the next server tries it")
    if row["failed_builds"]:
        count = sum(failure["builds"] for failure in row["failed_builds"])
        problems.append(
            f"{count} builds failed there in the last hour: {_causes(row['failed_builds'])}"
        )
    if row["refused_ago"] is not None and row["refused_ago"] < REFUSALS_SHOWN_SECONDS:
        problems.append(
            f"{refused_messages(row['refused_messages'], row['refused_ago'])}: a conductor's log "
            "has the reason"
        )
    if row["refused_hostname"]:
        problems.append(
            refused_hostname(row["refused_hostname"], row["facts"]["hypervisor_hostname"])
        )
    if not row["has_key"]:
        problems.append(
            f"it has no key, so conductors refuse its messages: kilonova host add {row['name']}"
        )
    return "; ".join(problems)
