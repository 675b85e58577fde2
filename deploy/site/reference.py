# SPDX-License-Identifier: Apache-2.0
"""The generated tables of the site: operations and actions of the API, options, filters, weighers.

    python -m deploy.site.reference            # all of them, as a JSON object: name -> Markdown

docs/conf.py runs this for each build, and inserts each table at ``<!-- table: NAME -->``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence

from oslo_config import cfg

from common.domain import states
from common.service.config import OPTIONS
from compute_api.compute.request.microversions import HISTORY
from compute_api.compute.routes import GONE, ROUTES, Route
from deploy.operator.config import allowed, default
from scheduler import filters, weighers


def api() -> str:
    """Return Markdown: operations in a table per resource, and a table of the removed paths."""
    kinds: dict[str, list[Route]] = {}
    for route in sorted(ROUTES, key=lambda route: _kind(route.path)):
        kinds.setdefault(_kind(route.path), []).append(route)
    parts = [
        f"## {kind}\n\n"
        + _table(("operation", "microversions", "policy", "success"), map(_operation, routes))
        for kind, routes in kinds.items()
    ]
    gone = ((f"`{path}`", methods.replace(" ", ", ")) for path, methods in sorted(GONE.items()))
    parts.append("## Removed: 410 at every microversion\n\n" + _table(("path", "methods"), gone))
    return "\n".join(parts)


def actions() -> str:
    """Return a Markdown table of all server actions, including delete and other operations."""
    return _table(
        ("action", "microversions", "policy", "from the states", "then", "success"),
        map(_action, states.ACTIONS),
    )


def configuration() -> str:
    """Return Markdown: a heading and a table of options for each section of the configuration."""
    return "\n".join(
        f"## [{group}]\n\n" + _table(("option", "type", "default", ""), map(_option, options))
        for group, options in OPTIONS.items()
    )


def filters_table() -> str:
    """Return a Markdown table of the built-in filters, by their names in ``enabled_filters``."""
    enabled = next(
        option for option in OPTIONS["scheduler"] if option.dest == "enabled_filters"
    ).default
    return _table(
        ("name", "effect", "by default", "also for rebuilds"),
        (
            (
                f"`{name}`",
                _passes(entry),
                "yes" if name in enabled or entry.make is None else "",
                "yes" if entry.on_rebuild else "",
            )
            for name, entry in filters.BUILT_IN.items()
        ),
    )


def weighers_table() -> str:
    """Return a Markdown table of the built-in weighers, by their names in ``enabled_weighers``."""
    conf = cfg.ConfigOpts()
    for group, options in OPTIONS.items():
        conf.register_opts(options, None if group == "DEFAULT" else group)
    conf([], default_config_files=[])
    helps = {entry.dest: entry.help or "" for entry in OPTIONS["scheduler"]} | {
        f"metrics_{entry.dest}": entry.help or "" for entry in OPTIONS["metrics"]
    }
    built_in = {name: make(conf) for name, make in weighers.BUILT_IN.items()}
    return _table(
        ("name", "multiplier", "default", ""),
        (
            (f"`{name}`", f"`{entry.key}`", f"{entry.multiplier:g}", _cell(helps[entry.key]))
            for name, entry in built_in.items()
        ),
    )


#: Name in a page's placeholder -> function that returns the table.
TABLES: dict[str, Callable[[], str]] = {
    "api": api,
    "actions": actions,
    "configuration": configuration,
    "filters": filters_table,
    "weighers": weighers_table,
}


def _kind(path: str) -> str:
    return path.split("/")[1]


def _operation(route: Route) -> Sequence[str]:
    return (
        f"`{route.method} {route.path}`",
        _versions(route.since, route.until),
        f"`{route.policy}`" if route.policy else "depends on the request",
        str(route.success),
    )


def _action(row: states.Action) -> Sequence[str]:
    name = f"{row.key} {row.when[1]}" if row.when else row.key
    return (
        f"`{name}`",
        _versions(row.since, row.until),
        f"`{row.policy}`",
        "any" if row.vm == states.ANY else ", ".join(row.vm),
        row.after or "unchanged",
        str(row.success),
    )


def _versions(since: str, until: str | None) -> str:
    if since == "2.1" and until is None:
        return "all"
    return f"{since} to {until or HISTORY[-1][0]}"


def _option(option: cfg.Opt) -> Sequence[str]:
    kind = str(option.type).split("(")[0].lower()
    value = default(option)
    words = _cell(option.help or "")
    limits = allowed(option)
    return (
        f"`{option.dest}`",
        kind + " (secret)" * bool(option.secret),
        f"`{_cell(value)}`" if value else "",
        f"{words} Allowed: {_cell(limits)}." if limits else words,
    )


def _passes(entry: filters.Entry) -> str:
    """Return the filter's effect for a table cell: the first paragraph of its docstring.

    For a filter that cannot be disabled, the text is that it is always checked. A filter with a
    limit in the metadata of aggregates gets a second sentence about this.
    """
    if entry.make is None:
        return "always checked, whatever is enabled"
    by_aggregate = isinstance(entry.make, functools.partial)
    make = entry.make.func if isinstance(entry.make, functools.partial) else entry.make
    text = " ".join((make.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
    return _cell(text + " The metadata of aggregates has the number." * by_aggregate)


def _cell(text: str) -> str:
    """Return the text on one line for a table cell, with Markdown outside code spans escaped."""
    outside = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", "\\|"))
    return "".join(
        part if at % 2 else re.sub(r"([*_<>\[\]{}$])", r"\\\1", part)
        for at, part in enumerate(outside)
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(json.dumps({name: make() for name, make in TABLES.items()}))
