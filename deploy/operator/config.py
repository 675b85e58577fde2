# SPDX-License-Identifier: Apache-2.0
"""``kilonova config sample``: generates the sample from the list of options."""

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
    """Print the sample of the configuration file."""
    print(text(), end="")
    return 0


def text() -> str:
    """Return the sample of the configuration file, with every option commented out."""
    parts = [HEAD]
    for group, options in config.OPTIONS.items():
        parts.append(f"\n[{group}]\n")
        if group == "DEFAULT":
            parts.append(BROKER)
        parts += ["\n" + "\n".join(_lines(option)) + "\n" for option in options]
    return "".join(parts)


def _lines(option: cfg.Opt) -> Iterator[str]:
    yield f"# {option.help}"
    limits = allowed(option)
    if limits:
        yield f"# Allowed: {limits}"
    yield f"#{option.dest} = {default(option)}".rstrip()


def default(option: cfg.Opt) -> str:
    """Return the option's default value as a configuration file contains it.

    The ``sample_default`` comes first. Without a default the text is "".
    """
    value = option.sample_default if option.sample_default is not None else option.default
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)


def allowed(option: cfg.Opt) -> str:
    """Return the choices or limits of the option as text, or "" without choices and lower limit."""
    choices = getattr(option.type, "choices", None)
    if choices:
        return ", ".join(map(str, choices))
    low, high = getattr(option.type, "min", None), getattr(option.type, "max", None)
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"{low} and more" if low is not None else ""
