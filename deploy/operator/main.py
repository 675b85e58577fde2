# SPDX-License-Identifier: Apache-2.0
"""The command ``kilonova NOUN [VERB]``: parses the command line and calls the noun's module.

Every command accepts --config. The default is $KILONOVA_CONF or /etc/kilonova/kilonova.conf.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO, cast

from common import __version__
from common.domain import errors
from common.domain.text import printable
from deploy.operator.commands import ARGUMENTS, COMMANDS, NOUNS, ONE_OF

#: Exit status that shells report for a program that ended by SIGPIPE.
READER_GONE = 141
#: The meaning of exit statuses.
STATUSES = {
    0: "success, without findings",
    1: "a finding or a failure, with a message",
    2: "the command line is wrong",
    3: "a service or host that kilonova explain or doctor needs does not answer",
    READER_GONE: "the reader of the output is gone, for example after | head",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, built from ``COMMANDS``."""
    top = argparse.ArgumentParser(prog="kilonova", description="Operate a Kilonova cloud.")
    top.add_argument(
        "--config", metavar="FILE", help="default: $KILONOVA_CONF or /etc/kilonova/kilonova.conf"
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    nouns = top.add_subparsers(required=True, metavar="COMMAND")
    verbs_by_noun: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for words, (module, function, text) in COMMANDS.items():
        if len(words) == 1:
            command = nouns.add_parser(words[0], help=text, description=text)
        else:
            if words[0] not in verbs_by_noun:
                noun = nouns.add_parser(words[0], help=NOUNS[words[0]], description=NOUNS[words[0]])
                verbs_by_noun[words[0]] = noun.add_subparsers(required=True, metavar="VERB")
            command = verbs_by_noun[words[0]].add_parser(words[1], help=text, description=text)
        command.set_defaults(module=module, function=function)
        arguments = ARGUMENTS.get(words, ())
        group = command.add_mutually_exclusive_group() if ONE_OF[0] in arguments else command
        for name, properties in arguments:
            (group if name in dict(ONE_OF) else command).add_argument(name, **properties)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status (``STATUSES``). Entry point of the console script.

    Args:
        arguments: The command line without the program's name. None: that of this process.

    Raises:
        SystemExit: The command line is wrong (status 2), or requests help or the version (0).
        BrokenPipeError: A pipe or socket other than standard output broke.
    """
    try:
        with _printable_output():
            return _run(arguments)
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # Discard the rest of the buffer, because the interpreter would write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


@contextlib.contextmanager
def _printable_output() -> Iterator[None]:
    """Filter standard output and standard error of the block through ``text.printable``.

    Many outputs contain texts of hosts, guests and external services. Escape sequences in these
    texts would be commands to the operator's terminal.
    """
    output, problems = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Printable(output))
    sys.stderr = cast(TextIO, _Printable(problems))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = output, problems
        output.flush()


class _Printable:
    """A stream that writes to another stream, without control characters."""

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        self._inner.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def _reader_is_gone() -> bool:
    """Return True if standard output has no reader.

    A BrokenPipeError may also come from another pipe or socket.
    """
    output = select.poll()
    output.register(sys.__stdout__ or 1, 0)
    return bool(output.poll(0))


def _run(arguments: Sequence[str] | None) -> int:
    options = parser().parse_args(arguments)
    from common.domain.errors import ConfigError
    from common.service.service import UMASK

    os.umask(UMASK)
    try:
        module = importlib.import_module(options.module)
    except ModuleNotFoundError as missing:
        print(
            f"kilonova: this command needs the Python module {missing.name}, which is not installed. Run the "
            "command on a controller, or install kilonova-control (with pip: kilonova[api,conductor])",
            file=sys.stderr,
        )
        return 1
    try:
        return int(getattr(module, options.function)(options))
    except errors.NoStore as problem:
        from deploy.operator.database import explain_silence

        print(f"kilonova: {explain_silence(options.config, problem)}", file=sys.stderr)
        return 1
    except (errors.Problem, ConfigError) as problem:
        print(f"kilonova: {problem}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
