# SPDX-License-Identifier: Apache-2.0
"""The operator's fencing hook: a program that makes sure that nothing runs on a host.

Called by the step ``fence`` of evacuate, in a lane of its own, because switching a machine off takes its time. The hook
gets the host's name and nothing else; only its exit with 0 is proof. It may be called again for the same host.
"""
from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable

from common import errors

log = logging.getLogger(__name__)
SHOWN = 500                      #: characters of what a hook said that are told


def hook(program: str, timeout: float) -> Callable[[str], None] | None:
    """What fences a host by this program; None when there is none.

    The callable raises Conflict: the host is not fenced, with what the hook said.
    """
    if not program:
        return None

    def fence(host: str) -> None:
        log.warning("fencing host %s by %s", host, program)
        try:
            done = subprocess.run([program, host], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout,
                                  check=False)
        except subprocess.TimeoutExpired as problem:
            raise errors.Conflict(f"The fencing hook did not end within {timeout:g} seconds; host {host} may still run "
                                  "its guests.") from problem
        except OSError as problem:
            raise errors.Conflict(f"The fencing hook cannot be run; host {host} may still run its guests. Ask the "
                                  "operator to look at [conductor] fencing_hook.") from problem
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-SHOWN:]
        if done.returncode != 0:
            log.error("the fencing hook for host %s ended with %d: %s", host, done.returncode, said)
            raise errors.Conflict(f"The fencing hook ended with {done.returncode}; host {host} may still run its "
                                  "guests.")
        log.warning("host %s is fenced", host)
    return fence
