# SPDX-License-Identifier: Apache-2.0
"""``kilonova config show``: every option with value and origin.

An origin is file and line, the environment, a credential, a file in the default place, another
option, or the default. Secrets are only shown as set or not set.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from oslo_config import cfg

from common.service import config, config_file
from deploy.operator.output import columns

HIDDEN = "(set)"


def show(options: argparse.Namespace) -> int:
    """Print the options. With ``--set`` print only options whose origin is not the default."""
    is_agent = options.agent or Path(options.config or "").name == Path(config.AGENT_FILE).name
    conf = config.load(options.config, config.AGENT if is_agent else "")
    shown_rows = [row for row in rows(conf) if row["from"] != "default" or not options.set]
    if options.json:
        print(json.dumps(shown_rows, indent=1))
        return 0
    table = [[row["option"], row["value"], row["from"]] for row in shown_rows]
    print(columns([["OPTION", "VALUE", "FROM"], *table]))
    return 0


def rows(conf: cfg.ConfigOpts) -> Iterator[dict[str, str]]:
    """Yield option, value and origin of every option of Kilonova, and of ``transport_url``.

    The keys are "option", "value" and "from". The value of a secret is ``HIDDEN``, or "" if the
    origin is the default.
    """
    lines = {
        (line.section, line.option): f"{path}:{line.number}"
        for path in conf.config_file
        for line in config_file.lines(path)
    }
    others = config.origins(conf)
    transport_url = cfg.StrOpt("transport_url", default="", secret=True)
    for section, options in config.OPTIONS.items():
        own = [transport_url] if section == "DEFAULT" else []
        for option in (*own, *options):
            name = f"{section}.{option.dest}"
            variable = f"OS_{section}__{option.dest}".upper()
            if variable in os.environ:
                origin = f"environment {variable}"
            elif (section, option.dest) in lines:
                origin = lines[section, option.dest]
            else:
                origin = others.get(name, "default")
            yield {
                "option": f"[{section}] {option.dest}",
                "value": _value(conf, section, option, origin),
                "from": origin,
            }


def _value(conf: cfg.ConfigOpts, section: str, option: cfg.Opt, origin: str) -> str:
    if option.secret:
        return HIDDEN if origin != "default" else ""
    value = (conf if section == "DEFAULT" else conf[section])[option.dest]
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
