# SPDX-License-Identifier: Apache-2.0
"""Shell completion of ``kilonova``, which shtab generates from the command line.

    python -m deploy.packaging.completion bash > /usr/share/bash-completion/completions/kilonova
    python -m deploy.packaging.completion zsh > /usr/share/zsh/vendor-completions/_kilonova

deploy/packaging/bundle.py writes both files into the packages. Shells complete commands, options,
choices and file names. They do not complete names in the cloud. For the choice of shtab see
docs/decisions/0051-packages-and-configuration.md.
"""

from __future__ import annotations

import sys

import shtab

from deploy.operator.main import parser
from deploy.packaging.manual import options, verbs

#: The metavar of arguments that are the path of a file.
FILE = "FILE"


def write_completion(shell: str) -> str:
    """Return the completion script for "bash" or "zsh"."""
    top = parser()
    for _, command in verbs(top):
        for action in options(command):
            if action.metavar == FILE:
                setattr(action, "complete", shtab.FILE)  # noqa: B010 - argparse has no such field.
    return shtab.complete(top, shell)


if __name__ == "__main__":
    print(write_completion(sys.argv[1]), end="")
