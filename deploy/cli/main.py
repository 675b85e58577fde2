# SPDX-License-Identifier: Apache-2.0
"""``kilonova NOUN [VERB]``: parses the command line and calls the noun's module.

Every command takes --config; the default is $KILONOVA_CONF or /etc/kilonova/kilonova.conf. Status 0: done and
well; 1: something was found or failed, said in one sentence; 2: the command line is wrong.
"""
from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from common import errors

#: words on the command line -> (module, function, what it does)
COMMANDS: dict[tuple[str, ...], tuple[str, str, str]] = {
    ("database", "upgrade"): ("deploy.cli.database", "upgrade", "bring the database to this version; repeatable"),
    ("database", "version"): ("deploy.cli.database", "version", "show the database's version and the one needed"),
    ("doctor",): ("deploy.cli.doctor", "doctor", "check the invariants of the whole cloud; changes nothing"),
    ("status",): ("deploy.cli.status", "status", "show services, what is in hand, what is stuck"),
    ("consoles", "list"): ("deploy.cli.consoles", "show", "show who has a console open"),
    ("consoles", "end"): ("deploy.cli.consoles", "end", "end the consoles of a server, or all"),
    ("config", "sample"): ("deploy.cli.config", "sample", "print a configuration file with every option"),
    ("config", "check"): ("deploy.cli.config", "check", "read the configuration and say what is wrong with it"),
}


def parser() -> argparse.ArgumentParser:
    """The command line, made from ``COMMANDS``."""
    top = argparse.ArgumentParser(prog="kilonova", description="Operate a Kilonova cloud.")
    top.add_argument("--config", metavar="FILE", help="default: $KILONOVA_CONF or /etc/kilonova/kilonova.conf")
    nouns = top.add_subparsers(required=True, metavar="COMMAND")
    made: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for words, (module, function, text) in COMMANDS.items():
        if len(words) == 1:
            command = nouns.add_parser(words[0], help=text, description=text)
        else:
            if words[0] not in made:
                noun = nouns.add_parser(words[0], help=f"{words[0]} …")
                made[words[0]] = noun.add_subparsers(required=True, metavar="VERB")
            command = made[words[0]].add_parser(words[1], help=text, description=text)
        command.set_defaults(module=module, function=function)
        if words == ("doctor",):
            command.add_argument("--json", action="store_true", help="one JSON list of findings")
            command.add_argument("--no-hosts", action="store_true", help="do not ask the hosts what they run")
        if words == ("consoles", "end"):
            command.add_argument("--server", metavar="ID", help="those of this server")
            command.add_argument("--all", action="store_true", help="those of every server")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script."""
    options = parser().parse_args(arguments)
    from common.config import ConfigError
    try:
        return int(getattr(importlib.import_module(options.module), options.function)(options))
    except (errors.Problem, ConfigError) as problem:
        print(f"kilonova: {problem}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
