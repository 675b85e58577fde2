# SPDX-License-Identifier: Apache-2.0
"""The operator's fencing hook: a program that makes sure that no guest runs on a host.

The step ``fence`` of an evacuation calls the hook, in a lane of its own, because to power off a
machine takes a long time. The only argument is the host's name. Only exit status 0 is proof. The
hook may be called again for the same host. The servers of a host are evacuated together, so they
share one result for ``SHARED_SECONDS``.

Invariant: ``SHARED_SECONDS`` is shorter than the boot of a host, so that no result is used after a
boot.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from common.domain import errors
from common.service.log import get_logger

log = get_logger(__name__)
#: Limit of the hook's output in the log.
MAX_SHOWN_CHARACTERS = 500
#: Seconds for which a result also holds for other servers of the host.
SHARED_SECONDS = 2.0


def hook(
    program: str, timeout: float, shared: float = SHARED_SECONDS
) -> Callable[[str], None] | None:
    """Return a function that fences a host with this program, or None without a program.

    The function takes the host's name, and returns once the program has proved that no guest runs
    there. Otherwise it raises Conflict with the reason.

    Args:
        program: The path of the fencing hook, or "".
        timeout: Seconds after which the program is killed.
        shared: Seconds for which a result is shared, see ``SHARED_SECONDS``.
    """
    if not program:
        return None
    results: dict[str, _HookResult] = defaultdict(_HookResult)
    adding = threading.Lock()

    def fence(host: str) -> None:
        with adding:
            result = results[host]
        with result.lock:
            if time.monotonic() > result.fresh_until:
                result.refusal = _run_hook(program, timeout, host)
                result.fresh_until = time.monotonic() + shared
            if result.refusal:
                raise errors.Conflict(result.refusal)

    return fence


@dataclass
class _HookResult:
    """The last result for a host. ``refusal`` is the reason why the host is not fenced, or ""."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    fresh_until: float = 0
    refusal: str = ""


def _run_hook(program: str, timeout: float, host: str) -> str:
    """Run the hook, and return why the host is not fenced, or "" on success."""
    log.warning("the fencing hook fences a host", host=host, program=program)
    try:
        process = subprocess.run(
            [program, host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        log.error("the fencing hook did not end in time", host=host, seconds=timeout)
        return (
            f"The fencing hook did not end within {timeout:g} seconds; host {host} may still run its guests. "
            "Power the host off, or repair the hook, and try again."
        )
    except OSError as problem:
        log.error("the fencing hook cannot be run", host=host, problem=problem)
        return (
            f"The fencing hook cannot be run; host {host} may still run its guests. Ask the operator to correct "
            "[conductor] fencing_hook."
        )
    output = (
        (process.stderr or process.stdout).decode(errors="replace").strip()[-MAX_SHOWN_CHARACTERS:]
    )
    if process.returncode != 0:
        log.error("the fencing hook failed", host=host, status=process.returncode, output=output)
        return (
            f"The fencing hook ended with {process.returncode}; host {host} may still run its guests. See the "
            "conductor's log for the output of the hook."
        )
    log.warning("a host is fenced", host=host)
    return ""
