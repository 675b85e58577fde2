# SPDX-License-Identifier: Apache-2.0
"""Man pages of ``kilonova`` and of the services, generated from their command lines.

    python -m deploy.packaging.manual FOLDER  # writes kilonova.1, kilonova-host.1, kilonova-api.8 …

deploy/packaging/bundle.py writes the pages into the packages. ``kilonova`` has a page, and each
first word of a command has one. For example, ``man kilonova host`` describes all commands for a
host.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import __version__
from common.service import config
from common.service.service import EX_CONFIG, command_line
from deploy.operator.main import STATUSES, parser
from deploy.packages import ROOT

UNITS = ROOT / "deploy/systemd"
SERVICE_STATUSES = {
    0: "the process received a signal to end",
    1: "a temporary failure, for example a port in use; systemd restarts the process",
    EX_CONFIG: "the configuration is wrong, see the last log line; systemd does not restart the process",
}


def verbs(
    command: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield the words and the parser of ``command`` and of all its subcommands, parents first.

    Args:
        command: The parser of the first command.
        words: The words of this command, for example ("host", "list"). () for ``kilonova`` itself.
    """
    yield words, command
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from verbs(below, (*words, word))


def options(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and arguments of a command, without its subcommands."""
    return [
        action for action in command._actions if not isinstance(action, argparse._SubParsersAction)
    ]


def services() -> list[str]:
    """Return the names, without "kilonova-", of the services whose units set KILONOVA_CONF."""
    return sorted(
        unit.stem.removeprefix("kilonova-")
        for unit in UNITS.glob("kilonova-*.service")
        if "KILONOVA_CONF=" in unit.read_text()
    )


def pages() -> dict[str, str]:
    """Return the roff text of every man page by file name, for example "kilonova-host.1"."""
    pages_by_file = {"kilonova.1": _main_page()}
    nouns = [(words, command) for words, command in verbs(parser()) if len(words) == 1]
    for words, command in nouns:
        pages_by_file[f"kilonova-{words[0]}.1"] = _noun_page(words[0], command)
    pages_by_file |= {f"kilonova-{name}.8": _service_page(name) for name in services()}
    return pages_by_file


def _main_page() -> str:
    """Return the roff text of kilonova.1, with an entry per command without subcommands."""
    top = parser()
    commands = [
        _term(" ".join(("kilonova", *words)), _sentence(_description(command)))
        for words, command in verbs(top)
        if words and not _has_subcommands(command)
    ]
    references = sorted({f"kilonova-{words[0]}(1)" for words, _ in verbs(top) if words})
    return _page(
        "kilonova",
        1,
        top,
        _section("COMMANDS", *commands),
        _section("OPTIONS", *_options(top)),
        _statuses(STATUSES),
        _files(config.DEFAULT_FILE, config.AGENT_FILE),
        _section("SEE ALSO", _text(", ".join(references))),
    )


def _noun_page(word: str, command: argparse.ArgumentParser) -> str:
    if _has_subcommands(command):
        parts = [
            f".SS {escape(' '.join(('kilonova', *words)))}\n"
            + "".join((_usage(verb), _text(_sentence(_description(verb))), *_options(verb)))
            for words, verb in verbs(command, (word,))
            if not _has_subcommands(verb)
        ]
        own = _section("COMMANDS", *parts)
    else:
        own = _section("OPTIONS", *_options(command))
    return _page(
        f"kilonova-{word}",
        1,
        command,
        own,
        _statuses(STATUSES),
        _files(config.DEFAULT_FILE, config.AGENT_FILE),
        _section("SEE ALSO", _text("kilonova(1)")),
    )


def _service_page(name: str) -> str:
    command = command_line(name)
    file = config.AGENT_FILE if name == config.AGENT else config.DEFAULT_FILE
    return _page(
        f"kilonova-{name}",
        8,
        command,
        _section("OPTIONS", *_options(command)),
        _section(
            "SIGNALS",
            _term("SIGHUP", "Reload the configuration. A wrong configuration changes nothing."),
            _term("SIGTERM", "Finish the work in hand, then end."),
        ),
        _statuses(SERVICE_STATUSES),
        _files(file),
        _section("SEE ALSO", _text("kilonova(1), kilonova-config(1), journalctl(1)")),
    )


def _page(name: str, section: int, command: argparse.ArgumentParser, *parts: str) -> str:
    about = command.description or ""
    return "".join(
        (
            f'.TH {name.upper()} {section} "" "Kilonova {__version__}" "Kilonova"\n',
            f".SH NAME\n{escape(name)} \\- {escape(about.split('; ')[0].rstrip('.'))}\n",
            _section("SYNOPSIS", _usage(command)),
            _section("DESCRIPTION", _text(_sentence(about))),
            *parts,
        )
    )


def _section(title: str, *parts: str) -> str:
    return f".SH {title}\n" + "".join(parts)


def _statuses(table: dict[int, str]) -> str:
    return _section(
        "EXIT STATUS", *(_term(str(status), _sentence(text)) for status, text in table.items())
    )


def _files(*names: str) -> str:
    return _section("FILES", *(f".TP\n.I {escape(name)}\n{_FILES[name]}\n" for name in names))


_FILES = {
    config.DEFAULT_FILE: "The configuration of the control plane.",
    config.AGENT_FILE: "The configuration of a host.",
}


def _options(command: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a roff entry for each option and argument with a help text, except --help."""
    for action in options(command):
        if action.help and not isinstance(action, argparse._HelpAction):
            yield _term(argument_name(action), _sentence(_help(action)))


def argument_name(action: argparse.Action) -> str:
    """Return an argument as a user writes it: "--file FILE", "-h, --help", "HOST"."""
    value = str(action.metavar or action.dest.upper()) if action.nargs != 0 else ""
    return " ".join((", ".join(action.option_strings), value)).strip()


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%(prog)s", "kilonova").replace("%%", "%")


def _has_subcommands(command: argparse.ArgumentParser) -> bool:
    return len(options(command)) < len(command._actions)


def _description(command: argparse.ArgumentParser) -> str:
    return command.description or ""


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + "." * (not text.endswith((".", "…")))


def _usage(command: argparse.ArgumentParser) -> str:
    words = " ".join(command.format_usage().removeprefix("usage: ").split())
    return f".B {escape(words)}\n.PP\n"


def _term(name: str, text: str) -> str:
    return f".TP\n.B {escape(name)}\n{escape(text)}\n"


def _text(text: str) -> str:
    return f"{escape(text)}\n.PP\n"


def escape(text: str) -> str:
    """Return the text on one line, escaped so that roff prints it as it is.

    The text never becomes a request of roff, and minus signs can be copied from the page.
    """
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def main(arguments: Sequence[str]) -> int:
    """Write all pages into the folder that is the first argument, and return 0."""
    folder = Path(arguments[0])
    for name, text in pages().items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
