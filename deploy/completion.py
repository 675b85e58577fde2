# SPDX-License-Identifier: Apache-2.0
"""Completion of ``kilonova`` in shells, made from its command line.

    python -m deploy.completion bash > /usr/share/bash-completion/completions/kilonova
    python -m deploy.completion zsh > /usr/share/zsh/vendor-completions/_kilonova

deploy/debian/rules runs both for the packages. What stands for a file is completed by files, what
has choices by them; names in the cloud are not asked for.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence

from deploy.cli.main import parser
from deploy.manual import options, verbs

BASH = """\
# Completion of kilonova in bash, made by python -m deploy.completion.
_kilonova() {
    local current=${COMP_WORDS[COMP_CWORD]} verb= argument=0 wanted= word index
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        if [[ -n $wanted ]]; then
            wanted=
        elif [[ $word == -* ]]; then
            wanted=$(_kilonova_value "$verb" "$word")
        elif _kilonova_words "$verb" | grep -qxF -- "$word"; then
            verb+=" $word"
        else
            ((argument += 1))
        fi
    done
    if [[ -z $wanted && $current != -* ]]; then
        wanted=$(_kilonova_value "$verb" "$argument")
    fi
    local IFS=$'\\n '
    case $wanted in
        FILE)
            IFS=$'\\n'
            compopt -o filenames 2> /dev/null
            COMPREPLY=($(compgen -f -- "$current")) ;;
        VALUE) COMPREPLY=() ;;
        ?*) COMPREPLY=($(compgen -W "$wanted" -- "$current")) ;;
        *)
            if [[ $current == -* ]]; then
                COMPREPLY=($(compgen -W "$(_kilonova_options "$verb")" -- "$current"))
            else
                COMPREPLY=($(compgen -W "$(_kilonova_words "$verb")" -- "$current"))
            fi ;;
    esac
}
"""
ZSH = """\
#compdef kilonova
# Completion of kilonova in zsh, made by python -m deploy.completion: bash's, which zsh can run.
autoload -Uz bashcompinit && bashcompinit
"""
#: What an argument's value is called where it is a file.
FILE = "FILE"


def bash() -> str:
    """The script for bash."""
    made = dict(verbs(parser()))
    words = {path: sorted(_below(path, made)) for path in made}
    flags = {
        path: sorted(flag for action in options(command) for flag in action.option_strings)
        for path, command in made.items()
    }
    values = {
        (path, name): value
        for path, command in made.items()
        for name, value in _values(options(command))
    }
    return "".join(
        (
            BASH,
            _function("_kilonova_words", {_key(path): "\n".join(words[path]) for path in words}),
            _function("_kilonova_options", {_key(path): " ".join(flags[path]) for path in flags}),
            _function(
                "_kilonova_value",
                {f"{_key(path)}:{name}": value for (path, name), value in values.items()},
            ),
            "complete -F _kilonova kilonova\n",
        )
    )


def zsh() -> str:
    """The script for zsh."""
    return f"{ZSH}{bash()}_bash_complete -F _kilonova\n"


def _below(path: tuple[str, ...], made: dict[tuple[str, ...], argparse.ArgumentParser]) -> set[str]:
    """The words that may follow these."""
    return {other[-1] for other in made if other[:-1] == path and other}


def _values(actions: Sequence[argparse.Action]) -> Iterator[tuple[str, str]]:
    """What completes an option's value, or that of the argument with this number."""
    number = 0
    for action in actions:
        if action.choices is not None:
            value = " ".join(map(str, action.choices))
        else:
            value = FILE if action.metavar == FILE else "VALUE"
        if not action.option_strings:
            yield str(number), value
            number += 1
        elif action.nargs != 0:
            yield from ((flag, value) for flag in action.option_strings)


def _key(path: tuple[str, ...]) -> str:
    return "".join(f" {word}" for word in path)


def _function(name: str, table: dict[str, str]) -> str:
    """A function of bash that prints what belongs to its arguments."""
    lines = "".join(
        f"        {shlex.quote(key)}) echo {shlex.quote(text)} ;;\n"
        for key, text in table.items()
        if text
    )
    return f'{name}() {{\n    local IFS=:\n    case "$*" in\n{lines}    esac\n}}\n'


SHELLS = {"bash": bash, "zsh": zsh}


def main(arguments: Sequence[str]) -> int:
    """Print the script for the shell that is named."""
    print(SHELLS[arguments[0]](), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
