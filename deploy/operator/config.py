# SPDX-License-Identifier: Apache-2.0
"""``kilonova config sample``: the sample is made from the list of options, so it is
never out of date.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from oslo_config import cfg

from common.service import config

HEAD = """# SPDX-License-Identifier: Apache-2.0
# Kilonova's configuration: /etc/kilonova/kilonova.conf, readable by its services only.
# Made by: kilonova config sample. Every option with its default; all may be left out.
"""
BROKER = """
# RabbitMQ as oslo.messaging writes it; several nodes: rabbit://u:p@node1:5672,u:p@node2:5672/
#transport_url = rabbit://kilonova:PASSWORD@127.0.0.1:5672/
"""


def sample(options: argparse.Namespace) -> int:
    """Print the sample."""
    print(text(), end="")
    return 0


def text() -> str:
    """The whole sample."""
    parts = [HEAD]
    for group, listed in config.OPTIONS.items():
        parts.append(f"\n[{group}]\n")
        if group == "DEFAULT":
            parts.append(BROKER)
        parts += ["\n" + "\n".join(_lines(option)) + "\n" for option in listed]
    return "".join(parts)


def _lines(option: cfg.Opt) -> Iterator[str]:
    yield f"# {option.help}"
    limits = allowed(option)
    if limits:
        yield f"# Allowed: {limits}"
    yield f"#{option.dest} = {default(option)}".rstrip()


def default(option: cfg.Opt) -> str:
    """What it is when nobody says anything, as a file would say it."""
    value = option.sample_default if option.sample_default is not None else option.default
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)


def allowed(option: cfg.Opt) -> str:
    """Its choices or limits in words; empty: there are none."""
    choices = getattr(option.type, "choices", None)
    if choices:
        return ", ".join(map(str, choices))
    low, high = getattr(option.type, "min", None), getattr(option.type, "max", None)
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"{low} and more" if low is not None else ""
