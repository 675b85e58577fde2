# SPDX-License-Identifier: Apache-2.0
"""Man pages of ``kilonova`` and of the services, made from their command lines.

    python -m deploy.packaging.manual FOLDER  # writes kilonova.1, kilonova-host.1, kilonova-api.8 …

deploy/debian/rules runs it for the packages. ``kilonova`` has a page, and so has each of the words
that follow it: ``man kilonova host`` tells of all that can be done with a host.
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
    0: "it was asked to end",
    1: "something that may pass by itself, as a port in use; systemd starts it again",
    EX_CONFIG: "the configuration has to be mended first, as the line before says; "
    "systemd does not start it again",
}


def verbs(
    command: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The command line itself and everything below it: the words that lead there, its parser."""
    yield words, command
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from verbs(below, (*words, word))


def options(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """What a command takes itself; not the commands below it."""
    return [
        action for action in command._actions if not isinstance(action, argparse._SubParsersAction)
    ]


def services() -> list[str]:
    """The processes whose units read Kilonova's configuration."""
    return sorted(
        unit.stem.removeprefix("kilonova-")
        for unit in UNITS.glob("kilonova-*.service")
        if "KILONOVA_CONF=" in unit.read_text()
    )


def pages() -> dict[str, str]:
    """Every page by the name of its file."""
    made = {"kilonova.1": _first()}
    nouns = [(words, command) for words, command in verbs(parser()) if len(words) == 1]
    for words, command in nouns:
        made[f"kilonova-{words[0]}.1"] = _noun(words[0], command)
    made |= {f"kilonova-{name}.8": _service(name) for name in services()}
    return made


def _first() -> str:
    """Of ``kilonova`` itself: every command in a line."""
    top = parser()
    listed = [
        _term(" ".join(("kilonova", *words)), _sentence(_said(command)))
        for words, command in verbs(top)
        if words and not _leads_on(command)
    ]
    see = sorted({f"kilonova-{words[0]}(1)" for words, _ in verbs(top) if words})
    return _page(
        "kilonova",
        1,
        top,
        _section("COMMANDS", *listed),
        _section("OPTIONS", *_options(top)),
        _statuses(STATUSES),
        _files(config.DEFAULT_FILE, config.AGENT_FILE),
        _section("SEE ALSO", _text(", ".join(see))),
    )


def _noun(word: str, command: argparse.ArgumentParser) -> str:
    if _leads_on(command):
        parts = [
            f".SS {escape(' '.join(('kilonova', *words)))}\n"
            + "".join((_usage(verb), _text(_sentence(_said(verb))), *_options(verb)))
            for words, verb in verbs(command, (word,))
            if not _leads_on(verb)
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


def _service(name: str) -> str:
    command = command_line(name)
    file = config.AGENT_FILE if name == config.AGENT else config.DEFAULT_FILE
    return _page(
        f"kilonova-{name}",
        8,
        command,
        _section("OPTIONS", *_options(command)),
        _section(
            "SIGNALS",
            _term("SIGHUP", "Read the configuration again; one that is wrong changes nothing."),
            _term("SIGTERM", "End what is in hand, then end."),
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
    """An entry for each that says more than its name."""
    for action in options(command):
        if action.help and not isinstance(action, argparse._HelpAction):
            yield _term(named(action), _sentence(_help(action)))


def named(action: argparse.Action) -> str:
    """An argument as its user writes it: "--file FILE", "-h, --help", "HOST"."""
    value = str(action.metavar or action.dest.upper()) if action.nargs != 0 else ""
    return " ".join((", ".join(action.option_strings), value)).strip()


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%(prog)s", "kilonova").replace("%%", "%")


def _leads_on(command: argparse.ArgumentParser) -> bool:
    return len(options(command)) < len(command._actions)


def _said(command: argparse.ArgumentParser) -> str:
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
    """As roff prints it: no line of text is a request, and a minus is one that can be copied."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def main(arguments: Sequence[str]) -> int:
    """Write them all."""
    folder = Path(arguments[0])
    for name, text in pages().items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
