# SPDX-License-Identifier: Apache-2.0
"""Fast runs of Python commands, from a fork server that has imported the commands' modules.

The imports of ``openstack`` with its plug-ins take a second of processor time, a command itself a
tenth of a second. So multiprocessing's fork server imports the modules once. Each command runs in a
child process with its own arguments, environment, folder, input and output, and calls the function
of the console script.

test_preloaded.py checks that the output equals that of the script. test_up.py and ``Live.typist``
start the scripts themselves.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import pkgutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import cliff.app

from deploy.operator.commands import COMMANDS
from deploy.packages import ROOT

#: Prefixes of the groups of entry points from which ``openstack`` loads modules.
PLUGINS = ("openstack", "cliff.")
#: Modules that ``kilonova`` imports inside functions.
LATE = ("common.rpc.agent", "common.rpc.conductor", "common.rpc.scheduler")


@cache
def _context() -> multiprocessing.context.ForkServerContext:
    """Return the context of the fork server, which ends with this process."""
    entry_points = importlib.metadata.entry_points()
    plugins = {
        entry.module
        for group in entry_points.groups
        if group.startswith(PLUGINS)
        for entry in entry_points.select(group=group)
    }
    nouns = {module for module, _, _ in COMMANDS.values()}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *sorted(plugins), *sorted(nouns), *LATE])
    return context


def run(
    script: Path, *arguments: str, text: str, seconds: float, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a console script of this environment in the repository, as ``subprocess.run`` would.

    Args:
        script: Path of the script.
        arguments: Arguments of the command.
        text: Standard input.
        seconds: Time limit.
        environment: All environment variables of the command.

    Raises:
        subprocess.TimeoutExpired: The command exceeds the time limit, and is killed.
    """
    [entry] = importlib.metadata.entry_points(group="console_scripts", name=script.name)
    with tempfile.TemporaryDirectory(prefix="kn-run-", dir="/tmp") as folder:
        streams = [Path(folder, name) for name in ("input", "output", "errors")]
        for path, content in zip(streams, (text, "", ""), strict=True):
            path.write_text(content)
        command = [str(script), *arguments]
        process = _context().Process(
            target=_become, args=(entry.value, command, dict(environment), streams)
        )
        process.start()
        try:
            process.join(seconds)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(
                    command, seconds, *(path.read_text() for path in streams[1:])
                )
        finally:
            process.kill()
            process.join()
        return subprocess.CompletedProcess(
            command, process.exitcode, *(path.read_text() for path in streams[1:])
        )


def _become(
    function: str, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[Path]
) -> None:
    """Set up the child process like a new interpreter, and call the console script's function."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=False)
    sys.argv = list(command)
    # cliff has set the name from the fork server's command line at import.
    cliff.app.App.NAME = Path(command[0]).name
    if environment.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    sys.exit(pkgutil.resolve_name(function)())
