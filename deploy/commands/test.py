# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test [RING ...] [-- PYTEST ARGUMENTS]``: install what tests need, run them, clean up.

Without a ring: lint and then every ring but bench. Each ring gets the private servers that it names here;
they end with the command. ``.ci/run`` calls exactly this, without a terminal.
"""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from deploy import environment, packages
from deploy.progress import Failure, main, say, steps
from deploy.servers import KINDS, Servers

#: ring -> the servers that its tests use
RINGS: dict[str, tuple[str, ...]] = {
    "lint": (),
    "unit": (),
    "contract": KINDS,
    "workflows": (),
    "functional": ("rabbitmq", "postgresql", "mariadb"),
    "api": (),
    "e2e": (),              # starts clouds of its own
    "bench": (),            # only when named; starts servers of its own
}
MODULES = {"lint": "deploy.lint", "bench": "tests.bench"}     # rings that are not pytest's
NO_TESTS = 5                # pytest's status


def run(arguments: Sequence[str]) -> int:
    """Parse the command line and do it."""
    names, more = _split(arguments)
    rings = names or [name for name in RINGS if name != "bench"]
    folder = Path(tempfile.mkdtemp(prefix="kn-test-", dir="/tmp"))
    log = folder / "install.log"
    needs: list[tuple[str, Callable[[], str | None]]] = [
        ("Debian packages", lambda: packages.install(packages.for_test(), log)),
        ("Python environment", lambda: environment.make(environment.TEST, log))]
    if "contract" in rings:
        needs.append(("Placement's own tests", lambda: environment.make_oracle(log)))
    total = len(needs) + len(rings)
    steps(needs, total=total)
    results: list[tuple[str, int, float]] = []
    with Servers(folder) as servers:
        environ = {**os.environ, "KILONOVA_TEST": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        for number, ring in enumerate(rings, len(needs) + 1):
            say(f"[{number}/{total}] {ring} …")
            began = time.monotonic()
            for kind in RINGS[ring]:
                variable = f"KILONOVA_TEST_{kind.upper()}_URL"
                if variable not in environ:
                    environ[variable] = servers.start(kind)
            status = _module(MODULES[ring], environ) if ring in MODULES else _pytest(ring, more, environ)
            results.append((ring, status, time.monotonic() - began))
    return _summary(results, folder)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, more = list(arguments[:at]), list(arguments[at + 1:])
    unknown = [name for name in names if name not in RINGS]
    if unknown:
        raise Failure(f"Unknown: {' '.join(unknown)}",
                      f"./deploy/test [{'|'.join(RINGS)}] [-- arguments of pytest, for instance -k name]")
    return names, more


def _module(name: str, environ: dict[str, str]) -> int:
    return _call([environment.PYTHON, "-m", name], environ)


def _pytest(ring: str, more: Sequence[str], environ: dict[str, str]) -> int:
    status = _call([environment.PYTHON, "-m", "pytest", "-q", "--durations=5", f"tests/{ring}", *more], environ)
    return 0 if status == NO_TESTS and more else status


def _call(command: Sequence[str | Path], environ: dict[str, str]) -> int:
    """Run in the foreground; when this process is told to end, the other ends first."""
    process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, env=environ,
                               cwd=packages.ROOT)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _summary(results: Sequence[tuple[str, int, float]], folder: Path) -> int:
    say("\nring         result      seconds")
    for ring, status, seconds in results:
        word = {0: "passed", NO_TESTS: "no tests"}.get(status, "FAILED")
        say(f"{ring:<12} {word:<10} {seconds:>8.1f}")
    if any(status for _, status, _ in results):
        say(f"\nNot everything passed. The servers' logs are in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


def _told_to_end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _told_to_end)
    sys.exit(main(lambda: run(sys.argv[1:])))
