# SPDX-License-Identifier: Apache-2.0
"""Commands of Python that are run often, without importing what they are made of each time.

To import ``openstack`` with its plug-ins takes a second of a processor, to do what it is asked for
a tenth of one. So multiprocessing's fork server imports them once, and each command is a child of
it: the script's own function with the command's arguments, environment, folder, input and output,
in a process that ends with the command. That both say the same is tested in test_preloaded.py; the
scripts themselves are also started by test_up.py and by the typist.
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

#: Of what these groups of entry points name, the client loads some for each command.
PLUGINS = ("openstack", "cliff.")
#: What ``kilonova`` imports where it needs it.
LATE = ("common.rpc.agent", "common.rpc.conductor", "common.rpc.scheduler")


@cache
def _context() -> multiprocessing.context.ForkServerContext:
    """One fork server for the whole session; it ends with this process."""
    every = importlib.metadata.entry_points()
    plugins = {
        entry.module
        for group in every.groups
        if group.startswith(PLUGINS)
        for entry in every.select(group=group)
    }
    nouns = {module for module, _, _ in COMMANDS.values()}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *sorted(plugins), *sorted(nouns), *LATE])
    return context


def run(
    script: Path, *arguments: str, text: str, seconds: float, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a console script of this environment to the end, as ``subprocess.run`` would, in the
    repository."""
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
    """In the child: what a new interpreter has of its environment, then what the console script
    does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=False)
    sys.argv = list(command)
    cliff.app.App.NAME = Path(command[0]).name  # read from the command line when it was imported
    if environment.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    sys.exit(pkgutil.resolve_name(function)())
